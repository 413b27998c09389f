"""Preparation in parts beyond what fits in memory: 10⁷ and 10⁸ documents merged, and 10 GB killed
twice.

Writes `evidence/long-tests/parts.txt`.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.long import logs
from tests.workflow.conftest import Project, make_project
from tokenscale.base.files import canonical_json, sha256_file, sha256_text, write_json
from tokenscale.data.corpus.build import SPLITS, VERSION
from tokenscale.data.corpus.parts import write_table
from tokenscale.data.parts import part_folder
from tokenscale.settings.data import CorpusSettings, SourceSettings
from tokenscale.settings.options import to_dict

pytestmark = [pytest.mark.long, pytest.mark.slow(900)]

PART_DOCUMENTS = 1_000_000
FILES = 40
FILE_BYTES = 250_000_000
LINES: list[str] = []

MERGE = """
import json, resource, sys, time
from pathlib import Path
from tokenscale.data.corpus.parts import merge_parts
from tokenscale.settings.data import CorpusSettings
from tokenscale.settings.options import from_json
start = time.monotonic()
manifest = merge_parts(from_json(CorpusSettings, sys.argv[1]), Path(sys.argv[2]))
print(json.dumps({
    "rows": manifest["splits"]["train"]["rows"],
    "seconds": time.monotonic() - start,
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""


@pytest.fixture(scope="module", autouse=True)
def log():
    yield
    if LINES:
        logs.write("parts", "\n".join(LINES) + "\n")


def report(line: str) -> None:
    print(line, flush=True)
    LINES.append(line)


def write_synthetic_part(directory: Path, settings: CorpusSettings, number: int) -> None:
    """Tables of documents that do not exist, with random hashes; its shard has one byte, as nobody
    reads it.
    """
    parts = settings.parts
    folder = part_folder(directory, number)
    folder.mkdir(parents=True)
    rng = np.random.default_rng(number)
    splits = {}
    for split in SPLITS:
        rows = PART_DOCUMENTS if split == "train" else 0
        path = folder / f"{split}.documents"
        lengths = rng.integers(1, 20_000, rows, dtype=np.uint32)
        write_table(path, rng.integers(0, 256, (rows, 32), dtype=np.uint8), lengths, lengths)
        (folder / f"{split}-00000.parquet").write_bytes(b"x")
        tables = [{"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}]
        files = [{"name": f"{split}-00000.parquet", "rows": rows, "bytes": 1, "sha256": ""}]
        splits[split] = {"rows": rows, "files": files, "tables": tables}
    counts = {"read": PART_DOCUMENTS, "duplicates": 0, "kept": PART_DOCUMENTS}
    digest = sha256_text(canonical_json(to_dict(settings)))
    facts = {
        "part": number,
        "parts": parts,
        "settings_sha256": digest,
        "source": {"kind": "files"},
        "documents": counts,
        "splits": splits,
    }
    write_json(folder / "manifest.json", {"schema_version": VERSION, "name": "x", **facts})


def test_memory_of_merging_is_bounded(tmp_path):
    for parts in (10, 100):
        directory = tmp_path / str(parts)
        source = SourceSettings(kind="files", files=("x",))
        settings = CorpusSettings(name="x", source=source, validation_share=0.0, parts=parts)
        for number in range(parts):
            write_synthetic_part(directory, settings, number)
        argv = [sys.executable, "-c", MERGE, json.dumps(to_dict(settings)), str(directory)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["rows"] == parts * PART_DOCUMENTS
        report(
            f"merge of {found['rows']:,} documents: {found['seconds']:.1f} s, peak "
            f"{found['peak_mib']:.0f} MiB"
        )
        # parts.MEMORY, Python with its libraries, and the table of a part
        assert found["peak_mib"] < 1700


def write_sources(folder: Path) -> None:
    """40 files of 250 MB of text: the same documents again and again, each with its own
    beginning.
    """
    rng = random.Random(3)
    words = ["".join(rng.choices("etaoinshrdlucm", k=rng.randrange(2, 10))) for _ in range(20_000)]
    texts = [" ".join(rng.choices(words, k=rng.randrange(40, 700))) for _ in range(20_000)]
    folder.mkdir()
    number = 0
    for file in range(FILES):
        batch = []
        size = 0
        while size < FILE_BYTES:
            batch.append(f"document {number}: {texts[number % len(texts)]}")
            size += len(batch[-1])
            number += 1
        pq.write_table(
            pa.table({"text": batch}), folder / f"f{file:02d}.parquet", compression="zstd"
        )


def list_memory(root: Path) -> list[tuple[str, float]]:
    """(command, MiB of memory of its own and shared) of the processes that work in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")) != root:
                continue
            words = (process / "cmdline").read_text().split("\0")
            pages = int((process / "statm").read_text().split()[1])
        except OSError:
            continue
        name = next((w for w in words if w in ("corpus", "pretokenize", "tokenizer")), None)
        if "tokenscale" in words and name:
            found.append((name, pages * 4096 / 2**20))
    return found


def run_until(
    project: Project, targets: list[str], finished: int | None, peaks: dict[str, float]
) -> bool:
    """Run Snakemake; kill it with all its jobs once so many parts are finished. Returns whether it
    ended by itself.
    """
    argv = [
        sys.executable,
        "-m",
        "snakemake",
        "--cores",
        "2",
        "--configfile",
        "many.yaml",
        "--rerun-incomplete",
    ]
    with open(project.root / "snakemake.log", "w") as log:
        process = subprocess.Popen(
            [*argv, *targets],
            cwd=project.root,
            env=project.environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    while process.poll() is None:
        time.sleep(0.2)
        for name, mib in list_memory(project.root):
            peaks[name] = max(peaks.get(name, 0), mib)
        if finished is not None and count_parts(project) >= finished:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False
    assert process.returncode == 0, (project.root / "snakemake.log").read_text()[-3000:]
    return True


def count_parts(project: Project) -> int:
    return len([*project.root.glob("results/*/**/parts/*/manifest.json")])


@pytest.mark.workflow
def test_ten_gigabytes_killed_twice_go_on(tmp_path):
    project = make_project(tmp_path)
    write_sources(project.root / "raw")
    size = sum(path.stat().st_size for path in (project.root / "raw").iterdir())
    for name, parts in {"many": FILES, "one": 1}.items():
        corpus = {"source": {"files": ["raw/*.parquet"]}, "parts": parts}
        bpe = {"kind": "bpe", "corpus": "small", "vocabulary_size": 4000}
        config = {"corpora": {"large": corpus}, "tokenizers": {"bpe": bpe}}
        (project.root / f"{name}.yaml").write_text(json.dumps(config))
    stores = ["packed", "token-list"]
    targets = [f"results/tokens/large/bpe/{store}/manifest.json" for store in stores]
    peaks: dict[str, float] = {}
    start = time.monotonic()
    assert not run_until(project, targets, 13, peaks)
    first = {
        path: path.stat().st_mtime_ns
        for path in project.root.glob("results/corpus/large/parts/*/manifest.json")
    }
    project.command("--unlock", "--configfile", "many.yaml")
    assert not run_until(project, targets, FILES + 25, peaks)
    project.command("--unlock", "--configfile", "many.yaml")
    assert run_until(project, targets, None, peaks)
    seconds = time.monotonic() - start
    again = [path for path, built in first.items() if path.stat().st_mtime_ns != built]
    # only what ran when Snakemake was killed was built again
    assert len(first) >= 12 and len(again) <= 2
    report(
        f"{FILES} files, {FILES * FILE_BYTES / 1e9:.0f} GB of text, {size / 1e9:.2f} GB of "
        "Parquet; killed twice:"
    )
    report(
        f"  corpus, {' and '.join(stores)} in {seconds:.0f} s; peaks of single processes in MiB: "
    )
    report("  " + ", ".join(f"{name} {mib:.0f}" for name, mib in sorted(peaks.items())))
    assert max(peaks.values()) < 1500

    found = read_manifests(project, stores)
    for name in ("corpus", "tokens"):  # both together would need 80 GB
        shutil.rmtree(project.root / "results" / name / "large")
    start = time.monotonic()
    project.command("--configfile", "one.yaml", "--cores", "2", targets[1], timeout=3000)
    report(f"  in one part, without packed: {time.monotonic() - start:.0f} s")
    whole = read_manifests(project, ["token-list"])
    assert found["corpus"] == whole["corpus"] and found["token-list"] == whole["token-list"]
    assert found["packed"] == found["token-list"]
    report("  text_sha256, splits and ids_digest equal those of one part")


def read_manifests(project: Project, stores: list[str]) -> dict[str, object]:
    """What may not depend on parts and kills."""
    corpus = json.loads((project.root / "results/corpus/large/manifest.json").read_text())
    found: dict[str, object] = {
        "corpus": {
            name: (split["rows"], split["text_sha256"]) for name, split in corpus["splits"].items()
        }
    }
    for store in stores:
        manifest = json.loads(
            (project.root / f"results/tokens/large/bpe/{store}/manifest.json").read_text()
        )
        found[store] = manifest["ids_digest"]["value"]
    return found
