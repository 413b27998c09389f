import os
import shutil
import subprocess

import pytest

from tests import served
from tests.workflow.conftest import ROOT

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20), pytest.mark.workflow]


def linked(project, *names):
    """The project with these folders elsewhere, and links in their places; {link: where it
    leads}.
    """
    found = {}
    for name in names:
        here = project.root / name
        there = project.root.parent / "elsewhere" / name
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(here, there) if here.exists() else there.mkdir()
        here.parent.mkdir(exist_ok=True)
        here.symlink_to(there, target_is_directory=True)
        found[here] = there
    return found


def kept(links):
    return all(
        here.is_symlink() and here.resolve() == there and os.listdir(there)
        for here, there in links.items()
    )


def status(project, *options):
    command = [served.python(), "-m", "tokenscale", "status", *options]
    where = {"cwd": project.root}
    return subprocess.check_output(
        command, env=project.environment, text=True, timeout=120, **where
    )


def test_where_results_became_a_link_a_missing_run_is_trained_and_nothing_else(copy):
    links = linked(copy, "results")
    (run,) = copy.root.glob("results/runs/token-list-*")
    shutil.rmtree(run)
    assert "3 complete" in status(copy) and copy.planned("runs") == {"train": 1}
    copy.snakemake("--cores", "2", "runs")
    assert kept(links) and "4 complete" in status(copy)
    assert "Nothing to be done" in copy.snakemake("-n", "runs").stdout
    assert (run / "done.json").resolve().is_relative_to(links[copy.root / "results"])


@pytest.mark.long
def test_stores_that_scratch_has_purged_are_made_again_by_the_stated_command(copy):
    """As profiles/alps/README.md has it: nothing reruns for their sake, and nothing after they are
    back.
    """
    links = linked(copy, "results/corpus", "results/tokens")
    before = {
        name: record for name, record in copy.records().items() if name.endswith("manifest.json")
    }
    for there in links.values():
        for file in there.rglob("*"):
            if file.is_file():
                file.unlink()
    assert copy.planned() == {}
    copy.snakemake(
        "--cores", "2", "-f", *[name for name in before if name.startswith("results/tokens/")]
    )
    assert kept(links) and copy.planned() == {}
    assert {
        name: record for name, record in copy.records().items() if name.endswith("manifest.json")
    } == before


def test_git_ignores_results_that_are_a_link(tmp_path):
    shutil.copy(ROOT / ".gitignore", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "results").symlink_to(tmp_path / "elsewhere")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    assert (
        subprocess.run(["git", "check-ignore", "--quiet", "results"], cwd=tmp_path).returncode == 0
    )
