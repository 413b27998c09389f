-- What processed positions do not train on. `not_useful_share`: 1 - useful over total tokens of a run's steps after
-- warm-up ($warmup_steps steps an attempt). Steps do not log what their ignored labels were; the manifest of the store
-- that a run reads tells them apart for a whole epoch: `padding_share`, and `ignored_share` of labels that are no padding
-- but begin a document or a piece of one. Both null where a run reads no store, and where its objective leaves out
-- labels of its own (masked, target). Logs that other trainers wrote count no padding, and have no row.
WITH measured AS (
    SELECT run_id, sum(useful_tokens)::BIGINT AS useful_tokens, sum(total_tokens)::BIGINT AS total_tokens
    FROM measured_steps($warmup_steps)
    GROUP BY run_id
    HAVING sum(total_tokens) > 0
),
stored AS (
    SELECT
        manifest_sha256,
        any_value(padding_tokens / nullif(total_tokens, 0)) AS padding_share,
        any_value((total_tokens - useful_tokens - padding_tokens) / nullif(total_tokens, 0)) AS ignored_share
    FROM stores
    GROUP BY manifest_sha256
)
SELECT
    r.run_id, r.approach, r.series, r.world_size, r.repeat, m.useful_tokens, m.total_tokens,
    1 - m.useful_tokens / m.total_tokens AS not_useful_share,
    s.padding_share, s.ignored_share
FROM measured AS m
JOIN runs AS r USING (run_id)
LEFT JOIN stored AS s
    ON s.manifest_sha256 = r.store_sha256 AND r.objective = 'causal' AND r.labels = 'all'
    AND r.approach <> 'length-bucketed'                -- its rows are padded anew
WHERE r.approach IS DISTINCT FROM 'other trainer' AND NOT only_reads(r.arm)
ORDER BY r.series, r.world_size, r.repeat, r.run_id;
