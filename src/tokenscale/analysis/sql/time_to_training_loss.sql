-- Time to a training loss: the running mean over the last `window_tokens` useful tokens (sum of losses over sum of useful
-- tokens; a token budget, not a number of steps, so that batch sizes compare), from the first full window on; the first
-- window whose mean is at or below the target. A single step below it proves nothing: its loss is noise, and the smaller
-- the batch, the more. The window moves by whole steps, by an eighth of itself at most. One row a run: `seconds` of
-- training steps and `useful_tokens` up to the end of that window, +inf where there is none (unreached). A cell is a
-- series at a world size; its columns are those of time_to_target. Without window_tokens: a twentieth of what the
-- shortest run trained on; without a target: the highest mean that any run ended with, which all runs reach.
WITH global AS MATERIALIZED (                          -- asked twice, and gathering the ranks is most of the work
    SELECT run_id, step, loss_sum, useful_tokens, step_s FROM steps_global
),
totals AS (
    SELECT run_id, sum(useful_tokens) AS useful_tokens, count(*) AS steps
    FROM global
    GROUP BY run_id
    HAVING sum(useful_tokens) > 0 AND count(loss_sum) > 0
),
strides AS (
    SELECT
        run_id,
        coalesce($window_tokens::BIGINT, greatest(1, min(useful_tokens) OVER () // 20))::BIGINT AS window_tokens,
        greatest(1, window_tokens * steps // (8 * useful_tokens))::BIGINT AS stride
    FROM totals
),
strode AS (
    SELECT
        g.run_id,
        g.step // s.stride AS place,
        any_value(s.window_tokens) AS window_tokens,
        max(g.step) AS step,
        sum(g.loss_sum) AS loss_sum,
        sum(g.useful_tokens)::BIGINT AS useful_tokens,
        sum(g.step_s) AS seconds
    FROM global AS g
    JOIN strides AS s USING (run_id)
    GROUP BY ALL
),
gone AS (
    SELECT
        *,
        sum(useful_tokens) OVER w::BIGINT AS useful_tokens_seen,
        sum(seconds) OVER w AS training_s
    FROM strode
    WINDOW w AS (PARTITION BY run_id ORDER BY place)
),
running AS (
    SELECT
        run_id,
        step,
        useful_tokens_seen,
        training_s,
        sum(loss_sum) OVER within / sum(useful_tokens) OVER within AS loss
    FROM gone
    WINDOW within AS (
        PARTITION BY run_id ORDER BY useful_tokens_seen RANGE BETWEEN window_tokens - 1 PRECEDING AND CURRENT ROW
    )
    QUALIFY useful_tokens_seen >= window_tokens
),
ends AS (
    SELECT arg_max(loss, step) AS loss FROM running GROUP BY run_id
),
target AS (
    SELECT coalesce($target::DOUBLE, max(loss)) AS target FROM ends
),
first AS (
    SELECT f.*
    FROM running AS f
    CROSS JOIN target AS t
    WHERE f.loss <= t.target
    QUALIFY row_number() OVER (PARTITION BY f.run_id ORDER BY f.step) = 1
),
reached AS (
    SELECT
        r.run_id,
        r.approach,
        r.series,
        r.world_size,
        r.repeat,
        t.target,
        s.window_tokens,
        f.run_id IS NOT NULL AS reached,
        f.step,
        coalesce(f.training_s, 'inf'::DOUBLE) AS seconds,
        coalesce(f.useful_tokens_seen, 'inf'::DOUBLE) AS useful_tokens,
        f.loss
    FROM strides AS s
    JOIN runs AS r USING (run_id)
    CROSS JOIN target AS t
    LEFT JOIN first AS f USING (run_id)
)
SELECT
    *,
    count(*) OVER cell AS runs_of_cell,
    count(*) FILTER (reached) OVER cell AS reached_of_cell,
    median(seconds) OVER cell AS median_s_of_cell
FROM reached
WINDOW cell AS (PARTITION BY series, world_size)
ORDER BY series, world_size, repeat, run_id;
