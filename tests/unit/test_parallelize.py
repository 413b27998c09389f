"""What `parallelize` makes of a model on one rank: compiled graphs, gradients, and the order of its steps."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.train.models.decoder import Decoder, initialise
from tokenscale.train.models.objective import Objective
from tokenscale.train.parallel.mesh import Mesh
from tokenscale.train.parallel.parallelize import parallelize
from tokenscale.train.parallel.world import World

#: more layers than torch's limit of recompilations, which fewer would hide
SHAPE, LENGTH = replace(PRESETS["llama-micro"], layers=12).with_vocabulary(96), 24
WORLD = World(0, 1, 0, torch.device("cpu"))


@pytest.fixture
def graphs(monkeypatch):
    """Compile blocks with a backend that runs and counts graphs."""
    torch._dynamo.reset()
    counters.clear()
    found = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        found.append(graph)
        return graph

    compile_block = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda block: compile_block(block, backend=backend))
    yield found
    torch._dynamo.reset()


def gradients(checkpointing: str, compiled: bool) -> list[torch.Tensor]:
    model = Decoder(SHAPE, LENGTH)
    initialise(model, 0)
    layout = Mesh(LayoutSettings(), WORLD)
    parallel = parallelize(Objective(model), layout, activation_checkpointing=checkpointing, compiled=compiled)
    tokens = torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    parallel.module(tokens, tokens).backward()
    return [weight.grad for weight in model.parameters()]


@pytest.mark.parametrize("checkpointing", ["none", "block", "selective"])
def test_equal_blocks_compile_to_one_graph_with_and_without_checkpointing(graphs, checkpointing):
    expected = gradients(checkpointing, compiled=False)
    found = gradients(checkpointing, compiled=True)
    assert len(graphs) == 1 and not counters["graph_break"]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_checkpointing_keeps_the_names_and_gradients_of_parameters():
    plain, names = gradients("none", compiled=False), []
    for mode in ("block", "selective"):
        model = Decoder(SHAPE, LENGTH)
        parallelize(Objective(model), Mesh(LayoutSettings(), WORLD), activation_checkpointing=mode)
        names.append([name for name, _ in model.named_parameters()])
        assert all(torch.equal(a, b) for a, b in zip(gradients(mode, compiled=False), plain, strict=True))
    assert names == 2 * [[name for name, _ in Decoder(SHAPE, LENGTH).named_parameters()]]
