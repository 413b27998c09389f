-- Trainers beside each other: useful tokens per second (sum over sum after warm-up), the median step, the memory of the
-- fullest rank (peak allocated on a GPU, peak resident set on a CPU, Python and libraries included) and the loss of the
-- last step.
WITH final AS (
    SELECT
        run_id,
        arg_max(loss_sum / nullif(useful_tokens, 0), step) AS final_loss,
        max(step) + 1 AS steps
    FROM steps_global
    GROUP BY run_id
),
memory AS (
    SELECT run_id, max(memory_peak_bytes) AS memory_bytes
    FROM steps
    GROUP BY run_id
)
SELECT
    r.run_id, r.cell, r.arm, r.model, r.world_size, r.repeat, r.science, s.useful_tokens_per_s, s.median_step_s,
    m.memory_bytes, f.final_loss, f.steps
FROM run_rates($warmup_steps) AS s
JOIN runs AS r USING (run_id)
LEFT JOIN memory AS m USING (run_id)
LEFT JOIN final AS f USING (run_id)
ORDER BY r.model, r.arm <> 'tokenscale', r.arm, r.world_size, r.repeat, r.run_id;
