-- Data path alone, no training: milliseconds a batch and microseconds a useful token, for each arm and round. The arm
-- `memcpy` copies ready batches in memory; it is the limit that no data path can pass. Opening a store is apart. Cold:
-- the files that the arm reads were dropped from the page cache before it opened them. An arm that could not run has one
-- row with the reason.
SELECT
    benchmark, arm, round,
    arm = 'memcpy' AS is_limit,
    open_s,
    1e3 * seconds / nullif(batches, 0) AS ms_per_batch,
    1e6 * seconds / nullif(useful_tokens, 0) AS us_per_useful_token,
    1 - useful_tokens / nullif(total_tokens, 0) AS not_useful_share,
    batches, useful_tokens, sequence_length, rows, tokenizer, corpus, cache, engine, workers, left_out, cpu, cores
FROM benchmarks
ORDER BY benchmark, is_limit, arm, round;
