-- Waiting in a pipeline: `bubble_share` is the time that ranks waited for other stages, transfers included, over that time
-- and the time of their forward and backward passes; sums over all ranks and steps after warm-up ($warmup_steps steps an
-- attempt). `speed_up` is useful tokens per second over those of schedule naive with as many micro-batches, all else equal.
-- `largest_loss_difference` is over all steps, against schedule naive with the fewest micro-batches of the same repeat.
WITH gathered AS MATERIALIZED (                       -- asked three times, and of a few runs alone
    SELECT g.run_id, g.step, g.loss_sum / nullif(g.useful_tokens, 0) AS loss, g.order_digest
    FROM steps_global AS g JOIN runs AS r USING (run_id)
    WHERE r.pipeline > 1
),
waited AS (
    SELECT
        s.run_id,
        max(s.micro_steps) AS micro_batches, sum(s.bubble_s) AS bubble_s,
        sum(s.forward_s + s.backward_s) AS passes_s, count(DISTINCT s.step) AS steps
    FROM steps AS s
    JOIN gathered AS g USING (run_id, step)            -- steps of all ranks, of runs that count
    WHERE s.attempt_step >= $warmup_steps
        AND s.bubble_s IS NOT NULL AND s.forward_s IS NOT NULL AND s.backward_s IS NOT NULL
    GROUP BY s.run_id
),
measured AS (
    SELECT r.*, w.micro_batches, w.bubble_s, w.passes_s, w.steps, t.useful_tokens_per_s
    FROM waited AS w
    JOIN runs AS r USING (run_id)
    JOIN run_rates($warmup_steps) AS t USING (run_id)
    WHERE w.bubble_s + w.passes_s > 0
),
pairs AS (
    SELECT m.run_id, n.run_id AS naive, n.micro_batches = m.micro_batches AS as_many, n.micro_batches
    FROM measured AS m
    JOIN measured AS n
        ON n.schedule = 'naive' AND n.approach = m.approach AND n.storage = m.storage AND n.science = m.science
        AND n.repeat = m.repeat AND n.pipeline = m.pipeline AND n.data = m.data AND n.shard = m.shard
        AND n.sharding = m.sharding AND n.tensor = m.tensor
),
reference AS (
    SELECT run_id, naive FROM pairs
    QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY micro_batches, naive) = 1
),
speed AS (
    SELECT run_id, naive FROM pairs WHERE as_many
    QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY naive) = 1
),
referenced AS MATERIALIZED (                           -- else both are joined by their steps alone first
    SELECT p.run_id, g.step, g.loss, g.order_digest
    FROM reference AS p JOIN gathered AS g ON g.run_id = p.naive
),
agreed AS (
    SELECT
        a.run_id,
        max(abs(a.loss - b.loss)) AS largest_loss_difference,
        same_data(a.order_digest, b.order_digest) AS same_data
    FROM gathered AS a JOIN referenced AS b USING (run_id, step)
    GROUP BY a.run_id
)
SELECT
    m.run_id, m.schedule, m.pipeline, m.stages_per_rank, m.world_size, m.micro_batches, m.micro_batch, m.repeat,
    m.device_kind, m.oversubscribed, m.steps, m.bubble_s, m.passes_s,
    m.bubble_s / (m.bubble_s + m.passes_s) AS bubble_share,
    m.useful_tokens_per_s,
    m.useful_tokens_per_s / n.useful_tokens_per_s AS speed_up,
    a.largest_loss_difference, a.same_data
FROM measured AS m
LEFT JOIN speed AS p ON p.run_id = m.run_id
LEFT JOIN measured AS n ON n.run_id = p.naive
LEFT JOIN agreed AS a ON a.run_id = m.run_id
ORDER BY m.pipeline, m.schedule, m.stages_per_rank, m.micro_batches, m.world_size, m.repeat, m.run_id;
