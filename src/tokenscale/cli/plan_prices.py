"""Prices of a configuration's runs, from the settings and the manifests that already exist below
`results/`.
"""

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import canonical_json, read_json
from tokenscale.cli.library_weights import count_library_weights
from tokenscale.costs import prices as costs
from tokenscale.costs.peaks import PEAKS, find_peak
from tokenscale.costs.prices import Price, StoreSize, Total, sum_prices
from tokenscale.runs.launch.submission import cpu_error
from tokenscale.runs.records.provenance import (
    count_gpus,
    describe_machine,
    measure_matrix_rate,
)
from tokenscale.settings import options
from tokenscale.settings.config import Config
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.experiments import Run
from tokenscale.settings.machine import Machine
from tokenscale.settings.options import decode, option, settings_class, to_dict
from tokenscale.settings.registry import BATCHES
from tokenscale.settings.run import RunSettings, start_step
from tokenscale.settings.yaml_files import read_yaml

#: tokenizer kind → its entries, where the kind decides them: known before the tokenizer is built
VOCABULARIES = {"tekken": 131_072}
#: FLOP/s that any CPU reaches: below its hours the machine's own rate need not be measured
LEAST_MATRIX_RATE = 1e9


@dataclass(frozen=True)
class StoreCounts:
    """Number and size of token stores: existing ones, ones whose size is predicted from another
    store of the same text, and the names of those of unknown size.
    """

    existing: int
    existing_bytes: int
    existing_files: int
    predicted: int
    predicted_bytes: int
    unknown: tuple[str, ...]


@settings_class
class GpuPrice:
    """Price of a rented GPU, as an entry of a price file states it. Money stays with its currency
    and date.
    """

    usd_per_gpu_hour: float | None = option(
        None, description="US dollars for a GPU and hour; null: not set", ge=0
    )
    source: str = option("", description="provider, and kind of machine")
    date: datetime.date | None = option(
        None, description="day on which the provider charged this price"
    )


def read_gpu_prices(file: Path) -> dict[str, GpuPrice]:
    """Return name of the GPU → its price. Raises UserError for an invalid file, and for a GPU
    without a known peak.
    """
    prices = {}
    for name, values in read_yaml(file).items():
        if find_peak(str(name)) is None:
            raise unknown(
                "GPU", str(name), [f"NVIDIA {n}" for peak in PEAKS for n in peak.names], file=file
            )
        prices[name] = options.decode(GpuPrice, values, file=str(file), key=name)
    return prices


