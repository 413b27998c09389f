"""This project's own trainer under the contract of arms, for parity recordings: `own.py
CONTRACT.json`.
"""

import numpy as np
import torch

from tokenscale.arms.contract import Contract
from tokenscale.data.batches.batch import Batch
from tokenscale.parity.recorder import ParityRecorder
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import decode
from tokenscale.settings.run import RunSettings
from tokenscale.train.models.attention import choose_kernel
from tokenscale.train.parallel.world import join
from tokenscale.train.phase_timer import timer_of
from tokenscale.train.trainer import Trainer


def main() -> None:
    """Train on the contract's batches and record."""
    contract = Contract()
    run = decode(RunSettings, values=contract.facts["run"])
    world = join(1, run.device)
    dtype = torch.float32 if run.precision == "fp32" else torch.bfloat16
    kernel = choose_kernel(
        run.attention, device=world.device, bounds=False, dtype=dtype, dropout=0.0
    )
    trainer = Trainer(
        run=run,
        shape=decode(ModelSettings, values=contract.shape),
        world=world,
        kernel=kernel,
    )
    module = trainer.parallel.module
    timer = timer_of(world.device)
    recorder = ParityRecorder(
        folder=contract.facts["recording"], model=module, optimizer=trainer.optimizer
    )
    labels = contract.rows * contract.sequence_length
    # the trainer calls backward on the sum of a micro-batch's losses over the labels of the whole
    # step
    module.register_forward_hook(
        lambda module, inputs, loss_sum: recorder.loss(loss_sum.detach() / labels)
    )
    useful = torch.tensor(float(labels), device=world.device)
    for step, rate in enumerate(contract.learning_rates):
        rows = np.asarray(contract.tokens[step], dtype=np.int64)
        batch = Batch.from_arrays(rows[:, :-1], rows[:, 1:], 0)
        timer.restart()
        trainer.step(batch, useful, rate, timer)
    recorder.close()
    world.close()


if __name__ == "__main__":
    main()
