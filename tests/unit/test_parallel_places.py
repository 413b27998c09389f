"""Ranks refuse a world that would compute the right losses at a speed that means nothing."""

import os
import socket

import pytest
import torch

from tokenscale.base.errors import UserError
from tokenscale.train.parallel import world as places
from tokenscale.train.parallel.world import NodeDevice, join

TWO_NODES = [NodeDevice(node, f"gpu {k}") for node in ("a", "b") for k in range(2)]


def test_one_rank_a_device_on_the_nodes_asked_for_is_right():
    places.check(TWO_NODES, 2)
    places.check(TWO_NODES, None)
    places.check(TWO_NODES[:1], 1)
    found = places.node_device(torch.device("cpu"), {"SLURMD_NODENAME": "nid000003"})
    assert found == NodeDevice("nid000003", f"process {os.getpid()}"), "on a CPU"


THREE = [NodeDevice("a", "1"), NodeDevice("a", "2"), NodeDevice("a", "3"), NodeDevice("b", "1")]


@pytest.mark.parametrize(
    "ranks, nodes, said",
    [
        ([*TWO_NODES[:3], TWO_NODES[0]], None, r"ranks +0 and 3\n +node +a\n +device +gpu 0"),
        *((TWO_NODES, n, rf"expected +{n} nodes\n +found +2: a, b") for n in (1, 3, 4)),
        ([TWO_NODES[i] for i in (0, 2, 1, 3)], 2, "0 on a, 1 on b, 2 on a, 3 on b"),
        (THREE, 2, "one after the other"),
    ],
)
def test_other_places_are_refused_with_what_was_found(ranks, nodes, said):
    with pytest.raises(UserError, match=said):
        places.check(ranks, nodes)


@pytest.mark.parametrize(
    "said, network",
    [
        ("Using network AWS Libfabric", "AWS Libfabric"),
        ("Assigned NET plugin Libfabric to comm", "Libfabric"),
        ("Bootstrap: Using hsn0:10.0.0.1<0>", None),
    ],
)
def test_what_nccl_says_of_its_network(tmp_path, said, network):
    (tmp_path / f"nccl.nid1.{os.getpid()}.log").write_text(
        f"before\nnid1:12:34 [0] NCCL INFO {said}\nafter\n"
    )
    (tmp_path / "nccl.nid1.1.log").write_text(
        "nid1:1:1 [0] NCCL INFO Using network of another rank\n"
    )
    assert places.reported_network({"NCCL_DEBUG_FILE": str(tmp_path / "nccl.%h.%p.log")}) == network
    assert places.reported_network({}) is None


def test_another_network_than_the_machines_is_refused():
    places.check_network("AWS Libfabric", "AWS Libfabric")
    for found in ("Socket", None):
        with pytest.raises(UserError, match="does not use the expected network"):
            places.check_network("AWS Libfabric", found)


def test_a_rank_that_is_told_of_another_world_is_refused(monkeypatch):
    """N runs of one rank that believe to be one of N would give plausible, wrong figures."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError) as found:
        join(2, "cpu")
    assert "wants world size 2" in str(found.value) and "WORLD_SIZE=3 (rank 1)" in str(found.value)


def set_variables(monkeypatch, values):
    """The variables of a rank, and no others."""
    others = (
        places.RENDEZVOUS_SECRET,
        "TOKENSCALE_ROOT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "LOCAL_WORLD_SIZE",
    )
    for name in (*others, "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("rank", [0, 3], ids=["nobody joins rank 0", "no rank 0 listens"])
@pytest.mark.parametrize("address", [True, False], ids=["with an address", "without an address"])
def test_variables_that_another_launcher_left_are_named(monkeypatch, rank, address):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    values = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank}
    set_variables(
        monkeypatch, values | ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if address else {})
    )
    monkeypatch.setattr(places, "MEET_S", 1.0)
    with pytest.raises(UserError, match="WORLD_SIZE=4") as refused:
        join(4, "cpu")
    assert refused.value.facts["next"].startswith("unset RANK WORLD_SIZE")


@pytest.mark.parametrize("size", ["1", "2"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("WORLD_SIZE", text) for text in ("", "0", "two")),
        *(("RANK", text) for text in ("x", "-1", "2")),
        *(("LOCAL_RANK", text) for text in ("1.0", "2")),
        *(("MASTER_PORT", text) for text in ("b", "0", "99999")),
        *(("MASTER_ADDR", text) for text in ("no.such.host.invalid", "192.0.2.1")),
    ],
)
def test_a_variable_without_sense_is_named(monkeypatch, size, name, value):
    values = {
        "RANK": "0",
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        name: value,
    }
    set_variables(monkeypatch, values)
    if size == "1" and name.startswith("MASTER"):
        assert join(None, "cpu").size == 1  # one rank needs no address
        return
    with pytest.raises(UserError) as refused:
        join(None, "cpu")
    assert (
        value in " ".join(map(str, refused.value.facts.values())) and name in refused.value.render()
    )