class RunPrices:
    """Prices of a configuration's runs on a machine, by default its own. A manifest is read when it
    is first needed.
    """

    def __init__(
        self, config: Config, results: Path = Path("results"), machine: Machine | None = None
    ):
        self._config = config
        self._results = results
        self._machine = machine or config.machine
        self._manifests: dict[Path, dict[str, Any] | None] = {}
        self._prices: dict[str, Price] = {}
        #: prefix of run ids → cell → run id → seconds
        self._measured: dict[str, dict[str, dict[str, float]]] = {}

    def price(self, run: Run) -> Price:
        if run.run_id not in self._prices:
            settings = run.settings
            vocabulary = self.read_vocabulary(run.settings)
            price = costs.estimate_run(
                count_library_weights(settings, vocabulary_size=vocabulary),
                self._machine,
                vocabulary_size=vocabulary,
                rows=self._read_rows(settings),
            )
            if seconds := self._measure(run):
                price = replace(
                    price, seconds=median(seconds), unknown=None, bound=None, measured=True
                )
            self._prices[run.run_id] = replace(price, places=run.count_places(self._machine))
        return self._prices[run.run_id]

    def _measure(self, run: Run) -> list[float]:
        """Return the seconds of this run, or else of all runs of its cell, that have ended on this
        machine.
        """
        prefix = run.run_id.rpartition("-")[0]
        if prefix not in self._measured:
            self._measured[prefix] = self._read_times(prefix)
        times = self._measured[prefix].get(_cell_of(to_dict(run.settings)), {})
        if run.run_id in times:
            return [times[run.run_id]]
        return list(times.values())

    def _read_times(self, prefix: str) -> dict[str, dict[str, float]]:
        """Return cell → run id → seconds of the ended runs whose ids begin so."""
        times: dict[str, dict[str, float]] = {}
        here = describe_machine()
        for file in sorted(self._results.glob(f"runs/{prefix}-*/done.json")):
            if found := self._read_time(file.parent, here):
                run_id, cell, seconds = found
                times.setdefault(cell, {})[run_id] = seconds
        return times

    def _read_time(self, folder: Path, here: dict[str, Any]) -> tuple[str, str, float] | None:
        """Return (run id, cell, seconds from start to end) of a run that ended on this machine,
        `here`; None for another.
        """
        try:
            record = read_json(folder / "run.json")
            outcome = record["outcome"]
            hardware = record["hardware"]
            same = all(hardware[key] == here.get(key) for key in ("architecture", "cpu", "cores"))
            if record["launch"]["machine"] != self._machine.name or not (
                same or self._machine != Machine()
            ):
                return None
            seconds = outcome["ended_unix_s"] - record["started_unix_s"]
            steps = outcome["steps"] - outcome["begins_at"]
            whole = outcome["steps"] - start_step(decode(RunSettings, values=record["run"]))
            return folder.name, _cell_of(record["run"]), seconds * whole / steps
        except (ValueError, LookupError, TypeError, ArithmeticError, UserError):
            return None  # incomplete, or of another version

    def read_vocabulary(self, run: RunSettings) -> int | None:
        """Return the entries of a run's tokenizer; None where it is not built and its kind does not
        decide them.
        """
        manifest = self.read_manifest("tokenizers", run.tokenizer.name)
        return manifest["vocabulary_size"] if manifest else VOCABULARIES.get(run.tokenizer.kind)

    def is_done(self, run_id: str) -> bool:
        """Return whether a run has ended; Snakemake may still find a reason to run it again
        (`snakemake -n`).
        """
        return (self._results / "runs" / run_id / "done.json").is_file()

    def time_limit_minutes(self, run: Run) -> int:
        return costs.job_minutes(self.price(run), self._machine)

    def sum_by_experiment(self, run_ids: Iterable[str]) -> dict[str, Total]:
        """Return experiment → total price of its requested runs; experiments without a requested
        run are left out.

        A run that several experiments need counts for the first one.
        """
        wanted = set(run_ids)
        found = {}
        chosen = [n for n in self._config.settings.experiments if self._config.has_scale(n)]
        # resolving all experiments takes a second
        for names in (lambda: chosen, lambda: self._config.usable(chosen)):
            for name in names() if wanted else ():
                runs = [run for run in self._config.runs(name) if run.run_id in wanted]
                wanted -= {run.run_id for run in runs}
                if runs:
                    found[name] = sum_prices(self.price(run) for run in runs)
        return found

    def find_cpu_error(self, run_ids: Iterable[str]) -> UserError | None:
        """Return the error for runs that take this machine's CPU longer than the configuration
        allows; None where they do not, or where a GPU or other machines compute them.

        Hours are the fewest that their matrix products can take.
        """
        run_ids = list(run_ids)
        if not run_ids or self._machine.gpus_per_node is not None or count_gpus():
            return None
        runs = self._config.all_runs(self._config.usable(()))
        flops = [self.price(runs[run_id]).flops or 0.0 for run_id in run_ids if run_id in runs]
        allowed = self._config.settings.budget.cpu_hours
        if sum(flops) < allowed * 3600 * LEAST_MATRIX_RATE:
            return None
        return cpu_error(flops, rate=measure_matrix_rate(), allowed_hours=allowed)

    def count_stores(self, names: list[str]) -> StoreCounts:
        """Count the token stores that experiments need."""
        existing = []
        predicted = []
        unknown = []
        for corpus, tokenizer, directory in self._config.stores(names):
            store = StoreSettings.parse(directory)
            manifest = self.read_manifest("tokens", corpus, tokenizer, directory)
            if manifest is not None:
                existing.append(manifest["files"] + manifest.get("records", {}).get("files", []))
            elif (similar := self._find_similar_store(corpus, tokenizer, store)) is not None:
                counts = similar["documents"], _count_tokens(similar), similar["vocabulary_size"]
                predicted.append(costs.store_bytes(store, *counts))
            else:
                unknown.append(f"{corpus}/{tokenizer}/{directory}")
        size = sum(file["bytes"] for files in existing for file in files)
        files = sum(len(f) + 2 for f in existing)
        # 2 files more: manifest.json and build.json
        return StoreCounts(
            existing=len(existing),
            existing_bytes=size,
            existing_files=files,
            predicted=len(predicted),
            predicted_bytes=sum(predicted),
            unknown=tuple(unknown),
        )

    def _read_rows(self, run: RunSettings) -> StoreSize | None:
        """Return the size of the store that a run reads, or of an equivalent store if it tokenizes
        while training.

        Before that store exists, bounds of its size; None without any.
        """
        if run.budget.kind not in ("epochs", "useful_tokens"):
            return None
        store = run.store or StoreSettings(
            "padded", sequence_length=run.sequence_length, eos=run.eos
        )
        manifest = self.read_manifest(
            "tokens", run.corpus.name, run.tokenizer.name, store.directory
        )
        stream = BATCHES[run.approach].streams
        if manifest is not None:
            rows = manifest["rows"]
            if stream:
                rows = Fraction(_count_tokens(manifest), run.sequence_length)
            return StoreSize(rows, useful_tokens=manifest["tokens_useful"])
        if run.budget.kind == "useful_tokens":
            useful = costs.min_useful_tokens(run, streams=stream)
            return (
                StoreSize(
                    per_epoch=1, useful_tokens=useful, bound="the fewest useful tokens per row"
                )
                if useful
                else None
            )
        documents, tokens, source = self._bound_text_size(run, store)
        rows = costs.max_rows(
            run,
            streams=stream,
            documents=documents,
            tokens=tokens,
        )
        return (
            StoreSize(
                per_epoch=rows, useful_tokens=0, bound=f"the most rows of an epoch, from {source}"
            )
            if rows
            else None
        )

    def _bound_text_size(
        self, run: RunSettings, store: StoreSettings
    ) -> tuple[int | None, int | None, str]:
        """Return upper bounds (documents, tokens, source) of the text that a run reads; None where
        there is no bound.

        The source is another store of the same text, the corpus, or what the configuration declares
        of the corpus.
        """
        corpus = run.corpus
        if (
            similar := self._find_similar_store(
                corpus.name, tokenizer=run.tokenizer.name, store=store
            )
        ) is not None:
            return similar["documents"], _count_tokens(similar), "another store of the same text"
        built = self.read_manifest("corpus", corpus.name) or {}
        try:
            split = built["splits"]["train"]
            # no tokenizer makes more tokens than bytes; beside them two control tokens for each
            # text of a pair
            return split["rows"], split["utf8_bytes"] + 4 * split["rows"], "the corpus"
        except (TypeError, KeyError):  # missing, or of another kind
            source = corpus.source
            stated = [
                n
                for n in (source.documents, source.published_documents, source.maximum_documents)
                if n
            ]
            return min(stated, default=None), None, "the configuration of the corpus"

    def _find_similar_store(
        self, corpus: str, tokenizer: str, store: StoreSettings
    ) -> dict[str, Any] | None:
        """Return the manifest of any store with the same documents and the same ids."""
        for folder in sorted((self._results / "tokens" / corpus / tokenizer).glob("*/")):
            manifest = self.read_manifest("tokens", corpus, tokenizer, folder.name) or {}
            options = manifest.get("options", {})
            if (
                options.get("split") == store.split
                and options.get("eos") == store.eos
                and "tokens_useful" in manifest
            ):
                return manifest
        return None

    def read_manifest(self, *where: str) -> dict[str, Any] | None:
        """Read a manifest below results without validating it; prices do not need that. None where
        it is missing.
        """
        path = self._results.joinpath(*where, "manifest.json")
        if path not in self._manifests:
            try:
                self._manifests[path] = read_json(path)
            except UserError:
                self._manifests[path] = None
        return self._manifests[path]


def _cell_of(settings: dict[str, Any]) -> str:
    """Return what all repeats of a cell have in common."""
    return canonical_json(
        {key: value for key, value in settings.items() if key not in ("repeat", "seed")}
    )


def _count_tokens(manifest: dict[str, Any]) -> int:
    """Count the tokens of a store's documents: n tokens have n - 1 useful ones, less those that are
    cut.
    """
    return manifest["tokens_useful"] + manifest["tokens_cut"] + manifest["documents"]
