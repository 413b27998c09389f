-- Validation loss in nats a useful token on the fixed held-out slice, the same rows for every approach. `step` counts the
-- optimizer steps done before; perplexity is exp(loss). Where several ranks or attempts report a step, the latest
-- attempt's lowest rank counts.
WITH reported AS (
    SELECT e.run_id, coalesce(e.step, 0) AS step, e.loss_sum, e.useful_tokens, e.duration_s,
        row_number() OVER (PARTITION BY e.run_id, coalesce(e.step, 0) ORDER BY e.attempt DESC, e.rank, e.t_mono_s DESC) AS place
    FROM events AS e
    WHERE e.event = 'validation' AND e.useful_tokens > 0
)
SELECT
    v.run_id,
    r.approach,
    r.series,
    r.world_size,
    r.repeat,
    v.step,
    coalesce((SELECT sum(g.useful_tokens) FROM steps_global AS g WHERE g.run_id = v.run_id AND g.step < v.step), 0)::BIGINT
        AS useful_tokens_seen,
    v.useful_tokens AS validation_tokens,
    v.loss_sum / v.useful_tokens AS loss,
    exp(v.loss_sum / v.useful_tokens) AS perplexity,
    v.step = max(v.step) OVER (PARTITION BY v.run_id) AS last
FROM reported AS v
JOIN runs AS r USING (run_id)
WHERE v.place = 1 AND r.validity IN ('valid', 'suspect')
ORDER BY r.series, r.world_size, r.repeat, v.run_id, v.step;
