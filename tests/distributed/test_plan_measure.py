"""`plan --measure`: predicted beside measured bytes of each cell, and what cannot run without its device."""

from dataclasses import replace

import pytest

from tests.distributed.ranks import run_ranks
from tests.distributed.test_held_memory import LAYOUTS, run_of
from tokenscale.base.errors import UserError
from tokenscale.cli.plan_memory import measure_memory

pytestmark = pytest.mark.distributed


def measured(world, runs):
    return list(measure_memory(runs))


def test_each_cell_is_measured_once_and_predicted_beside_it():
    runs = [run_of(LAYOUTS[name], 4) for name in ("zero3", "ddp")]
    repeats = [replace(run, repeat=1, compile=True) for run in runs]
    (lines,) = run_ranks(measured, 1, [*runs, *repeats])
    assert [line.split(",")[0].split()[:3] for line in lines[1::5]] == [
        ["llama-micro", "zero3", "4"],
        ["llama-micro", "data", "4"],
    ]
    names = ("between steps", "between micro-steps", "peak", "sent")
    for line, name in zip(lines[2:6] + lines[7:11], names * 2, strict=True):
        text = line.strip().removeprefix(name)
        predicted, found = (float(part.split()[0]) for part in text.split("/"))
        assert text != line.strip() and found == pytest.approx(predicted, rel=0.02)


def test_cells_that_need_their_device_are_refused_in_one_message():
    run = run_of(LAYOUTS["zero3"], 4)
    refused = [
        replace(run, arm="nanoGPT"),
        replace(run, float8=True),
        replace(run, attention="sdpa-cudnn", precision="bf16"),
        replace(run, model=replace(run.model, vocabulary_size=None)),
    ]
    with pytest.raises(UserError, match="cannot run these cells") as error:
        next(measure_memory([run, *refused]))
    cells = error.value.facts["cells"].splitlines()
    words = ("arm nanoGPT", "float8 needs", "sdpa-cudnn needs", "vocabulary is not known")
    assert len(cells) == len(words)
    assert all(word in cell for word, cell in zip(words, cells, strict=True))
