-- Quantities of runs as the source studies took them, by the name that studies.csv gives them.
WITH progress AS (
    SELECT run_id, step, loss_sum, useful_tokens, sum(step_s) OVER (PARTITION BY run_id ORDER BY step) AS seconds,
        max(step) OVER (PARTITION BY run_id) AS last
    FROM steps_global
),
to_loss AS (  -- until the first step whose loss is not above 5.5; never: infinity
    SELECT run_id, coalesce(min(seconds) FILTER (loss_sum <= 5.5 * useful_tokens), 'inf'::DOUBLE) AS seconds
    FROM progress GROUP BY run_id
),
pairs AS (
    SELECT r.run_id, s.run_id AS base, r.world_size AS ranks, s.world_size AS base_ranks, s.schedule AS base_schedule,
        s.precision = r.precision AS same_precision, s.micro_batch = r.micro_batch AS same_rows
    FROM runs AS r JOIN runs AS s USING (model, approach, repeat)
)
SELECT 'useful tokens/s' AS quantity, run_id, useful_tokens_per_s AS value FROM throughput
UNION ALL SELECT 'total tokens/s', run_id, total_tokens_per_s FROM throughput
UNION ALL SELECT 'useful share %', run_id, 100 * (1 - not_useful_share) FROM throughput
UNION ALL SELECT 'MFU %', run_id, 100 * mfu_palm FROM computing
UNION ALL SELECT 'TFLOP/s', run_id, tflops_per_s FROM computing
UNION ALL SELECT 'efficiency %', run_id, 100 * efficiency FROM scaling_weak
UNION ALL SELECT 'efficiency against one GPU %', p.run_id, 100 * t.useful_tokens_per_s / (ranks * b.useful_tokens_per_s)
    FROM pairs AS p JOIN throughput AS t USING (run_id) JOIN throughput AS b ON b.run_id = base
    WHERE base_ranks = 1 AND same_precision
UNION ALL SELECT 'seconds of training', run_id, training_s FROM epochs
UNION ALL SELECT 'seconds of an epoch', run_id, training_s / 10 FROM epochs
UNION ALL SELECT 'seconds of an epoch of 2', run_id, training_s / 2 FROM epochs
UNION ALL SELECT 'speed-up of an epoch', p.run_id, b.training_s / t.training_s
    FROM pairs AS p JOIN epochs AS t USING (run_id) JOIN epochs AS b ON b.run_id = base WHERE base_ranks = 1
UNION ALL SELECT 'speed-up of a pipeline', p.run_id, b.training_s / t.training_s
    FROM pairs AS p JOIN epochs AS t USING (run_id) JOIN epochs AS b ON b.run_id = base
    WHERE base_ranks = ranks AND base_schedule = 'naive'
UNION ALL SELECT 'seconds to a training loss of 5.5', run_id, seconds FROM to_loss
UNION ALL SELECT 'efficiency to that loss %', p.run_id, 100 * base_ranks * b.seconds / (ranks * t.seconds)
    FROM pairs AS p JOIN to_loss AS t USING (run_id) JOIN to_loss AS b ON b.run_id = base
    WHERE base_ranks = 4 AND same_rows
UNION ALL SELECT 'last training loss', run_id, sum(loss_sum) / sum(useful_tokens)
    FROM progress WHERE step > last - 100 GROUP BY run_id
UNION ALL SELECT 'training loss of the last step', run_id, sum(loss_sum) / sum(useful_tokens)
    FROM progress WHERE step > last - 1 GROUP BY run_id
UNION ALL SELECT 'validation loss', run_id, loss FROM validation WHERE last
UNION ALL SELECT 'BLEU', run_id, bleu FROM translation
UNION ALL SELECT 'GB a GPU', run_id, peak_bytes / 1e9 FROM memory
UNION ALL SELECT 'GB of weights', run_id, parameters_bytes / 1e9 FROM memory
UNION ALL SELECT 'GB of optimizer state', run_id, optimizer_bytes / 1e9 FROM memory
UNION ALL SELECT 'GB of weights, gradients and optimizer state', run_id,
    (parameters_bytes + gradients_bytes + optimizer_bytes) / 1e9 FROM memory
