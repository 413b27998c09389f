"""A corpus built in parts has the documents, the splits and the hashes of one that is built at
once.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.corpora import flip_bit, texts_of
from tests.refusals import tree_of
from tests.unit.conftest import files_of
from tokenscale.base.errors import UserError
from tokenscale.cli.main import main
from tokenscale.cli.verify import verify_results
from tokenscale.data.corpus import fingerprint
from tokenscale.data.corpus.build import SPLITS, build
from tokenscale.data.corpus.fingerprint import fingerprint_sources
from tokenscale.data.corpus.parts import Duplicates, build_part, merge_parts, write_table
from tokenscale.data.corpus.raw_text import RawText, write_text_records
from tokenscale.data.parts import part_folder
from tokenscale.settings.data import (
    CleaningSettings,
    CorpusSettings,
    SourceSettings,
    state_held_out,
)


def write_files(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for number, texts in enumerate(files):
        pq.write_table(
            pa.table({"text": pa.array(texts, pa.string())}), folder / f"f{number:03d}.parquet"
        )


def corpus_settings(folder, parts, **options):
    source = SourceSettings(kind="files", files=(str(folder / "f*.parquet"),), **options)
    return CorpusSettings(
        name="x", source=source, validation_share=0.3, row_group_rows=3, parts=parts
    )


def build_in_parts(settings, directory, processes=1):
    for number in range(settings.parts):
        build_part(settings, number, part_folder(directory, number))
    return merge_parts(settings, directory, processes)


def read_rows(directory, split):
    manifest = json.loads((directory / "manifest.json").read_text())
    tables = [
        pq.read_table(directory / file["name"]) for file in manifest["splits"][split]["files"]
    ]
    return [
        row
        for table in tables
        for row in zip(*(table[c].to_pylist() for c in ("text", "origin")), strict=True)
    ]


def without_files(manifest):
    found = {key: value for key, value in manifest.items() if key not in ("splits", "parts")}
    return found, {
        name: {k: v for k, v in s.items() if k != "files"} for name, s in manifest["splits"].items()
    }


texts = st.lists(
    st.one_of(st.sampled_from([f"text {i}" for i in range(12)]), st.text(max_size=9), st.none()),
    max_size=9,
)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.lists(texts, min_size=1, max_size=7), data=st.data())
def test_any_number_of_parts_gives_the_corpus_of_one(tmp_path, files, data):
    folder = tmp_path / "case"
    shutil.rmtree(folder, ignore_errors=True)
    write_files(folder / "raw", [["the first text is always here, and long"], *files])
    parts = data.draw(st.integers(2, len(files) + 1))
    try:
        whole = build(corpus_settings(folder / "raw", 1), folder / "one")
    except UserError as error:  # everything fell into the validation split
        with pytest.raises(UserError, match=error.what):
            build_in_parts(corpus_settings(folder / "raw", parts), folder / "many")
        return
    merged = build_in_parts(corpus_settings(folder / "raw", parts), folder / "many")
    assert without_files(merged) == without_files(whole)
    for split in SPLITS:
        assert read_rows(folder / "many", split) == read_rows(folder / "one", split)
        one = RawText(folder / "one", split)
        many = RawText(folder / "many", split)
        assert [t for b in many.batches(4) for t in b] == [t for b in one.batches(4) for t in b]


@pytest.mark.parametrize("deduplicate", [True, False])
def test_held_out_texts_that_any_part_trains_on_are_counted(tmp_path, deduplicate):
    write_files(tmp_path / "raw", [["a", "b", "x"], ["c", "d", "b"], ["e", "f"]])
    write_files(tmp_path / "held", [["p", "e", "q"], ["y", "a", "p"], ["a", "e", "e"]])
    options = {"validation_files": (str(tmp_path / "held" / "*.parquet"),)}
    one, three = (
        replace(
            corpus_settings(tmp_path / "raw", n, **options),
            cleaning=CleaningSettings(deduplicate=deduplicate),
        )
        for n in (1, 3)
    )
    whole = build(one, tmp_path / "one")
    merged = build_in_parts(three, tmp_path / "many")
    assert without_files(merged) == without_files(whole)
    assert whole["cleaning"]["documents"]["held_out_in_training"] == 2  # a and e
    assert "2 distinct held-out texts" in state_held_out(whole)
    kept = [t for t, _ in read_rows(tmp_path / "many", "validation")]
    assert kept == (
        ["p", "q", "y"] if deduplicate else ["p", "e", "q", "y", "a", "p", "a", "e", "e"]
    )
    assert sum(1 for t, _ in read_rows(tmp_path / "many", "train") if t == "b") == (
        1 if deduplicate else 2
    )


def test_commands_state_held_out_texts_that_are_trained_on(tmp_path, capsys):
    write_files(tmp_path / "raw", [["a", "b", "x"], ["c", "d", "b"]])
    write_files(tmp_path / "held", [["p", "a"]])
    source = {
        "kind": "files",
        "files": [f"{tmp_path}/raw/*"],
        "validation_files": [f"{tmp_path}/held/*"],
    }
    settings = {"name": "x", "source": source, "cleaning": {"deduplicate": False}}
    output = tmp_path / "results/corpus/x/manifest.json"
    assert (
        main(["corpus", "--settings", json.dumps(settings), "--content", "--output", str(output)])
        == 0
    )
    assert main(["verify", str(tmp_path / "results")]) == 0
    assert (
        capsys.readouterr().out.count(
            "1 distinct held-out texts also occur in the training text and were kept"
        )
        == 2
    )


@pytest.mark.parametrize("deduplicate", [True, False])
def test_commands_state_documents_that_were_dropped_as_duplicates(deduplicate, tmp_path, capsys):
    """Repeated rows of records may be data."""
    write_files(tmp_path / "raw", [["a", "b", "a"], ["c", "a", "d"]])
    source = {"kind": "files", "files": [f"{tmp_path}/raw/*"]}
    settings = {"name": "x", "source": source, "cleaning": {"deduplicate": deduplicate}}
    output = tmp_path / "results/corpus/x/manifest.json"
    argv = ["corpus", "--settings", json.dumps(settings), "--content", "--output", str(output)]
    assert main(argv) == 0
    assert main(["verify", str(tmp_path / "results")]) == 0
    stated = "2 of 6 documents (33.3%) were dropped as duplicates; corpora.x.cleaning.deduplicate"
    assert capsys.readouterr().out.count(stated) == (2 if deduplicate else 0)


def test_records_in_two_processes_are_those_of_one(tmp_path):
    write_files(tmp_path / "raw", [[f"text {i} of {n % 2}" for i in range(20)] for n in range(4)])
    build_in_parts(corpus_settings(tmp_path / "raw", 4), tmp_path / "c", processes=2)
    files = json.loads((tmp_path / "c/manifest.json").read_text())["splits"]["train"]["files"]
    # parts 2 and 3 have nothing new
    assert {file["name"].split("/")[0] for file in files} == {"parts"}
    first = write_text_records(tmp_path / "c")
    contents = files_of(tmp_path / "c/records")
    assert (
        write_text_records(tmp_path / "c", processes=2) == first
        and files_of(tmp_path / "c/records") == contents
    )
    assert texts_of(tmp_path / "c") == [t for b in RawText(tmp_path / "c").batches() for t in b]


def test_shards_that_lose_documents_are_written_again_and_the_part_stays(tmp_path):
    write_files(tmp_path / "raw", [["a", "b", "c", "d"], ["x", "b", "y", "d", "z"]])
    settings = corpus_settings(tmp_path / "raw", 2)
    directory = tmp_path / "c[1]*?'"
    merged = build_in_parts(settings, directory, processes=2)
    assert merged["cleaning"]["documents"]["duplicates"] == 2
    assert any(
        file["name"].startswith("deduplicated/00001-")
        for s in merged["splits"].values()
        for file in s["files"]
    )
    before = {
        path: data for path, data in tree_of(directory).items() if not path.endswith("build.json")
    }
    shutil.rmtree(directory / "parts/00001")
    build_part(settings, 1, part_folder(directory, 1))
    merge_parts(settings, directory)
    assert {path: data for path, data in tree_of(directory).items() if path in before} == before


def test_many_duplicates_of_one_text_over_many_tables(tmp_path):
    rng = np.random.default_rng(3)
    hashes = rng.integers(0, 256, (40, 32), dtype=np.uint8)
    hashes[7, :8] = hashes[9, :8]  # equal in the first half only
    expected = []
    seen = set()
    sets = []
    for number in range(6):
        drawn = rng.integers(0, 40, 50)
        lengths = np.zeros(50, dtype=np.uint32)
        write_table(tmp_path / str(number), hashes[drawn], lengths, lengths)
        for row, index in enumerate(drawn.tolist()):
            if index in seen:
                expected += [(number, row)]
            seen.add(index)
        sets.append(set(drawn.tolist()))
    found = Duplicates([pq.read_table(tmp_path / str(number)) for number in range(6)], tmp_path)
    assert [(n, row) for n in range(6) for row in found.read(n).tolist()] == expected
    assert found.count_shared(3) == len(
        (sets[0] | sets[1] | sets[2]) & (sets[3] | sets[4] | sets[5])
    )


def test_too_little_memory_is_one_message_and_keeps_the_corpus(tmp_path, monkeypatch):
    write_files(tmp_path / "raw", [["a", "b"], ["b", "c"]])
    build_in_parts(corpus_settings(tmp_path / "raw", 2), tmp_path / "c")
    before = (tmp_path / "c/manifest.json").read_bytes()
    monkeypatch.setattr("tokenscale.data.corpus.parts.MEMORY", "1KB")
    with pytest.raises(UserError, match="duplicates"):
        merge_parts(corpus_settings(tmp_path / "raw", 2), tmp_path / "c")
    assert (tmp_path / "c/manifest.json").read_bytes() == before and not (
        tmp_path / "c/.building"
    ).exists()


#: how part 1 of 3 is damaged, from (its folder, the settings, the folder of sources)
DAMAGE = {
    "missing": lambda part, settings, raw: shutil.rmtree(part),
    "truncated shard": lambda part, settings, raw: os.truncate(part / "train-00000.parquet", 20),
    "documents": lambda part, settings, raw: flip_bit(part / "train.documents"),
    "shard": lambda part, settings, raw: [flip_bit(path, 10) for path in part.glob("*.parquet")],
    "of another number": lambda part, settings, raw: build_part(corpus_settings(raw, 2), 1, part),
    "of other settings": lambda part, settings, raw: build_part(
        replace(settings, validation_share=0.9), 1, part
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_part_is_named_with_the_command_that_rebuilds_it(tmp_path, damage):
    write_files(tmp_path / "raw", [["a", "b", "c", "d"], ["x", "b", "y", "d", "z"], ["u", "v"]])
    settings = corpus_settings(tmp_path / "raw", 3)
    build_in_parts(settings, tmp_path / "c")
    part = part_folder(tmp_path / "c", 1)
    damage(part, settings, tmp_path / "raw")
    before = (tmp_path / "c/manifest.json").read_bytes()
    with pytest.raises(UserError) as caught:
        merge_parts(settings, tmp_path / "c")
    assert caught.value.facts["next"] == f"snakemake -f {part}/manifest.json"
    assert (tmp_path / "c/manifest.json").read_bytes() == before  # nothing lost
    build_part(settings, 1, part)
    merge_parts(settings, tmp_path / "c")
    assert (tmp_path / "c/manifest.json").read_bytes() == before


def test_a_damaged_shard_is_named_by_readers_with_the_part_and_a_failing_rebuild_keeps_it(tmp_path):
    write_files(tmp_path / "raw", [["a", "b", "c", "d"], ["u", "v", "w"]])
    settings = corpus_settings(tmp_path / "raw", 2)
    parts = tmp_path / "c/parts"
    build_in_parts(settings, tmp_path / "c")
    before = tree_of(parts / "00000")
    (tmp_path / "raw/f000.parquet").write_bytes(b"no Parquet")
    with pytest.raises(UserError, match="not readable Parquet"):
        build_part(settings, 0, parts / "00000")
    assert tree_of(parts / "00000") == before
    flip_bit(parts / "00001/train-00000.parquet", 10)
    with pytest.raises(UserError) as caught:
        list(RawText(tmp_path / "c").batches())
    assert caught.value.facts["next"] == f"snakemake -f {parts}/00001/manifest.json"


def test_the_fingerprint_of_a_part_changes_with_its_own_files_only(tmp_path):
    write_files(tmp_path / "raw", [["a"], ["b"], ["c"], ["d"]])
    settings = corpus_settings(tmp_path / "raw", 2)
    folder = tmp_path / "results"
    memory = tmp_path / "cache.json"

    def fingerprints():
        fingerprint._list_named_paths.cache_clear()
        return [fingerprint_sources(settings, folder, number, memory) for number in (0, 1)]

    planned = fingerprints()
    for number in (0, 1):
        build_part(settings, number, part_folder(folder / "x", number), content=planned[number])
    assert fingerprints() == planned and not memory.exists()  # no file was hashed for it
    write_files(tmp_path / "other", [["e"]])
    shutil.copy(tmp_path / "other/f000.parquet", tmp_path / "raw/f003.parquet")
    changed = fingerprints()
    assert changed[0] == planned[0] and changed[1] != planned[1]
    shutil.rmtree(tmp_path / "raw")
    assert fingerprints() == planned  # results copied without their sources stay valid


def test_another_number_of_parts_leaves_nothing_behind_but_strangers(tmp_path):
    write_files(tmp_path / "raw", [["a", "b", "c"], ["b", "d", "e"], ["f"]])
    with pytest.raises(UserError, match="more parts than source files"):
        build_part(corpus_settings(tmp_path / "raw", 4), 0, tmp_path / "c/parts/00000")
    build_in_parts(corpus_settings(tmp_path / "raw", 3), tmp_path / "c")
    (tmp_path / "c/parts/.nfs0001").touch()
    build_in_parts(corpus_settings(tmp_path / "raw", 2), tmp_path / "c")
    assert sorted(path.name for path in (tmp_path / "c/parts").iterdir()) == [
        ".nfs0001",
        "00000",
        "00001",
    ]
    (tmp_path / "c/parts/.nfs0001").unlink()
    build(corpus_settings(tmp_path / "raw", 1), tmp_path / "c")
    assert not {"parts", "deduplicated"} & {path.name for path in (tmp_path / "c").iterdir()}
    build_in_parts(corpus_settings(tmp_path / "raw", 2), tmp_path / "c")
    assert not list((tmp_path / "c").glob("*.parquet"))


def test_verify_names_every_damaged_part(tmp_path):
    write_files(tmp_path / "raw", [["a", "b", "c"], ["f", "d", "e"], ["g", "h"]])
    settings = corpus_settings(tmp_path / "raw", 3)
    corpus = tmp_path / "results/corpus/x"
    build_in_parts(settings, corpus)
    assert verify_results(tmp_path / "results")[0] == []
    (corpus / "parts/00000/manifest.json").write_text("{}")
    write_files(tmp_path / "raw", [["a", "b", "c"], ["f", "d", "E"]])
    build_part(settings, 1, part_folder(corpus, 1))  # its file is as large as before
    found = [finding.what for finding in verify_results(tmp_path / "results")[0]]
    assert any("parts/00000" in what for what in found) and any(
        "parts/00001" in what for what in found
    )


def test_processes_end_with_the_command_that_is_killed():
    task = "import time; print('begin', flush=True); time.sleep(600)"
    code = (
        "from tokenscale.base.processes import map_processes; list(map_processes(exec, "
        f"[({task!r},)] * 2, 2))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.kill()
        process.wait()
        process.communicate(timeout=60)  # the pipe ends when no process holds it any more
