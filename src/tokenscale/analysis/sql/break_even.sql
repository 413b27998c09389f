-- Break-even epochs of preprocessing: seconds that the store of an offline run took to write, over the seconds that an
-- epoch is shorter than that of its online twin: `online_epoch_s - offline_epoch_s`, the epoch's rows over each run's rows
-- per second (sum over sum after $warmup_steps steps an attempt). +inf where nothing is saved. Twins share factors, layout, settings, micro-batch, world size and
-- repeat; the corpus and the tokenizer, which both need, count for neither. Null where no build record is at hand.
WITH twins(online, offline) AS (VALUES ('padded', 'pretokenized-padded'), ('padding-free', 'token-list')),
speed AS (
    SELECT run_id, sum(rows) / sum(step_s) AS rows_per_s
    FROM measured_steps($warmup_steps)
    GROUP BY run_id
    HAVING sum(step_s) > 0
),
written AS (
    SELECT manifest_sha256, any_value(total_tokens) AS total_tokens, any_value(seconds) AS seconds
    FROM stores
    GROUP BY manifest_sha256
),
paired AS (
    SELECT
        f.*,
        o.run_id AS online_run_id,
        t.online AS online_approach,
        w.seconds AS preprocessing_s,
        w.total_tokens / f.sequence_length AS epoch_rows,
        w.total_tokens / f.sequence_length / b.rows_per_s AS offline_epoch_s,
        w.total_tokens / f.sequence_length / a.rows_per_s AS online_epoch_s
    FROM runs AS f
    JOIN twins AS t ON t.offline = f.approach
    JOIN runs AS o
        ON o.approach = t.online AND o.factors = f.factors AND o.layout = f.layout AND o.science = f.science
        AND o.micro_batch = f.micro_batch AND o.repeat = f.repeat AND o.world_size = f.world_size
    JOIN speed AS a ON a.run_id = o.run_id
    JOIN speed AS b ON b.run_id = f.run_id
    LEFT JOIN written AS w ON w.manifest_sha256 = f.store_sha256
)
SELECT
    run_id,
    online_run_id,
    approach,
    online_approach,
    series,
    world_size,
    repeat,
    preprocessing_s,
    epoch_rows,
    online_epoch_s,
    offline_epoch_s,
    online_epoch_s - offline_epoch_s AS saved_s_per_epoch,
    CASE WHEN online_epoch_s > offline_epoch_s THEN preprocessing_s / (online_epoch_s - offline_epoch_s)
         WHEN preprocessing_s IS NOT NULL THEN 'inf'::DOUBLE END AS break_even_epochs
FROM paired
ORDER BY series, world_size, repeat, run_id;
