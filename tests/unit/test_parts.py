"""Jobs that build several parts: what is finished is kept, everything else is built."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tokenscale.base.files import canonical_json
from tokenscale.cli.main import main
from tokenscale.data.corpus.parts import build_part
from tokenscale.data.parts import RECORD
from tokenscale.settings.data import CorpusSettings, SourceSettings
from tokenscale.settings.options import to_dict

PARTS = 3


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Settings of a corpus in three parts, in the working directory."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(3)
    (tmp_path / "raw").mkdir()
    for number in range(PARTS):
        texts = [f"{rng.randrange(900)} of file {number}, number {n}" for n in range(40)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"raw/f{number}.parquet")
    (tmp_path / "code.json").write_text("{}")
    return CorpusSettings(
        name="sky",
        source=SourceSettings(kind="files", files=(str(tmp_path / "raw/*.parquet"),)),
        parts=PARTS,
    )


def build(settings, *options) -> int:
    return main(
        [
            *("corpus", "--settings", canonical_json(to_dict(settings))),
            *("--part", "0", "1", "2", "--content", "a", "b", "c"),
            *("--inputs", "code.json", "--output", "sky/manifest.json", *options),
        ]
    )


def contents(folder) -> dict[str, bytes]:
    """Files of all parts but the records of when and where they were built."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.glob("parts/*/*"))
        if path.name not in ("build.json", ".lock")
    }


@pytest.fixture
def built(source, tmp_path, capsys):
    assert build(source) == 0
    capsys.readouterr()
    return contents(tmp_path / "sky")


def test_parts_of_one_job_are_those_that_are_built_one_by_one(source, built, tmp_path):
    for number in range(PARTS):
        build_part(source, number, tmp_path / f"alone/parts/{number:05d}")
    alone = contents(tmp_path / "alone")
    assert {name: built[name] for name in alone} == alone
    assert set(built) - set(alone) == {f"parts/{n:05d}/{RECORD}" for n in range(PARTS)}


def test_several_processes_build_the_same_bytes(source, built, tmp_path):
    for path in sorted((tmp_path / "sky").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert build(source, "--processes", "2") == 0
    assert contents(tmp_path / "sky") == built


def test_a_repeated_job_builds_only_the_part_that_is_missing(source, built, tmp_path, capsys):
    """Snakemake has deleted every manifest, as it does with those of a job that begins or fails."""
    parts = tmp_path / "sky/parts"
    for manifest in parts.glob("*/manifest.json"):
        manifest.unlink()
    (parts / "00001" / RECORD).unlink()  # it was killed in this part
    inodes = {path: path.stat().st_ino for path in parts.glob("0000[02]/*.parquet")}
    assert build(source) == 0
    said = capsys.readouterr().out
    assert [f"part {n}: finished by an earlier job" in said for n in range(PARTS)] == [
        True,
        False,
        True,
    ]
    assert {path: path.stat().st_ino for path in inodes} == inodes
    assert contents(tmp_path / "sky") == built


@pytest.mark.parametrize("damage", ["shorter", "other", "gone", "table", "record"])
def test_a_damaged_part_is_built_again(source, built, tmp_path, damage, capsys):
    part = tmp_path / "sky/parts/00001"
    name = {"table": "train.documents", "record": RECORD}.get(damage, "train-00000.parquet")
    content = (part / name).read_bytes()
    if damage == "gone":
        (part / name).unlink()
    elif damage == "shorter":
        (part / name).write_bytes(content[:-1])
    else:
        changed = bytes([content[20] ^ 1])
        (part / name).write_bytes(content[:20] + changed + content[21:])
    assert build(source) == 0
    assert capsys.readouterr().out.count("finished by an earlier job") == PARTS - 1
    assert contents(tmp_path / "sky") == built


@pytest.mark.parametrize("change", ["code", "settings", "content"])
def test_parts_that_were_built_from_something_else_are_built_again(
    source, built, change, tmp_path, capsys
):
    from dataclasses import replace

    again = PARTS
    if change == "code":
        (tmp_path / "code.json").write_text("[]")
        assert build(source) == 0
    elif change == "settings":
        assert build(replace(source, validation_share=0.5)) == 0
    else:
        again = 1
        assert build(source, "--content", "a", "b", "other") == 0
    assert capsys.readouterr().out.count("finished by an earlier job") == PARTS - again


def test_a_part_that_fails_leaves_the_others_finished(source, tmp_path, capsys):
    raw = tmp_path / "raw/f2.parquet"
    content = raw.read_bytes()
    raw.write_bytes(content[:-3])
    assert build(source) == 2
    assert [(tmp_path / f"sky/parts/{n:05d}" / RECORD).is_file() for n in range(PARTS)] == [
        True,
        True,
        False,
    ]
    raw.write_bytes(content)
    capsys.readouterr()
    assert build(source) == 0
    assert capsys.readouterr().out.count("finished by an earlier job") == 2
