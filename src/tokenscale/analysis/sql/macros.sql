-- Definitions that several queries share. Every rate of tokens in this project is `tokens_per_s` over `measured_steps`.

-- Tokens per second of a set of steps: sum of tokens over sum of step times. Rates are never averaged (Hoefler & Belli
-- 2015, rule 3). NULL where the steps took no time.
CREATE MACRO tokens_per_s(tokens, step_s) AS sum(tokens) / nullif(sum(step_s), 0);

-- Steps that count for a rate: those with a time, without the first `warmup_steps` steps of each attempt.
CREATE MACRO measured_steps(warmup_steps) AS TABLE
    SELECT * FROM steps_global AS g WHERE g.attempt_step >= warmup_steps AND g.step_s IS NOT NULL;

-- Largest difference of losses that rounding explains, as a share of the loss, so many steps after equal weights.
CREATE MACRO loss_tolerance(precision, steps) AS
    2.0 ** (CASE WHEN precision = 'fp32' THEN least(-8, -18 + greatest(0, steps - 19) / 5)
        ELSE least(-5, -9 + greatest(0, steps - 19) / 5) END);

-- Whether a run only reads its batches, and trains on none.
CREATE MACRO only_reads(arm) AS coalesce(arm IN ('reader', 'studies', 'memcpy'), false);

-- Whether two runs read the same data in all steps of a group: both state a digest for each step, and these are equal.
CREATE MACRO same_data(one, other) AS count(*) = count(*) FILTER (one = other);

-- Approaches that train on equal batches: tokenized online, and before.
CREATE VIEW twins AS FROM (VALUES ('padded', 'pretokenized-padded'), ('padding-free', 'token-list')) AS t(online, offline);

-- Rates of each run over its measured steps.
CREATE MACRO run_rates(warmup_steps) AS TABLE
    SELECT run_id, tokens_per_s(useful_tokens, step_s) AS useful_tokens_per_s,
        tokens_per_s(total_tokens, step_s) AS total_tokens_per_s, median(step_s) AS median_step_s,
        sum(useful_tokens) / sum(total_tokens) AS useful_share
    FROM measured_steps(warmup_steps)
    GROUP BY run_id
    HAVING sum(step_s) > 0;

-- Steps for loss curves: those that count, and those before the stop of a run whose loss was not finite.
CREATE VIEW shown_steps AS
    SELECT run_id, step, useful_tokens, total_tokens, loss_sum, step_s FROM steps_global
    UNION ALL
    SELECT s.run_id, s.step, sum(s.useful_tokens)::BIGINT, sum(s.total_tokens)::BIGINT, sum(s.loss_sum), max(s.step_s)
    FROM steps AS s JOIN runs AS r USING (run_id)
    WHERE r.status = 'nonfinite' AND r.validity = 'invalid'
    GROUP BY s.run_id, s.step
    HAVING count(*) = any_value(s.world_size) AND NOT bool_or(s.nonfinite);

-- Runs that trained on the same batches: at the smallest world size and at another one, with all else equal; and the
-- run at the start of a chain of resumed runs, which was never interrupted, with each run that goes on from its state.
CREATE VIEW reference_pairs AS
    WITH RECURSIVE comparable AS (
        SELECT run_id, series, science, repeat, world_size, resumed_from FROM runs WHERE validity IN ('valid', 'suspect')
    ),
    begun AS (
        SELECT *, min(world_size) OVER (PARTITION BY series, science, repeat) AS smallest
        FROM comparable
        WHERE resumed_from IS NULL
    ),
    back AS (                                          -- from a resumed run to the one before it, and so on
        SELECT run_id, resumed_from AS earlier FROM comparable WHERE resumed_from IS NOT NULL
        UNION
        SELECT b.run_id, c.resumed_from FROM back AS b JOIN comparable AS c ON c.run_id = b.earlier
        WHERE c.resumed_from IS NOT NULL
    )
    SELECT 'world sizes' AS kind, a.run_id AS reference, b.run_id AS compared
    FROM begun AS a JOIN begun AS b USING (series, science, repeat)
    WHERE a.world_size = a.smallest AND b.world_size > a.world_size
    UNION ALL
    SELECT 'resumed and uninterrupted', a.run_id, b.run_id
    FROM back
    JOIN begun AS a ON a.run_id = back.earlier
    JOIN comparable AS b ON b.run_id = back.run_id AND b.science = a.science AND b.repeat = a.repeat;

-- Bytes that the rank that sends most sends in a step, measured in the first step of its latest attempt.
CREATE VIEW sent AS
    SELECT run_id, max(sent_bytes) AS sent_bytes
    FROM (
        SELECT run_id, sent_bytes FROM events
        WHERE event = 'memory'
        QUALIFY attempt = max(attempt) OVER (PARTITION BY run_id)
    )
    GROUP BY run_id;

-- Memory of a run's fullest rank, measured in the first step of its latest attempt. A rank with a part that was not
-- measured comes first, and makes the sum null: it may be the fullest.
CREATE VIEW fullest_ranks AS
    SELECT
        run_id, rank, parameters_bytes, gradients_bytes, optimizer_bytes, activations_bytes,
        parameters_bytes + gradients_bytes + optimizer_bytes + activations_bytes AS bytes
    FROM events
    WHERE event = 'memory'
    QUALIFY row_number() OVER (
        PARTITION BY run_id
        ORDER BY attempt DESC,
            parameters_bytes + gradients_bytes + optimizer_bytes + activations_bytes IS NULL DESC,
            parameters_bytes + gradients_bytes + optimizer_bytes + coalesce(activations_bytes, 0) DESC, rank
    ) = 1;
