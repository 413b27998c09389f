-- Weak scaling at a fixed batch a rank: useful tokens per second T(N) at world size N (sum over sum after $warmup_steps
-- steps an attempt), speed-up T(N) / T(N0) and efficiency T(N) / (N / N0 × T(N0)). Runs are of one line where approach,
-- store, layout, micro-batch, rows a rank and all settings but global batch, budget and repeat are equal; N0
-- (`base_world_size`) is the smallest world size measured of a line, and each run is held against the run there of the
-- same repeat, whose absolute T(N0) stands beside it. A run without such a partner has no efficiency, and `not_compared`
-- says why.
WITH measured AS (
    SELECT r.*, t.useful_tokens_per_s, r.global_batch / r.world_size AS rows_per_rank
    FROM run_rates($warmup_steps) AS t JOIN runs AS r USING (run_id)
),
lines AS (
    SELECT
        approach, storage, layout, micro_batch, science_per_rank, rows_per_rank,
        min(world_size) AS base_world_size, max(world_size) AS largest_world_size
    FROM measured
    GROUP BY ALL
),
paired AS (
    SELECT
        m.*,
        l.base_world_size, b.useful_tokens_per_s AS base_useful_tokens_per_s,
        CASE
            WHEN m.science_per_rank IS NULL
                THEN 'its settings are not known'
            WHEN l.largest_world_size = l.base_world_size
                THEN printf('no other world size was measured with %g rows a rank', m.rows_per_rank)
            WHEN b.run_id IS NULL
                THEN 'no run of its repeat was measured at world size ' || l.base_world_size
        END AS not_compared
    FROM measured AS m
    LEFT JOIN lines AS l USING (approach, storage, layout, micro_batch, science_per_rank, rows_per_rank)
    LEFT JOIN measured AS b
        ON b.world_size = l.base_world_size AND b.repeat = m.repeat AND b.approach = m.approach AND b.storage = m.storage
        AND b.layout = m.layout AND b.micro_batch = m.micro_batch AND b.science_per_rank = m.science_per_rank
        AND b.rows_per_rank = m.rows_per_rank
    -- budgets may differ inside a line: of several, the one that is the run itself, or has its steps
    QUALIFY row_number() OVER (
        PARTITION BY m.run_id ORDER BY b.run_id <> m.run_id, b.steps_asked <> m.steps_asked, b.run_id
    ) = 1
)
SELECT
    run_id, approach, series, world_size, repeat, device, device_kind, oversubscribed, global_batch, rows_per_rank,
    useful_tokens_per_s, base_world_size,
    CASE WHEN not_compared IS NULL THEN base_useful_tokens_per_s END AS base_useful_tokens_per_s,
    CASE WHEN not_compared IS NULL THEN useful_tokens_per_s / base_useful_tokens_per_s END AS speed_up,
    CASE WHEN not_compared IS NULL
         THEN useful_tokens_per_s / (world_size / base_world_size * base_useful_tokens_per_s) END AS efficiency,
    not_compared
FROM paired
ORDER BY approach, storage, layout, micro_batch, science_per_rank, rows_per_rank, world_size, repeat, run_id;
