-- Strong scaling at a fixed global batch: useful tokens per second T(N) at world size N, and efficiency T(N) / (N × T(1)),
-- each run against the run at world size 1 of the same series (the approach and all other factors), the same settings and
-- the same repeat. A run without such a partner has no efficiency.
WITH throughput AS (
    SELECT
        g.run_id,
        sum(g.useful_tokens) / sum(g.step_s) AS useful_tokens_per_s
    FROM steps_global AS g
    WHERE g.attempt_step >= $warmup_steps AND g.step_s IS NOT NULL
    GROUP BY g.run_id
    HAVING sum(g.step_s) > 0
),
measured AS (
    SELECT r.*, t.useful_tokens_per_s FROM throughput AS t JOIN runs AS r USING (run_id)
)
SELECT
    m.run_id,
    m.approach,
    m.series,
    m.world_size,
    m.repeat,
    m.device,
    m.device_kind,
    m.oversubscribed,
    m.threads_per_rank,
    s.threads_per_rank AS single_threads_per_rank,
    m.useful_tokens_per_s,
    s.useful_tokens_per_s AS single_useful_tokens_per_s,
    m.useful_tokens_per_s / s.useful_tokens_per_s AS speed_up,
    m.useful_tokens_per_s / (m.world_size * s.useful_tokens_per_s) AS efficiency
FROM measured AS m
LEFT JOIN measured AS s                                -- one row at most: ingest refuses a repeat that is there twice
    ON s.world_size = 1 AND s.series = m.series AND s.science = m.science AND s.micro_batch = m.micro_batch
    AND s.repeat = m.repeat
ORDER BY m.series, m.world_size, m.repeat, m.run_id;
