"""What `parallelize` makes of a model on one rank: gradients, and the names of its parameters."""

from dataclasses import replace

import pytest
import torch

from tests.graphs import counting_backend
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.train.models.decoder import Decoder, initialise
from tokenscale.train.models.objective import Objective
from tokenscale.train.parallel.parallelize import parallelize
from tokenscale.train.parallel.sharding import Mesh
from tokenscale.train.parallel.world import World

#: more layers than torch's limit of recompilations, which fewer would hide
SHAPE, LENGTH = replace(PRESETS["llama-micro"], layers=12).with_vocabulary(96), 24
WORLD = World(0, 1, 0, torch.device("cpu"))


def gradients(checkpointing: str, compiled: bool) -> list[torch.Tensor]:
    model = Decoder(SHAPE, LENGTH)
    initialise(model, 0)
    layout = Mesh(LayoutSettings(), WORLD)
    parallel = parallelize(Objective(model), layout, activation_checkpointing=checkpointing, compiled=compiled)
    tokens = torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    parallel.module(tokens, tokens).backward()
    return [weight.grad for weight in model.parameters()]


@pytest.mark.parametrize("checkpointing", ["none", "block", "selective"])
def test_compiled_blocks_have_the_gradients_of_eager_ones(checkpointing):
    expected = gradients(checkpointing, compiled=False)
    with counting_backend():
        found = gradients(checkpointing, compiled=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_checkpointing_keeps_the_names_and_gradients_of_parameters():
    plain, names = gradients("none", compiled=False), []
    for mode in ("block", "selective"):
        model = Decoder(SHAPE, LENGTH)
        parallelize(Objective(model), Mesh(LayoutSettings(), WORLD), activation_checkpointing=mode)
        names.append([name for name, _ in model.named_parameters()])
        assert all(torch.equal(a, b) for a, b in zip(gradients(mode, compiled=False), plain, strict=True))
    assert names == 2 * [[name for name, _ in Decoder(SHAPE, LENGTH).named_parameters()]]
