-- Training loss of a step in nats a useful token: sum of losses over sum of useful tokens, over all ranks (never a mean
-- of the ranks' means), against the useful tokens that the run has trained on, this step included.
SELECT
    g.run_id,
    r.approach,
    r.series,
    r.world_size,
    r.repeat,
    g.step,
    g.useful_tokens,
    sum(g.useful_tokens) OVER (PARTITION BY g.run_id ORDER BY g.step)::BIGINT AS useful_tokens_seen,
    g.loss_sum / nullif(g.useful_tokens, 0) AS loss
FROM steps_global AS g
JOIN runs AS r USING (run_id)
ORDER BY r.series, r.world_size, r.repeat, g.run_id, g.step;
