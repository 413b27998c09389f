-- Training loss in at most $points points a run, for curves that a page can hold. A run's useful tokens are cut into
-- $points equal parts; a point is the steps that end in one of them, and stands at the last of these. `loss` is the sum
-- of losses over the sum of useful tokens of these steps (never a mean of their losses), `loss_lowest` and
-- `loss_highest` the extremes of theirs, tokens per second those of these steps (`tokens_per_s`). `useful_tokens_seen`
-- and `training_s` are what the run has trained on at the point, including what the run that it continues from trained on,
-- and the time of its own steps. A run of at most $points steps has one point per step. Losses, and which steps of which
-- runs count, are those of loss.sql; steps before the stop of a training whose loss was not finite are marked `stopped`.
WITH placed AS (
    SELECT
        run_id, step, useful_tokens, total_tokens, loss_sum, step_s,
        row_number() OVER so_far - 1 AS place, sum(useful_tokens) OVER so_far AS seen, count(*) OVER whole AS steps,
        sum(useful_tokens) OVER whole AS total
    FROM shown_steps
    WINDOW so_far AS (PARTITION BY run_id ORDER BY step), whole AS (PARTITION BY run_id)
),
points AS (
    SELECT
        run_id,
        CASE WHEN steps <= $points THEN place ELSE greatest(seen - 1, 0) * $points // greatest(total, 1) END AS point,
        max(step) AS step, count(*) AS steps, sum(useful_tokens) AS useful_tokens,
        sum(total_tokens) AS total_tokens, sum(loss_sum) AS loss_sum, sum(step_s) AS seconds,
        tokens_per_s(useful_tokens, step_s) AS useful_tokens_per_s,
        tokens_per_s(total_tokens, step_s) AS total_tokens_per_s,
        min(loss_sum / nullif(useful_tokens, 0)) AS lowest,
        max(loss_sum / nullif(useful_tokens, 0)) AS highest
    FROM placed
    GROUP BY ALL
)
SELECT
    p.run_id, r.approach, r.series, r.world_size, r.repeat,
    r.status = 'nonfinite' AS stopped,
    p.step, p.steps,
    p.useful_tokens::BIGINT AS useful_tokens,
    sum(p.useful_tokens) OVER so_far::BIGINT + coalesce(r.tokens_before, 0) AS useful_tokens_seen,
    sum(p.seconds) OVER so_far AS training_s, p.loss_sum / nullif(p.useful_tokens, 0) AS loss,
    p.lowest AS loss_lowest, p.highest AS loss_highest, p.useful_tokens_per_s, p.total_tokens_per_s
FROM points AS p JOIN runs AS r USING (run_id)
WINDOW so_far AS (PARTITION BY p.run_id ORDER BY p.step)
ORDER BY r.series, r.world_size, r.repeat, p.run_id, p.step;
