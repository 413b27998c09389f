-- Seconds of a run and of an epoch. `training_s` is the sum of all steps (warm-up included, each as long as its slowest
-- rank's); `validation_s` was spent between them, `checkpoint_s` on writing weights, in part beside them; `start_s` is
-- the longest that a rank of the first attempt took before its first step; `wall_s` runs from the first event to the
-- last, all attempts and what lay between them included. An epoch is what the token store of the run holds; for an
-- approach that tokenizes while training, the store of its offline twin from the same corpus. `epoch_s` is the epoch's
-- rows over the run's rows per second after $warmup_steps steps an attempt; null where no such store is at hand. A row of
-- a stream is a sequence length of its tokens; of length-bucketed batches, a document.
WITH twins(approach, format) AS (VALUES ('padded', 'padded'), ('padding-free', 'token-list')),
stored AS (
    SELECT r.run_id, s.*
    FROM runs AS r JOIN stores AS s ON s.manifest_sha256 = r.store_sha256
    UNION ALL
    SELECT r.run_id, s.*
    FROM runs AS r
    JOIN twins AS t USING (approach)
    JOIN stores AS s
        ON s.format = t.format AND s.split = 'train' AND s.corpus_sha256 = r.corpus_sha256 AND s.tokenizer = r.tokenizer
        AND s.eos = r.eos AND coalesce(s.sequence_length, r.sequence_length) = r.sequence_length
    WHERE r.store_sha256 IS NULL
),
epoch AS (                                             -- stores that differ in their codec only hold the same tokens
    SELECT
        s.run_id,
        min(s.useful_tokens) AS useful_tokens, min(s.documents) AS documents,
        CASE WHEN any_value(r.approach) = 'length-bucketed' THEN min(s.documents)
             ELSE min(s.total_tokens) / any_value(r.sequence_length) END AS rows
    FROM stored AS s JOIN runs AS r USING (run_id)
    GROUP BY s.run_id
    HAVING min(s.total_tokens) = max(s.total_tokens)
),
trained AS (
    SELECT
        run_id,
        count(*) AS steps, sum(step_s) AS training_s, sum(rows)::BIGINT AS rows,
        sum(rows) FILTER (attempt_step >= $warmup_steps AND step_s IS NOT NULL)
            / nullif(sum(step_s) FILTER (attempt_step >= $warmup_steps), 0) AS rows_per_s
    FROM steps_global
    GROUP BY run_id
),
between_steps AS (
    SELECT
        run_id,
        coalesce(sum(duration_s) FILTER (event = 'validation' AND rank = 0), 0) AS validation_s,
        coalesce(sum(duration_s) FILTER (event = 'checkpoint' AND rank = 0), 0) AS checkpoint_s,
        max(duration_s) FILTER (event = 'init_done' AND attempt = 0) AS start_s
    FROM events
    GROUP BY run_id
)
SELECT
    r.run_id, r.approach, r.series, r.world_size, r.repeat, t.steps, t.training_s, b.validation_s, b.checkpoint_s,
    b.start_s,
    r.stopped_unix_s - r.started_unix_s AS wall_s,
    t.rows, t.rows_per_s, e.rows AS epoch_rows, e.useful_tokens AS epoch_useful_tokens,
    e.documents AS epoch_documents,
    t.rows / e.rows AS epochs, e.rows / t.rows_per_s AS epoch_s
FROM trained AS t
JOIN runs AS r USING (run_id)
LEFT JOIN between_steps AS b USING (run_id)
LEFT JOIN epoch AS e USING (run_id)
ORDER BY r.series, r.world_size, r.repeat, r.run_id;
