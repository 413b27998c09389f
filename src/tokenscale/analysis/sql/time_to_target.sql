-- Time to a validation loss: the first validation at or below the target that is followed by no higher one within the next
-- `window_tokens` useful tokens of training, or until the run's end. One row a run: `seconds` of training steps and
-- `useful_tokens` before that validation, +inf where there is none (unreached); the loss fell below the target after
-- `seconds_before`, the time of the validation before. `validations` lie inside the window, that one included; where the
-- run ended inside it, `whole_window` is false. A cell is a series at a world size: `reached_of_cell` of `runs_of_cell`
-- runs reached it, `median_s_of_cell` is their median with +inf as the largest value, so +inf where half or more did not.
-- Without a target it is that of the experiment's file (`target_loss`; `target_stated` is then true), and where that has
-- none the highest loss that any run ended with, which all runs reach unless they rose again. Without
-- window_tokens, a validation stands for itself.
WITH checks AS MATERIALIZED (
    SELECT run_id, step, useful_tokens_seen, training_s, loss, last FROM validation
),
target AS (
    SELECT
        coalesce($target::DOUBLE, getvariable('target_loss')::DOUBLE, max(loss) FILTER (last)) AS target,
        coalesce($target::DOUBLE, getvariable('target_loss')::DOUBLE) IS NOT NULL AS target_stated
    FROM checks
),
following AS (
    SELECT
        v.run_id, v.step, v.useful_tokens_seen, v.training_s, v.loss,
        lag(v.training_s) OVER (PARTITION BY v.run_id ORDER BY v.step) AS seconds_before,
        max(v.loss) OVER within AS highest, count(*) OVER within AS validations,
        max(v.useful_tokens_seen) OVER (PARTITION BY v.run_id)
            >= v.useful_tokens_seen + coalesce($window_tokens::BIGINT, 0) AS whole_window
    FROM checks AS v
    WINDOW within AS (
        PARTITION BY v.run_id ORDER BY v.useful_tokens_seen
        RANGE BETWEEN CURRENT ROW AND coalesce($window_tokens::BIGINT, 0) FOLLOWING
    )
),
first AS (
    SELECT f.*
    FROM following AS f
    CROSS JOIN target AS t
    WHERE f.highest <= t.target
    QUALIFY row_number() OVER (PARTITION BY f.run_id ORDER BY f.step) = 1
),
reached AS (
    SELECT
        r.run_id, r.approach, r.series, r.world_size, r.repeat, t.target, t.target_stated,
        f.run_id IS NOT NULL AS reached,
        f.step,
        coalesce(f.training_s, 'inf'::DOUBLE) AS seconds,
        f.seconds_before,
        coalesce(f.useful_tokens_seen, 'inf'::DOUBLE) AS useful_tokens,
        f.loss, f.validations, f.whole_window
    FROM (SELECT DISTINCT run_id FROM checks) AS v
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
