"""How fast is text turned into batches, and batches read: the five approaches, side by side, without a model.

One process, one core, warm page cache. In each round every arm opens its source anew and takes the same number of
batches; the order of the arms changes from round to round, so that drift of the machine falls on all alike. In the
same round, copying a batch's arrays is timed: no reader can beat it. Before anything is timed, online and offline arms
of a pair are compared bit for bit. Times and counts are recorded, rates are left to the analysis.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.batches.batch import Batch, Batches
from tokenscale.batches.open import open_batches
from tokenscale.corpus.reader import read_manifest as read_corpus_manifest
from tokenscale.errors import UserError
from tokenscale.files import sha256_file, write_json
from tokenscale.order.permutation import permute
from tokenscale.records import hardware
from tokenscale.records.provenance import versions
from tokenscale.settings.benchmark import DataBenchmarkSettings
from tokenscale.settings.data import CorpusSettings, TokenizerSettings
from tokenscale.settings.options import to_dict
from tokenscale.settings.run import APPROACHES, RunSettings
from tokenscale.tokenizer.manifest import read_manifest

VERSION = 1
PAIRS = (("padded", "pretokenized-padded"), ("padding-free", "token-list"))
MEMCPY = "memcpy"


def measure(
    settings: DataBenchmarkSettings, corpus_directory: Path, tokenizer_directory: Path, stores: Path, output: Path
) -> dict[str, Any]:
    """Run the benchmark and write its one JSON file; returns what was written.

    `stores` is results/tokens/<corpus>/<tokenizer>; it must hold the three formats at this sequence length. Raises
    UserError for a store that is missing or does not match, and for a pair whose batches differ.
    """
    runs = {approach: _run(settings, approach, corpus_directory, tokenizer_directory) for approach in APPROACHES}

    def opened(approach: str) -> Batches:
        run = runs[approach]
        return open_batches(
            run,
            corpus_directory=corpus_directory,
            tokenizer_directory=tokenizer_directory,
            store_directory=stores / run.store.directory if run.store else None,
        )

    with _one_core() as core:
        checked = _check_pairs(opened, settings)
        rounds = [_round(opened, settings, number) for number in range(settings.rounds)]
    result = {
        "schema": VERSION,
        "benchmark": "data",
        "settings": {name: getattr(settings, name) for name in ("sequence_length", "rows", "batches", "rounds")},
        "corpus": runs["packed"].corpus.name,
        "corpus_manifest_sha256": sha256_file(corpus_directory / "manifest.json"),
        "tokenizer": runs["packed"].tokenizer.name,
        "tokenizer_file_sha256": read_manifest(tokenizer_directory)["file"]["sha256"],
        "approaches": {approach: to_dict(run, science_only=True) for approach, run in runs.items()},
        "cache": "warm",
        "checked": checked,
        "hardware": {**hardware.describe(), "core_used": core},
        "versions": versions(),
        "finished_unix_s": time.time(),
        "records": [record for records in rounds for record in records],
    }
    write_json(output, result)
    return result


def table(result: dict[str, Any]) -> str:
    """The result for a terminal: medians over rounds, and useful tokens a second as sum over sum."""
    settings = result["settings"]
    lines = [
        f"{settings['rounds']} rounds of {settings['batches']} batches of {settings['rows']} x "
        f"{settings['sequence_length']}, one core, page cache {result['cache']}",
        f"{'arm':<20} {'open s':>8} {'median ms':>10} {'mean ms':>9} {'useful':>7} {'useful tokens/s':>16} "
        f"{'x memcpy':>9}",
    ]
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for record in result["records"]:
        by_arm.setdefault(record["arm"], []).append(record)
    copy_s = float(np.median([s for record in by_arm[MEMCPY] for s in record["batch_s"]]))
    for arm, records in by_arm.items():
        batch_s = float(np.median([s for record in records for s in record["batch_s"]]))
        useful = sum(record["useful_tokens"] for record in records)
        total = sum(record["total_tokens"] for record in records)
        seconds = sum(record["seconds"] for record in records)
        mean_s = seconds / sum(record["batches"] for record in records)
        opening = float(np.median([record["open_s"] for record in records]))
        lines.append(
            f"{arm:<20} {opening:>8.3f} {batch_s * 1e3:>10.3f} {mean_s * 1e3:>9.3f} {useful / total:>7.1%} "
            f"{useful / seconds:>16,.0f} {batch_s / copy_s:>9.1f}"
        )
    lines.append("x memcpy: ratio of medians. Opening holds the decoding of a Parquet store that fits the cache")
    return "\n".join(lines)


def _run(
    settings: DataBenchmarkSettings, approach: str, corpus_directory: Path, tokenizer_directory: Path
) -> RunSettings:
    """The same run for every arm but for its approach. Kind and name of the tokenizer are the manifest's."""
    tokenizer = read_manifest(tokenizer_directory)
    corpus = read_corpus_manifest(corpus_directory)
    run = RunSettings(
        corpus=CorpusSettings(name=corpus["name"]),
        tokenizer=TokenizerSettings(name=tokenizer["name"], kind=tokenizer["kind"]),
        approach=approach,
        sequence_length=settings.sequence_length,
    )
    return replace(run, global_batch=settings.rows, micro_batch=settings.rows)


