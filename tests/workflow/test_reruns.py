"""What reruns and what does not: days of GPU time hang on it."""

import json
import shutil

import pytest

from tests.workflow.conftest import OFFLINE

pytestmark = pytest.mark.workflow
ANALYSIS = {"build_page": 1, "build_pdf": 1}


def test_a_second_run_has_nothing_to_do_even_after_touching_every_file(copy):
    assert "Nothing to be done" in copy.snakemake("--cores", "2").stdout
    for path in [
        p for p in copy.root.rglob("*") if p.is_file() and ".snakemake" not in p.parts and "results" not in p.parts
    ]:
        path.touch()
    assert copy.planned() == {}


def test_a_run_that_two_experiments_need_is_trained_once(built):
    assert len(list(built.root.glob("results/runs/*/done.json"))) == 4


@pytest.mark.skipif(not OFFLINE, reason="this machine allows no network namespace")
def test_everything_is_rebuilt_from_raw_parquet_without_network(copy):
    before = copy.records()
    for path in copy.root.glob("results/*"):
        if path.name != "corpus":
            shutil.rmtree(path)
    shutil.rmtree(copy.root / ".snakemake")
    text = copy.snakemake("--cores", "2", offline=True).stdout
    assert "build_corpus" not in text.split("Job stats:")[1].split("\n\n")[0]
    assert (copy.root / "results/report/index.html").is_file()
    assert copy.records() == before and len(before) == 5 + 5


def test_a_removed_figure_is_drawn_alone(copy):
    figure = copy.root / "results/figures/ways/loss_over_time.svg"
    before = figure.read_bytes()
    figure.unlink()
    assert copy.planned("results/figures/ways/loss_over_time.svg") == {"draw_figure": 1}
    copy.snakemake("--cores", "1", "results/figures/ways/loss_over_time.svg")
    assert figure.read_bytes() == before


def test_an_edit_of_one_format_reruns_that_format_and_its_runs(copy):
    path = copy.root / "src/tokenscale/formats/token_list.py"
    path.write_text(path.read_text() + "\n# an edited line\n")
    text = copy.snakemake("--cores", "2", "-n", "tokens").stdout
    assert copy.planned("tokens") == {"pretokenize": 1} and "/ token-list" in text
    copy.snakemake("--cores", "2", "tokens")
    text = copy.snakemake("--cores", "2", "-n").stdout
    planned = copy.planned()
    assert planned.pop("train_one") == 1 and "train token-list-" in text
    # of the two experiments only the one with that run is read again; its benchmark reads every format
    assert planned == {"benchmark_data": 1, "ingest": 1, "draw_figure": 3, **ANALYSIS}


@pytest.mark.parametrize(
    "file, expected",
    [
        ("report/page.py", {"build_page": 1}),
        ("report/figures/loss_over_time.py", {"draw_figure": 1, **ANALYSIS}),
        ("cli.py", {}),
        ("errors.py", {}),
        ("launch/attempts.py", {}),
        ("settings/registry.py", {}),
        ("settings/presets.py", {}),
        ("benchmark/data.py", {"benchmark_data": 1, "ingest": 1, "draw_figure": 3, **ANALYSIS}),
        ("analysis/sql/order.sql", ANALYSIS),
        ("report/page.css", {"build_page": 1}),
        ("settings/config.py", {}),
        ("parallel/data.py", {"train_many": 1, "ingest": 1, "draw_figure": 1, **ANALYSIS}),
    ],
)
def test_an_edit_reruns_what_uses_the_file(copy, file, expected):
    path = copy.root / "src/tokenscale" / file
    path.write_text(path.read_text() + "\n# an edited line\n")
    assert copy.planned() == expected


def test_a_purged_store_is_restored_by_its_command_and_nothing_reruns(copy):
    store = copy.root / "results/tokens/small/bpe/packed-sequence_length=32"
    before = (store / "manifest.json").read_bytes()
    (store / "tokens.bin").unlink()
    copy.snakemake("--cores", "1", "-f", str((store / "manifest.json").relative_to(copy.root)))
    assert (store / "tokens.bin").is_file() and (store / "manifest.json").read_bytes() == before
    assert copy.planned() == {}


def test_one_more_level_trains_the_new_run_only(copy):
    path = copy.root / "config/experiments/ways.yaml"
    experiment = json.loads(path.read_text())
    experiment["factors"]["approach"].append("padded")
    path.write_text(json.dumps(experiment))
    assert copy.planned()["train_one"] == 1


def test_another_profile_reruns_nothing(copy):
    assert "Nothing to be done" in copy.snakemake("--profile", "profiles/local", "--config", "scale=demo").stdout


def test_a_complete_run_is_sealed_again_without_training(copy):
    done = next(copy.root.glob("results/runs/packed-*-w1-*/done.json"))
    before = done.read_bytes()
    copy.snakemake("--cores", "2", "-f", str(done.relative_to(copy.root)))
    assert done.read_bytes() == before
    assert not (done.parent / "attempt=01").exists()
