"""One cluster for all tests that do not break it; those that do take one of their own."""

import pytest

from tests.once import once
from tests.slurm import projects
from tests.slurm.cluster import Cluster
from tests.slurm.missing import message
from tests.workflow.conftest import Project, copy_of


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Workers of a test session are told of narrow terminals."""
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture(scope="session")
def slurm():
    """Skips where SLURM is not installed."""
    if message():
        pytest.skip(message())


@pytest.fixture(scope="session")
def cluster(slurm, tmp_path_factory):
    """Four idle nodes of four GPUs each. Tests end their own jobs, and leave the nodes as they
    were.
    """
    with Cluster(tmp_path_factory.mktemp("slurm") / "c") as cluster:
        yield cluster


@pytest.fixture
def another(slurm, tmp_path_factory):
    """A cluster that is not up yet, for tests that begin and end it themselves."""
    return Cluster(tmp_path_factory.mktemp("slurm") / "c")


@pytest.fixture(scope="session")
def made(slurm, tmp_path_factory):
    """A project whose tokens are made. Nobody may change it."""
    return Project(once(tmp_path_factory, "on-cluster", projects.make) / "project")


@pytest.fixture
def project(made, cluster, tmp_path):
    """A copy of it that submits to the cluster; what it leaves in the queue is cancelled."""
    found = projects.OnCluster(copy_of(made, tmp_path), cluster)
    yield found
    left = [
        j["id"]
        for j in cluster.jobs()
        if j["workdir"] == str(found.root) and j["state"] in ("RUNNING", "PENDING")
    ]
    if left:
        cluster.run("scancel", *left)


@pytest.fixture
def local(made, tmp_path_factory):
    """Another copy, for the local profile."""
    return copy_of(made, tmp_path_factory.mktemp("local"))
