"""Peers through torch's DataLoader: the same rows in the same order, whoever reads them."""

import sys

import numpy as np
import pytest

from tests.corpora import HOSTILE, Lab, texts_around
from tokenscale.benchmark import data
from tokenscale.benchmark.peers import Peers
from tokenscale.settings.benchmark import DataBenchmarkSettings
from tokenscale.settings.data import StoreSettings

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20)]

T = 16
ROWS = np.arange(400, dtype=np.int32).reshape(40, 10)
ORDER = np.random.default_rng(0).permutation(40).reshape(8, 5)


@pytest.fixture(scope="module", autouse=True)
def the_one_that_needs_no_package():
    """To ask whether the others are there takes their imports, in a process each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenscale.benchmark.peers.MODULES", {"nanogpt": "numpy"})
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(Peers, what one says that was asked once: its files are there)."""
    peers = Peers(ROWS, tmp_path_factory.mktemp("peers"))
    return peers, peers.measure("nanogpt", ORDER)


@pytest.fixture
def peers(measured):
    return measured[0]


def test_without_a_loader_no_batch_is_opening(measured):
    assert len(measured[1]["batch_s"]) == len(ORDER)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_peer_gives_the_rows_through_workers_and_the_first_batch_is_opening(peers, workers):
    found = peers.measure("nanogpt", ORDER, workers)  # raises where the tokens are others
    assert len(found["batch_s"]) == len(ORDER) - 1 and found["open_s"] > 0


@pytest.mark.parametrize("workers", [None, 2])
def test_a_peer_that_gives_other_tokens_is_not_measured(peers, monkeypatch, tmp_path, workers):
    monkeypatch.setattr(peers, "_rows", tmp_path / "rows.npy")
    np.save(tmp_path / "rows.npy", ROWS + 1)  # what the peer has on disk is now something else
    with pytest.raises(RuntimeError, match="other tokens"):
        peers.measure("nanogpt", ORDER, workers)


def test_a_peer_that_fails_says_with_how_many_workers(peers):
    with pytest.raises(RuntimeError, match="nope failed with 2 workers"):
        peers.measure("nope", ORDER, 2)


def test_peers_are_arms_with_each_number_of_workers(tmp_path, monkeypatch):
    lab = Lab(tmp_path / "lab", [*HOSTILE, *texts_around(T)], vocabulary_size=262)
    for form in ("padded", "token-list", "packed"):
        lab.store(StoreSettings(form, **({} if form == "token-list" else {"sequence_length": T})))
    monkeypatch.setattr(data.studies, "explain_missing", lambda: "left out here")
    settings = DataBenchmarkSettings(sequence_length=T, rows=3, batches=2, rounds=1, workers=(0, 2))
    folders = lab.corpus, lab.tokenizer, lab.directory / "tokens"
    result = data.measure(settings, *folders, tmp_path / "out.json", peers=sys.executable)
    found = {r["arm"]: r for r in result["records"] if r["arm"].startswith("nanogpt")}
    assert set(found) == {"nanogpt", "nanogpt, DataLoader 0", "nanogpt, DataLoader 2"}
    assert [r.get("workers") for _, r in sorted(found.items())] == [None, 0, 2]
    for record in found.values():
        assert len(record["batch_s"]) == 2 and record["useful_tokens"] == record["total_tokens"] == 2 * 3 * T
        assert record["seconds"] == sum(record["batch_s"]) and record["memory_bytes"] >= 0
