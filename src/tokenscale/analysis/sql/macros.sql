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
