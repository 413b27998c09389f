-- Loss of a run against that of the run at the smallest world size of the same series, settings and repeat, step by step;
-- of a run that goes on from another one's state, against the run that the state came from in the end, which was never
-- interrupted; in at most $points points: of the steps that a point stands for, the largest difference of training losses (absolute,
-- nats a useful token), with the reference's loss there. At one global batch both train on the same samples at every
-- step (`same_data`: the digests of all steps of the point are equal), so that nothing but rounding should differ: sums
-- in another order, which training then carries on. Runs of weak scaling have other batches, and no pair here.
WITH pairs AS (
    SELECT b.*, p.reference, a.world_size AS reference_world_size
    FROM reference_pairs AS p
    JOIN runs AS a ON a.run_id = p.reference
    JOIN runs AS b ON b.run_id = p.compared
),
referenced AS MATERIALIZED (                           -- else both are joined by their steps alone first
    SELECT p.run_id, g.step, g.loss_sum / nullif(g.useful_tokens, 0) AS loss, g.order_digest
    FROM pairs AS p
    JOIN steps_global AS g ON g.run_id = p.reference
),
compared AS (
    SELECT
        b.run_id,
        b.step,
        a.loss AS reference_loss,
        abs(b.loss_sum / nullif(b.useful_tokens, 0) - a.loss) AS difference,
        a.order_digest AS reference_digest,
        b.order_digest,
        row_number() OVER (PARTITION BY b.run_id ORDER BY b.step) - 1 AS place,
        count(*) OVER (PARTITION BY b.run_id) AS steps
    FROM referenced AS a
    JOIN steps_global AS b USING (run_id, step)
)
SELECT
    p.run_id,
    p.approach,
    p.series,
    p.world_size,
    p.repeat,
    p.reference,
    p.reference_world_size,
    p.resumed_from,
    p.resumed_at,
    max(c.step) AS step,
    count(*) AS steps,
    arg_max(c.reference_loss, c.difference ORDER BY c.step) AS reference_loss,
    max(c.difference) AS largest_difference,
    same_data(c.order_digest, c.reference_digest) AS same_data
FROM compared AS c
JOIN pairs AS p USING (run_id)
GROUP BY p.run_id, p.approach, p.series, p.world_size, p.repeat, p.reference, p.reference_world_size,
    p.resumed_from, p.resumed_at,
    CASE WHEN c.steps <= $points THEN c.place ELSE c.place * $points // c.steps END
HAVING max(c.difference) IS NOT NULL
ORDER BY p.series, p.world_size, p.repeat, p.run_id, step;
