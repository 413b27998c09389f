-- Operations per second of a run, by named conventions: processed tokens per second (sum over sum, after $warmup_steps
-- steps an attempt, padding included) times FLOPs a token, counted from the settings (costs/flops.py). `palm`: 6 N +
-- 12 L d T, N all weights but tables that are only looked up, attention over the full square (Chowdhery et al. 2022,
-- appendix B). `causal`: the attention term halved, as a causal mask leaves half of it; documents that share a row are
-- not told apart. `useful`: palm, for useful tokens alone, so that padding is no work. `hardware`: palm and what backward
-- computes again. MFU is the first over the peak of all devices in the run's number format (`peak_flops` a device, from
-- `peak_source`), HFU the last; both null where no peak is known, as on a CPU.
SELECT
    r.run_id, r.approach, r.series, r.world_size, r.repeat, r.model, r.device, r.number_format, r.flops_per_token,
    r.peak_flops, r.peak_source, m.total_tokens_per_s,
    1e-12 * m.total_tokens_per_s * r.flops_per_token AS tflops_per_s,
    1e-12 * m.total_tokens_per_s * r.flops_per_token / r.world_size AS tflops_per_device_s,
    m.total_tokens_per_s * r.flops_per_token / (r.world_size * r.peak_flops) AS mfu_palm,
    m.total_tokens_per_s * r.flops_per_token_causal / (r.world_size * r.peak_flops) AS mfu_causal,
    m.useful_share * m.total_tokens_per_s * r.flops_per_token / (r.world_size * r.peak_flops) AS mfu_useful,
    m.total_tokens_per_s * r.flops_per_token_hardware / (r.world_size * r.peak_flops) AS hfu
FROM run_rates($warmup_steps) AS m JOIN runs AS r USING (run_id)
ORDER BY r.series, r.world_size, r.repeat, r.run_id;
