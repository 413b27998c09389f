"""A run whose predicted memory exceeds the machine's is refused before a process starts."""

from dataclasses import replace

import pytest

from tests.unit.study_train.conftest import asked
from tokenscale.base.errors import UserError
from tokenscale.base.wording import format_bytes
from tokenscale.cli.train_request import LEARNED_VOCABULARY
from tokenscale.costs.memory import largest_memory
from tokenscale.runs.launch import start
from tokenscale.runs.records import provenance
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.machine import Machine
from tokenscale.settings.run import RunSettings

GIB = 1 << 30
TINY = RunSettings(device="cpu")
WIDE = replace(TINY, model=TINY.model.with_vocabulary(131_072), micro_batch=64, sequence_length=512)
TINY = replace(TINY, model=TINY.model.with_vocabulary(4096))


@pytest.fixture(autouse=True)
def sixteen_gib(monkeypatch):
    monkeypatch.setattr(provenance, "read_memory", lambda: (16 * GIB, 8 * GIB))
    monkeypatch.setattr(provenance, "cgroup_limits", lambda: (None, None))


def with_ranks(run, ranks):
    return replace(run, layout=LayoutSettings(data=ranks), global_batch=run.micro_batch * ranks)


@pytest.mark.parametrize(
    "run",
    [
        replace(TINY, sequence_length=100_000),
        replace(TINY, micro_batch=4096, global_batch=4096),
        with_ranks(
            replace(TINY, model=RunSettings().model.with_vocabulary(131_072), micro_batch=64, sequence_length=512), 3
        ),
    ],
    ids=["long sequences", "large micro-batch", "three ranks with a large vocabulary"],
)
def test_a_run_that_does_not_fit_is_refused_with_numbers(run):
    with pytest.raises(UserError, match="more memory") as refused:
        start.check_memory(run)
    assert refused.value.facts["found"] == "16.0 GiB"
    needed = run.layout.world_size * largest_memory(run).total
    assert format_bytes(needed) in refused.value.facts["needed"]


def test_a_control_group_counts_as_the_machine(monkeypatch):
    needed = largest_memory(TINY).total
    start.check_memory(TINY)
    monkeypatch.setattr(provenance, "cgroup_limits", lambda: (None, needed))
    start.check_memory(TINY)
    monkeypatch.setattr(provenance, "cgroup_limits", lambda: (None, needed - 1))
    with pytest.raises(UserError, match="more memory"):
        start.check_memory(TINY)


def test_all_ranks_of_a_cpu_share_its_memory(monkeypatch):
    one = largest_memory(TINY).total
    monkeypatch.setattr(provenance, "read_memory", lambda: (int(2.5 * one), None))
    start.check_memory(with_ranks(TINY, 2))
    with pytest.raises(UserError, match="3 ranks"):
        start.check_memory(with_ranks(TINY, 3))


def test_on_a_gpu_each_rank_has_a_gpus_memory():
    run = with_ranks(replace(TINY, device="auto"), 2)
    gib = largest_memory(run, "cuda").total / GIB
    start.check_memory(run, Machine(name="m", gpus_per_node=2, gpu_memory_gib=1.01 * gib))
    with pytest.raises(UserError, match="than a GPU has"):
        start.check_memory(run, Machine(name="m", gpus_per_node=2, gpu_memory_gib=0.99 * gib))


def test_a_run_without_a_known_vocabulary_or_memory_passes(monkeypatch):
    start.check_memory(replace(RunSettings(device="cpu"), sequence_length=100_000))
    monkeypatch.setattr(provenance, "read_memory", lambda: (None, None))
    start.check_memory(replace(TINY, sequence_length=100_000))


def test_the_default_tokenizer_of_train_does_not_outweigh_the_model(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a line of text"}\n' * 20)
    small = asked("--dataset", str(text)).run
    assert small.tokenizer.vocabulary_size == LEARNED_VOCABULARY
    gpt2 = asked("--dataset", str(text), "--model", "gpt2-tiny").run
    assert gpt2.tokenizer.vocabulary_size == LEARNED_VOCABULARY
    assert asked("--dataset", str(text), "--tokenizer-name", "tekken").run.tokenizer.kind == "tekken"
    assert asked("--dataset", str(text), "--model-size", "small").run.tokenizer.kind == "tekken"
    assert asked("--dataset", str(text), "--model", "llama-8b-nemo").run.tokenizer.kind == "tekken"


@pytest.mark.parametrize("starter", [{}, {"starter": "srun", "gpus_per_node": 4}])
def test_the_memory_that_a_machines_file_grants_is_compared(starter):
    """A job may use what it requests; on this machine a file may state less than there is."""
    start.check_memory(TINY, Machine(**starter))
    with pytest.raises(UserError, match="needs more memory") as error:
        start.check_memory(TINY, Machine(memory_mb=10, **starter))
    assert "memory_mb = 10" in error.value.facts["next"]
