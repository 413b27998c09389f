"""`results` and folders in it as links to another file system: scratch that is purged, storage that is not."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.workflow.conftest import ROOT

pytestmark = pytest.mark.workflow


def linked(project, *names):
    """The project with these folders elsewhere, and links in their places; {link: where it leads}."""
    found = {}
    for name in names:
        here, there = project.root / name, project.root.parent / "elsewhere" / name
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(here, there) if here.exists() else there.mkdir()
        here.parent.mkdir(exist_ok=True)
        here.symlink_to(there, target_is_directory=True)
        found[here] = there
    return found


def kept(links):
    return all(here.is_symlink() and here.resolve() == there and os.listdir(there) for here, there in links.items())


def status(project, *options):
    command = [sys.executable, "-m", "tokenscale", "status", *options]
    done = subprocess.run(
        command, cwd=project.root, env=project.environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "names", [["results"], ["results/tokens"], ["results/runs"], ["results/corpus", "results/tokens"]]
)
def test_folders_that_became_links_rerun_nothing_and_stay_links(copy, names):
    links = linked(copy, *names)
    assert copy.planned() == {}
    assert "Nothing to be done" in copy.snakemake("--cores", "1").stdout
    assert kept(links)


def test_a_project_whose_results_are_a_link_builds_and_is_watched(fresh):
    links = linked(fresh, "results")
    assert status(fresh)
    fresh.snakemake("--cores", "2", "tokens")
    fresh.snakemake("--cores", "2", "runs")
    assert kept(links) and fresh.planned("runs") == {}
    assert "4 complete" in status(fresh)
    assert status(fresh, "--stale", "runs") == "nothing is stale\n"
    stores = list((links[fresh.root / "results"] / "tokens").glob("*/*/*/manifest.json"))
    assert stores and not [file for file in stores if file.is_symlink()]


def test_stores_that_scratch_has_purged_are_made_again_by_the_stated_command(copy):
    """As profiles/alps/README.md has it: nothing reruns for their sake, and nothing after they are back."""
    links = linked(copy, "results/corpus", "results/tokens")
    before = {name: record for name, record in copy.records().items() if name.endswith("manifest.json")}
    for there in links.values():
        for file in there.rglob("*"):
            if file.is_file():
                file.unlink()
    assert copy.planned() == {}
    copy.snakemake("--cores", "2", "-f", *[name for name in before if name.startswith("results/tokens/")])
    assert kept(links) and copy.planned() == {}
    assert {name: record for name, record in copy.records().items() if name.endswith("manifest.json")} == before


def test_the_profile_of_alps_plans_the_same_where_results_are_a_link(copy):
    before = copy.snakemake("-n", "--quiet", "host", "--profile", "alps").stdout
    links = linked(copy, "results")
    after = copy.snakemake("-n", "--quiet", "host", "--profile", "alps").stdout
    assert "Job stats:" in before + after or "Nothing to be done" in before
    assert [x for x in after.splitlines() if x.startswith(("rule ", "total"))] == [
        x for x in before.splitlines() if x.startswith(("rule ", "total"))
    ]
    assert kept(links)


def test_git_ignores_results_that_are_a_link(tmp_path):
    shutil.copy(ROOT / ".gitignore", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "results").symlink_to(tmp_path / "elsewhere")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    assert subprocess.run(["git", "check-ignore", "--quiet", "results"], cwd=tmp_path).returncode == 0
