"""`verify results/`: every byte that was written is read again, and what is wrong is named."""

import shutil

import pytest
import torch

from tests.corpora import HOSTILE, Lab, make_run
from tokenscale.base.files import read_json, write_json
from tokenscale.cli import main as cli
from tokenscale.cli.verify import verify_results
from tokenscale.runs.launch.attempts import mark_end
from tokenscale.runs.records import provenance
from tokenscale.runs.records.provenance import log_hashes
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import to_dict
from tokenscale.train.checkpoint import Piece, State, commit, write_rank

RUN = "packed-tiny-single-w1-0123456789"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of results with one of everything, without a training: its logs are two lines."""
    results = tmp_path_factory.mktemp("project") / "results"
    lab = Lab(tmp_path_factory.mktemp("lab"), HOSTILE, vocabulary_size=262)
    shutil.copytree(lab.corpus, results / "corpus/tiny")
    shutil.copytree(lab.tokenizer, results / "tokenizers/bpe")
    for store in (StoreSettings("packed"), StoreSettings("token-list")):
        shutil.copytree(lab.store(store), results / "tokens/tiny/bpe" / store.directory)
    run = results / "runs" / RUN
    log = run / "attempt=00/rank=00000"
    log.mkdir(parents=True)
    (log / "steps.jsonl").write_text('{"schema":2,"step":0}\n{"schema":2,"step":1}\n')
    folder = run / "checkpoints/final"
    write_rank(folder, 0, State({"model.a": Piece.of(torch.arange(40.0))}))
    facts = {"kind": "model", "run_id": run.name, "step": 2}
    commit(
        folder,
        1,
        facts | {"run": to_dict(make_run("packed", 16)), "model": to_dict(ModelSettings())},
    )
    record = provenance.start_record(run, {"run_id": run.name, "attempt": 0})
    provenance.seal_record(run, record, {"status": "complete", "steps": 2, "logs": log_hashes(run)})
    write_json(run / "done.json", mark_end(run.name, read_json(run / "run.json")))
    return results


@pytest.fixture
def results(made, tmp_path):
    shutil.copytree(made, tmp_path / "results")
    return tmp_path / "results"


def verified(results, capsys) -> tuple[int, str]:
    code = cli.main(["verify", str(results)])
    return code, capsys.readouterr().out


def test_what_was_written_is_read_and_what_goes_on_or_was_left_over_is_a_note(results, capsys):
    code, told = verified(results, capsys)
    assert code == 0 and "corpus 1, tokenizers 1, tokens 2, runs 1; no faults" in told, told
    (path,) = results.glob("runs/*/run.json")
    write_json(path, {k: v for k, v in read_json(path).items() if k != "seal"})
    (path.parent / "done.json").unlink()  # as Snakemake does before it starts a run
    (path.parent / "checkpoints/step=00000003.partial").mkdir()
    code, told = verified(results, capsys)
    assert code == 0 and "has not ended" in told and "left over" in told


BYTES = [
    *("corpus/*/train-00000.parquet", "corpus/*/manifest.json", "tokenizers/*/tokenizer.json"),
    *("tokenizers/*/manifest.json", "tokens/*/*/packed/tokens.bin", "tokens/*/*/packed/pieces.npy"),
    *("tokens/*/*/token-list/shard-00000.parquet", "tokens/*/*/packed/manifest.json"),
    *(
        "runs/*/checkpoints/final/rank=00000.safetensors",
        "runs/*/checkpoints/final/rank=00000.json",
    ),
    *("runs/*/attempt=00/rank=00000/steps.jsonl", "runs/*/run.json", "runs/*/done.json"),
]


@pytest.mark.parametrize("pattern", BYTES)
def test_one_flipped_bit_or_a_missing_file_is_found_and_named(results, capsys, pattern):
    (path,) = results.glob(pattern)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    code, told = verified(results, capsys)
    assert (
        code == 1 and str(path.parent) in told and path.name in told and "1 fault\n" in told + "\n"
    ), told
    if not pattern.endswith(("manifest.json", "run.json", "done.json")):
        path.unlink()
        code, told = verified(results, capsys)
        assert code == 1 and path.name in told and "missing" in told, told


STRAY = [
    "corpus/tiny/train-00001.parquet",
    "tokens/tiny/bpe/packed/other.bin",
    "tokenizers/bpe/vocab.json",
]
STRAY += [
    f"runs/{RUN}/{name}"
    for name in ("x.txt", "checkpoints/final/x", "attempt=00/rank=00001/steps.jsonl")
]


@pytest.mark.parametrize("name", [*STRAY, "corpus/stray.txt", "tokens/tiny/bpe/purged/tokens.bin"])
def test_what_belongs_to_nothing_is_said(results, capsys, name):
    (results / name).parent.mkdir(exist_ok=True)
    (results / name).write_text("x")
    code, told = verified(results, capsys)
    assert code == 1 and ((results / name).name in told or "holds no manifest.json" in told), told


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "5",
        "{}",
        '{"seal": 5}',
        '{"seal": "x", "a": NaN}',
        '{"seal": "x", "a": 1e999}',
        '{"seal": "x", "a": "\\ud800"}',
        "{",
        "\xff",
        "[" * 99999,
    ],
)
def test_a_record_that_is_none_is_a_finding_and_no_stack_trace(results, text):
    (path,) = results.glob("runs/*/run.json")
    path.write_text(text, encoding="latin-1")
    found, _ = verify_results(results)
    assert any(path.parent.name in finding.what for finding in found)


def test_the_diff_of_a_dirty_tree_is_held_against_the_record(results, capsys):
    (path,) = results.glob("runs/*/run.json")
    record = read_json(path)
    record["git"] = {"commit": "0" * 40, "dirty": True, "diff_sha256": "0" * 64}
    provenance.seal_record(path.parent, record, record["outcome"])
    write_json(path.parent / "done.json", {"seal": read_json(path)["seal"]})
    (path.parent / "dirty.diff").unlink(missing_ok=True)
    assert "dirty.diff: missing" in verified(results, capsys)[1]
    (path.parent / "dirty.diff").write_text("edited")
    code, told = verified(results, capsys)
    assert code == 1 and "dirty.diff: changed" in told
