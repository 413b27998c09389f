"""The bounds of the shipped machines against what CSCS publishes of the same quantity."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tokenscale.base.errors import UserError
from tokenscale.settings.machine import load_machine
from tokenscale.train.parallel import preflight

ROOT = Path(__file__).parents[2]
MACHINES = sorted(ROOT.glob("profiles/*/machine.toml"))
#: microseconds of an all-reduce of 128 MiB over 2 nodes with one rank on each, in place
#: (eth-cscs/cscs-docs 80abed1, docs/software/container-engine/sarus-suite/index.md)
PUBLISHED_US = 5867.43
#: the same with four ranks on each and TCP in place of the plugin (docs/software/communication/nccl.md)
TCP_US, TCP_RANKS = 43293, 8
BYTES = 134_217_728


#: cudaMemGetInfo's total on a GH200 of Alps (eth-cscs/alps-gh200-reproducers a460b25, gpudirect-oom)
GPU_MEMORY_BYTES = 102_005_473_280


def bus_gb_s(ranks, microseconds):
    return 2 * (ranks - 1) / ranks * BYTES / microseconds / 1e3


@pytest.fixture
def check(monkeypatch):
    """check_links with the time that an all-reduce takes at a bus bandwidth of each kind."""

    def run(nodes, each, gb_s):
        kinds = iter((["node"] if each > 1 else []) + (["network"] if nodes > 1 else []))
        counts = {"node": each, "network": nodes}

        def time(buffer, barrier, group=None):
            kind = next(kinds)
            ranks = counts[kind]
            return 2 * (ranks - 1) / ranks * buffer.nbytes / gb_s[kind] / 1e9

        monkeypatch.setattr(preflight, "time_all_reduce", time)
        monkeypatch.setattr(
            preflight, "new_buffer", lambda device: torch.empty(BYTES // 4, device="meta")
        )
        monkeypatch.setattr(
            preflight,
            "dist",
            SimpleNamespace(
                all_reduce=lambda tensor, op: None,
                ReduceOp=SimpleNamespace(MAX=0),
                new_subgroups_by_enumeration=lambda members: [members[0]],
                destroy_process_group=lambda group: None,
            ),
        )
        world = preflight.World(0, nodes * each, 0, None)
        named = replace(world, device=torch.device("cpu"), nodes=tuple("abcd"[:nodes]))
        alps = load_machine(ROOT / "profiles/alps/machine.toml")
        return preflight.check_links(named, alps.least_links).links

    return run


def test_what_the_machine_states_of_the_network_is_what_cscs_published():
    network = load_machine(ROOT / "profiles/alps/machine.toml").published["network"]
    assert preflight.GPU_BYTES == BYTES, "the published buffer is the preflight's"
    assert network.gb_s == pytest.approx(bus_gb_s(2, PUBLISHED_US), rel=1e-3)
    assert network.slow_gb_s == pytest.approx(bus_gb_s(TCP_RANKS, TCP_US), rel=1e-3)


@pytest.mark.parametrize("nodes", [2, 3, 4])
@pytest.mark.parametrize("each", [1, 4])
def test_a_run_starts_at_the_published_bandwidth_and_is_refused_at_that_of_tcp(nodes, each, check):
    published = bus_gb_s(2, PUBLISHED_US)
    links = check(nodes, each, {"node": 250, "network": published})
    assert links["network"] == pytest.approx(published)
    with pytest.raises(UserError, match="between nodes are slower"):
        check(nodes, each, {"node": 250, "network": bus_gb_s(TCP_RANKS, TCP_US)})


@pytest.mark.parametrize("file", MACHINES, ids=lambda file: file.parent.name)
def test_every_bound_stands_beside_a_published_measurement(file):
    machine = load_machine(file)
    assert set(machine.least_links) == set(machine.published)


def test_the_memory_of_a_gpu_is_at_most_what_cuda_states_and_nearly_that():
    stated = GPU_MEMORY_BYTES / 2**30
    assert (
        0.98 * stated < load_machine(ROOT / "profiles/alps/machine.toml").gpu_memory_gib <= stated
    )


@pytest.mark.parametrize("least", [5, 30])
def test_a_bound_that_does_not_separate_the_published_figures_is_refused(least, tmp_path):
    text = (ROOT / "profiles/alps/machine.toml").read_text()
    changed = text.replace("least_network_gb_s = 15", f"least_network_gb_s = {least}")
    (tmp_path / "machine.toml").write_text(changed)
    with pytest.raises(UserError, match=f"{least} is not between 5.43 and 22.88 GB/s") as error:
        load_machine(tmp_path / "machine.toml")
    assert "least_network_gb_s" in str(error.value) and "cscs-docs" in str(error.value)
