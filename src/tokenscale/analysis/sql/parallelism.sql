-- Parallel methods beside each other: useful tokens per second of a run (all ranks, sum over sum after warm-up), efficiency
-- T(N) / (N × T(1)), memory, and whether the same was computed. The reference is the run on one rank of the same approach,
-- settings, micro-batch and repeat; a run without it has no efficiency and no differences. Memory is that of the rank that
-- holds most: parameters, gradients, optimizer state, and activations as the step needs them at once, measured in the first
-- step of the latest attempt. `sent_bytes` is what the rank that sends most sends in that step, collectives as rings send
-- them, beside what the settings predict. `final_loss` is that of the last step; `largest_loss_difference` is over all
-- steps, the last included; `same_data` says that all steps have the reference's digests. A method goes by the degrees
-- above one, with the degree where there are several.
WITH gathered AS MATERIALIZED (                       -- asked three times, and gathering the ranks is most of the work
    SELECT run_id, step, loss_sum / nullif(useful_tokens, 0) AS loss, order_digest FROM steps_global
),
named AS (
    SELECT
        run_id,
        concat_ws(
            ' + ',
            CASE WHEN pipeline > 1 THEN schedule || CASE WHEN pipeline < world_size THEN ' ' || pipeline ELSE '' END END,
            CASE WHEN tensor > 1 THEN 'tp' || CASE WHEN tensor < world_size THEN ' ' || tensor ELSE '' END END,
            CASE WHEN shard > 1 AND data > 1 THEN 'hsdp ' || data || ' × ' || shard
                 WHEN shard > 1 THEN sharding || CASE WHEN shard < world_size THEN ' ' || shard ELSE '' END
                 WHEN data > 1 THEN copies || CASE WHEN data < world_size THEN ' ' || data ELSE '' END
                 WHEN world_size = 1 THEN 'single' END
        ) AS method,
        (pipeline > 1)::INTEGER + (tensor > 1)::INTEGER + (shard > 1)::INTEGER + (data > 1)::INTEGER AS parts
    FROM runs
),
measured AS (
    SELECT r.* EXCLUDE (method), n.method, n.parts, t.useful_tokens_per_s
    FROM run_rates($warmup_steps) AS t
    JOIN runs AS r USING (run_id)
    JOIN named AS n USING (run_id)
),
pairs AS (
    SELECT m.run_id, s.run_id AS single
    FROM measured AS m
    JOIN measured AS s
        ON s.world_size = 1 AND s.approach = m.approach AND s.factors = m.factors AND s.storage = m.storage
        AND s.science = m.science AND s.micro_batch = m.micro_batch AND s.repeat = m.repeat
    QUALIFY row_number() OVER (PARTITION BY m.run_id ORDER BY s.run_id <> m.run_id, s.layout, s.run_id) = 1
),
final AS (
    SELECT run_id, arg_max(loss, step) AS final_loss FROM gathered GROUP BY run_id
),
referenced AS MATERIALIZED (                           -- else both are joined by their steps alone first
    SELECT p.run_id, g.step, g.loss, g.order_digest
    FROM pairs AS p JOIN gathered AS g ON g.run_id = p.single
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
    m.run_id, m.approach, m.factors, m.storage, m.method, m.layout, m.world_size, m.repeat, m.device, m.device_kind,
    m.oversubscribed, m.threads_per_rank, s.threads_per_rank AS single_threads_per_rank, m.useful_tokens_per_s,
    s.useful_tokens_per_s AS single_useful_tokens_per_s,
    m.useful_tokens_per_s / (m.world_size * s.useful_tokens_per_s) AS efficiency,
    h.parameters_bytes::DOUBLE AS parameters_bytes, h.gradients_bytes::DOUBLE AS gradients_bytes,
    h.optimizer_bytes::DOUBLE AS optimizer_bytes, h.activations_bytes::DOUBLE AS activations_bytes,
    h.bytes::DOUBLE AS memory_bytes, e.sent_bytes::DOUBLE AS sent_bytes,
    m.predicted_sent_bytes::DOUBLE AS predicted_sent_bytes,
    f.final_loss, a.largest_loss_difference, a.same_data
FROM measured AS m
JOIN final AS f USING (run_id)
LEFT JOIN fullest_ranks AS h ON h.run_id = m.run_id
LEFT JOIN sent AS e ON e.run_id = m.run_id
LEFT JOIN pairs AS p ON p.run_id = m.run_id
LEFT JOIN measured AS s ON s.run_id = p.single
LEFT JOIN agreed AS a ON a.run_id = m.run_id
ORDER BY m.approach, m.factors, m.storage, m.world_size, m.parts, m.pipeline, m.tensor, m.shard, m.sharding, m.schedule,
    m.layout, m.repeat, m.run_id;
