"""The scripts in `tests/benchmarks/`, each at tiny size, and what makes their figures comparable."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.benchmarks import growth, pretokenize, sizes, training
from tests.corpora import HOSTILE, Lab, make_corpus, make_tokenizer, texts_around
from tokenscale.base.errors import UserError
from tokenscale.data.corpus.raw_text import RawText
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.run import APPROACHES

pytestmark = [pytest.mark.experiment, pytest.mark.slow(100)]

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path.name
    for path in (ROOT / "tests/benchmarks").glob("*.py")
    if "def main(" in path.read_text()
)
T = 16


@pytest.mark.parametrize("script", sorted({*SCRIPTS} - {"plain_script.py"}))
def test_a_script_runs_from_any_folder_and_prints_its_help(tmp_path, monkeypatch, capsys, script):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != ROOT])
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_path(str(ROOT / "tests/benchmarks" / script), run_name="__main__")
    assert f"usage: python tests/benchmarks/{script} " in capsys.readouterr().out


def test_no_installed_module_imports_a_script():
    for path in (ROOT / "src").rglob("*.py"):
        assert not re.search(r"^\s*(import|from) tests\b", path.read_text(), re.MULTILINE), path


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"), [*HOSTILE, *texts_around(T)], vocabulary_size=262)
    for form in ("padded", "token-list", "packed"):
        lab.store(StoreSettings(form, **({} if form == "token-list" else {"sequence_length": T})))
    lab.store(StoreSettings("lengths"))
    return lab


def inputs(lab, output, **settings):
    settings = {"sequence_length": T, "rows": 3, "batches": 2, "rounds": 2} | settings
    paths = [
        "--corpus",
        lab.corpus / "manifest.json",
        "--tokenizer",
        lab.tokenizer / "manifest.json",
    ]
    return ["--settings", json.dumps(settings), *map(str, paths), "--output", str(output)]


# -- training


@pytest.mark.long
def test_training_times_every_arm_in_each_round_on_equal_models(monkeypatch):
    options = {"sequence_length": 32, "rows": 2, "vocabulary_size": 64, "steps": 2, "rounds": 2}
    result = training.measure(None, models=("llama-micro",), **options)
    timed = [(r["round"], r["arm"]) for r in result["records"]]
    assert len(timed) == len(set(timed)) == 2 * 3 and all(
        min(r["step_s"]) > 0 for r in result["records"]
    )
    text = training.format_table(result)
    assert training.LOOP in text and "bookkeeping a step" in text
    monkeypatch.setattr(training._PlainLoopArm, "first_loss", lambda self: 1.0)
    with pytest.raises(UserError, match="different losses"):
        training.measure(None, models=("llama-micro",), **options)


# -- reading


@pytest.mark.long
def test_every_approach_reads_a_corpus_and_the_same_text_many_times_over(
    lab, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sizes, "STEP_S", 0.001)
    monkeypatch.setattr(sizes, "STEPS", 3)
    given = RawText(lab.corpus)
    large = tmp_path / "out-sizes/corpus"
    size = 5 * given.split["utf8_bytes"]
    arguments = [*inputs(lab, tmp_path / "out.json"), "--size", str(size / 1e9), "--cold"]
    assert sizes.main(arguments) == 0
    texts = [text for batch in RawText(large).batches() for text in batch]
    first = [text for batch in given.batches() for text in batch]
    assert texts[: len(first)] == first and len(set(texts)) >= 4 * len(set(first))
    assert size <= RawText(large).split["utf8_bytes"] < 1.1 * size
    records = json.loads((tmp_path / "out.json").read_text())["records"]
    timed = sorted((r["approach"], r["corpus"], r["round"]) for r in records if "median_s" in r)
    assert timed == sorted(
        (a, c, n) for a in APPROACHES for c in ("given", "large") for n in range(2)
    )
    assert all(r["wait_s"] < r["seconds"] for r in records if "wait_s" in r)
    printed = capsys.readouterr().out
    assert all(f"\n{approach} " in printed for approach in APPROACHES)
    before = (large / "manifest.json").stat().st_mtime_ns
    assert sizes.main(arguments) == 0 and (large / "manifest.json").stat().st_mtime_ns == before


# -- whole commands


@pytest.mark.long
def test_pretokenizing_is_timed_beside_a_plain_script(tmp_path, capsys):
    pytest.importorskip("transformers")
    corpus = make_corpus(
        tmp_path / "corpus", [f"document {i} has words" for i in range(300)], row_group_rows=50
    )
    make_tokenizer(tmp_path / "tokenizer", corpus, 300)
    arguments = [f"--{kind}={tmp_path / kind}/manifest.json" for kind in ("corpus", "tokenizer")]
    arguments += ["--output", str(tmp_path / "out.json"), "--rounds", "1", "--memory", "1"]
    assert pretokenize.main([*arguments, "--stores", "token-list"]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert {r["side"] for r in result["records"]} == {"token-list", "plain script"}
    assert all(
        r["seconds"] > 0 and r["peak_bytes"] > 1e7 for r in [*result["records"], *result["memory"]]
    )
    assert "x tokenizers" in capsys.readouterr().out
    assert pretokenize.main([*arguments, "--cores", "4096"]) == 2


@pytest.mark.long
def test_the_start_of_a_rank_is_measured():
    """The second of eight ranks opens the record, eight indices, its own file and the first's, with
    the step counts.
    """
    command = [
        sys.executable,
        ROOT / "tests/benchmarks/startup.py",
        "load",
        "--model",
        "gpt2-micro",
        "--ranks",
        "8",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and json.loads(done.stdout)["opens"] == 1 + 8 + 2, done.stderr


# -- growth


@pytest.mark.long
def test_every_command_is_measured_on_a_campaign(tmp_path, capsys):
    assert growth.main(["--runs", "8", "--repeats", "2", "--folder", str(tmp_path), "--keep"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in ("snakemake -n", "status --failed", "page"))
    (runs,) = tmp_path.glob(f"*/results/tables/{growth.NAME}/validity.parquet")
    assert pq.read_table(runs)["validity"].to_pylist() == ["valid"] * 8
    assert growth.main(["--runs", "7"]) == 2
