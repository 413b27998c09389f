"""Every cell of the scale `study` trains at toy size: a tiny model of its family, two ranks for
many, 10 steps. The first cell of one rank of each experiment is in the gate, the others are long
tests.
"""

import json
import random
from dataclasses import replace

import pytest

from tests.corpora import WORDS, GrammarLab, Lab, pairs_source
from tests.distributed.ranks import run_ranks, train_rank
from tests.workflow.conftest import ROOT
from tokenscale.runs.records.provenance import read_sealed
from tokenscale.settings.config import ALL, load_config
from tokenscale.settings.data import CorpusSettings, TokenizerSettings
from tokenscale.settings.layout import DEGREES
from tokenscale.settings.run import BudgetSettings

pytestmark = [pytest.mark.experiment, pytest.mark.slow(30), pytest.mark.distributed]

STEPS = 10
PAIRS = CorpusSettings(name="tiny", source=pairs_source(300))
TOKENIZER = TokenizerSettings(name="bpe", kind="bpe", corpus="tiny", vocabulary_size=512)


def shrink(run):
    """The run at toy size. Objective, optimizer, schedule, precision, data path and layout stay;
    degrees are 1 or 2.
    """
    degrees = {degree: min(2, getattr(run.layout, degree)) for degree in DEGREES}
    layout = replace(run.layout, **degrees)
    rows = run.micro_batch if run.micro_batch <= 2 else run.micro_batch // 4
    batch = (
        run.global_batch
        * rows
        * layout.data_parallel_size
        // (run.micro_batch * run.layout.data_parallel_size)
    )
    shape = {
        "dimension": 32,
        "layers": 2,
        "heads": 2,
        "hidden": 64,
        "maximum_positions": None,
        "vocabulary_size": None,
    }
    grouped = run.model.key_value_heads < run.model.heads
    return replace(
        run,
        corpus=PAIRS if run.labels == "target" else CorpusSettings(name="tiny"),
        tokenizer=TOKENIZER,
        model=replace(run.model, name="toy", key_value_heads=1 if grouped else 2, **shape),
        sequence_length=64 if run.labels == "target" else run.sequence_length // 64,
        layout=layout,
        micro_batch=rows,
        global_batch=batch,
        device="cpu",
        budget=BudgetSettings(steps=STEPS),
        schedule=replace(run.schedule, warmup_steps=min(5, run.schedule.warmup_steps)),
        validation=replace(run.validation, rows=4, bleu=min(2, run.validation.bleu)),
    )


def list_toys():
    """(cells by their experiments, toy run), one for each toy run that differs from the others."""
    config = load_config(root=ROOT, overrides={"scale": "study"})
    toys = {}
    for name in config.select_experiments([ALL]):
        for run in config.runs(name):
            toys.setdefault(shrink(run.settings), name)
    first = {name: toy for toy, name in reversed(toys.items()) if toy.layout.world_size == 1}
    return [
        pytest.param(
            toy,
            id=f"{name}-{toy.identity}",
            marks=() if toy == first[name] else pytest.mark.long,
        )
        for toy, name in toys.items()
    ]


@pytest.fixture(scope="module")
def labs(tmp_path_factory):
    pick = random.Random(0)
    texts = [" ".join(pick.choices(WORDS, k=pick.choice([3, 10, 30, 200]))) for _ in range(150)]
    text = Lab(tmp_path_factory.mktemp("text"), texts, 512, validation_share=0.2)
    return {"all": text, "target": GrammarLab(tmp_path_factory.mktemp("pairs"), PAIRS, 512)}


@pytest.mark.parametrize("run", list_toys())
def test_a_cell_of_the_studies_trains_at_toy_size(labs, tmp_path, run):
    run_ranks(train_rank, run.layout.world_size, run, labs[run.labels].inputs(run), tmp_path)
    record = read_sealed(tmp_path / "run.json")
    assert record["outcome"]["status"] == "complete" and record["outcome"]["steps"] == STEPS
    steps = [
        json.loads(line)
        for line in (tmp_path / "attempt=00/rank=00000/steps.jsonl").read_text().splitlines()
    ]
    rates = [step["learning_rate"] for step in steps]
    assert max(rates) == pytest.approx(run.optimizer.learning_rate)
    if run.schedule.shape == "constant":
        assert len({*rates[run.schedule.warmup_steps :]}) == 1
    events = (tmp_path / "attempt=00/rank=00000/events.jsonl").read_text()
    assert ('"event":"translation"' in events) == (run.validation.bleu > 0)
