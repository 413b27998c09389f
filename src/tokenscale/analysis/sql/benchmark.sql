-- Data path alone, no training: milliseconds a batch and microseconds a useful token, of each run that only reads. The
-- arm `memcpy` copies ready batches in memory; it is the limit that no data path can pass. Opening a store is apart. Cold:
-- the files that the arm reads were dropped from the page cache before it opened them. An arm that could not run has one
-- row with the reason. Records of the benchmark that measured this in the rounds of one process are read as they were.
WITH opened AS (
    SELECT run_id, duration_s FROM spans
    WHERE name = 'open'
    QUALIFY attempt = max(attempt) OVER (PARTITION BY run_id)
),
read AS (
    SELECT
        r.run_id, r.corpus || '-' || r.tokenizer AS benchmark, r.repeat AS round,
        CASE r.arm
            WHEN 'memcpy' THEN r.arm
            WHEN 'studies' THEN 'studies'' ' || r.approach
            ELSE concat_ws(', ', r.approach, nullif(r.engine, 'auto'), CASE WHEN r.cold THEN 'cold' END, 'DataLoader ' || r.workers)
        END AS arm,
        any_value(o.duration_s) AS open_s, sum(g.step_s) AS seconds, count(g.step) AS batches,
        sum(g.useful_tokens)::BIGINT AS useful_tokens, sum(g.total_tokens)::BIGINT AS total_tokens,
        r.sequence_length, r.global_batch AS rows, r.tokenizer, r.corpus,
        CASE WHEN r.cold THEN 'cold' ELSE 'warm' END AS cache, nullif(r.engine, 'auto') AS engine, r.workers,
        CASE WHEN r.validity = 'invalid' THEN r.reasons END AS left_out, r.cpu, r.cores
    FROM runs AS r LEFT JOIN steps_global AS g USING (run_id) LEFT JOIN opened AS o USING (run_id)
    WHERE only_reads(r.arm) AND r.validity <> 'missing'
    GROUP BY ALL
)
SELECT
    benchmark, arm, round,
    arm = 'memcpy' AS is_limit,
    open_s,
    1e3 * seconds / nullif(batches, 0) AS ms_per_batch,
    1e6 * seconds / nullif(useful_tokens, 0) AS us_per_useful_token,
    1 - useful_tokens / nullif(total_tokens, 0) AS not_useful_share,
    batches, useful_tokens, sequence_length, rows, tokenizer, corpus, cache, engine, workers, left_out, cpu, cores,
    run_id
FROM (FROM read UNION ALL BY NAME FROM benchmarks)
ORDER BY benchmark, is_limit, arm, round, run_id;
