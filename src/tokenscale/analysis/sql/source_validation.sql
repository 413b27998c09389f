-- Validation loss of each corpus of a mixture, in nats a useful token on the corpus's own held-out slice, the same rows
-- for every mixture. `source` is the corpus, `corpus` the mixture. `share` is the corpus's share of the sequences of the
-- run. Where several attempts report a step, the latest attempt's counts.
WITH reported AS (
    SELECT e.run_id, coalesce(e.step, 0) AS step, e.corpus AS source, e.loss_sum, e.useful_tokens
    FROM events AS e JOIN runs AS r USING (run_id)
    WHERE e.event = 'source_validation' AND e.useful_tokens > 0 AND r.validity IN ('valid', 'suspect')
    QUALIFY row_number() OVER (
        PARTITION BY e.run_id, coalesce(e.step, 0), e.corpus ORDER BY e.attempt DESC, e.rank, e.t_mono_s DESC
    ) = 1
)
SELECT
    v.run_id, r.approach, r.series, r.corpus, r.world_size, r.repeat, v.source,
    json_transform(r.mixture, '"MAP(VARCHAR,DOUBLE)"')[v.source] AS share,
    v.step, v.useful_tokens AS validation_tokens,
    v.loss_sum / v.useful_tokens AS loss,
    v.step = max(v.step) OVER (PARTITION BY v.run_id) AS last
FROM reported AS v JOIN runs AS r USING (run_id)
ORDER BY r.series, r.world_size, r.repeat, v.run_id, v.source, v.step;
