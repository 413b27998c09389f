"""Compile that compiles: graphs, graph breaks, recompiles and eager blocks in every layout, and
what a run records.
"""

from dataclasses import replace

import pytest
import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition

from tests.distributed.ranks import run_ranks
from tests.graphs import (
    CASES,
    CHECKPOINTING,
    LAYOUTS,
    MASKS,
    PRECISIONS,
    batch_of,
    count,
    count_case,
    counting_backend,
    inductor_replaced,
    run_of,
)
from tokenscale.train import compilation
from tokenscale.train.compilation import compile_blocks, compile_function
from tokenscale.train.fake_world import fake_world
from tokenscale.train.models.attention import build_block_mask
from tokenscale.train.phase_timer import HostTimer
from tokenscale.train.trainer import Trainer

pytestmark = pytest.mark.slow(40)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


#: each layout once, with any of the others in turn; and the one mask that makes scores on a CPU
DAILY = [
    (layout, CHECKPOINTING[(n + 2) % 3], ("row", "sdpa", "varlen")[n // 3 % 3], PRECISIONS[n % 4])
    for n, layout in enumerate(LAYOUTS)
] + [("single", "selective", "flex", "bf16")]
#: each method alone; pairs of methods and other schedules are long tests
METHODS = {"single", "ddp", "zero1", "zero2", "zero3", "tp", "1f1b"}
#: each layout with two others: all masks, modes and number formats
SOMETIMES = {
    (layout, CHECKPOINTING[(k + n) % 3], MASKS[(k + 2 * n) % 4], PRECISIONS[(k + 3 * n) % 4])
    for n, layout in enumerate(LAYOUTS)
    for k in (0, 1)
}


def counts_of(graphs, recompiles, blocks=12):
    return {
        "graphs": graphs,
        "recompiles": recompiles,
        "graph_breaks": 0,
        "blocks": blocks,
        "eager_blocks": 0,
    }


def check(case):
    layout, _, mask, _ = case
    loss = LAYOUTS[layout].pipeline == 1  # else another rank's
    # lengths of documents differ between batches: its second graph takes any
    again = mask == "varlen"
    assert count_case(*case) == (counts_of(1 + loss + again, again), 12 + loss), case


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case[0] in METHODS else pytest.mark.long) for case in DAILY],
    ids="-".join,
)
def test_all_blocks_share_one_graph_and_the_loss_has_one(case):
    check(case)


@pytest.mark.long
@pytest.mark.parametrize("case", sorted(SOMETIMES - {*DAILY}), ids="-".join)
def test_all_blocks_share_one_graph_with_other_masks_and_number_formats(case):
    check(case)


@pytest.mark.long
def test_all_blocks_share_one_graph_in_any_combination():
    for case in sorted({*CASES} - SOMETIMES - {*DAILY}):
        check(case)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss_chunk": 0}, (2, 0)),
        ({"loss_chunk": 40}, (2, 0)),  # 32 positions of a micro-batch of 2 rows
        ({"loss_chunk": 20}, (3, 1)),  # a last chunk of another length is a second graph, for any
        ({"global_batch": 5}, (4, 2)),  # micro-batches of 2, 2 and 1 rows
    ],
)
def test_chunks_and_rows_that_do_not_divide_are_one_graph_more_for_any_length(changes, expected):
    run = replace(run_of("single", "none", "row", "bf16"), **changes)
    with fake_world(1) as world:
        assert count(run, "sdpa", world)[0] == counts_of(*expected)


class Special(torch.nn.Linear):
    def __init__(self, number):
        super().__init__(4, 4)
        self.number = str(number)  # a constant of the graph

    def forward(self, x):
        return super().forward(x) if self.number else x


class Breaking(torch.nn.Linear):
    def forward(self, x):
        x = x + 1
        torch._dynamo.graph_break()
        return super().forward(x)


def test_graph_breaks_and_blocks_beyond_the_limit_of_recompiles_are_counted():
    """A test of the tests: what a `functools.partial` on each instance once did to tensor
    parallelism.
    """
    with counting_backend() as seen:
        compilation = compile_blocks([Special(n) for n in range(1, 13)])
        x = torch.ones(2, 4)
        for block in compilation.blocks:
            x = block(x)
        counts = compilation.counts()
    assert counts["graphs"] == seen["graphs"] == 8 and counts["recompiles"] == 7
    assert counts["blocks"] == 12 and counts["eager_blocks"] == 4
    with counting_backend():
        compilation = compile_blocks([Breaking(4, 4)])
        compilation.blocks[0](torch.ones(2, 4))
        counts = compilation.counts()
    assert counts["graphs"] == 2 and counts["graph_breaks"] > 0  # Dynamo counts frame by frame


def gradients(world, run):
    """Sum of losses, gradients and counts of an eager and of a compiled step, of graphs that are
    made functional and differentiated.
    """
    from torch._dynamo.backends.debugging import aot_eager

    found = []
    for compiled in (False, True):
        with inductor_replaced(aot_eager):
            trainer = Trainer(replace(run, compile=compiled), run.model, world, "sdpa")
            batch = batch_of(run, 3)
            done = trainer.step(batch, torch.tensor(2.0 * batch.useful_tokens), 1e-3, HostTimer())
            counts = trainer.parallel.compilation.counts() if compiled else {}
            assert torch._dynamo.config.optimize_ddp, "of others who compile in this process"
        pieces = {
            name: piece.tensor.detach().float().numpy()
            for name, piece in trainer.pieces(resume=False).items()
        }
        found.append((done.loss_sum.item(), done.norm.item(), pieces, counts))
    return found


