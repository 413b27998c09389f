-- Milliseconds of a new token against its position, in stretches of positions: seconds of a stretch over its tokens, for all
-- rows of the batch together, in each round. Of each model and batch the longest text that was timed, behind its shortest
-- prompt. Without a cache every position before is read again for each token.
WITH decoding AS (
    SELECT *
    FROM inference_benchmarks
    WHERE left_out IS NULL AND part = 'decode'
    QUALIFY new_tokens = max(new_tokens) OVER (PARTITION BY benchmark, of_run, batch)
        AND prompt_tokens = min(prompt_tokens) OVER (PARTITION BY benchmark, of_run, batch)
)
SELECT
    benchmark, of_run AS run_id, model, batch, prompt_tokens, new_tokens, cached, round, position, tokens,
    1e3 * seconds / tokens AS ms_per_token, rows_equal = batch AS same_text
FROM decoding
ORDER BY benchmark, model, run_id, batch, cached, round, position;
