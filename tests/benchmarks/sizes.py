"""Benchmark of reading at two sizes: a corpus as it is, and the same text many times over, larger
than any cache.

The larger corpus repeats the documents of the given one, each behind a number of its own, so that
the two differ in size alone. One process on one core; in each round every approach reads from both
corpora, in changing order. Measured are the CPU time of a batch, the bytes that the disk delivers
for a batch while nothing is in the page cache, and the time that a loop of simulated training steps
waits for its batches, with a reading thread as on GPUs.
"""

import functools
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base import page_cache, processes
from tokenscale.base.files import sha256_file, write_json
from tokenscale.benchmark.rounds import format_columns, format_spread, group_by, interleave
from tokenscale.cli.main import Parser, exit_code
from tokenscale.data.batches.batch import Batches, Inputs, Prefetcher
from tokenscale.data.batches.open import open_batches
from tokenscale.data.corpus.build import build_from
from tokenscale.data.corpus.raw_text import RawText, records_manifest, write_text_records
from tokenscale.data.stores.manifest import open_store
from tokenscale.data.stores.writing import write_store
from tokenscale.data.tokenizers.base import read_tokenizer_manifest
from tokenscale.runs.records import provenance
from tokenscale.runs.records.provenance import find_versions
from tokenscale.settings.data import CleaningSettings, CorpusSettings, TokenizerSettings
from tokenscale.settings.options import from_json, option, settings_class
from tokenscale.settings.run import APPROACHES, RunSettings

VERSION = 1
#: seconds of a simulated training step, and steps in a round
STEP_S = 0.055
STEPS = 20
#: cold batches that are not counted: they read the tables of the files
TABLE_BATCHES = 16


@settings_class
class Settings:
    """Size of the measurement."""

    sequence_length: int = option(1024, description="tokens per sequence", ge=8)
    rows: int = option(8, description="sequences per batch", ge=1)
    batches: int = option(16, description="batches per approach and round", ge=1)
    rounds: int = option(5, description="rounds; every approach runs once per round", ge=1)


def measure(
    settings: Settings,
    corpus_directory: Path,
    tokenizer_directory: Path,
    size: int,
    output: Path,
    *,
    cold: bool = False,
) -> dict[str, Any]:
    """Run the benchmark and write its one JSON file; returns what was written.

    `size` is the text of the larger corpus in bytes. Corpora and stores are written next to
    `output` and reused. With `cold` the files are dropped from the page cache before a part of the
    rounds. Raises UserError as the builders of corpora and stores do.
    """
    folder = output.parent / f"{output.stem}-sizes"
    corpora = {
        "given": corpus_directory,
        "large": _enlarge(corpus_directory, size, folder / "corpus"),
    }
    runs = {
        approach: _build_run(settings, approach, tokenizer_directory) for approach in APPROACHES
    }
    for name, corpus in corpora.items():
        if RawText(corpus).open_records() is None:
            write_text_records(corpus)
        for store in dict.fromkeys(run.store for run in runs.values() if run.store is not None):
            where = folder / "tokens" / name / store.directory
            if not _is_current(where, store, corpus):
                write_store(store, corpus, tokenizer_directory, where)
    arms = [(approach, name) for approach in runs for name in corpora]
    cores = processes.available_cores()
    records: list[dict[str, Any]] = []
    for number, (approach, name) in interleave(arms, settings.rounds):
        run = runs[approach]
        corpus = corpora[name]
        tokens = folder / "tokens" / name / run.store.directory if run.store else None
        files = sorted((tokens or records_manifest(corpus).parent).iterdir())
        open_again = functools.partial(
            open_batches, run, Inputs(corpus, tokenizer_directory, tokens)
        )
        place = {"approach": approach, "corpus": name, "round": number}
        _read_whole(files)  # a cold round has dropped them
        with processes.pin_to_cores({min(cores)} if cores else set()):
            records.append(
                {**place, "cache": "warm", **_time_batches(open_again(), settings.batches, number)}
            )
            if cold:
                found = _read_cold(open_again, files, settings.batches, number)
                records.append({**place, "cache": "cold", **found})
        _read_whole(files)
        records.append({**place, "cache": "warm", "step_s": STEP_S, **_wait(open_again())})
        if cold and page_cache.explain_warm_cache(page_cache.drop_page_cache(files)) is None:
            records.append({**place, "cache": "cold", "step_s": STEP_S, **_wait(open_again())})
    result = {
        "schema": VERSION,
        "benchmark": "sizes",
        "settings": {
            name: getattr(settings, name)
            for name in ("sequence_length", "rows", "batches", "rounds")
        },
        "corpus_manifest_sha256": sha256_file(corpus_directory / "manifest.json"),
        "text_bytes": {
            name: RawText(corpus).split["utf8_bytes"] for name, corpus in corpora.items()
        },
        "hardware": provenance.describe_machine(),
        "versions": find_versions(),
        "finished_unix_s": time.time(),
        "records": records,
    }
    write_json(output, result)
    return result


