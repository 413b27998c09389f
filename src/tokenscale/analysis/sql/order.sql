-- Same data, proven. The digest of a global batch is the sum over ranks, modulo 2^52, of one number for each row of the
-- batch (the step, the row's place, and which row or document it holds); equal digests at every step mean that both runs
-- trained on the same batches. Pairs: one approach at two world sizes, and an online approach with its offline twin at
-- one world size; all other settings and the repeat are equal. Losses are compared at the steps that both have.
WITH twins(online, offline) AS (VALUES ('padded', 'pretokenized-padded'), ('padding-free', 'token-list')),
comparable AS (
    SELECT run_id, approach, world_size, science, repeat FROM runs WHERE validity IN ('valid', 'suspect')
),
smallest AS (
    SELECT approach, science, repeat, min(world_size) AS world_size FROM comparable GROUP BY approach, science, repeat
),
pairs AS (
    SELECT 'world sizes' AS kind, a.run_id AS reference, b.run_id AS compared
    FROM comparable AS a
    JOIN smallest USING (approach, science, repeat, world_size)
    JOIN comparable AS b ON a.approach = b.approach AND a.science = b.science AND a.repeat = b.repeat
        AND a.world_size < b.world_size
    UNION ALL
    SELECT 'online and offline', a.run_id, b.run_id
    FROM comparable AS a
    JOIN twins AS t ON t.online = a.approach
    JOIN comparable AS b ON b.approach = t.offline AND a.science = b.science AND a.repeat = b.repeat
        AND a.world_size = b.world_size
)
SELECT
    p.kind,
    x.approach AS approach,
    y.approach AS other_approach,
    x.world_size AS world_size,
    y.world_size AS other_world_size,
    x.repeat,
    p.reference,
    p.compared,
    count(*) AS steps_compared,
    count(*) FILTER (a.order_digest = b.order_digest) AS steps_equal,
    (count(*) = count(*) FILTER (a.order_digest = b.order_digest)) AS same_data,
    max(abs(a.loss_sum / nullif(a.useful_tokens, 0) - b.loss_sum / nullif(b.useful_tokens, 0))) AS largest_loss_difference,
    coalesce(bool_and(a.loss_sum = b.loss_sum), false) AS losses_identical,
    bool_and(a.useful_tokens = b.useful_tokens) AS same_useful_tokens
FROM pairs AS p
JOIN comparable AS x ON x.run_id = p.reference
JOIN comparable AS y ON y.run_id = p.compared
JOIN steps_global AS a ON a.run_id = p.reference
JOIN steps_global AS b ON b.run_id = p.compared AND a.step = b.step
GROUP BY ALL
ORDER BY p.kind DESC, x.approach, y.approach, x.world_size, y.world_size, x.repeat, p.reference, p.compared;
