"""What tests of stores share: hostile texts, documents that end at every border of a row, and their
stores.
"""

import os

import pytest

from tests.corpora import HOSTILE, Lab, texts_around

T = 16
TEXTS = [*HOSTILE, *texts_around(T)] * 3


class Interrupted(BaseException):
    """As a signal is."""


fsync = os.fsync


@pytest.fixture(scope="session", autouse=True)
def no_power_cut():
    """Files of these tests need not survive one (those of tests/faults do): waiting for the disk
    takes long.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """A corpus of hostile texts, its tokenizer, and stores made when first asked for. Nobody may
    change it.
    """
    return Lab(tmp_path_factory.mktemp("lab"), [*HOSTILE, *texts_around(T)], vocabulary_size=262)


@pytest.fixture(scope="session")
def large_lab(tmp_path_factory):
    """The same with each text three times."""
    return Lab(tmp_path_factory.mktemp("lab"), TEXTS, vocabulary_size=262)


@pytest.fixture
def small_parts(monkeypatch):
    from tokenscale.data.stores import write_parquet

    monkeypatch.setattr(write_parquet, "SHARD_ROWS", 20)
    monkeypatch.setattr("tokenscale.data.stores.documents.GROUP_DOCUMENTS", 10)


def files_of(path):
    """Name → content of a store's files, what must be equal on a rebuild."""
    return {
        p.name: p.read_bytes()
        for p in path.iterdir()
        if p.is_file() and p.name not in ("build.json", ".lock")
    }
