import json
import os
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.web import Server
from tests.workflow.conftest import CONFIG

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20), pytest.mark.workflow]
#: large enough that Snakemake judges it by its time
DOCUMENTS = [
    f"document {i}: " + " ".join(str(i * k % 9973) for k in range(60)) for i in range(6000)
]


def configure(project, parts=1, **source):
    config = CONFIG | {"corpora": {"small": {"source": source, "parts": parts}}}
    (project.root / "config/config.yaml").write_text(json.dumps(config))


def write_parquet(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"body": texts}), path, compression="none")


def test_own_files_rebuild_the_corpus_when_their_content_changes_and_only_then(fresh):
    path = fresh.root / "data/mine.parquet"
    write_parquet(path, DOCUMENTS)
    assert path.stat().st_size > 1_500_000
    configure(fresh, files="data/*.parquet", text_column="body")
    fresh.snakemake("--cores", "1", "corpus")
    manifest = (fresh.root / "results/corpus/small/manifest.json").read_bytes()
    os.utime(path)
    assert fresh.planned("corpus") == {}, "touched"
    path.rename(fresh.root / "mine.parquet")
    assert fresh.planned("corpus") == {}, "gone: results were brought here without their text"
    write_parquet(path, [*DOCUMENTS[:-1], "another end"])
    assert fresh.planned("corpus") == {"build_corpus": 1}, "edited"
    write_parquet(path, DOCUMENTS)
    write_parquet(fresh.root / "data/more.parquet", ["one more"])
    assert fresh.planned("corpus") == {"build_corpus": 1}, "one more file for the pattern"
    fresh.snakemake("--cores", "1", "corpus")
    assert (fresh.root / "results/corpus/small/manifest.json").read_bytes() != manifest
    assert fresh.planned("corpus") == {}


def test_a_download_is_a_rule_of_its_own_and_trainings_need_no_network(fresh):
    with Server() as web:
        web.files["/tales.txt"] = "<|endoftext|>".join(DOCUMENTS[:300]).encode()
        configure(fresh, files=f"{web.address}/tales.txt", separator="<|endoftext|>")
        data = {
            "download": 1,
            "build_corpus": 1,
            "corpus_records": 1,
            "build_tokenizer": 1,
            "pretokenize": 4,
        }
        assert fresh.planned("tokens") == data
        fresh.snakemake("--cores", "1", "corpus")
        configure(fresh, files=f"{web.address}/tales.txt", separator="\n")
        assert fresh.planned("corpus") == {"build_corpus": 1}, (
            "another way to read downloads nothing"
        )
        configure(fresh, files=f"{web.address}/tales.txt", separator="<|endoftext|>")
    shutil.rmtree(fresh.root / "results/downloads")
    assert fresh.planned("corpus") == {}, "a purged download is not needed any more"
    assert "download" not in fresh.planned("tokens")
    store = "results/tokens/small/bpe/packed-sequence_length=32/manifest.json"
    fresh.snakemake("--cores", "2", store)  # the server is gone


def test_downloads_of_several_kinds_are_planned_at_once_in_a_fresh_clone(fresh):
    """Their code differs: Snakemake finds a list of source files that was written after it had
    looked for another.
    """
    hub = {"kind": "hub", "repository": "some/where", "revision": "0" * 40, "files": ["*.parquet"]}
    sources = {"web": {"files": "https://somewhere.invalid/tales.txt"}, "hub": hub}
    sources |= {"bucket": {"files": "s3://nowhere/raw/*.parquet"}}
    corpora = CONFIG["corpora"] | {name: {"source": source} for name, source in sources.items()}
    (fresh.root / "config/config.yaml").write_text(json.dumps(CONFIG | {"corpora": corpora}))
    assert fresh.planned(*(f"results/downloads/{name}/manifest.json" for name in sources)) == {
        "download": 3
    }


@pytest.mark.long
def test_parts_are_planned_and_only_what_changed_is_built_again(fresh):
    def write_source(number, word="word"):
        texts = ["a common text", *(f"{word} {i} of file {number}" for i in range(1500))]
        write_parquet(fresh.root / f"raw/f{number}.parquet", texts)

    for number in range(3):
        write_source(number)
    configure(fresh, files=["raw/*.parquet"], text_column="body", parts=3)
    targets = [
        f"results/tokens/small/bpe/{store}/manifest.json"
        for store in ("token-list", "packed-sequence_length=32")
    ]
    made = {"corpus_parts_00000_00002": 1, "merge_corpus": 1}
    made |= {"token_parts_00000_00002": 2, "merge_store": 2}
    assert fresh.planned(*targets) == made | {"build_tokenizer": 1}
    fresh.snakemake("--cores", "2", *targets)
    manifests = {
        path: path.read_bytes() for path in fresh.root.glob("results/*/small/**/manifest.json")
    }
    assert "Nothing to be done" in fresh.dry_run(*targets)
    os.utime(fresh.root / "raw/f1.parquet")
    assert "Nothing to be done" in fresh.dry_run(*targets)

    # one part, deleted, is built again and is equal to the byte, so that nothing else is
    parts = fresh.root / "results/corpus/small/parts"
    shutil.rmtree(parts / "00002")
    fresh.snakemake("--cores", "2", "results/corpus/small/parts/00002/manifest.json")
    log = fresh.root / "results/logs/corpus/small-parts-00000.log"
    assert list_finished(log) == [0, 1]
    assert {path: path.read_bytes() for path in manifests} == manifests
    assert "Nothing to be done" in fresh.dry_run(*targets)

    write_source(1, word="other")
    planned = fresh.planned(*targets)
    assert planned["corpus_parts_00000_00002"] == 1 and planned["merge_corpus"] == 1
    fresh.snakemake("--cores", "2", *targets)
    assert list_finished(log) == [0, 2], "a changed file builds its part alone"
    changed = {path for path in manifests if path.read_bytes() != manifests[path]}
    assert {path.parent for path in changed if path.is_relative_to(parts)} == {parts / "00001"}


@pytest.mark.long
def test_other_ranges_of_the_same_parts_build_no_part_again(fresh):
    for number in range(3):
        write_parquet(
            fresh.root / f"raw/f{number}.parquet", [f"text {number} {i}" for i in range(50)]
        )
    configure(fresh, files=["raw/*.parquet"], text_column="body", parts=3)
    fresh.snakemake("--cores", "2", "corpus")
    before = {path: path.stat().st_ino for path in fresh.root.glob("results/corpus/**/*.parquet")}
    single = ("--config", "parts_per_job=1")
    assert fresh.planned("corpus", *single) == {
        "corpus_parts_00000_00000": 1,
        "corpus_parts_00001_00001": 1,
        "corpus_parts_00002_00002": 1,
        "merge_corpus": 1,
    }
    fresh.snakemake("--cores", "2", "corpus", *single)
    parts = {path: inode for path, inode in before.items() if "parts" in path.parts}
    assert parts and {path: path.stat().st_ino for path in parts} == parts


def list_finished(log) -> list[int]:
    """Parts that a job found finished."""
    return sorted(map(int, re.findall(r"part (\d+): finished by an earlier job", log.read_text())))
