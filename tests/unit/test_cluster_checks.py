"""What a profile asks of a cluster beyond what it offers, by the programs of CSCS."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.machines import ROOT, program
from tokenscale.runs.launch import cluster
from tokenscale.settings.machine import Machine, load_machine

#: docs/clusters/clariden.md of eth-cscs/cscs-docs, with the cores and memory of a GH200 node
SINFO = """debug|gpu:4|1:30:00|288|870000
normal*|gpu:4|12:00:00|288|870000
low|gpu:4|1-00:00:00|288|870000
xfer|(null)|1-00:00:00|64|250000
"""
#: docs/storage/filesystems.md: a row is directory, file system, and used, percent, grace and limit, of the
#: user and of the project, first of bytes, then of files
ROWS = [
    "/iopsstor/scratch/cscs/user lustre 32.0G - - - - - 7746 - - - - -",
    "/capstor/scratch/cscs/user lustre 243.0G 0.2 - - - 150.0T 336479 33.6 - - - 1000000",
    "/vast/users/cscs/user vast 11.7G 23.3 Unknown - - 50.0G 485014 97.0 Unknown - - 500000",
]
QUOTA = "Retrieving data ...\n" + "".join(f"| {' | '.join(row.split())} |\n" for row in ROWS)


def alps():
    return load_machine(ROOT / "profiles/alps/machine.toml")


def config(name):
    return yaml.safe_load((ROOT / f"profiles/{name}/config.yaml").read_text())


def judge(values, machine, **resources):
    found = cluster.partition_errors(
        values,
        values["default-resources"] | resources,
        machine,
        partitions=cluster.parse_partitions(SINFO),
        file="profiles/alps/config.yaml",
    )
    return [error.what for error in found]


def test_the_shipped_profiles_fit_the_partitions_of_clariden():
    assert judge(config("alps"), alps()) == []
    debug = load_machine(ROOT / "profiles/alps-debug/machine.toml")
    assert judge(config("alps-debug"), debug) == []


@pytest.mark.parametrize(
    "values, machine, resources, words",
    [
        ({}, {"minutes": 1440}, {}, "minutes of alps's machine.toml asks for 1,440"),
        ({}, {"memory_mb": 900_000}, {}, "memory_mb of alps's machine.toml asks for 900,000"),
        ({}, {"cores_per_rank": 80}, {}, "cores of alps's machine.toml asks for 320"),
        ({"set-threads": {"merge_corpus": 300}}, {}, {}, "set-threads: merge_corpus asks for 300"),
        ({"set-resources": {"train": {"runtime": 900}}}, {}, {}, "set-resources: train asks"),
        ({"set-resources": ["train:runtime=900"]}, {}, {}, "set-resources: train asks for 900"),
        ({"set-resources": {"train": {"mem_mb": 10**6}}}, {}, {}, "has 870,000"),
        ({}, {}, {"slurm_partition": "long"}, "no partition long"),
    ],
)
def test_each_request_beyond_the_partition_is_named(values, machine, resources, words):
    (found,) = judge(config("alps") | values, replace(alps(), **machine), **resources)
    assert words in found


def test_low_has_room_for_a_day():
    assert judge(config("alps"), replace(alps(), minutes=1440), slurm_partition="low") == []


def test_an_account_is_a_group_where_the_machine_says_so(tmp_path, monkeypatch):
    program(tmp_path, "id", "echo g1 g174")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cluster.account_error("g174", alps()) is None
    error = cluster.account_error("g9", alps())
    assert "g9 is none of your groups" in error.what and error.facts["found"] == "g1, g174"
    assert cluster.account_error("g9", Machine()) is None, (
        "accounts of other clusters have any name"
    )
    assert cluster.account_error("$ALPS_ACCOUNT", alps()) is None, "that is another error"


@pytest.mark.parametrize("hours, refused", [(13 * 24, False), (15 * 24, True)])
def test_a_plan_longer_than_the_purge_is_refused_for_the_folder_behind_a_link(
    tmp_path, hours, refused
):
    machine = replace(alps(), purged_days={str(tmp_path / "scratch"): 14})
    (tmp_path / "scratch/runs").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "scratch/runs")
    error = cluster.purge_error(machine, [tmp_path / "home", tmp_path / "runs"], hours)
    assert (error is not None) == refused
    assert error is None or "14 days after their last access" in error.facts["found"]


def test_a_quota_that_is_used_up_is_named_where_results_or_home_lie(tmp_path, monkeypatch):
    program(tmp_path, "quota", f"cat <<'END'\n{QUOTA}END")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (error,) = cluster.quota_errors([Path("/users/user/tokenscale")])
    assert error.what == "the quota of /users/user is used up to 97 %."
    assert not list(cluster.quota_errors([Path("/capstor/scratch/cscs/user/tokenscale/runs")]))
    program(tmp_path, "quota", "exit 1")
    assert not list(cluster.quota_errors([Path("/users/user")]))
