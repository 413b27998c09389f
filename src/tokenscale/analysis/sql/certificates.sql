-- Parity certificates: the verdict on two trainers with the same initial weights and batches, per pair of cells. A
-- certificate is of the first repeat of both cells and says what the other repeats have in common with it: code, settings.
SELECT
    c.run_id, c.over, r.cell AS of_cell, o.cell AS over_cell, r.arm AS of_arm, o.arm AS over_arm, c.verdict,
    c.reason, c.steps, c.first_difference, c.cause, c.loss_difference, c.loss_floor
FROM certificates AS c
LEFT JOIN runs AS r ON r.run_id = c.run_id
LEFT JOIN runs AS o ON o.run_id = c.over
ORDER BY c.run_id, c.over;
