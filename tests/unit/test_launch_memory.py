"""What is refused before a process starts: too much memory, a variable without a value, a budget
that is too small.
"""

from dataclasses import replace

import pytest

from tests.unit.study_train.conftest import asked
from tokenscale.base.errors import UserError
from tokenscale.base.wording import format_bytes
from tokenscale.cli.plan_memory import render_memory
from tokenscale.cli.train.request import LEARNED_VOCABULARY
from tokenscale.costs.memory import largest_memory
from tokenscale.costs.prices import Price, sum_prices
from tokenscale.runs.launch import start
from tokenscale.runs.launch.submission import budget_error, format_costs, unset_variable_error
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
        with_ranks(WIDE, 3),
    ],
    ids=["long sequences", "large micro-batch", "three ranks with a large vocabulary"],
)
def test_a_run_that_does_not_fit_is_refused_with_numbers(run):
    with pytest.raises(UserError, match="more memory") as refused:
        start.check_memory(run)
    assert refused.value.facts["found"] == "16.0 GiB"
    needed = run.layout.world_size * largest_memory(run).total
    assert format_bytes(needed) in refused.value.facts["needed"]


def test_a_control_group_counts_as_the_machine_and_all_ranks_of_a_cpu_share_its_memory(monkeypatch):
    needed = largest_memory(TINY).total
    for limit in (None, needed):
        monkeypatch.setattr(provenance, "cgroup_limits", lambda limit=limit: (None, limit))
        start.check_memory(TINY)
    monkeypatch.setattr(provenance, "cgroup_limits", lambda: (None, needed - 1))
    with pytest.raises(UserError, match="more memory"):
        start.check_memory(TINY)
    monkeypatch.setattr(provenance, "cgroup_limits", lambda: (None, int(2.5 * needed)))
    start.check_memory(with_ranks(TINY, 2))
    with pytest.raises(UserError, match="3 ranks"):
        start.check_memory(with_ranks(TINY, 3))


def test_on_a_gpu_each_rank_has_a_gpus_memory():
    run = with_ranks(replace(TINY, device="auto"), 2)
    gib = largest_memory(run, "cuda").total / GIB
    start.check_memory(run, Machine(name="m", gpus_per_node=2, gpu_memory_gib=1.01 * gib))
    with pytest.raises(UserError, match="than a GPU has"):
        start.check_memory(run, Machine(name="m", gpus_per_node=2, gpu_memory_gib=0.99 * gib))


def test_whole_gradients_between_micro_steps_are_refused_where_their_shards_fit():
    shard = LayoutSettings(shard=4)
    run = replace(TINY, device="auto", layout=shard, micro_batch=1, global_batch=16)
    room = (largest_memory(run, "cuda").total + 1000) / GIB
    machine = Machine(name="m", gpus_per_node=4, gpu_memory_gib=room)
    start.check_memory(run, machine)
    whole = replace(run, layout=replace(shard, accumulation="unsharded"))
    with pytest.raises(UserError, match="than a GPU has"):
        start.check_memory(whole, machine)
    start.check_memory(replace(whole, global_batch=4), machine)  # one micro-step


def test_a_run_that_fits_but_for_a_moment_of_its_step_is_refused():
    """`plan` lists it in the same words."""
    run = replace(TINY, device="auto", layout=LayoutSettings(shard=4), global_batch=64)
    held = largest_memory(run, "cuda")
    assert held.transient > 0.05 * held.sum_of_parts
    room = (held.sum_of_parts + held.transient / 2) / GIB
    with pytest.raises(UserError, match="needs more memory than a GPU has"):
        start.check_memory(run, Machine(name="m", gpus_per_node=4, gpu_memory_gib=room))
    (line,) = list(render_memory([run], room))[1:]
    assert line.endswith(f" for a moment in a pass: does not fit a GPU of {room:g} GiB")


