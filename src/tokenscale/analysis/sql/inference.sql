-- Text from trained models, one row a model, number of prompts at once (batch), length of prompt and answer, cache of keys
-- and values or none, and round. Prefill: from the call until the first new token is known. Decoding: the tokens behind the
-- first, of all rows, over the seconds from it to the last one (sum over sum). The cache's bytes by formula are 2 x layers x
-- key-value heads x head width x positions x bytes of a number x rows (keys and values, Shazeer 2019, "Fast Transformer
-- Decoding"). same_text: in every round, with the cache and without, each row's tokens were the same; a speed-up (decoding
-- with the cache over without it, in the same round) is given only for such cells, since a cell that differs does other work.
WITH cells AS (
    SELECT
        benchmark, of_run, batch, prompt_tokens, new_tokens, cached, round,
        any_value(model) AS model, any_value(model_step) AS model_step, any_value(dtype) AS dtype,
        sum(CASE WHEN part = 'prompt' THEN seconds END) AS prefill_s,
        sum(CASE WHEN part = 'decode' THEN seconds END) AS decode_s,
        sum(CASE WHEN part = 'decode' THEN tokens END) AS decode_tokens,
        any_value(rows_equal) AS rows_equal, min(first_difference) AS first_difference,
        any_value(cache_bytes) AS cache_bytes,
        any_value(2 * layers * key_value_heads * head_dimension * (prompt_tokens + new_tokens)::BIGINT * number_bytes
            * batch) AS formula_bytes,
        any_value(peak_bytes) AS peak_bytes, any_value(device) AS device, any_value(cpu) AS cpu,
        any_value(threads) AS threads
    FROM inference_benchmarks
    WHERE left_out IS NULL
    GROUP BY benchmark, of_run, batch, prompt_tokens, new_tokens, cached, round
),
rates AS (
    SELECT
        *,
        bool_and(rows_equal = batch) OVER (PARTITION BY benchmark, of_run, batch, prompt_tokens, new_tokens) AS same_text,
        batch * decode_tokens / nullif(decode_s, 0) AS tokens_per_s
    FROM cells
)
SELECT
    r.benchmark, r.of_run AS run_id, r.model, r.model_step, r.dtype, r.batch, r.prompt_tokens, r.new_tokens,
    r.cached, r.round, r.prefill_s,
    r.batch * r.prompt_tokens / nullif(r.prefill_s, 0) AS prefill_tokens_per_s,
    r.tokens_per_s,
    1e3 * r.decode_s / nullif(r.decode_tokens, 0) AS ms_per_token,
    r.rows_equal, r.first_difference, r.same_text,
    CASE WHEN r.cached AND r.same_text THEN r.tokens_per_s / u.tokens_per_s END AS speed_up,
    r.cache_bytes,
    CASE WHEN r.cached THEN r.formula_bytes ELSE 0 END AS formula_bytes,
    r.peak_bytes, r.device, r.cpu, r.threads,
    NULL::VARCHAR AS left_out
FROM rates AS r
LEFT JOIN rates AS u ON NOT u.cached AND r.cached AND u.benchmark = r.benchmark AND u.of_run = r.of_run
    AND u.batch = r.batch AND u.prompt_tokens = r.prompt_tokens AND u.new_tokens = r.new_tokens AND u.round = r.round
UNION ALL BY NAME
SELECT benchmark, of_run AS run_id, model, model_step, dtype, left_out, device, cpu, threads
FROM inference_benchmarks
WHERE left_out IS NOT NULL
ORDER BY benchmark, model, run_id, batch, prompt_tokens, new_tokens, cached, round;
