-- Validation loss in nats a useful token on the fixed held-out slice, the same rows for every approach. `step` counts the
-- optimizer steps done before, `useful_tokens_seen` and `training_s` what they trained on (steps of another run that this
-- one goes on from included), `positions_seen` the positions that were computed, padding included (not known of a run that
-- goes on from another one), `training_s` how long the run's own took (validation itself left out). Perplexity is exp(loss). `bits_per_byte` is the loss in bits times the useful tokens of
-- the validation store over the UTF-8 bytes of its text (Gao et al. 2020, section 3.1): comparable between tokenizers,
-- exact where the slice is the whole store, of causal models; null where no such store and corpus are at hand. Where
-- several ranks or attempts report a step, the latest attempt's lowest rank counts. `accuracy` is the share of useful labels
-- that have the largest logit: of next tokens, or of masked ones; null where the run did not count them.
WITH reported AS (
    SELECT e.run_id, coalesce(e.step, 0) AS step, e.loss_sum, e.useful_tokens, e.correct_tokens
    FROM events AS e JOIN runs AS r USING (run_id)
    WHERE e.event = 'validation' AND e.useful_tokens > 0 AND r.validity IN ('valid', 'suspect')
    QUALIFY row_number() OVER (
        PARTITION BY e.run_id, coalesce(e.step, 0) ORDER BY e.attempt DESC, e.rank, e.t_mono_s DESC
    ) = 1
),
strides AS (                                           -- steps that no validation parts are added up first
    SELECT run_id, list_reduce(list(step ORDER BY step), lambda a, b: gcd(a, b)) AS stride
    FROM reported
    WHERE step > 0
    GROUP BY run_id
),
strode AS (
    SELECT
        g.run_id,
        (g.step // s.stride + 1) * s.stride AS step, sum(g.useful_tokens) AS useful_tokens, sum(g.total_tokens) AS positions,
        sum(g.step_s) AS seconds
    FROM steps_global AS g JOIN strides AS s USING (run_id)
    GROUP BY ALL
),
gone AS (
    SELECT
        run_id, step, sum(useful_tokens) OVER w AS useful_tokens, sum(positions) OVER w AS positions,
        sum(seconds) OVER w AS seconds
    FROM strode
    WINDOW w AS (PARTITION BY run_id ORDER BY step)
),
texts AS (
    SELECT manifest_sha256, any_value(useful_tokens / nullif(text_bytes, 0)) AS tokens_per_byte
    FROM stores
    GROUP BY manifest_sha256
)
SELECT
    v.run_id, r.approach, r.series, r.world_size, r.repeat, v.step,
    coalesce(g.useful_tokens, 0)::BIGINT + coalesce(r.tokens_before, 0) AS useful_tokens_seen,
    CASE WHEN coalesce(r.tokens_before, 0) = 0 THEN coalesce(g.positions, 0)::BIGINT END AS positions_seen,
    coalesce(g.seconds, 0) AS training_s,
    v.useful_tokens AS validation_tokens,
    v.loss_sum / v.useful_tokens AS loss, exp(v.loss_sum / v.useful_tokens) AS perplexity,
    CASE WHEN r.objective = 'causal' AND r.labels = 'all'
         THEN v.loss_sum / v.useful_tokens / ln(2) * t.tokens_per_byte END AS bits_per_byte,
    v.correct_tokens / v.useful_tokens AS accuracy,
    r.validation_attention AS attention,               -- of positions of held-out rows
    v.step = max(v.step) OVER (PARTITION BY v.run_id) AS last
FROM reported AS v
JOIN runs AS r USING (run_id)
LEFT JOIN texts AS t ON t.manifest_sha256 = r.validation_store_sha256
ASOF LEFT JOIN gone AS g ON g.run_id = v.run_id AND g.step <= v.step
ORDER BY r.series, r.world_size, r.repeat, v.run_id, v.step;
