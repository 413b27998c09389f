"""Benchmark of tokenizing and reading without a model: all approaches side by side on the same ids.

One process on one core. In each round every arm reopens its source and reads batches; the order of
the arms changes between rounds, so that drift affects all equally. The limit is measured in the
same rounds: copying two int64 tensors of a batch's shape, from a pool as large as the token file,
so that the copy reads memory like a reader. Before timing, online and offline arms of a pair are
compared bit for bit. Times and counts are recorded; the analysis computes rates.
"""

import argparse
import dataclasses
import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.base.files import sha256_file, write_sealed
from tokenscale.benchmark import machine, studies
from tokenscale.benchmark.machine import make_timing_record
from tokenscale.benchmark.rounds import group_by, interleave
from tokenscale.data.batches.batch import Batch, Batches, Inputs
from tokenscale.data.batches.open import open_batches
from tokenscale.data.batches.stored import PackedBatches
from tokenscale.data.corpus.raw_text import read_corpus_manifest
from tokenscale.data.stores.manifest import open_store
from tokenscale.data.stores.packed import PackedStore
from tokenscale.data.tokenizers.base import read_tokenizer_manifest
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.runs.records import provenance
from tokenscale.runs.records.provenance import find_versions
from tokenscale.settings.benchmarks import DataBenchmarkSettings, Engine
from tokenscale.settings.data import CorpusSettings, StoreSettings, TokenizerSettings
from tokenscale.settings.options import from_json, to_dict
from tokenscale.settings.registry import BATCHES
from tokenscale.settings.run import APPROACHES, RunSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    required: dict[str, Any] = {"required": True, "type": Path}
    parser.add_argument(
        "--settings", default="{}", metavar="JSON", help="sequence_length, rows, batches, rounds"
    )
    parser.add_argument(
        "--corpus", **required, metavar="FILE", help="results/corpus/NAME/manifest.json"
    )
    parser.add_argument(
        "--tokenizer", **required, metavar="FILE", help="results/tokenizers/NAME/manifest.json"
    )
    parser.add_argument(
        "--stores", **required, metavar="DIR", help="results/tokens/CORPUS/TOKENIZER"
    )
    parser.add_argument("--output", **required, metavar="FILE", help="the JSON to write")


def run(arguments: argparse.Namespace) -> None:
    """Run the benchmark and print its table."""
    folders = arguments.corpus.parent, arguments.tokenizer.parent, arguments.stores
    print(
        format_table(
            measure(
                from_json(DataBenchmarkSettings, text=arguments.settings),
                *folders,
                arguments.output,
            )
        )
    )


LIMIT = "memcpy"
ONLINE = tuple(name for name, approach in BATCHES.items() if approach.online)
#: further readers of a packed store
PACKED = ("packed, first touch", "packed, int32")


@dataclass(frozen=True)
class Arm:
    """Reader from files to batches.

    `what` is an approach, another reader of packed rows, an arm of the studies, another library, or
    the limit. `engine` is None for arms that read a store, and for the engine of `auto`.
    """

    what: str
    engine: Engine | None = None
    cold: bool = False
    workers: int | None = None  # of torch's DataLoader; None: without a DataLoader

    @property
    def name(self) -> str:
        """Name in records and figures.

        >>> Arm("padded", engine="tiktoken", workers=2).name, Arm("packed", cold=True).name
        ('padded, tiktoken, DataLoader 2', 'packed, cold')
        """
        loader = None if self.workers is None else f"DataLoader {self.workers}"
        return ", ".join(
            part for part in (self.what, self.engine, "cold" if self.cold else None, loader) if part
        )


VERSION = 3
PAIRS = tuple((entry.twin, approach) for approach, entry in BATCHES.items() if entry.twin)
#: arms that are too fast for a few batches to be meaningful
TIMES_AS_MANY = 64
FAST = {LIMIT, "packed", *PACKED}
POOL_BYTES = 2 << 30


