-- Training loss of a step in nats a useful token: sum of losses over sum of useful tokens, over all ranks (never a mean
-- of the ranks' means), against the useful tokens that the run has trained on, this step included. A run whose training
-- stopped at a loss that was not finite is invalid and counts for no statistic; its steps before the stop are listed here
-- alone, marked `stopped`.
SELECT
    g.run_id, r.approach, r.series, r.world_size, r.repeat,
    r.status = 'nonfinite' AS stopped,
    g.step, g.useful_tokens,
    sum(g.useful_tokens) OVER (PARTITION BY g.run_id ORDER BY g.step)::BIGINT + coalesce(r.tokens_before, 0)
        AS useful_tokens_seen,                         -- those of a run that it goes on from included
    g.loss_sum / nullif(g.useful_tokens, 0) AS loss
FROM shown_steps AS g JOIN runs AS r USING (run_id)
ORDER BY r.series, r.world_size, r.repeat, g.run_id, g.step;
