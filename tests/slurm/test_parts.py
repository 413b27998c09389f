"""A corpus of many parts on the cluster: one node goes down, one part is damaged; equal to a local
build.
"""

import json
import random
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.slurm.cluster import NODES

pytestmark = [pytest.mark.long, pytest.mark.slow(60)]

FILES = 15
#: parts that one job builds
RANGE = 5
STORES = ["token-list", "packed-sequence_length=32"]


def write_sources(root) -> None:
    """Files of 60 documents, some of which other files have too; a configuration of as many parts,
    and of one.
    """
    rng = random.Random(11)
    words = ["sun", "moon", "star", "comet", "planet", "dust", "orbit"]
    (root / "raw").mkdir()
    for number in range(FILES):
        texts = [f"{rng.randrange(1800)} " + " ".join(rng.choices(words, k=20)) for _ in range(40)]
        texts += [f"common {rng.randrange(300)}" for _ in range(20)]
        pq.write_table(pa.table({"text": texts}), root / f"raw/f{number:02d}.parquet")
    for name, parts in {"many": FILES, "one": 1}.items():
        corpus = {"source": {"files": ["raw/*.parquet"]}, "parts": parts}
        config = {"corpora": {"sky": corpus}, "parts_per_job": RANGE}
        (root / f"{name}.yaml").write_text(json.dumps(config))


def manifests(root) -> dict[str, dict]:
    paths = {"corpus": root / "results/corpus/sky/manifest.json"}
    paths |= {store: root / f"results/tokens/sky/bpe/{store}/manifest.json" for store in STORES}
    return {name: json.loads(path.read_text()) for name, path in paths.items()}


def what_parts_keep(found: dict[str, dict]) -> dict[str, object]:
    """What may not depend on parts, nodes and failures."""
    splits = found["corpus"]["splits"]
    kept = {
        name: {key: split[key] for key in ("rows", "utf8_bytes", "text_sha256")}
        for name, split in splits.items()
    }
    documents = found["corpus"]["cleaning"]["documents"]
    return {"splits": kept, "documents": documents} | {
        store: found[store]["ids_digest"] for store in STORES
    }


def when_built(part) -> tuple[datetime, datetime]:
    """When a part was begun and finished, by its record."""
    record = json.loads((part / "build.json").read_text())
    finished = datetime.fromisoformat(record["created_utc"])
    return finished - timedelta(seconds=record["duration_s"]), finished


def test_parts_of_one_job_overlap_in_time(project):
    write_sources(project.root)
    rng = random.Random(5)
    for number in range(FILES):  # some seconds of work for each part
        texts = [f"{rng.randrange(10**9)} " + "sun moon " * 40 for _ in range(60_000)]
        pq.write_table(pa.table({"text": texts}), project.root / f"raw/f{number:02d}.parquet")
    project.snakemake("results/corpus/sky/parts/00000/manifest.json", "--configfile", "many.yaml")
    jobs = [job for job in project.cluster.jobs() if job["workdir"] == str(project.root)]
    assert len(jobs) == 1
    parts = [project.root / f"results/corpus/sky/parts/{n:05d}" for n in range(RANGE)]
    times = [when_built(part) for part in parts]
    span = max(finished for _, finished in times) - min(begun for begun, _ in times)
    work = sum((finished - begun for begun, finished in times), timedelta())
    # times of finishing are whole seconds: one after another, the work would be the span
    assert work > span + timedelta(seconds=2), times


def test_parts_survive_a_node_and_a_damaged_part(project, local):
    for root in (project.root, local.root):
        write_sources(root)
    targets = [f"results/tokens/sky/bpe/{store}/manifest.json" for store in STORES]
    process = project.start(*targets, "--configfile", "many.yaml")
    folder = project.root / "results/corpus/sky/parts"
    project.until(lambda: len([*folder.glob("*/manifest.json")]) > 2)
    running = [job for job in project.cluster.jobs() if job["state"] == "RUNNING"]
    node = running[0]["nodes"] if running else NODES[0]
    project.cluster.set_node(node, "down")  # its jobs are lost, and it comes back
    project.ended(process)
    assert len([*folder.glob("*/manifest.json")]) == FILES
    jobs = {job["id"] for job in project.cluster.jobs() if job["workdir"] == str(project.root)}
    # a job for each range of the corpus and of each store, and a merge of each; at most as many were
    # lost with the node
    expected = (1 + len(STORES)) * (FILES // RANGE + 1)
    assert len(jobs) <= 2 * expected < FILES * (1 + len(STORES))

    local.snakemake("--cores", "2", *targets, "--configfile", "one.yaml")
    assert what_parts_keep(manifests(project.root)) == what_parts_keep(manifests(local.root))
    assert manifests(project.root)["token-list"]["parts"] != manifests(local.root)[
        "token-list"
    ].get("parts")

    before = {
        path: path.read_bytes() for path in project.root.glob("results/*/sky/**/manifest.json")
    }
    damaged = folder / "00007/train-00000.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-7])
    text = project.snakemake(
        "-f", "results/corpus/sky/manifest.json", "--configfile", "many.yaml", code=1
    )
    repair = "results/corpus/sky/parts/00007/manifest.json"
    assert "a file of the corpus has changed" in text and f"snakemake -f {repair}" in text
    project.snakemake("-f", repair, "--configfile", "many.yaml")
    project.snakemake("results/corpus/sky/manifest.json", *targets, "--configfile", "many.yaml")
    assert {path: path.read_bytes() for path in before} == before
    assert "no faults" in project.tokenscale("verify", "results")
