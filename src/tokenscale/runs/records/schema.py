"""The contract of the event files: names, types, units. Version 2: a step's computing in its parts.

`results/runs/<run_id>/attempt=NN/rank=NNNNN/{steps,spans,events}.jsonl`: one writer a file, one line a record, a new
directory for each attempt. Sums and counts are logged, never rates; every definition built on them lives in SQL.
"""

VERSION = 2

#: file → field → SQL type. A field may be missing in a line (null); an unknown one is ignored by readers.
FIELDS: dict[str, dict[str, str]] = {
    "steps": {
        "schema": "INTEGER",
        "step": "BIGINT",  # counted from 0
        "t_unix_s": "DOUBLE",  # end of the step, by the wall clock as it was when this log began
        "t_mono_s": "DOUBLE",  # end of the step, monotonic clock of this process
        "step_s": "DOUBLE",  # end of the last step to end of this one, validation and checkpoints left out
        "data_wait_s": "DOUBLE",  # waiting for the batch
        "own_s": "DOUBLE",  # the host's bookkeeping since the step before was handed over; in step_s on a CPU
        "h2d_s": "DOUBLE",  # batch to the device, as far as the device waited for it
        "forward_s": "DOUBLE",  # all micro-batches, loss included
        "backward_s": "DOUBLE",  # all micro-batches, until the last gradients were ready to be exchanged
        "bubble_s": "DOUBLE",  # waiting for other stages of a pipeline, transfers included; null without one
        "exposed_communication_s": "DOUBLE",  # from then on until they had been exchanged; null where nothing is
        "optimizer_s": "DOUBLE",  # norm, clipping and update
        # the next four, and order_digest, add up over ranks: where ranks train on the same rows (a tensor group, a
        # pipeline), one of them has the values and the others zeros
        "loss_sum": "DOUBLE",  # sum of the cross-entropy over this rank's useful tokens, nats
        "useful_tokens": "BIGINT",  # labels that count, this rank
        "total_tokens": "BIGINT",  # positions computed on, padding included, this rank
        "rows": "BIGINT",  # rows of the global batch that this rank holds
        "micro_steps": "INTEGER",  # forward passes
        "learning_rate": "DOUBLE",
        "grad_norm": "DOUBLE",  # before clipping
        "grad_norm_clipped": "DOUBLE",  # grad_norm times the coefficient that the gradients were scaled with
        "order_digest": "BIGINT",  # sum over this rank's slots; ranks add up modulo 2**52 (data/order/permutation.py)
        "memory_peak_bytes": "BIGINT",  # allocated on the device; resident set on a CPU
        "loss_scale": "DOUBLE",  # fp16: what the loss was multiplied with
        "skipped": "BOOLEAN",  # fp16: the gradient overflowed, nothing was changed, the scale was halved
        "nonfinite": "BOOLEAN",  # the loss or the gradient norm is NaN or infinite (then written as null)
    },
    "spans": {
        "schema": "INTEGER",
        "name": "VARCHAR",
        "step": "BIGINT",
        "start_mono_s": "DOUBLE",
        "duration_s": "DOUBLE",
    },
    "events": {
        "schema": "INTEGER",
        # run_start, resume, init_done, memory, compilation (after the first step, and at the end if it changed),
        # validation, source_validation (of each corpus of a mixture), checkpoint, translation (each by one rank),
        # run_stop
        "event": "VARCHAR",
        "t_unix_s": "DOUBLE",
        "t_mono_s": "DOUBLE",
        "step": "BIGINT",
        "status": "VARCHAR",  # run_stop: complete, nonfinite, interrupted; checkpoint, resume: its folder
        "world_size": "INTEGER",  # run_start: as observed by this rank
        "boot": "VARCHAR",  # run_start: the boot that t_mono_s counts from, where the system names it (Linux)
        "loss_sum": "DOUBLE",  # validation: over the whole slice
        "useful_tokens": "BIGINT",  # validation: of the whole slice
        "correct_tokens": "BIGINT",  # validation: of them, with the largest logit; null where nobody counted
        "rows": "BIGINT",  # validation
        "corpus": "VARCHAR",  # source_validation: of its rows
        "number": "BIGINT",  # translation: of the document in the validation split
        "source": "VARCHAR",  # translation; so the next two
        "hypothesis": "VARCHAR",
        "reference": "VARCHAR",
        "duration_s": "DOUBLE",
        "bytes": "BIGINT",  # checkpoint: on disk
        "parameters_bytes": "BIGINT",  # memory: held by this rank; so the three below
        "gradients_bytes": "BIGINT",
        "optimizer_bytes": "BIGINT",
        "activations_bytes": "BIGINT",  # of the passes in flight, and messages; null where not measured
        "graphs": "INTEGER",  # compilation: compiled by this rank since its model was built; so the four below
        "recompiles": "INTEGER",  # of the graphs: of code that had one already
        "graph_breaks": "INTEGER",
        "blocks": "INTEGER",  # of this rank's part of the model
        "eager_blocks": "INTEGER",  # of the blocks: ran outside of any graph
        "energy_j": "DOUBLE",  # run_stop: of this rank's board, over this attempt's steps; null where nothing counts it
    },
}
