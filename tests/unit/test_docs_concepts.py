"""docs/parallelism.md against the code: the numbers that follow from formulas."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tokenscale.costs.communication import bus_factor
from tokenscale.costs.flops import Convention, flops_per_token, hardware_flops_per_token, weights
from tokenscale.costs.memory import largest_memory
from tokenscale.costs.pipeline_schedules import bubble_share, build_schedule, max_in_flight
from tokenscale.data.order.permutation import micro_steps
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.options import decode
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import RunSettings

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/parallelism.md").read_text()
GIB = 2**30


@pytest.fixture(scope="module")
def example() -> RunSettings:
    stated = yaml.safe_load(re.search(r"^```yaml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[1])
    return replace(decode(RunSettings, stated | {"model": {}}), model=PRESETS[stated["model"]])


def rows(*heads: str) -> list[list[str]]:
    """Cells of the table whose first heads are these."""
    (table,) = re.findall(
        rf"^\| {re.escape(' | '.join(heads))}.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE
    )
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def with_cell(run: RunSettings, cell: str) -> RunSettings:
    """The run with a cell's layout, and what else it says in a second pair of braces."""
    layout, *more = (yaml.safe_load(part) for part in re.findall(r"`(\{.*?\})`", cell))
    run = replace(run, layout=decode(LayoutSettings, layout), **(more[0] if more else {}))
    assert run.problems() == []
    return run


def test_what_ranks_hold_is_what_is_predicted(example):
    table = rows("layout", "parameters")
    assert len(table) == 10
    for cell, *numbers in table:
        held = largest_memory(with_cell(example, cell), "cuda")
        parts = (held.parameters, held.gradients, held.optimizer, held.activations, held.total)
        assert numbers == [f"{part / GIB:.2f}" for part in parts], cell


def product(factors: str, values: dict[str, int]) -> int:
    return math.prod(int(f) if f.isdigit() else values[f] for f in factors.split("·") if f)


def test_what_is_sent_follows_from_the_formulas(example):
    table = rows("layout", "$M$")
    assert len(table) == 10
    count = weights(example.model)
    for cell, micro, formula, gib in table:
        run = with_cell(example, cell)
        values = {
            "P": count.total,
            "K": count.blocks,
            "R": count.total - count.blocks,
            "L": run.model.layers,
        }
        values["M"] = micro_steps(run.global_batch, run.layout.data_parallel_size, run.micro_batch)
        values["X"] = run.micro_batch * run.sequence_length * run.model.dimension
        sent = 0.0
        for term in formula.strip("`").split(" + "):
            form = r"([\w·]*?)(all_reduce|all_gather|reduce_scatter|send)\((.+)\)"
            times, operation, size = re.fullmatch(form, term).groups()
            factor = 1 if operation == "send" else bus_factor(operation, run.layout.world_size)
            sent += product(times, values) * factor * product(size, values)
        assert (micro, gib) == (str(values["M"]), f"{sent / GIB:.2f}"), cell


def test_bubbles_are_those_of_the_schedules():
    table = rows("`schedule`", "stages per rank")
    assert [row[0].strip("`") for row in table] == [
        "naive",
        "gpipe",
        "1f1b",
        "interleaved",
        "zero-bubble",
    ]
    for name, chunks, *numbers in table:
        name = name.strip("`")
        chunks = int(chunks)
        kept = [max_in_flight(build_schedule(name, rank, 4, 32, chunks)) for rank in (0, 3)]
        assert numbers == [f"{bubble_share(name, 4, m, chunks):.3f}" for m in (8, 32)] + list(
            map(str, kept)
        ), name


def test_what_checkpointing_saves_and_costs(example):
    for mode, gib, times in rows("`activation_checkpointing`", "activations"):
        run = replace(example, activation_checkpointing=mode.strip("`"))
        of = run.model, run.sequence_length, Convention.FULL
        trained = flops_per_token(*of)
        computed = hardware_flops_per_token(*of, run.activation_checkpointing)
        assert (gib, times) == (
            f"{largest_memory(run, 'cuda').activations / GIB:.2f}",
            f"{computed / trained:.2f}",
        )
