-- Values of the steps that every rank has written, and of the validations before them. The names in braces are fields of the logs
-- (analysis/measures.py).
WITH over_ranks AS (
    SELECT step, max(t_unix_s) AS t_unix_s, {summed_steps}
    FROM latest_steps
    WHERE $ended OR attempt IN (SELECT attempt FROM events WHERE event = 'run_start' AND world_size IS NOT NULL)
    GROUP BY step HAVING count(*) = any_value(world_size)
),
rates AS (
    SELECT step, tokens_per_s(useful_tokens, step_s) AS useful_tokens_per_s,
        tokens_per_s(total_tokens, step_s) AS total_tokens_per_s
    FROM over_ranks GROUP BY step
),
trained AS (
    SELECT step, coalesce(t_unix_s, 0.0) AS t_unix_s, {steps},
        CASE WHEN nonfinite IS DISTINCT FROM 1 THEN loss_sum / nullif(useful_tokens, 0) END AS "train/loss",
        useful_tokens_per_s AS "speed/useful_tokens_per_s", total_tokens_per_s AS "speed/total_tokens_per_s",
        data_wait_s / nullif(step_s, 0) AS "speed/data_wait_share",
        sum(useful_tokens) OVER (ORDER BY step) AS "train/useful_tokens_seen"
    FROM over_ranks JOIN rates USING (step)
),
latest AS (
    SELECT * REPLACE (coalesce(step, 0) AS step), loss_sum / useful_tokens AS loss
    FROM events
    WHERE event IN ('validation', 'source_validation') AND useful_tokens > 0
    QUALIFY row_number() OVER (
        PARTITION BY event, corpus, coalesce(step, 0) ORDER BY attempt DESC, rank, t_mono_s DESC NULLS LAST
    ) = 1
),
validated AS (
    SELECT step, coalesce(t_unix_s, 0.0) AS t_unix_s, {validations},
        loss AS "validation/loss", exp(loss) AS "validation/perplexity"
    FROM latest
    WHERE event = 'validation' AND ($ended OR step <= coalesce((SELECT max(step) FROM over_ranks), -1) + 1)
)
SELECT step, true AS after, t_unix_s, name, value
FROM (UNPIVOT trained ON COLUMNS(* EXCLUDE (step, t_unix_s)) INTO NAME name VALUE value)
UNION ALL
SELECT step, false, t_unix_s, name, value
FROM (UNPIVOT validated ON COLUMNS(* EXCLUDE (step, t_unix_s)) INTO NAME name VALUE value)
WHERE isfinite(value)
UNION ALL
SELECT v.step, false, v.t_unix_s, 'validation/' || s.corpus || '/loss', s.loss
FROM validated AS v JOIN latest AS s ON s.step = v.step AND s.event = 'source_validation' AND s.corpus IS NOT NULL
ORDER BY step, after
