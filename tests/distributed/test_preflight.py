"""The preflight measures links inside nodes and between them, and a slow link ends a run before its
first step.
"""

import json
from dataclasses import replace

import pytest

from tests import served
from tests.corpora import Lab, small_run
from tests.distributed.ranks import run_ranks
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json
from tokenscale.runs.launch.start import start_run
from tokenscale.settings.machine import Machine
from tokenscale.settings.run import ValidationSettings
from tokenscale.train.parallel import preflight

pytestmark = [pytest.mark.distributed, pytest.mark.slow(15)]


def checked(world, nodes, least):
    preflight.CPU_BYTES = 2**16
    world = replace(world, nodes=nodes)
    try:
        return preflight.check_links(world, least).links
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    "nodes, kinds", [("a", "node"), ("ab", "node network"), ("abcd", "network")]
)
def test_every_rank_has_the_same_figures_of_the_links_that_there_are(nodes, kinds):
    found = run_ranks(checked, 4, tuple(nodes), {"node": 1e-9, "network": 1e-9})
    assert all(links == found[0] for links in found)
    assert set(found[0]) == set(kinds.split()) and all(
        1e-5 < value < 1e3 for value in found[0].values()
    )


def test_groups_are_neighbours_inside_a_node_and_equal_local_ranks_between_nodes(monkeypatch):
    seen = []
    monkeypatch.setattr(preflight, "_measure", lambda world, members: seen.append(members) or 1.0)
    preflight.measure_links(replace(preflight.World(0, 6, 0, None), nodes=("a", "b")))
    assert seen == [[[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]]


@pytest.mark.parametrize("kind, where", [("node", "inside a node"), ("network", "between nodes")])
def test_a_link_that_is_too_slow_is_refused_by_every_rank_with_both_figures(kind, where):
    found = run_ranks(checked, 4, ("a", "b"), {kind: 1e6})
    assert len(set(found)) == 1
    assert f"links {where} are slower" in found[0] and "at least 1e+06 GB/s" in found[0]
    assert "GB/s (bus bandwidth" in found[0] and f"least_{kind}_gb_s" in found[0]


@pytest.mark.experiment
def test_a_slow_link_ends_a_run_before_its_first_step_and_a_fast_one_is_recorded(tmp_path, capfd):
    lab = Lab(
        tmp_path / "lab", ["links are measured before steps are timed " * n for n in range(1, 20)]
    )
    run = small_run("packed", 2, 2, validation=ValidationSettings(rows=0))
    manifests = {"store": lab.inputs(run).store / "manifest.json"}
    for least, code in ((1e6, 2), (1e-9, 0)):
        folder = tmp_path / str(code)
        machine = Machine(python=served.python(), least_node_gb_s=least)
        assert start_run(run, folder / "done.json", manifests, machine=machine) == code
        assert bool(list(folder.glob("attempt=*/rank=*/steps.jsonl"))) == (code == 0)
    assert "slower than the machine's file expects" in capfd.readouterr().err
    assert 0 < read_json(tmp_path / "0/run.json")["hardware"]["links_gb_s"]["node"] < 1e3
    assert json.loads((tmp_path / "0/done.json").read_text())
