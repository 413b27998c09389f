"""`ready` says whether experiments can start, and names each thing that is missing with the step
that mends it.
"""

import argparse
import json
import re
import shutil
from dataclasses import replace

import pytest

from tests.machines import GPU, ROOT, program, write_image_record
from tokenscale.cli import check, main, ready
from tokenscale.cli.doctor import Finding
from tokenscale.cli.plan_prices import RunPrices
from tokenscale.runs.launch.cluster import Partition
from tokenscale.runs.launch.submission import format_hours
from tokenscale.runs.records import provenance
from tokenscale.settings.config import load_config

WELL = {name: Finding("ok", "fine") for name in {*ready.HERE, *ready.SUBMITTED}}


@pytest.fixture(autouse=True)
def project(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    record = write_image_record(tmp_path / "installed/image.json")
    monkeypatch.setitem(ALPS, "container_record", record)
    # the groups of who runs this; no program of a cluster
    program(tmp_path, "id", "echo g1 users")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ALPS_ACCOUNT", "g1")
    # whatever this clone has built
    monkeypatch.setattr(RunPrices, "is_done", lambda prices, run_id: False)


def find(profile=None, machine=(), experiments=("demo",), **overrides):
    config = load_config(profile=profile, overrides=overrides)
    config.machine = replace(config.machine, **dict(machine))
    names = config.select_experiments(list(experiments))
    return list(ready.find_problems(config, names, RunPrices(config), profile))


#: of the machine: where the record of its image is, which `project` writes
ALPS = {}


def test_nothing_is_missing_for_the_demo_here_nor_on_a_described_cluster():
    assert find() == [] and find("alps", ALPS) == []


def changed(owner, name, value):
    """Find problems with an attribute of a module replaced."""
    return lambda patch: (patch.setattr(owner, name, value), find())[1]


FULL = shutil.disk_usage(".")._replace(free=1000)
UNDECIDED = check.Problem("refuse", "factor a never changes alone", "factors.a", "fix one")
NOWHERE = {"corpora": {"own": {"source": {"files": "nowhere/*.parquet"}}}, "corpus": "own"}
OPTIONAL = {"no_such": lambda run: True, "numpy": lambda run: True}
WITHOUT = {
    "container_packages": tuple(
        {*load_config(profile="alps").machine.container_packages} - {"numpy"}
    )
}
#: what is missing → how, and words of the next step
CASES = {
    "an account": (
        lambda patch: (patch.delenv("ALPS_ACCOUNT"), find("alps", ALPS))[1],
        "export ALPS_ACCOUNT=",
    ),
    "a group": (
        lambda patch: (patch.setenv("ALPS_ACCOUNT", "g2"), find("alps", ALPS))[1],
        "slurm_account of the profile",
    ),
    "time before a purge": (
        lambda patch: find("alps", ALPS | {"purged_days": {str(ROOT): 0}}),
        "link it to another folder",
    ),
    "packages beside the image": (
        lambda patch: find("alps", ALPS | {"container_record": "nowhere.json"}),
        "profiles/alps/prepare.sh",
    ),
    "a package": (lambda patch: find("alps", ALPS | WITHOUT), "container_packages"),
    "a budget": (
        lambda patch: find("alps", ALPS, budget={"node_hours": 0.5}),
        "budget={node_hours:",
    ),
    "memory": (changed(provenance, "read_memory", lambda: (1 << 20, None)), "micro_batch"),
    "memory of GPUs": (lambda patch: find("alps", ALPS | {"gpu_memory_gib": 0.001}), "micro_batch"),
    "space": (changed(shutil, "disk_usage", lambda path: FULL), "free space"),
    "files of the corpus": (lambda patch: find(**NOWHERE), "corpora.own.source.files"),
    "an optional package": (changed(check, "ONLY_FOR", OPTIONAL), "pip install no-such"),
    "a design that decides": (
        changed(check, "find_design_problems", lambda design: [UNDECIDED]),
        "config/experiments/demo.yaml: factors.a",
    ),
}


@pytest.mark.parametrize(("lacking", "following"), CASES.values(), ids=CASES)
def test_each_lack_is_one_problem_with_its_next_step(lacking, following, monkeypatch):
    problems = lacking(monkeypatch)
    assert len(problems) == 1, problems
    assert following in " ".join(problems[0][:2])


def test_warnings_are_listed_and_do_not_count(monkeypatch):
    """A vocabulary that dwarfs the model, and a text that the tokenizer loses a part of."""
    lacks = find(experiments=["ddp_scaling_weak"])
    assert lacks and not any(lack.refuses for lack in lacks)
    config = load_config()
    assert next(ready.render(config, ["demo"], RunPrices(config), lacks)).startswith(
        f"ready: {len(lacks)} warnings"
    )
    entries = {"kind": "bpe", "corpus": "docstrings", "vocabulary_size": 131_072}
    (large,) = find(tokenizers={"bpe-4096": entries})
    assert "131,072 entries" in large.what and not large.refuses


def test_the_readmes_row_for_a_cluster_states_the_budget_that_it_needs():
    (row,) = re.findall(
        r"snakemake ([\w ]+) --profile alps --config 'budget=\{node_hours: (\d+)\}'",
        (ROOT / "README.md").read_text(),
    )
    names = row[0].split()
    assert not [
        lack
        for lack in find("alps", ALPS, names, budget={"node_hours": int(row[1])})
        if lack.refuses
    ]
    (refused,) = [lack for lack in find("alps", ALPS, names) if lack.refuses]
    assert f"node_hours: {row[1]}" in refused.next


@pytest.mark.parametrize(
    ("experiments", "stated"),
    [
        (["parallelism", "formats_in_training"], r"at most ([\d,.]+) node-hours as shipped"),
        (["ddp_scaling_weak"], r"1 to 16 GPUs, DDP and FSDP: ([\d,.]+) node-hours"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_readmes_rows_for_a_cluster_state_the_hours_that_plan_prints(experiments, stated):
    (hours,) = re.findall(stated, (ROOT / "README.md").read_text())
    config = load_config(profile="alps")
    totals = RunPrices(config).sum_by_experiment(config.all_runs(experiments))
    assert format_hours(totals).removeprefix("≤ ") == hours


@pytest.mark.parametrize(
    ("lost", "unknown", "accepted", "refuses"),
    [(0, 0, 0.05, None), (0.02, 0, 0.05, False), (0, 0.3, 0.05, False), (0.02, 0.3, 0.01, True)],
)
def test_a_tokenizer_that_loses_text_does_not_fit(tmp_path, lost, unknown, accepted, refuses):
    config = load_config()
    (store, *_) = config.stores(["demo"])
    path = tmp_path.joinpath("tokens", *store, "manifest.json")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"text_sample": {"lost": lost, "unknown": unknown}}))
    runs = [run.settings for run in config.runs("demo")]
    runs = [replace(run, tokenizer=replace(run.tokenizer, accepted_loss=accepted)) for run in runs]
    found = list(check.check_tokenizers(runs, RunPrices(config, tmp_path), tmp_path))
    assert [problem.level == "refuse" for problem in found] == (
        [refuses] if refuses is not None else []
    )


def test_the_partition_and_its_gpus_are_those_of_the_cluster():
    config = load_config(profile="alps")
    alps = Partition(gpus=4, minutes=720, cores=288, memory_mb=870_000)
    for partitions, words in (
        ({"normal": alps, "debug": alps}, []),
        ({"normal": Partition(0, 0, 0, 0)}, []),  # the cluster does not say
        ({"long": alps}, ["no partition normal"]),
        ({"normal": alps._replace(gpus=2)}, ["asks for 4, and the partition normal has 2"]),
    ):
        values = {name: partition._asdict() for name, partition in partitions.items()}
        found = {"slurm": Finding("ok", "", values={"partitions": values})}
        lacks = ready.judge_machine(config, ["demo"], found, "alps")
        assert [text in lack.what for text, lack in zip(words, lacks, strict=True)] == [True] * len(
            words
        )


@pytest.mark.parametrize(
    ("findings", "lacks"),
    [
        ({}, 0),
        ({"trainer packages": Finding("no", "missing: torch", "pip install torch")}, 1),
        ({"results folder": Finding("no", "read-only", "choose another")}, 1),
        ({"gpu": Finding("no", "none"), "nccl": Finding("no", "no GPU")}, 0),  # the CPU does
        ({"gloo": Finding("no", "hangs")}, 1),
        # there are runs of two ranks and more
        ({"gpu": Finding("ok", "", values={"devices": [GPU]})}, 1),
        ({"gpu": Finding("ok", "", values={"devices": [GPU] * 4})}, 0),
        (
            {
                "gpu": Finding("ok", "", values={"devices": [GPU] * 4}),
                "nccl": Finding("no", "no path"),
            },
            1,
        ),
    ],
)
def test_what_doctor_finds_counts_where_runs_need_it(findings, lacks):
    # demo: device cpu
    config = load_config(overrides={"scale": "workstation" if findings.get("gpu") else "demo"})
    assert len(list(ready.judge_machine(config, ["demo"], WELL | findings))) == lacks


def test_the_first_line_is_the_verdict_and_the_exit_code_agrees(monkeypatch, capsys):
    parser = argparse.ArgumentParser()
    ready.add_arguments(parser)
    for findings, verdict, exit_code in (
        (WELL, "ready: ", 0),
        ({"python": Finding("no", "3.9", "install")}, "not ready: 1 missing", 2),
    ):
        monkeypatch.setattr(
            ready.doctor, "examine", lambda results, only, findings=findings: findings
        )
        assert ready.run(parser.parse_args(["demo"])) == exit_code
        assert capsys.readouterr().out.startswith(verdict)
    assert main.main(["ready", "no-such-experiment"]) == 2