def test_a_run_without_a_known_vocabulary_or_memory_passes(monkeypatch):
    start.check_memory(replace(RunSettings(device="cpu"), sequence_length=100_000))
    monkeypatch.setattr(provenance, "read_memory", lambda: (None, None))
    start.check_memory(replace(TINY, sequence_length=100_000))


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("", "bpe"),
        ("--model gpt2-tiny", "bpe"),
        ("--tokenizer-name tekken", "tekken"),
        ("--model-size small", "tekken"),
    ]
    + [("--model llama-8b-nemo", "tekken")],
)
def test_the_default_tokenizer_of_train_does_not_outweigh_the_model(tmp_path, words, kind):
    (tmp_path / "text.jsonl").write_text('{"text": "a line of text"}\n' * 20)
    found = asked("--dataset", str(tmp_path / "text.jsonl"), *words.split()).run.tokenizer
    assert found.kind == kind and (kind == "tekken" or found.vocabulary_size == LEARNED_VOCABULARY)


@pytest.mark.parametrize("starter", [{}, {"starter": "srun", "gpus_per_node": 4}])
def test_the_memory_that_a_machines_file_grants_is_compared(starter):
    """A job may use what it requests; on this machine a file may state less than there is."""
    start.check_memory(TINY, Machine(**starter))
    with pytest.raises(UserError, match="needs more memory") as error:
        start.check_memory(TINY, Machine(memory_mb=10, **starter))
    assert "memory_mb = 10" in error.value.facts["next"]


def of(node_hours, **why):
    return sum_prices(
        [Price(4, 1, None if "unknown" in why else node_hours * 3600, 1, 1, 0, 1, **why)]
    )


def test_a_variable_without_a_value_is_named_with_what_sets_it():
    jobs = [{"slurm_account": "$ALPS_ACCOUNT", "mem_mb": 450000, "slurm_partition": "normal"}] * 3
    said = unset_variable_error(jobs).render()
    assert "ALPS_ACCOUNT" in said.splitlines()[0] and said.count("\n") == 2, (
        "three jobs, one message"
    )
    assert "slurm_account: $ALPS_ACCOUNT" in said and "export ALPS_ACCOUNT=<project>" in said
    error = unset_variable_error(
        [{"slurm_account": "g1"}, {"qos": "${MY_QOS}", "slurm_account": "$ALPS_ACCOUNT"}]
    )
    assert "ALPS_ACCOUNT, MY_QOS" in error.what and "export MY_QOS=<value>" in error.facts["next"]
    alike = {"slurm_account": "g1", "slurm_extra": "--comment=of-$HOME", "runtime": 720, "n": "$"}
    assert unset_variable_error([]) is None and unset_variable_error([alike]) is None


def test_a_budget_that_is_not_kept_names_the_largest_experiments_and_the_way_out():
    assert budget_error({}, 50) is None and budget_error({"demo": of(0.1)}, 0) is not None
    assert budget_error({"demo": of(20.0), "other": of(30.0)}, 50) is None
    totals = {
        "small": of(1.0),
        "large": of(40.0),
        "middle": of(20.04),
        **{f"e{n}": of(0.5) for n in range(4)},
    }
    error = budget_error(totals, 50)
    assert "63.0" in error.facts["needed"] and error.facts["budget"].startswith("50 ")
    lines = [line.split() for line in error.facts["largest"].splitlines()]
    assert [line[0] for line in lines] == ["large", "middle", "small", "e0", "e1", "and"] and lines[
        -1
    ][-1] == "1.00"
    assert (
        "--config 'budget={node_hours: 70}'" in error.facts["next"]
        and "corpus tokens" not in error.facts["next"]
    )
    error = budget_error(totals | {"other": of(0, unknown="no device")}, 50)
    assert "≥ 63.0" in error.facts["needed"] and "1 runs of unknown hours" in error.facts["needed"]


def test_upper_bounds_count_for_the_budget_and_are_marked():
    totals = {"exact": of(1.0), "bounded": of(3.0, bound="the time limit of their jobs")}
    error = budget_error(totals, 3)
    assert "≤ 4.00" in error.facts["needed"] and "snakemake corpus tokens" in error.facts["next"]
    assert error.facts["largest"].split() == ["bounded", "≤", "3.00", "exact", "1.00"]
    first, *lines = format_costs(totals, 50)
    assert "≤ 4.00" in first and "within the budget of 50 " in first
    assert [line.split()[:2] for line in lines] == [
        ["exact", "1.00"],
        ["bounded", "≤"],
        ["≤:", "1"],
    ]
    assert "over the budget of 3 " in format_costs(totals, 3)[0] and format_costs({}, 0) == []