def _round(opened: Any, settings: DataBenchmarkSettings, number: int) -> list[dict[str, Any]]:
    """Every arm once, in this round's order, and the copy of the last batch's arrays."""
    arms = [*APPROACHES, MEMCPY]
    records = []
    example = _take(opened("packed"), 1)[0]
    for i in permute(np.arange(len(arms)), len(arms), seed=0, epoch=number).tolist():
        record = _memcpy(example, settings) if arms[i] == MEMCPY else _arm(opened, arms[i], settings)
        records.append({"arm": arms[i], "round": number, "batches": settings.batches, **record})
    return records


def _arm(opened: Any, approach: str, settings: DataBenchmarkSettings) -> dict[str, Any]:
    start = time.perf_counter()
    batches = opened(approach)
    open_s = time.perf_counter() - start
    batch_s = []
    useful = total = 0
    for _ in range(settings.batches):
        start = time.perf_counter()
        batch = batches.next()
        batch_s.append(time.perf_counter() - start)
        useful += batch.useful_tokens
        total += batch.total_tokens
    return {
        "open_s": open_s,
        "batch_s": batch_s,
        "median_batch_s": float(np.median(batch_s)),
        "seconds": sum(batch_s),
        "useful_tokens": useful,
        "total_tokens": total,
    }


def _memcpy(batch: Batch, settings: DataBenchmarkSettings) -> dict[str, Any]:
    """Copying the inputs and labels of one batch, int64, into memory that is there already: the limit."""
    sources = [np.ascontiguousarray(batch.tokens_bt), np.ascontiguousarray(batch.labels_bt)]
    targets = [np.zeros_like(source) for source in sources]
    batch_s = []
    for _ in range(settings.batches):
        start = time.perf_counter()
        for source, target in zip(sources, targets, strict=True):
            np.copyto(target, source)
        batch_s.append(time.perf_counter() - start)
    return {
        "open_s": 0.0,
        "batch_s": batch_s,
        "median_batch_s": float(np.median(batch_s)),
        "seconds": sum(batch_s),
        "useful_tokens": batch.useful_tokens * settings.batches,
        "total_tokens": batch.total_tokens * settings.batches,
    }


def _check_pairs(opened: Any, settings: DataBenchmarkSettings) -> list[dict[str, Any]]:
    """Compare the first batches of each pair; what one round reads is read here once, which warms the page cache."""
    checked = []
    for online, offline in PAIRS:
        pair = zip(_take(opened(online), settings.batches), _take(opened(offline), settings.batches), strict=True)
        for number, (a, b) in enumerate(pair):
            if not (np.array_equal(a.tokens_bt, b.tokens_bt) and np.array_equal(a.labels_bt, b.labels_bt)):
                raise UserError(
                    f"{online} and {offline} give different batches: nothing was timed.",
                    batch=number,
                    digests=f"{a.order_digest} and {b.order_digest}",
                    next="rebuild the store; if they still differ, this is a bug worth reporting",
                )
        checked.append({"online": online, "offline": offline, "identical_batches": settings.batches})
    _take(opened("packed"), settings.batches)
    return checked


def _take(batches: Batches, count: int) -> list[Batch]:
    return [batches.next().copy() for _ in range(count)]


@contextmanager
def _one_core() -> Iterator[int | None]:
    """Hold this process, threads of libraries included, to one core. None where the system cannot."""
    if not hasattr(os, "sched_setaffinity"):
        yield None
        return
    before = os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(0, {core})
    try:
        yield core
    finally:
        os.sched_setaffinity(0, before)
