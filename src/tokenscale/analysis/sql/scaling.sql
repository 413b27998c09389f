-- Strong scaling at a fixed global batch: useful tokens per second T(N) at world size N (sum over sum after $warmup_steps
-- steps an attempt), speed-up T(N) / T(N0) and efficiency T(N) / (N / N0 × T(N0)). N0 (`base_world_size`) is the smallest
-- world size measured of a series (the approach and all other factors); each run is held against the run there of the
-- same settings, micro-batch and repeat, whose absolute T(N0) stands beside it. A run without such a partner has no
-- efficiency, and `not_compared` says why; a run at world size 1 is its own base.
WITH measured AS (
    SELECT
        r.*,
        t.useful_tokens_per_s,
        min(r.world_size) OVER (PARTITION BY r.series) AS base_world_size,
        max(r.world_size) OVER (PARTITION BY r.series) AS largest_world_size
    FROM run_rates($warmup_steps) AS t JOIN runs AS r USING (run_id)
),
paired AS (
    SELECT
        m.*,
        b.useful_tokens_per_s AS base_useful_tokens_per_s, b.threads_per_rank AS base_threads_per_rank,
        CASE
            WHEN m.base_world_size > 1 AND m.largest_world_size = m.base_world_size
                THEN 'no other world size of its series was measured'
            WHEN b.run_id IS NULL
                THEN 'no run of its repeat was measured at world size ' || m.base_world_size
            WHEN b.global_batch <> m.global_batch
                THEN 'global batch ' || m.global_batch || ', at world size ' || m.base_world_size || ' ' || b.global_batch
            WHEN b.micro_batch <> m.micro_batch
                THEN 'micro-batch ' || m.micro_batch || ', at world size ' || m.base_world_size || ' ' || b.micro_batch
            WHEN b.science IS DISTINCT FROM m.science
                THEN 'other settings than at world size ' || m.base_world_size
        END AS not_compared
    FROM measured AS m
    LEFT JOIN measured AS b                            -- one row at most: ingest refuses a repeat that is there twice
        ON b.series = m.series AND b.repeat = m.repeat AND b.world_size = m.base_world_size
)
SELECT
    run_id, approach, series, world_size, repeat, device, device_kind, oversubscribed, threads_per_rank,
    CASE WHEN not_compared IS NULL THEN base_threads_per_rank END AS single_threads_per_rank,
    global_batch, useful_tokens_per_s, base_world_size,
    CASE WHEN not_compared IS NULL THEN base_useful_tokens_per_s END AS base_useful_tokens_per_s,
    CASE WHEN not_compared IS NULL THEN useful_tokens_per_s / base_useful_tokens_per_s END AS speed_up,
    CASE WHEN not_compared IS NULL
         THEN useful_tokens_per_s / (world_size / base_world_size * base_useful_tokens_per_s) END AS efficiency,
    not_compared
FROM paired
ORDER BY series, world_size, repeat, run_id;
