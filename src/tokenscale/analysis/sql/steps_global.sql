-- One row a step of a run: tokens, rows and losses summed over ranks, times maximal over ranks (the slowest rank is
-- the one that everybody waits for). Steps that lack a rank are left out; so are runs that are invalid or missing.
WITH counted AS NOT MATERIALIZED (
    SELECT s.* FROM steps AS s JOIN runs AS r USING (run_id)
    WHERE r.validity IN ('valid', 'suspect')
)
SELECT                                                 -- one rank: nothing to gather, which is five times as fast
    run_id, step, attempt, attempt_step, 1 AS ranks, loss_sum, useful_tokens, total_tokens, rows,
    step_s, data_wait_s, h2d_s, forward_s, backward_s, bubble_s, exposed_communication_s, optimizer_s, memory_peak_bytes,
    grad_norm, (order_digest % 4503599627370496)::BIGINT AS order_digest   -- modulo 2^52
FROM counted
WHERE world_size = 1
UNION ALL
SELECT
    run_id, step, any_value(attempt), any_value(attempt_step), count(*)::INTEGER,
    sum(loss_sum), sum(useful_tokens)::BIGINT, sum(total_tokens)::BIGINT, sum(rows)::BIGINT,
    max(step_s), max(data_wait_s), max(h2d_s), max(forward_s), max(backward_s), max(bubble_s),
    max(exposed_communication_s), max(optimizer_s), max(memory_peak_bytes),
    max(grad_norm), CASE WHEN count(order_digest) = count(*) THEN (sum(order_digest) % 4503599627370496)::BIGINT END
FROM counted
WHERE world_size <> 1
GROUP BY run_id, step
HAVING count(*) = any_value(world_size)
ORDER BY run_id, step;
