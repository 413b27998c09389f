-- One row a step of a run: tokens, rows and losses summed over ranks, times maximal over ranks (the slowest rank is
-- the one that everybody waits for). Steps that lack a rank are left out; so are runs that are invalid or missing.
SELECT
    s.run_id,
    s.step,
    any_value(s.attempt) AS attempt,
    any_value(s.attempt_step) AS attempt_step,
    count(*)::INTEGER AS ranks,
    sum(s.loss_sum) AS loss_sum,
    sum(s.useful_tokens)::BIGINT AS useful_tokens,
    sum(s.total_tokens)::BIGINT AS total_tokens,
    sum(s.rows)::BIGINT AS rows,
    max(s.step_s) AS step_s,
    max(s.data_wait_s) AS data_wait_s,
    max(s.h2d_s) AS h2d_s,
    max(s.forward_s) AS forward_s,
    max(s.backward_s) AS backward_s,
    max(s.bubble_s) AS bubble_s,
    max(s.exposed_communication_s) AS exposed_communication_s,
    max(s.optimizer_s) AS optimizer_s,
    max(s.memory_peak_bytes) AS memory_peak_bytes,
    CASE WHEN count(s.order_digest) = count(*)
         THEN (sum(s.order_digest) % 4503599627370496)::BIGINT END AS order_digest   -- modulo 2^52
FROM steps AS s
JOIN runs AS r USING (run_id)
WHERE r.validity IN ('valid', 'suspect')
GROUP BY s.run_id, s.step
HAVING count(*) = any_value(s.world_size)
ORDER BY s.run_id, s.step;
