-- Answers of trained models to prompts: the text behind each prompt, how its tokens were chosen (temperature 0 takes the
-- likeliest), the steps that the model was trained for, and whether it is the same, token by token, without the cache of
-- keys and values.
SELECT
    benchmark, of_run AS run_id, model, model_step, number, prompt, prompt_tokens, temperature, top_k, top_p, seed,
    text, tokens, same_uncached
FROM generations
ORDER BY benchmark, model, run_id, number, temperature, top_k, top_p, seed;
