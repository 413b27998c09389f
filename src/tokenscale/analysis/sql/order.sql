-- Same data. The digest of a global batch is the sum over ranks, modulo 2^52, of one number for each row of the batch: the
-- step, the row's place, and the number of the row or document that it holds. It names the samples, not their content:
-- equal digests at every step mean the same samples in the same order. Pairs: one approach at two world sizes, which read
-- the same text or store; a run that was resumed from another one's state, with the first run of that chain, which was
-- never interrupted, in whatever layouts they are; and an online approach with its offline twin at one world size. All
-- other factors, settings and the repeat of a pair are equal. Compared are the steps that both have. Equal data gives
-- equal useful tokens and equal losses: online and offline to the last bit, the others to rounding, as the sums of a
-- step are in another order. Training amplifies rounding. The tolerance is a share of the largest loss, by number format:
-- fp32 2^-18 in the first 20 steps (`loss_tolerance`), then doubled every 5 steps up to 2^-8; 16 bits 2^-9, up to 2^-5.
-- Gradients that are rounded to bf16 before they are reduced count as 16 bits.
-- `late_loss_tolerance` is that of the last step. Measured with llama-micro over 400 steps, micro-batches of 4 rows
-- against 16: in fp32 1e-7 in the first 20 steps, at a learning rate of 0.01 3e-5 at step 50 and 3e-3 at step 100; in
-- bf16 5e-5, then 2e-2 and 4e-2 (at 0.001 3e-7 in all of fp32, 3e-3 in all of bf16). Longer runs had 1e-3 and 1e-2.
WITH comparable AS (
    SELECT run_id, approach, series, factors, layout, world_size, micro_batch, science, repeat, resumed_at,
        if(compression = 'bf16', 'bf16', precision) AS rounding
    FROM runs
    WHERE validity IN ('valid', 'suspect') AND arm IS DISTINCT FROM 'studies'  -- which read in an order of their own
),
pairs AS (
    SELECT * FROM reference_pairs
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
        same_data(a.order_digest, b.order_digest) AS same_data,
        max(abs(a.loss - b.loss)) AS largest_loss_difference,
        max(abs(a.loss - b.loss) / loss_tolerance(r.rounding, a.step - coalesce(r.resumed_at, 0))) AS beside_tolerance,
        loss_tolerance(any_value(r.rounding), max(a.step - coalesce(r.resumed_at, 0))) AS late_tolerance,
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
    p.same_data,
    p.largest_loss_difference,
    p.largest_loss * loss_tolerance(y.rounding, 0) AS loss_tolerance,
    p.largest_loss * p.late_tolerance AS late_loss_tolerance,
    p.losses_lacking = 0 AND coalesce(p.beside_tolerance <= p.largest_loss, true) AS losses_agree,
    p.steps_compared = p.losses_equal AS losses_identical,
    p.steps_compared = p.useful_equal AS same_useful_tokens
FROM agreed AS p
JOIN comparable AS x ON x.run_id = p.reference
JOIN comparable AS y ON y.run_id = p.compared
ORDER BY p.kind DESC, x.series, y.series, x.world_size, y.world_size, x.repeat, p.reference, p.compared;
