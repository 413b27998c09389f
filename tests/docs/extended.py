"""What docs/extend.md says of its examples; run inside a copy of the project that has them
(test_documentation.py).
"""

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tokenscale
from tests import logs
from tests.corpora import make_run, sentence_lab
from tests.distributed.parity import ONE, compare, on_ranks, run_of, steps, whole
from tests.distributed.ranks import run_ranks
from tokenscale.base.errors import UserError
from tokenscale.data.batches.batch import Inputs
from tokenscale.data.stores.documents import IGNORED
from tokenscale.settings.closure import training_code
from tokenscale.settings.extensions import load_extension, read_extension
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import (
    BudgetSettings,
    OptimizerSettings,
    RunSettings,
    ScheduleSettings,
    ValidationSettings,
)
from tokenscale.train.loop import train
from tokenscale.train.parallel.world import World

RAW = read_extension(("token_format",), "raw:Raw")
SOURCE = read_extension(("objective",), "dpo:DPO")
DPO = load_extension(SOURCE.name, "objective")
open_pairs = load_extension(SOURCE.name, "objective", "rows")
BETA = importlib.import_module("extensions.dpo").BETA
pairs_of = importlib.import_module("extensions.pairs").pairs_of
T = 32
WORLD = World(0, 1, 0, torch.device("cpu"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return sentence_lab(tmp_path_factory.mktemp("lab"), 150, 60)


def run_with(approach="token-list", **changes) -> RunSettings:
    settings = {
        "objective": SOURCE.name,
        "extensions": (*SOURCE.settings, *RAW.settings),
        "model": PRESETS["llama-micro"],
        "global_batch": 8,
        "micro_batch": 3,
    }
    settings |= {"budget": BudgetSettings(steps=30), "schedule": ScheduleSettings(warmup_steps=3)}
    settings |= {"optimizer": OptimizerSettings(learning_rate=1e-2)}
    settings |= {"validation": ValidationSettings(rows=8, accuracy=True)}
    run = replace(make_run(approach, T), **(settings | changes))
    assert run.problems() == []
    return run


def losses_of(folder: Path) -> list[float]:
    """Loss a pair of each step, over all ranks."""
    return [step["loss_sum"] / step["useful_tokens"] for step in logs.read_steps(folder).values()]


def validations_of(folder: Path) -> list[dict]:
    lines = (folder / "attempt=00/rank=00000/events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "validation"]


def train_on(world: World, run: RunSettings, inputs, folder: Path) -> None:
    train(run, inputs, folder, world)


@pytest.fixture(scope="module")
def trained(lab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    train(run := run_with(), lab.inputs(run), folder, WORLD)
    return folder


def test_the_copy_is_what_is_tested():
    assert Path(tokenscale.__file__).is_relative_to(Path(__file__).parents[2])


# -- the format


def test_trainings_on_raw_and_on_token_list_are_one(lab, trained, tmp_path):
    train(run := run_with(RAW.name), lab.inputs(run), tmp_path, WORLD)
    assert losses_of(tmp_path) == losses_of(trained)
    assert [v["loss_sum"] for v in validations_of(tmp_path)] == [
        v["loss_sum"] for v in validations_of(trained)
    ]


def test_an_extension_is_code_of_its_own_runs_and_a_method_of_all():
    runs = {
        "raw": RunSettings(approach=RAW.name, extensions=RAW.settings),
        "dpo": RunSettings(objective=SOURCE.name, extensions=SOURCE.settings),
    }
    found = {name: training_code(run) for name, run in runs.items()}
    for file, expected in {
        "extensions/raw.py": ["raw"],
        "extensions/dpo.py": ["dpo"],
        "extensions/pairs.py": ["dpo"],
        "train/parallel/each.py": ["raw", "dpo"],
    }.items():
        users = [name for name, code in found.items() if any(f.endswith(file) for f in code)]
        assert users == expected


def test_smoothed_labels_are_those_of_torch():
    source = read_extension(("objective",), "smoothed:Smoothed")
    model = Table([[0.0, 1.0, 2.0], [1.0, 0.0, 0.0], [0.0, 0.0, 3.0]])
    smoothed = load_extension(source.name, "objective")(model)
    tokens, labels = torch.tensor([[0, 1, 2]]), torch.tensor([[1, IGNORED, 2]])
    expected = 0.0
    for logits, label in ((model.logits[0], 1), (model.logits[2], 2)):
        log_p = logits.log_softmax(0)
        expected -= 0.9 * log_p[label].item() + 0.1 * log_p.mean().item()
    assert smoothed(tokens, labels).item() == pytest.approx(expected, rel=1e-6)


# -- the copies


def steps_of_each(world, runs):
    return [steps(world, run, 3) for run in runs]


def test_two_copies_compute_what_one_does_and_to_the_last_bit_what_ddp_does():
    cases = {"single": run_of(ONE), "ddp": run_of(LayoutSettings(data=2))}
    cases |= {"each": run_of(LayoutSettings(data=2, copies="each"))}
    found = {}
    for name, ranks in on_ranks(steps_of_each, cases).items():
        found[name] = (*ranks[0][:2], whole([pieces for _, _, pieces in ranks]))
    compare(found["each"], found["single"])
    assert found["each"][0] == found["ddp"][0]
    assert LayoutSettings(data=2, copies="each").method == "each"


def test_copies_are_refused_where_there_are_none():
    for layout in (LayoutSettings(copies="each"), LayoutSettings(data=2, shard=2, copies="each")):
        assert [field for field, _ in run_of(layout).problems()] == ["layout.copies"]


# -- the objective


class Table(nn.Module):
    """Logits of the next token by the last one alone: what can be worked out by hand."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))
        self.head = nn.Identity()

    def forward(self, tokens_bt, bounds=None):
        return self.head(self.hidden(tokens_bt, bounds))

    def hidden(self, tokens_bt, bounds=None):
        return self.logits[tokens_bt]


def test_the_loss_is_equation_7():
    model = Table([[0.0, 1.0, 2.0], [1.0, 0.0, 0.0], [0.0, 0.0, 3.0]])
    objective = DPO(model, loss_chunk=0, compiled=False)
    model.logits.data = torch.tensor([[0.0, 2.0, 1.0], [1.0, 0.5, 0.0], [0.0, 1.0, 3.0]])
    # chosen 0 1, rejected 0 2; the second row predicts nothing
    tokens = torch.tensor([[0, 1, 0, 2], [0, 1, 0, 2]])
    labels = torch.tensor([[1, 2, 2, 1], [IGNORED] * 4])

    def log_p(logits, label):
        return logits[label] - math.log(sum(map(math.exp, logits)))

    chosen = log_p([0, 2, 1], 1) + log_p([1, 0.5, 0], 2) - log_p([0, 1, 2], 1) - log_p([1, 0, 0], 2)
    rejected = log_p([0, 2, 1], 2) + log_p([0, 1, 3], 1) - log_p([0, 1, 2], 2) - log_p([0, 0, 3], 1)
    expected = -math.log(1 / (1 + math.exp(-BETA * (chosen - rejected))))
    assert objective(tokens, labels).item() == pytest.approx(expected, rel=1e-6)


def test_what_a_row_predicts_is_turned_around_and_nothing_else():
    tokens = np.array([[0, 5, 6, 1, 7, 8, 9], [0, 5, 6, 7, 8, 9, 10]])
    labels = np.array([[IGNORED, IGNORED, IGNORED, 7, 8, 9, 1], [5, 6, 7, 8, 9, 10, 11]])
    pairs, theirs = pairs_of(tokens, labels)
    assert pairs[:, :7].tolist() == tokens.tolist() and theirs[:, :7].tolist() == labels.tolist()
    assert pairs[:, 7:].tolist() == [[0, 5, 6, 1, 9, 8, 7], [0, 10, 9, 8, 7, 6, 5]]
    assert theirs[:, 7:].tolist() == [
        [IGNORED, IGNORED, IGNORED, 9, 8, 7, 1],
        [10, 9, 8, 7, 6, 5, 11],
    ]


def test_it_begins_at_log_2_and_falls(trained):
    losses = losses_of(trained)
    held_out = validations_of(trained)
    first = json.loads((trained / "attempt=00/rank=00000/steps.jsonl").read_text().splitlines()[0])
    assert (first["rows"], first["useful_tokens"], first["total_tokens"]) == (8, 8, 8 * T)
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert losses[-1] < 0.5 * losses[0]
    first, last = (v["loss_sum"] / v["useful_tokens"] for v in (held_out[0], held_out[-1]))
    assert first == pytest.approx(math.log(2), rel=1e-6) and last < 0.6 * first
    assert (held_out[0]["correct_tokens"], held_out[-1]["correct_tokens"]) == (
        0,
        held_out[-1]["useful_tokens"],
    )


def test_two_ranks_learn_what_one_does(lab, trained, tmp_path):
    run = run_with(layout=LayoutSettings(data=2, copies="each"), budget=BudgetSettings(steps=6))
    run_ranks(train_on, 2, run, lab.inputs(run), tmp_path)
    one = tmp_path / "one"
    train(replace(run, layout=ONE), lab.inputs(run), one, WORLD)
    assert losses_of(tmp_path) == pytest.approx(losses_of(one), rel=1e-4)


def test_layouts_that_cut_the_model_are_refused():
    for layout in (LayoutSettings(tensor=2), LayoutSettings(pipeline=2), LayoutSettings(shard=2)):
        assert any(
            "whole model" in text for _, text in replace(run_with(), layout=layout).problems()
        )
    with pytest.raises(UserError, match="bounds"):
        open_pairs(run_with("packed", document_mask=True), Inputs(), held_out=False)
