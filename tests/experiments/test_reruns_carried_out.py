"""What reruns, carried out: the rows of test_reruns.py that a dry run cannot show."""

import json
import shutil

import pytest

from tests.workflow.conftest import EXPERIMENTS, OFFLINE, copy_of
from tests.workflow.jobs import (
    ACCEPTED,
    APPROACHES,
    RANKS,
    RUNS,
    STORES,
    WAYS,
    changed,
    source_files,
)

pytestmark = [pytest.mark.experiment, pytest.mark.slow(110), pytest.mark.workflow]


@pytest.mark.long
@pytest.mark.parametrize("newer", ["lists", "results"])
def test_results_copied_without_metadata_are_adopted_with_touch(built, tmp_path, newer):
    """Without metadata Snakemake goes by times, and by chance: whichever was copied last."""
    project = copy_of(built, tmp_path, copy_function=shutil.copyfile)
    shutil.rmtree(project.root / ".snakemake")
    for path in project.root.glob("results/code/*/*" if newer == "lists" else "results/**/*.*"):
        path.touch()
    assert newer == "results" or project.planned()["train"] == 4
    project.snakemake("--cores", "1", "--touch", "--forceall")
    for path in source_files(project):
        path.touch()
    assert project.planned() == {}, "contents are known again"
    with changed(project.root / "src/tokenscale/train/parallel/ddp.py"):
        assert project.planned() == RUNS


def test_results_copied_without_metadata_but_with_their_times_are_judged_by_content(copy):
    shutil.rmtree(copy.root / ".snakemake")
    for path in source_files(copy):
        path.touch()
    assert copy.planned() == {}
    with changed(copy.root / "src/tokenscale/train/parallel/ddp.py"):
        assert copy.planned() == RUNS


def test_an_edit_that_changes_nothing_is_accepted_by_an_option_or_for_good(copy):
    file = copy.root / "src/tokenscale/train/models/decoder.py"
    file.write_text("# a comment\n\n" + file.read_text())
    assert copy.planned() == RUNS
    assert copy.planned(*ACCEPTED) == {}
    copy.snakemake("--cores", "1", "--touch")
    assert copy.planned() == {}


def test_a_store_that_is_rebuilt_equal_stops_the_wave(copy):
    """The writers' code alone changed: what a dry run listed below the stores is not run."""
    path = copy.root / "src/tokenscale/cli/pretokenize.py"
    path.write_text(path.read_text() + "\n# an edited line\n")
    assert copy.planned() == STORES
    copy.snakemake("--cores", "2", "tokens")
    assert copy.planned() == {}


@pytest.mark.long
def test_a_level_taken_out_keeps_its_run_and_put_back_trains_nothing(copy):
    runs = sorted(p.name for p in (copy.root / "results/runs").iterdir())
    path = copy.root / "config/experiments/ways.yaml"
    with changed(
        path,
        lambda text: json.dumps(EXPERIMENTS["ways"] | {"factors": {"approach": APPROACHES[:2]}}),
    ):
        copy.snakemake("--cores", "1", "results/tables/ways/validity.parquet")
        assert copy.planned("tables") == {}
    assert sorted(p.name for p in (copy.root / "results/runs").iterdir()) == runs
    assert copy.planned() == {"run_table": 1} | WAYS


def test_purged_shards_and_stores_are_restored_by_the_documented_command_and_only_a_new_run_trains(
    copy,
):
    manifest = copy.root / "results/tokens/small/bpe/packed-sequence_length=32/manifest.json"
    before = manifest.read_bytes()
    restore = ("--cores", "1", "-f", str(manifest.relative_to(copy.root)))
    manifest.with_name("tokens.bin").unlink()
    assert copy.planned() == {}, "shards are not declared"
    copy.snakemake(*restore)
    assert manifest.with_name("tokens.bin").is_file() and copy.planned() == {}
    shutil.rmtree(manifest.parent)
    path = copy.root / "config/experiments/ranks.yaml"
    path.write_text(json.dumps(EXPERIMENTS["ranks"] | {"factors": {"layout.data": [1, 2, 4]}}))
    assert copy.planned()["train"] == 3, "two of them because their store is gone"
    copy.snakemake(*restore)
    assert (
        manifest.read_bytes() == before and copy.planned() == {"run_table": 1, "train": 1} | RANKS
    )


@pytest.mark.skipif(not OFFLINE, reason="this machine allows no network namespace")
def test_everything_is_rebuilt_from_raw_parquet_without_network(copy):
    """In processes of their own, as users start them; all tokens, and one training of each number
    of ranks.
    """
    assert (copy.root / "results/report/index.html").is_file()
    before = copy.records()
    for path in copy.root.glob("results/*"):
        if path.name != "corpus":
            shutil.rmtree(path)
    shutil.rmtree(copy.root / ".snakemake")
    text = copy.command(
        "--workflow-profile",
        "none",
        "--cores",
        "2",
        "tokens",
        "results/report/ranks.html",
        offline=True,
    )
    assert "build_corpus" not in text.split("Job stats:")[1].split("\n\n")[0]
    again = copy.records()
    assert again == {name: before[name] for name in again} and len(again) == 5 + 3


def test_a_complete_run_is_sealed_again_without_training(copy):
    done = next(copy.root.glob("results/runs/packed-*-w1-*/done.json"))
    before = done.read_bytes()
    copy.snakemake("--cores", "2", "-f", str(done.relative_to(copy.root)))
    assert done.read_bytes() == before
    assert not (done.parent / "attempt=01").exists()
