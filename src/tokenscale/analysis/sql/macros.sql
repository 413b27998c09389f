-- Definitions that several queries share. Every rate of tokens in this project is `tokens_per_s` over `measured_steps`.

-- Tokens per second of a set of steps: sum of tokens over sum of step times. Rates are never averaged (Hoefler & Belli
-- 2015, rule 3). NULL where the steps took no time.
CREATE MACRO tokens_per_s(tokens, step_s) AS sum(tokens) / nullif(sum(step_s), 0);

-- Steps that count for a rate: those with a time, without the first `warmup_steps` steps of each attempt.
CREATE MACRO measured_steps(warmup_steps) AS TABLE
    SELECT * FROM steps_global AS g WHERE g.attempt_step >= warmup_steps AND g.step_s IS NOT NULL;