def measure(
    settings: DataBenchmarkSettings,
    corpus: Path,
    tokenizer: Path,
    stores: Path,
    output: Path,
    open_sources: Callable[..., "Sources"] | None = None,
) -> dict[str, Any]:
    """Run the benchmark and write its one JSON file; returns what was written.

    `stores` is results/tokens/<corpus>/<tokenizer> with the stores of
    `config.list_benchmark_stores`. `open_sources` may return further arms. Raises UserError for a
    missing or mismatched store, and for a pair with different batches.
    """
    bench: Sources = (open_sources or Sources)(settings, corpus, tokenizer, stores)
    arms, left_out = bench.list_arms()
    core = min(bench.cores) if bench.cores else None
    with machine.pin_to_cores({core} if core is not None else set()):
        checked = bench.check_pairs()
        gc.collect()
        gc.freeze()  # exclude existing objects from the collections before each arm
        try:
            records = [
                bench.record(arm, number)
                for number, arm in interleave(arms, rounds=settings.rounds)
            ]
        finally:
            gc.unfreeze()
    run = bench.runs["packed"]
    result = {
        "schema": VERSION,
        "benchmark": "data",
        "settings": {
            name: list(v) if isinstance(v, tuple) else v
            for name, v in dataclasses.asdict(settings).items()
        },
        "corpus": run.corpus.name,
        "corpus_manifest_sha256": sha256_file(corpus / "manifest.json"),
        "tokenizer": run.tokenizer.name,
        "tokenizer_file_sha256": read_tokenizer_manifest(tokenizer)["file"]["sha256"],
        "engine": bench.engine,
        "approaches": {
            approach: to_dict(run, science_only=True) for approach, run in bench.runs.items()
        },
        "limit": {
            "pool_bytes": bench.pool_bytes,
            "what": "two torch copy_ of int64 [rows, sequence_length]",
        },
        "token_file_bytes": bench.token_file_bytes,
        "left_out": left_out,
        "peers": bench.peers,
        "checked": checked,
        "hardware": {**provenance.describe_machine(), "core_used": core},
        "versions": find_versions(),
        "finished_unix_s": time.time(),
        "records": records,
    }
    write_sealed(output, record=result)
    return result


