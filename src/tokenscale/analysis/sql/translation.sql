-- Translation: speed and quality of a run side by side. Tokens per second are sums over sums of the steps after
-- $warmup_steps steps an attempt, each as long as its slowest rank's and from the end of one to the end of the next, so
-- that making the batch is part of it: `target_tokens_per_s` counts labels that are trained on (with `labels: target`,
-- translations alone), `positions_per_s` what was computed on, padding included. `validation_loss` is the last one. BLEU
-- is sacrebleu's, of greedy translations of the first `bleu_sentences` held-out pairs, with the 95 % interval of a
-- bootstrap over these sentences: it says what other sentences would do; repeats say what other seeds do.
-- `bleu_signature` names what was computed. `bleu_by_epoch` are the scores after each epoch, where a run translated more
-- than once. Only runs that translated something have a row.
WITH timed AS (
    SELECT run_id, sum(rows)::BIGINT AS rows, count(*) AS steps FROM steps_global GROUP BY run_id
)
SELECT
    r.run_id, r.approach, r.series, r.world_size, r.repeat, r.global_batch, t.steps, t.rows,
    s.useful_tokens_per_s AS target_tokens_per_s, s.total_tokens_per_s AS positions_per_s, v.loss AS validation_loss,
    r.bleu, r.bleu_low, r.bleu_high, r.bleu_sentences, r.bleu_signature, b.bleu_by_epoch
FROM runs AS r
JOIN timed AS t USING (run_id)
LEFT JOIN run_rates($warmup_steps) AS s USING (run_id)
LEFT JOIN (
    SELECT run_id, string_agg(printf('%.1f', bleu), ', ' ORDER BY step) AS bleu_by_epoch
    FROM bleu
    GROUP BY run_id
    HAVING count(*) > 1
) AS b USING (run_id)
LEFT JOIN (SELECT run_id, loss FROM validation WHERE last) AS v USING (run_id)
WHERE r.bleu IS NOT NULL
ORDER BY r.series, r.world_size, r.repeat, r.run_id;
