"""Deleted files of the report: what counts as missing, and the command that restores it."""

from tokenscale.cli.status_missing import MAX_LISTED, PAGE, RECORD, MissingFiles, find_missing, write_record

FIGURE = [f"results/figures/demo/loss.{kind}" for kind in ("svg", "csv")]
STORE = ["results/tokens/web/bpe/packed/manifest.json"]


def built(folder, outputs):
    """A folder with all files of a report, and the record of them."""
    for file in (file for files in outputs for file in files):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    (folder / RECORD).parent.mkdir(exist_ok=True)
    write_record(outputs, "snakemake --cores 1", folder)


def test_a_job_is_named_once_by_the_first_of_its_files_that_is_missing(tmp_path):
    built(tmp_path, [[PAGE], FIGURE, STORE])
    assert find_missing(tmp_path).files == [] and find_missing(tmp_path).render() == ""
    (tmp_path / FIGURE[1]).unlink()
    assert find_missing(tmp_path).files == [FIGURE[1]]
    (tmp_path / FIGURE[0]).unlink()
    (tmp_path / STORE[0]).unlink()
    assert find_missing(tmp_path).files == [FIGURE[0], STORE[0]]
    assert find_missing(tmp_path).command == f"snakemake --cores 1 {FIGURE[0]} {STORE[0]}"


def test_without_a_report_or_a_readable_record_nothing_is_missing(tmp_path):
    assert find_missing(tmp_path).files == []
    built(tmp_path, [[PAGE], STORE])
    (tmp_path / STORE[0]).unlink()
    (tmp_path / PAGE).unlink()
    assert find_missing(tmp_path).files == []
    (tmp_path / PAGE).touch()
    for text in ("", "{}", '{"outputs": 3, "call": ""}', "[]"):
        (tmp_path / RECORD).write_text(text)
        assert find_missing(tmp_path).files == []


def test_a_call_for_other_targets_leaves_the_record_as_it_is(tmp_path):
    built(tmp_path, [[PAGE], STORE])
    write_record([FIGURE], "snakemake --cores 8", tmp_path)
    (tmp_path / STORE[0]).unlink()
    assert find_missing(tmp_path) == MissingFiles(STORE, "snakemake --cores 1")


def test_many_missing_files_still_are_one_short_command():
    found = MissingFiles(
        [f"results/runs/run-{number}/done.json" for number in range(50)], "snakemake --profile profiles/local"
    )
    assert found.command == "snakemake --profile profiles/local $(python -m tokenscale status --missing)"
    assert len(found.render().splitlines()) == MAX_LISTED + 3
    assert "  run        run-0" in found.render() and "and 38 more" in found.render()