def _enlarge(corpus: Path, size: int, folder: Path) -> Path:
    """Write the corpus again and again until its text has `size` bytes; return the folder."""
    text = RawText(corpus)
    description = {"kind": "repeated", "text_sha256": text.split["text_sha256"], "bytes": size}
    if (folder / "manifest.json").exists() and RawText(folder).manifest["source"] == description:
        return folder

    def documents() -> Iterator[tuple[str, str]]:
        written = 0
        for repetition in itertools.count():
            for number, document in enumerate(itertools.chain.from_iterable(text.batches())):
                if written >= size:
                    return
                repeated = document if repetition == 0 else f"{repetition} {document}"
                written += len(repeated.encode("utf-8"))
                yield repeated, f"{repetition}::{number}"

    cleaning = CleaningSettings(strip=False, minimum_characters=0, deduplicate=False)
    settings = CorpusSettings(name="large", cleaning=cleaning, validation_share=0.0)
    build_from(documents(), settings, folder, description)
    return folder


def _build_run(settings: Settings, approach: str, tokenizer_directory: Path) -> RunSettings:
    tokenizer = read_tokenizer_manifest(tokenizer_directory)
    run = RunSettings(
        tokenizer=TokenizerSettings(name=tokenizer["name"], kind=tokenizer["kind"]),
        approach=approach,
        sequence_length=settings.sequence_length,
    )
    return replace(run, global_batch=settings.rows, micro_batch=settings.rows)


def _is_current(where: Path, store: Any, corpus: Path) -> bool:
    if not (where / "manifest.json").exists():
        return False
    manifest = open_store(where, store)
    return manifest["corpus_manifest_sha256"] == sha256_file(corpus / "manifest.json")


def _read_whole(files: list[Path]) -> None:
    """Read files that batches are read from, so that they are in the page cache."""
    for path in files:
        if path.suffix != ".parquet":
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 23):
                    pass


def _time_batches(batches: Batches, count: int, number: int) -> dict[str, Any]:
    """Time `count` batches, after as many that are not timed; every round reads other ones."""
    batches.seek({"step": 0})
    for _ in range(count * (1 + number % 2)):
        batches.next()
    cpu_s = []
    for _ in range(count):
        start = time.process_time()
        batches.next()
        cpu_s.append(time.process_time() - start)
    return {"batches": count, "cpu_s": float(np.sum(cpu_s)), "median_s": float(np.median(cpu_s))}


def _read_cold(open_again: Any, files: list[Path], count: int, number: int) -> dict[str, Any]:
    """Count the bytes that the disk delivers for `count` batches; stored ids, or UTF-8, are the
    bytes that are used.
    """
    if reason := page_cache.explain_warm_cache(page_cache.drop_page_cache(files)):
        return {"not_cold": reason}
    batches = open_again()
    for _ in range(TABLE_BATCHES):  # small tables are read whole, once
        batches.next()
    before = _read_bytes()
    used = 0
    start = time.perf_counter()
    for _ in range(count):
        used += batches.next().useful_tokens
    return {
        "batches": count,
        "seconds": time.perf_counter() - start,
        "read_bytes": _read_bytes() - before,
        "useful_tokens": used,
    }


