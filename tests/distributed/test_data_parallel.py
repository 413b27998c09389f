"""DDP computes what one process computes: gradients of one batch, weights after some steps, whatever the shares."""

import numpy as np
import pytest
import torch

from tests.distributed.ranks import run_ranks
from tokenscale.data.batches.batch import Batch
from tokenscale.data.order.permutation import micro_steps, rank_slots
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import OptimizerSettings
from tokenscale.train.models.decoder import Decoder, initialise
from tokenscale.train.models.objective import Objective
from tokenscale.train.optimizer import adamw, total_norm, update
from tokenscale.train.parallel.parallelize import parallelize
from tokenscale.train.parallel.sharding import Mesh
from tokenscale.train.phase_timer import HostTimer
from tokenscale.train.trainer import forward_backward

pytestmark = pytest.mark.distributed
SHAPE, LENGTH, GLOBAL_BATCH = PRESETS["llama-micro"].with_vocabulary(96), 24, 7
#: fp32: sums run in another order
TOLERANCE = {"atol": 2e-7, "rtol": 2e-5}


def global_batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows with very unequal numbers of useful tokens: where per-rank means would weigh them wrongly."""
    random = np.random.default_rng(step)
    tokens = random.integers(0, 96, (GLOBAL_BATCH, LENGTH))
    labels = random.integers(0, 96, (GLOBAL_BATCH, LENGTH))
    for row in range(GLOBAL_BATCH):
        labels[row, 1 + (row * 5 + step) % LENGTH :] = -100
    return tokens, labels


def my_batch(step: int, reader: int, readers: int) -> Batch:
    mine = rank_slots(GLOBAL_BATCH, reader, readers)
    tokens, labels = (values[mine.start : mine.stop] for values in global_batch(step))
    return Batch(tokens, labels, int((labels >= 0).sum()), tokens.size, 0)


def model_of(world):
    model = Decoder(SHAPE, LENGTH)
    # only rank 0 has the right weights: wrapping must bring them to the others
    initialise(model, 0 if world.rank == 0 else 100 + world.rank)
    return parallelize(Objective(model, loss_chunk=0), Mesh(LayoutSettings(data=world.size), world))


def differentiate(parallel, step, micro_batch, world, layout=None):
    """As the engine does it: this rank's sum of losses, and gradients of the global mean."""
    layout = layout or LayoutSettings(data=world.size)
    place, readers = layout.coordinate(world.rank), layout.data_parallel_size
    batch = my_batch(step, place.data_rank, readers)
    useful = torch.tensor(float(batch.useful_tokens * place.is_group_leader))
    if world.size > 1:
        torch.distributed.all_reduce(useful)
    return forward_backward(
        parallel,
        batch,
        weight=readers / useful,
        micro_batch_size=micro_batch,
        micro_steps=micro_steps(GLOBAL_BATCH, readers, micro_batch),
        device=world.device,
        timer=HostTimer(),
    )


def gradients(world, micro_batch):
    model = model_of(world)
    loss = differentiate(model, 0, micro_batch, world)
    return loss.item(), {n: p.grad.numpy() for n, p in model.objective.model.named_parameters()}


def weights(world, micro_batch, steps):
    model = model_of(world)
    optimizer = adamw(model.objective.parameters(), OptimizerSettings(learning_rate=1e-3))
    norms = []
    for step in range(steps):
        differentiate(model, step, micro_batch, world)
        norm = total_norm([p.grad for p in model.objective.parameters()])
        norms.append(update(optimizer, norm, 0.5, torch.ones(()))[0].item())
        optimizer.zero_grad()
    return norms, {n: p.detach().numpy() for n, p in model.objective.model.named_parameters()}


def close(a, b):
    return all(np.allclose(a[name], b[name], **TOLERANCE) for name in a)


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_gradient_is_that_of_one_process(world_size, micro_batch):
    """7 rows on 2, 3 and 4 ranks: unequal shares, and passes that have no rows on some ranks."""
    ((loss, expected),) = run_ranks(gradients, 1, 8)
    found = run_ranks(gradients, world_size, micro_batch)
    assert sum(rank_loss for rank_loss, _ in found) == pytest.approx(loss, rel=1e-6)
    for _, gradient in found:
        for name in expected:
            np.testing.assert_allclose(gradient[name], expected[name], err_msg=name, **TOLERANCE)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_weights_after_five_steps_are_those_of_one_process(world_size):
    """Adam divides by the root of the squared gradient: rounding grows where gradients are near zero, hence 1e-5."""
    ((norms, expected),) = run_ranks(weights, 1, 8, 5)
    found = run_ranks(weights, world_size, 2, 5)
    for rank_norms, rank_weights in found:
        assert rank_norms == pytest.approx(norms, rel=1e-4)
        for name in expected:
            np.testing.assert_allclose(rank_weights[name], expected[name], atol=1e-5, rtol=1e-4, err_msg=name)
            np.testing.assert_array_equal(rank_weights[name], found[0][1][name], err_msg=f"ranks differ in {name}")