class Sources:
    """Sources to measure, reopened for each arm of each round."""

    def __init__(
        self, settings: DataBenchmarkSettings, corpus: Path, tokenizer: Path, stores: Path
    ):
        self.settings = settings
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.stores = stores
        self.runs = {
            approach: _build_run(
                settings,
                approach,
                corpus=corpus,
                tokenizer=tokenizer,
            )
            for approach in APPROACHES
        }
        self.peers: dict[str, str] = {}  # versions of other libraries
        self.cores = machine.available_cores()
        packed = self.runs["packed"].store
        assert packed is not None  # the approach reads one
        self._packed = stores / packed.directory
        self._manifest = open_store(self._packed, expected=packed)
        self.token_file_bytes = sum(
            file["bytes"] for file in self._manifest["files"] if "checked_by" in file
        )
        self.pool_bytes = min(self.token_file_bytes, POOL_BYTES)
        self.engine = load_tokenizer(tokenizer).engine
        self.engines, self.left_out = machine.list_engines(
            settings.engines, tokenizer, auto=self.engine
        )
        self._pool: list[Any] = []

    def list_arms(self) -> tuple[list[Arm], dict[str, str]]:
        """Return (arms, arm → reason why it is left out)."""
        arms = [Arm(approach) for approach in APPROACHES]
        files = self.files()
        arms += [Arm(online, engine) for engine in self.engines for online in ONLINE]
        left_out: dict[str, str] = {}
        reason = studies.explain_missing() if self.settings.studies else None
        if reason is not None:
            left_out |= dict.fromkeys(studies.ARMS, reason)
        elif self.settings.studies:
            arms += [Arm(name) for name in studies.ARMS]
        for arm in [Arm(arm.what, cold=True) for arm in arms if arm.engine is None]:
            reason = machine.explain_warm_cache(machine.drop_page_cache(files[arm.what]))
            if reason is None:
                arms.append(arm)
            else:
                left_out[arm.name] = reason
        arms += [
            Arm(what=arm.what, engine=arm.engine, workers=n)
            for arm in arms
            if not arm.cold
            for n in self.settings.workers
        ]
        left_out |= {
            f"{online}, {engine}": why for engine, why in self.left_out.items() for online in ONLINE
        }
        return [*arms, *map(Arm, PACKED), Arm(LIMIT)], left_out

    def open(self, arm: Arm) -> Batches:
        run = self.runs[arm.what]
        run = replace(run, engine=arm.engine) if arm.engine else run
        return open_batches(run, inputs=self.inputs(run))

    def inputs(self, run: RunSettings) -> Inputs:
        return Inputs(
            corpus=self.corpus,
            tokenizer=self.tokenizer,
            store=self.stores / run.store.directory if run.store else None,
        )

    def files(self) -> dict[str, list[Path]]:
        """Return arm → files it reads: the text for online arms, and all files of its store.

        The tokenizer's file is left out: all arms read it with the same code, so it may stay in the
        page cache.
        """
        text = [
            self.corpus / file["name"]
            for file in read_corpus_manifest(self.corpus)["splits"]["train"]["files"]
        ]
        text += sorted((self.corpus / "records").glob("*"))
        folders = {approach: self.inputs(run).store for approach, run in self.runs.items()}
        if self.settings.studies:
            study = self._study_folders()
            read = (None, None, study["token-list"], study["padded"])
            folders |= zip(studies.ARMS, read, strict=True)
        found = {}
        for what, folder in folders.items():
            stored = sorted(folder.rglob("*")) if folder is not None else []
            of_text = text if folder is None or what in ONLINE else []
            found[what] = [*of_text, *(path for path in stored if path.is_file())]
        return found

    def record(self, arm: Arm, number: int) -> dict[str, Any]:
        """Measure an arm once, in a round."""
        machine.release_memory()
        before = machine.anonymous_bytes()
        many = arm.what in FAST and not arm.cold and arm.workers is None
        count = self.settings.batches * (TIMES_AS_MANY if many else 1)
        kept_share = machine.drop_page_cache(self.files()[arm.what]) if arm.cold else None
        record, kept = self.measure_arm(arm, count)
        record.setdefault("memory_bytes", max(0, machine.anonymous_bytes() - before))
        del kept
        place = {
            "arm": arm.name,
            "round": number,
            "batches": count,
            "cache": "cold" if arm.cold else "warm",
        }
        place |= {
            "engine": (arm.engine or self.engine) if arm.what in ONLINE else None,
            "workers": arm.workers,
        }
        return {**place, **({"kept_share": kept_share} if arm.cold else {}), **record}

    def check_pairs(self) -> list[dict[str, Any]]:
        """Compare the first batches of each pair, with every engine. Raises UserError if they
        differ.

        Also warms the page cache, since it reads everything that a round reads.
        """
        checked = []
        count = self.settings.batches
        for online, offline in PAIRS:
            for arm in [Arm(online), *(Arm(online, engine) for engine in self.engines)]:
                sides = (_take_batches(self.open(one), count) for one in (arm, Arm(offline)))
                for number, (a, b) in enumerate(zip(*sides, strict=True)):
                    if not (
                        np.array_equal(a.tokens_bt, b.tokens_bt)
                        and np.array_equal(a.labels_bt, b.labels_bt)
                    ):
                        what = f"{arm.name} and {offline} give different batches."
                        next_step = "rebuild the store; if they still differ, report a bug"
                        raise UserError(
                            what,
                            batch=number,
                            digests=f"{a.order_digest} and {b.order_digest}",
                            next=next_step,
                        )
                checked.append({"online": arm.name, "offline": offline, "identical_batches": count})
        batches = self.open(Arm("packed"))
        for _ in range(count * TIMES_AS_MANY):
            batches.next()
        return checked

    def packed_rows(self) -> np.ndarray:
        store = PackedStore(self._packed, self._manifest)
        return store.stored(np.arange(len(store)))

    def measure_arm(self, arm: Arm, count: int) -> tuple[dict[str, Any], Any]:
        """Measure one arm. Returns (record, object that keeps the arm's memory alive)."""
        if arm.what == LIMIT:
            return self._measure_copies(count)
        if arm.workers is not None:
            return self._measure_with_loader(arm, count), None
        start = time.perf_counter()
        if arm.what in studies.ARMS:
            theirs = self._open_study(arm.what)
            return _time_batches(
                theirs.next,
                counts=lambda batch: batch[2:],
                count=count,
                start=start,
            ), theirs
        batches = self._open_packed(arm) if arm.what in ("packed", *PACKED) else self.open(arm)
        counts = attrgetter("useful_tokens", "total_tokens")
        return _time_batches(
            batches.next,
            counts,
            count=count,
            start=start,
        ), batches

    def _open_study(self, arm: str) -> studies.StudyBatches:
        rows = self.settings.rows
        length = self.settings.sequence_length
        return studies.open_arm(
            arm,
            rows,
            sequence_length=length,
            corpus=self.corpus,
            tokenizer=self.tokenizer,
            stores=self._study_folders(),
        )

    def _study_folders(self) -> dict[str, Path]:
        storage: dict[str, Any] = {
            "sequence_length": self.settings.sequence_length,
            **studies.STORAGE,
        }
        return {
            form: self.stores / StoreSettings(form, **storage).directory
            for form in ("padded", "token-list")
        }

    def _measure_with_loader(self, arm: Arm, count: int) -> dict[str, Any]:
        """Measure an arm through torch's DataLoader."""
        from tokenscale.benchmark import workers
        from tokenscale.data.batches.torch_data import BatchStream

        def make() -> Any:
            if arm.what in studies.ARMS:
                return workers.AnyReader(lambda: self._open_study(arm.what))
            run = self.runs[arm.what]
            run = replace(run, engine=arm.engine) if arm.engine else run
            return BatchStream(run, inputs=self.inputs(run))

        assert arm.workers is not None  # else there is no loader
        with machine.pin_to_cores(self.cores):
            return workers.measure(make, batches=count, workers=arm.workers)

    def _open_packed(self, arm: Arm) -> PackedBatches:
        """Open a reader of the packed store; only cold and first-touch arms verify rows."""
        run = self.runs["packed"]
        verify = arm.cold or arm.what == "packed, first touch"
        store = PackedStore(where=self._packed, manifest=self._manifest, verify=verify)
        out = np.int32 if arm.what == "packed, int32" else np.int64
        return PackedBatches(
            store=store,
            run=run,
            inputs=Inputs(),
            out=out,
        )

    def _measure_copies(self, count: int) -> tuple[dict[str, Any], Any]:
        """Measure the limit: copy inputs and labels of a batch, int64, into existing memory."""
        import torch

        torch.set_num_threads(1)
        shape = (self.settings.rows, self.settings.sequence_length)
        if not self._pool:
            tensors = max(2, self.pool_bytes // (8 * shape[0] * shape[1]))
            self._pool = [torch.randint(0, 100_000, shape) for _ in range(tensors)]
        tokens = torch.empty(shape, dtype=torch.int64)
        labels = torch.empty(shape, dtype=torch.int64)
        pool = itertools.cycle(self._pool)

        def copy() -> int:
            tokens.copy_(next(pool))
            labels.copy_(next(pool))
            return tokens.numel()

        record = _time_batches(
            copy,
            counts=lambda total: (total, total),
            count=count,
            start=time.perf_counter(),
        )
        return record | {"memory_bytes": 0}, None


def _time_batches(
    take: Callable[[], Any], counts: Callable[[Any], tuple[int, int]], count: int, start: float
) -> dict[str, Any]:
    """Time `count` batches; the time since `start` is opening."""
    open_s = time.perf_counter() - start
    batch_s = []
    useful = 0
    total = 0
    for _ in range(count):
        start = time.perf_counter()
        batch = take()
        batch_s.append(time.perf_counter() - start)
        found = counts(batch)
        useful = useful + found[0]
        total = total + found[1]
    return make_timing_record(
        open_s,
        batch_s,
        useful_tokens=useful,
        total_tokens=total,
    )


def _take_batches(batches: Batches, count: int) -> list[Batch]:
    return [batches.next().copy() for _ in range(count)]


def _build_run(
    settings: DataBenchmarkSettings, approach: str, corpus: Path, tokenizer: Path
) -> RunSettings:
    """Return the run of an arm; arms differ in the approach only. The tokenizer is the
    manifest's.
    """
    made = read_tokenizer_manifest(tokenizer)
    rows = settings.rows
    read = (
        CorpusSettings(name=read_corpus_manifest(corpus)["name"]),
        TokenizerSettings(made["name"], kind=made["kind"]),
    )
    run = RunSettings(*read, approach=approach, sequence_length=settings.sequence_length)
    return replace(run, global_batch=rows, micro_batch=rows)


OURS = ("packed", "packed, first touch", "packed, int32", "packed, cold")


class Table:
    """Records of a result by arm: seconds per batch of each round."""

    def __init__(self, result: dict[str, Any]):
        self.records = group_by(result["records"], "arm")
        self.batch_s = {
            arm: np.array(
                [r["seconds"] / r["batches"] for r in sorted(records, key=lambda r: r["round"])]
            )
            for arm, records in self.records.items()
        }

    def ratio(self, arm: str, to: str) -> tuple[float, float, float]:
        """Return (median, minimum, maximum) over rounds of the ratio of two arms' times per
        batch.
        """
        found = self.batch_s[arm] / self.batch_s[to]
        return float(np.median(found)), float(found.min()), float(found.max())


def format_table(result: dict[str, Any]) -> str:
    """Format the result for a terminal: medians and ranges over rounds, then the main ratios."""
    found = Table(result)
    settings = result["settings"]
    width = max(map(len, found.records))
    lines = [
        f"{settings['rounds']} rounds, batches of {settings['rows']} x "
        f"{settings['sequence_length']}, one core, "
        f"token file {result['token_file_bytes'] / 1e6:.0f} MB; engine {result['engine']}",
        f"{'arm':<{width}} {'open s':>7} {'MB held':>8} {'us a batch':>11} "
        f"{'range of rounds':>21} {'useful':>7} "
        f"{'x memcpy':>9}",
    ]
    for arm in sorted(found.records, key=lambda arm: float(np.median(found.batch_s[arm]))):
        records = found.records[arm]
        us = found.batch_s[arm] * 1e6
        useful = sum(r["useful_tokens"] for r in records) / sum(r["total_tokens"] for r in records)
        opening, held = (
            float(np.median([r[key] for r in records])) for key in ("open_s", "memory_bytes")
        )
        lines.append(
            f"{arm:<{width}} {opening:>7.3f} {held / 1e6:>8.1f} {np.median(us):>11,.1f} "
            f"{us.min():>9,.1f} – "
            f"{us.max():>9,.1f} {useful:>7.1%} {found.ratio(arm, LIMIT)[0]:>9,.2f}"
        )
    lines += ["", "ratios in the same round, median (minimum – maximum):"]
    for name, (mid, low, high) in sorted(compute_ratios(found).items(), key=lambda item: item[1]):
        lines.append(f"  {name:<{width + 9}} {mid:>9,.2f}  ({low:,.2f} – {high:,.2f})")
    if {"packed", "packed, first touch"} <= found.records.keys():
        extra = (found.batch_s["packed, first touch"] - found.batch_s["packed"]) * 1e6
        spread = f"({extra.min():.2f} – {extra.max():.2f})"
        lines.append(
            f"  {'checksums on first touch, us a batch':<{width + 9}} {np.median(extra):>9.2f}  "
            f"{spread}"
        )
    lines += [f"left out: {arm}: {reason}" for arm, reason in result["left_out"].items()]
    return "\n".join(lines)


def compute_ratios(found: Table) -> dict[str, tuple[float, float, float]]:
    """Return the ratio of packed to the limit, and of all other arms to packed."""
    named = {
        f"{arm} / {LIMIT}": found.ratio(arm, to=LIMIT) for arm in OURS[:3] if arm in found.records
    }
    others = [arm for arm in found.records if arm not in OURS and arm != LIMIT]
    return named | {f"{arm} / packed": found.ratio(arm, to="packed") for arm in others}