def _wait(batches: Batches) -> dict[str, Any]:
    """Wait for the batches of simulated steps, which leave the cores to the reading thread as a GPU
    does.
    """
    ahead = Prefetcher(batches)
    ahead.next()
    waited = 0.0
    start = time.perf_counter()
    for _ in range(STEPS):
        time.sleep(STEP_S)
        before = time.perf_counter()
        ahead.next()
        waited += time.perf_counter() - before
    seconds = time.perf_counter() - start
    ahead.close()
    return {"steps": STEPS, "wait_s": waited, "seconds": seconds}


def _read_bytes() -> int:
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))


def format_table(result: dict[str, Any]) -> str:
    """Format the result for a terminal: medians over rounds, with ranges of the ratio."""
    sizes = " and ".join(f"{size / 1e6:,.0f} MB" for size in result["text_bytes"].values())
    settings = result["settings"]
    head = (
        f"{settings['rounds']} rounds, batches of {settings['rows']} x "
        f"{settings['sequence_length']}, one core, "
        f"text of {sizes}; waits: share of {STEPS} steps of {STEP_S * 1e3:.0f} ms"
    )
    rows = [
        (
            "approach",
            "given ms",
            "large ms",
            "large / given",
            "cold bytes/token",
            "waits",
            "cold waits",
        )
    ]
    for approach, of_approach in group_by(result["records"], "approach").items():
        given, large = (
            np.array(
                [r["median_s"] for r in of_approach if r["corpus"] == name and "median_s" in r]
            )
            * 1e3
            for name in ("given", "large")
        )
        found = [record for record in of_approach if record["corpus"] == "large"]
        read = [r["read_bytes"] / r["useful_tokens"] for r in found if "read_bytes" in r]
        waits = [
            _median(
                [
                    r["wait_s"] / r["seconds"]
                    for r in found
                    if "wait_s" in r and r["cache"] == cache
                ],
                ".2%",
            )
            for cache in ("warm", "cold")
        ]
        middle = _median(given, ".3f"), _median(large, ".3f"), format_spread(large / given)
        rows.append((approach, *middle, _median(read, ".1f"), *waits))
    return f"{head}\n{format_columns(rows)}"


def _median(values: Sequence[float] | np.ndarray, form: str) -> str:
    return format(float(np.median(values)), form) if len(values) else "–"


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, and print the table. Return the exit code."""
    parser = Parser(prog="python tests/benchmarks/sizes.py", description=__doc__)
    required: dict[str, Any] = {"required": True, "metavar": "FILE", "type": Path}
    parser.add_argument(
        "--settings", default="{}", metavar="JSON", help="sequence_length, rows, batches, rounds"
    )
    parser.add_argument("--corpus", **required, help="results/corpus/NAME/manifest.json")
    parser.add_argument("--tokenizer", **required, help="results/tokenizers/NAME/manifest.json")
    parser.add_argument(
        "--size", required=True, type=float, metavar="GB", help="text of the larger corpus"
    )
    parser.add_argument(
        "--cold", action="store_true", help="also read what is not in the page cache"
    )
    parser.add_argument("--output", **required, help="the JSON to write")
    parsed = parser.parse_args(arguments)
    if not 0 < parsed.size < math.inf:
        parser.error(f"argument --size: {parsed.size} is not above 0")

    def run() -> None:
        settings = from_json(Settings, parsed.settings)
        folders = parsed.corpus.parent, parsed.tokenizer.parent
        print(
            format_table(
                measure(settings, *folders, int(parsed.size * 1e9), parsed.output, cold=parsed.cold)
            )
        )

    return exit_code(run, f"{parser.prog} --help")


if __name__ == "__main__":
    raise SystemExit(main())
