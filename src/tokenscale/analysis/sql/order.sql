-- Same data. The digest of a global batch is the sum over ranks, modulo 2^52, of one number for each row of the batch: the
-- step, the row's place, and the number of the row or document that it holds. It names the samples, not their content:
-- equal digests at every step mean the same samples in the same order. Pairs: one approach at two world sizes, which read
-- the same text or store; a run that was resumed from another one's state, with the first run of that chain, which was
-- never interrupted, in whatever layouts they are; and an online approach with its offline twin at one world size. All
-- other factors, settings and the repeat of a pair are equal. Compared are the steps that both have. Equal data gives
-- equal useful tokens and equal losses: online and offline to the last bit, the others as far as sums in another order
-- are equal: within `loss_tolerance` in the first 20 steps, which is the largest loss times the unit roundoff of the
-- precision (fp32 2^-24, 16-bit formats 2^-9; Higham 2002, section 2.1) times 64, or 16 of 16 bits. Training then
-- amplifies rounding, in fp32 from 1e-6 to 6e-3 nats in 300 steps at a high learning rate, until it saturates where
-- 16-bit runs are (0.07 nats of 5.7, measured): later steps have the 16-bit tolerance, `late_loss_tolerance`.
WITH RECURSIVE twins(online, offline) AS (VALUES ('padded', 'pretokenized-padded'), ('padding-free', 'token-list')),
comparable AS (
    SELECT run_id, approach, series, factors, layout, world_size, micro_batch, science, repeat, resumed_from, resumed_at,
        precision
    FROM runs
    WHERE validity IN ('valid', 'suspect')
),
begun AS (
    SELECT * FROM comparable WHERE resumed_from IS NULL
),
smallest AS (
    SELECT series, science, repeat, min(world_size) AS world_size FROM begun GROUP BY series, science, repeat
),
back AS (                                              -- from a resumed run to the one before it, and so on
    SELECT run_id, resumed_from AS earlier FROM comparable WHERE resumed_from IS NOT NULL
    UNION
    SELECT b.run_id, c.resumed_from FROM back AS b JOIN comparable AS c ON c.run_id = b.earlier
    WHERE c.resumed_from IS NOT NULL
),
pairs AS (
    SELECT 'world sizes' AS kind, a.run_id AS reference, b.run_id AS compared
    FROM begun AS a
    JOIN smallest USING (series, science, repeat, world_size)
    JOIN begun AS b ON a.series = b.series AND a.science = b.science AND a.repeat = b.repeat
        AND a.world_size < b.world_size
    UNION ALL
    SELECT 'resumed and uninterrupted', a.run_id, b.run_id
    FROM back
    JOIN begun AS a ON a.run_id = back.earlier
    JOIN comparable AS b ON b.run_id = back.run_id AND a.science = b.science AND a.repeat = b.repeat
    UNION ALL
    SELECT 'online and offline', a.run_id, b.run_id
    FROM comparable AS a
    JOIN twins AS t ON t.online = a.approach
    JOIN comparable AS b ON b.approach = t.offline AND a.factors = b.factors AND a.layout = b.layout
        AND a.science = b.science AND a.micro_batch = b.micro_batch AND a.repeat = b.repeat AND a.world_size = b.world_size
),
gathered AS MATERIALIZED (                             -- asked twice, and gathering the ranks is most of the work
    SELECT run_id, step, loss_sum, useful_tokens, loss_sum / nullif(useful_tokens, 0) AS loss, order_digest
    FROM steps_global
),
referenced AS MATERIALIZED (                           -- else both are joined by their steps alone first
    SELECT p.kind, p.reference, p.compared, g.* EXCLUDE (run_id)
    FROM pairs AS p
    JOIN gathered AS g ON g.run_id = p.reference
),
agreed AS (
    SELECT
        a.kind,
        a.reference,
        a.compared,
        count(*) AS steps_compared,
        count(*) FILTER (a.order_digest = b.order_digest) AS steps_equal,
        max(abs(a.loss - b.loss)) AS largest_loss_difference,
        max(abs(a.loss - b.loss)) FILTER (a.step < coalesce(r.resumed_at, 0) + 20) AS first_loss_difference,
        max(greatest(abs(a.loss), abs(b.loss))) AS largest_loss,
        count(*) FILTER ((a.loss IS NULL) <> (b.loss IS NULL)) AS losses_lacking,
        count(*) FILTER (a.loss_sum IS NOT DISTINCT FROM b.loss_sum) AS losses_equal,
        count(*) FILTER (a.useful_tokens = b.useful_tokens) AS useful_equal
    FROM referenced AS a
    JOIN gathered AS b ON b.run_id = a.compared AND b.step = a.step
    JOIN comparable AS r ON r.run_id = a.compared
    GROUP BY a.kind, a.reference, a.compared
)
SELECT
    p.kind,
    x.approach AS approach,
    y.approach AS other_approach,
    x.series AS series,
    y.series AS other_series,
    x.world_size AS world_size,
    y.world_size AS other_world_size,
    x.repeat,
    p.reference,
    p.compared,
    p.steps_compared,
    p.steps_equal,
    p.steps_compared = p.steps_equal AS same_data,
    p.largest_loss_difference,
    p.largest_loss * CASE WHEN x.precision = 'fp32' THEN 64 * 2.0 ** -24 ELSE 16 * 2.0 ** -9 END AS loss_tolerance,
    p.largest_loss * 16 * 2.0 ** -9 AS late_loss_tolerance,
    p.losses_lacking = 0 AND coalesce(p.first_loss_difference <= loss_tolerance, true)
        AND coalesce(p.largest_loss_difference <= late_loss_tolerance, true) AS losses_agree,
    p.steps_compared = p.losses_equal AS losses_identical,
    p.steps_compared = p.useful_equal AS same_useful_tokens
FROM agreed AS p
JOIN comparable AS x ON x.run_id = p.reference
JOIN comparable AS y ON y.run_id = p.compared
ORDER BY p.kind DESC, x.series, y.series, x.world_size, y.world_size, x.repeat, p.reference, p.compared;
