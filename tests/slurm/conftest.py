"""One cluster for all tests that do not break it; those that do take one of their own."""

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.missing import message


@pytest.fixture(scope="session")
def slurm():
    """Skips where SLURM is not installed."""
    if message():
        pytest.skip(message())


@pytest.fixture(scope="session")
def cluster(slurm, tmp_path_factory):
    """Four idle nodes of four GPUs each. Tests end their own jobs, and leave the nodes as they were."""
    with Cluster(tmp_path_factory.mktemp("slurm") / "c") as cluster:
        yield cluster


@pytest.fixture
def another(slurm, tmp_path_factory):
    """A cluster that is not up yet, for tests that begin and end it themselves."""
    return Cluster(tmp_path_factory.mktemp("slurm") / "c")
