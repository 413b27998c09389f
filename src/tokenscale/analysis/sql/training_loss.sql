-- Training loss of the last tenth of a run's steps, at least one, in nats a useful token: sum of losses over sum of useful
-- tokens. It is of the batches of these steps, which another order or text would change, not of a held-out slice.
SELECT run_id, sum(loss_sum) / sum(useful_tokens) AS loss
FROM (
    SELECT
        run_id, loss_sum, useful_tokens, row_number() OVER (PARTITION BY run_id ORDER BY step DESC) AS from_end,
        count(*) OVER (PARTITION BY run_id) AS steps
    FROM steps_global
    WHERE useful_tokens > 0
)
WHERE from_end <= ceil(steps / 10)
GROUP BY run_id
ORDER BY run_id;
