-- Tokens and rows (samples) per second of a run, all ranks together: sum of tokens over sum of step times, after warm-up.
-- Useful tokens are labels that count; total (processed) tokens are positions computed on, padding included; per device
-- is that over the world size. Warm-up by rule: the first $warmup_steps steps of each attempt are left out. Rates are
-- never averaged (Hoefler & Belli 2015, rule 3).
SELECT
    r.run_id, r.approach, r.series, r.world_size, r.repeat, r.factors, r.storage, r.layout, r.science,
    r.oversubscribed,
    count(*) AS steps, sum(g.step_s) AS seconds, sum(g.useful_tokens)::BIGINT AS useful_tokens,
    sum(g.total_tokens)::BIGINT AS total_tokens, sum(g.rows)::BIGINT AS rows,
    tokens_per_s(g.useful_tokens, g.step_s) AS useful_tokens_per_s,
    tokens_per_s(g.total_tokens, g.step_s) AS total_tokens_per_s,
    sum(g.rows) / sum(g.step_s) AS rows_per_s,
    tokens_per_s(g.useful_tokens, g.step_s) / any_value(r.world_size) AS useful_tokens_per_device_s,
    tokens_per_s(g.total_tokens, g.step_s) / any_value(r.world_size) AS total_tokens_per_device_s,
    1 - sum(g.useful_tokens) / sum(g.total_tokens) AS not_useful_share,
    median(g.step_s) AS median_step_s
FROM measured_steps($warmup_steps) AS g JOIN runs AS r USING (run_id)
GROUP BY ALL
HAVING sum(g.step_s) > 0
ORDER BY r.series, r.world_size, r.repeat, r.run_id;