@pytest.mark.parametrize(
    "layout, checkpointing",
    [
        ("zero3", "selective"),
        pytest.param("ddp", "block", marks=pytest.mark.long),
        pytest.param("tp", "none", marks=pytest.mark.long),
    ],
)
def test_compiled_ranks_compute_what_eager_ranks_do(layout, checkpointing):
    """Collectives of tensor parallelism are part of the graphs: between two real ranks."""
    run = run_of(layout, checkpointing, "sdpa", "fp32")
    run = replace(run, model=replace(run.model, layers=3))
    for (right, right_norm, right_weights, _), (loss, norm, weights, counts) in run_ranks(
        gradients, 2, run
    ):
        assert loss == pytest.approx(right, rel=1e-6) and norm == pytest.approx(
            right_norm, rel=1e-5
        )
        for name, values in right_weights.items():
            torch.testing.assert_close(
                torch.from_numpy(weights[name]), torch.from_numpy(values), rtol=1e-4, atol=1e-5
            )
        assert counts == counts_of(2, 0, blocks=3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("checkpointing", "precision", "chunk"),
    [
        ("none", "fp32", 0),
        ("block", "fp32", 20),
        ("selective", "bf16", 0),
        ("selective", "bf16-true", 20),
    ],
)
def test_inductors_code_computes_what_eager_blocks_do(checkpointing, precision, chunk):
    exact = precision == "fp32"
    run = replace(run_of("single", checkpointing, "sdpa", precision), loss_chunk=chunk)
    found = {}
    with fake_world(1) as world:
        for compiled in (False, True):
            torch._dynamo.reset()
            compile_function.cache_clear()
            trainer = Trainer(replace(run, compile=compiled), run.model, world, "sdpa")
            batches = [batch_of(run, seed) for seed in range(3)]
            tokens = [torch.tensor(float(batch.useful_tokens)) for batch in batches]
            done = [
                trainer.step(b, n, 1e-3, HostTimer()) for b, n in zip(batches, tokens, strict=True)
            ]
            values = [(d.loss_sum.item(), d.norm.item()) for d in done]
            weights = {
                name: weight.detach().float() for name, weight in trainer.model.named_parameters()
            }
            found[compiled] = values, weights
    graphs = trainer.parallel.compilation.counts()["graphs"]
    assert (
        graphs == (3 if chunk else 2) and trainer.parallel.compilation.counts()["eager_blocks"] == 0
    )
    assert found[True][0] != found[False][0], "other code computed them"
    for (loss, norm), (right, right_norm) in zip(found[True][0], found[False][0], strict=True):
        assert loss == pytest.approx(right, rel=1e-6 if exact else 1e-3)
        assert norm == pytest.approx(right_norm, rel=1e-4 if exact else 0.05)
    for name, right in found[False][1].items():
        torch.testing.assert_close(
            found[True][1][name], right, rtol=1e-4, atol=1e-5 if exact else 6e-3, msg=name
        )


def test_the_block_mask_of_a_compiled_function_is_that_of_the_plain_one():
    ids = torch.tensor([[0] * 100 + [1] * 156, [0] * 30 + [1] * 226])
    with counting_backend() as seen:
        compiled = compile_function(build_block_mask, dynamic=False)
        found = [compiled(ids, True), compiled(ids.flip(1), True)]
    assert seen["graphs"] == 1
    for mask, source in zip(found, (ids, ids.flip(1)), strict=True):
        assert torch.equal(mask.to_dense(), build_block_mask(source, True).to_dense())


@pytest.mark.parametrize(("mode", "again"), [("selective", 0), ("block", 1)])
def test_selective_checkpointing_stores_the_output_of_flex_attention(mode, again, monkeypatch):
    """Calls in the graph of a block's backward pass, split as Inductor does it."""
    from torch._dynamo.backends.common import aot_autograd

    calls = []

    def look(graph, inputs):
        calls.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    backend = aot_autograd(
        fw_compiler=look, bw_compiler=look, partition_fn=min_cut_rematerialization_partition
    )
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    run = run_of("single", mode, "flex", "fp32")
    run = replace(run, model=replace(run.model, layers=1), global_batch=2)
    with fake_world(1) as world, inductor_replaced(backend):
        trainer = Trainer(run, run.model, world, "flex")
        trainer.step(batch_of(run, 0), torch.ones(()), 1e-3, HostTimer())
    backward = [names for names in calls if "flex_attention_backward" in names]
    assert len(backward) == 1 and backward[0].count("flex_attention") == again


@pytest.mark.parametrize("name", ["torch_attn._varlen_attn.default", "aten.mm.default"])
def test_selective_checkpointing_stores_operations_by_the_names_torch_gives_them(name):
    from torch.nn.attention import varlen  # noqa: F401 - registers its operation

    namespace, operation, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), operation), overload)
    assert str(found) in compilation.STORED
