import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import logs
from tests.corpora import small_run, words_lab
from tests.distributed.parity import (
    HYBRID,
    LAYOUTS,
    ONE,
    batch_of,
    each,
    held,
    on_ranks,
    run_of,
    trainer_of,
    whole,
)
from tests.distributed.ranks import run_ranks, train_rank
from tokenscale.base.files import read_json
from tokenscale.runs.records.provenance import read_sealed
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import CheckpointSettings, RunSettings, ValidationSettings
from tokenscale.train.checkpoint import Checkpoint, State, commit, write_rank
from tokenscale.train.phase_timer import HostTimer

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20), pytest.mark.distributed]


def write_seed(world, run, parent):
    """A resume state after two steps, written by these ranks; and what it holds."""
    folder = parent / run.layout.method
    trainer = trainer_of(run, world)
    for step in range(2):
        trainer.step(*batch_of(step, world, run.layout), 1e-3, HostTimer())
    write_rank(folder, world.rank, State(trainer.pieces(resume=True)))
    if world.rank == 0:
        commit(
            folder,
            world.size,
            {"kind": "model", "run_id": "tiny", "run": {}, "model": {}, "step": 2},
        )
    world.barrier()
    return held(trainer, resume=True)


def read_seeds(world, run, folders):
    """What this rank holds after loading each that `folders` has for its layout; and with ZeRO-1, all
    weights.
    """
    found = {}
    for folder in folders[run.layout]:
        trainer = trainer_of(replace(run, seed=5), world)
        trainer.load(Checkpoint(folder))
        weights = trainer.model.named_parameters() if run.layout.sharding == "zero1" else ()
        found[folder.name] = (
            held(trainer, resume=True),
            {name: weight.detach().numpy() for name, weight in weights},
        )
    return found


@pytest.mark.parametrize(
    "shifts",
    [
        pytest.param((0, 2, 5), id="each writer and each reader, in three pairs or more"),
        pytest.param(range(7), id="every pair", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_of_one_layout_loads_in_every_other_to_the_last_bit(shifts, tmp_path):
    layouts = {"single": ONE, **LAYOUTS}
    writers = ("single", "zero1@3", "zero3@2", HYBRID, "tp@4", "1f1b@2", "tp-zero1@2x2")
    written = on_ranks(
        each, {name: run_of(layouts[name]) for name in writers}, write_seed, tmp_path
    )
    written = {layouts[name].method: whole(ranks) for name, ranks in written.items()}
    folders = [tmp_path / method for method in written]
    names = ("single", "ddp@2", "zero1@2", "zero2@4", "zero3@3", HYBRID, "tp@2")
    names += ("gpipe@4", "interleaved@2", "1f1b-tp@2x2")
    readers = {name: run_of(layouts[name]) for name in names}
    read = {
        run.layout: [folders[(number + shift) % len(folders)] for shift in shifts]
        for number, run in enumerate(readers.values())
    }
    for reader, ranks in on_ranks(each, readers, read_seeds, read).items():
        for writer in ranks[0]:
            expected = written[writer]
            together = whole([found[writer][0] for found in ranks])
            assert together.keys() == expected.keys() and any(
                "exp_avg_sq" in name for name in expected
            )
            for name, values in expected.items():
                np.testing.assert_array_equal(
                    together[name], values, err_msg=f"{writer} → {reader}: {name}"
                )
            for found in ranks:
                for name, values in found[writer][1].items():
                    np.testing.assert_array_equal(
                        values, expected["model." + name], err_msg=f"{writer}: {name}"
                    )


STEPS = 8


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return words_lab(tmp_path_factory.mktemp("lab"), 120)


def training_of(layout, resume_from=None) -> RunSettings:
    """Validation of 5 rows: ranks with unequal numbers of them, one with a pass too few."""
    return small_run(
        steps=STEPS,
        model=replace(PRESETS["llama-micro"], key_value_heads=2, tied_embeddings=True),
        document_mask=True,
        micro_batch=1,
        layout=layout,
        validation=ValidationSettings(rows=5, every=4, accuracy=True),
        checkpoints=CheckpointSettings(every=2, keep_last=9, keep_resume_state=True, final=True),
        resume_from=resume_from,
    )


def trained(lab, directory, run):
    """(step → (loss, digest), step → (validation loss, correct labels)) of a whole training."""
    run_ranks(train_rank, run.layout.world_size, run, lab.inputs(run), directory)
    assert read_sealed(directory / "run.json")["outcome"]["status"] == "complete"
    events = map(
        json.loads, (directory / "attempt=00/rank=00000/events.jsonl").read_text().splitlines()
    )
    counts = {e["step"]: e for e in events if e["event"] == "validation"}
    held_out = {
        k: (e["loss_sum"] / e["useful_tokens"], e["correct_tokens"]) for k, e in counts.items()
    }
    steps = logs.read_steps(directory).items()
    return {
        k: (step["loss_sum"] / step["useful_tokens"], step["order_digest"]) for k, step in steps
    }, held_out


def test_a_run_goes_on_in_other_layouts_with_the_same_samples_and_losses(lab, tmp_path):
    expected, held_out = trained(lab, tmp_path / "whole", training_of(ONE))
    assert list(expected) == list(range(STEPS))
    before = None
    for begins, name in {0: "zero3@2", 2: "1f1b-tp@2x2", 4: "ddp@2", 6: "tp-zero3@2x2"}.items():
        layout = LAYOUTS[name]
        directory = tmp_path / f"{layout.method}-{layout.world_size}"
        found, validation = trained(lab, directory, training_of(layout, before and str(before)))
        assert list(found) == list(range(begins, STEPS))
        for step, (loss, digest) in found.items():
            assert digest == expected[step][1], (
                f"{layout.method} reads other samples in step {step}"
            )
            assert loss == pytest.approx(expected[step][0], abs=1e-5), (layout.method, step)
        (loss, correct) = validation[STEPS]
        (expected_loss, expected_correct) = held_out[STEPS]
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        # one label may be a near tie
        assert abs(correct - expected_correct) <= 1 < expected_correct, layout.method
        before = directory / f"checkpoints/step={begins + 2:08d}"
    assert read_json(tmp_path / "tp-fsdp-4/checkpoints/final/checkpoint.json")["world_size"] == 4
    weights = {
        n: Checkpoint(tmp_path / d / "checkpoints/final")
        for n, d in (("one", "whole"), ("four", "tp-fsdp-4"))
    }
    for name in weights["one"].names():
        torch.testing.assert_close(
            weights["four"].tensor(name), weights["one"].tensor(name), atol=2e-4, rtol=1e-3
        )
