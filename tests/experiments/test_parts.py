"""What is planned and rebuilt where a corpus is built in parts."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.experiment, pytest.mark.workflow, pytest.mark.slow(20)]

STORES = ["token-list", "packed-sequence_length=32"]
TARGETS = [f"results/tokens/own/bpe/{store}/manifest.json" for store in STORES]
OPTIONS = ["--configfile", "own.yaml"]


@pytest.fixture
def project(fresh):
    (fresh.root / "raw").mkdir()
    for number in range(3):
        write_source(fresh, number)
    own = {"own": {"source": {"files": ["raw/*.parquet"]}, "parts": 3}}
    (fresh.root / "own.yaml").write_text(json.dumps({"corpora": own}))
    return fresh


def write_source(project, number, word="word"):
    texts = ["a common text", *(f"{word} {i} of file {number}" for i in range(1500))]
    pq.write_table(pa.table({"text": texts}), project.root / f"raw/f{number}.parquet")


def test_parts_are_planned_and_only_what_changed_is_built_again(project):
    made = {"corpus_part": 3, "merge_corpus": 1, "pretokenize_part": 6, "merge_store": 2}
    tokenizer = {"build_corpus": 1, "build_tokenizer": 1}
    assert project.planned(*TARGETS, *OPTIONS) == made | tokenizer
    project.snakemake("--cores", "2", *TARGETS, *OPTIONS)
    manifests = {path: path.read_bytes() for path in project.root.glob("results/*/own/**/manifest.json")}
    assert "Nothing to be done" in project.dry_run(*TARGETS, *OPTIONS)
    os.utime(project.root / "raw/f1.parquet")
    assert "Nothing to be done" in project.dry_run(*TARGETS, *OPTIONS)

    # one part, deleted, is built again and is equal to the byte, so that nothing else is
    (project.root / "results/corpus/own/parts/00002/manifest.json").unlink()
    project.snakemake("--cores", "2", "results/corpus/own/parts/00002/manifest.json", *OPTIONS)
    assert {path: path.read_bytes() for path in manifests} == manifests
    assert "Nothing to be done" in project.dry_run(*TARGETS, *OPTIONS)

    write_source(project, 1, word="other")
    planned = project.planned(*TARGETS, *OPTIONS)
    assert planned["corpus_part"] == 1 and planned["merge_corpus"] == 1
