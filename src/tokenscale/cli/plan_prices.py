"""Prices of a configuration's runs, with what `results/` says already: vocabularies, token stores, finished runs."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenscale.costs.prices import (
    Price,
    Rows,
    Total,
    fewest_useful,
    job_minutes,
    most_rows,
    price,
    store_bytes,
    total,
)
from tokenscale.settings.config import Config
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.experiments import Run
from tokenscale.settings.registry import BATCHES
from tokenscale.settings.run import RunSettings

#: tokenizer kind → its entries, where the kind decides them: known before the tokenizer is built
VOCABULARIES = {"tekken": 131_072}


@dataclass(frozen=True)
class Stores:
    """Token stores: those that are there, those whose tokens another store of the same text knows, and the others."""

    there: int
    there_bytes: int
    there_files: int
    foreseen: int
    foreseen_bytes: int
    unknown: tuple[str, ...]


class Priced:
    """The runs of a configuration, priced on its machine. Manifests are read once, when they are first asked for."""

    def __init__(self, config: Config, results: Path = Path("results")):
        self._config, self._results = config, results
        self._manifests: dict[Path, dict[str, Any] | None] = {}
        self._prices: dict[str, Price] = {}

    def price(self, run: Run) -> Price:
        """Of one run."""
        if run.run_id not in self._prices:
            settings, manifest = run.settings, self._manifest("tokenizers", run.settings.tokenizer.name)
            vocabulary = manifest["vocabulary_size"] if manifest else VOCABULARIES.get(settings.tokenizer.kind)
            self._prices[run.run_id] = price(settings, self._config.machine, vocabulary, self._rows(settings))
        return self._prices[run.run_id]

    def done(self, run_id: str) -> bool:
        """Whether a run has ended; Snakemake may still find a reason to run it again (`status --stale`)."""
        return (self._results / "runs" / run_id / "done.json").is_file()

    def minutes(self, run: Run) -> int:
        """Time limit of the run's job."""
        return job_minutes(self.price(run), self._config.machine)

    def totals(self, run_ids: Iterable[str]) -> dict[str, Total]:
        """Experiment → what its requested runs take; experiments without a requested run are left out.

        A run that several experiments need counts for the first one.
        """
        wanted, found = set(run_ids), {}
        chosen = self._config.settings.experiments
        for name in dict.fromkeys([*chosen, *self._config.usable(chosen)]):
            runs = [run for run in self._config.runs(name) if run.run_id in wanted]
            wanted -= {run.run_id for run in runs}
            if runs:
                found[name] = total(self.price(run) for run in runs)
        return found

    def stores(self, names: list[str]) -> Stores:
        """The token stores that experiments need. Their archives are not among them."""
        there, foreseen, unknown = [], [], []
        for corpus, tokenizer, directory in self._config.stores(names):
            store = StoreSettings.parse(directory)
            manifest = self._manifest("tokens", corpus, tokenizer, directory)
            if manifest is not None:
                there.append(manifest["files"])
            elif (like := self._like(corpus, tokenizer, store)) is not None:
                foreseen.append(store_bytes(store, like["documents"], _tokens(like), like["vocabulary_size"]))
            else:
                unknown.append(f"{corpus}/{tokenizer}/{directory}")
        return Stores(
            there=len(there),
            there_bytes=sum(file["bytes"] for files in there for file in files),
            there_files=sum(len(files) + 2 for files in there),  # manifest.json and build.json
            foreseen=len(foreseen),
            foreseen_bytes=sum(foreseen),
            unknown=tuple(unknown),
        )

    def _rows(self, run: RunSettings) -> Rows | None:
        """What the run's store holds; of a run that tokenizes while training, a store of the same rows.

        Before that store is there, bounds of what it will hold; None where there are none.
        """
        if run.budget.kind not in ("epochs", "useful_tokens"):
            return None
        form = {"padded": "padded", "padding-free": "token-list"}.get(run.approach)
        store = run.store or StoreSettings(form, sequence_length=run.sequence_length, eos=run.eos)
        manifest = self._manifest("tokens", run.corpus.name, run.tokenizer.name, store.directory)
        stream = BATCHES[run.approach].streams
        if manifest is not None:
            rows = _tokens(manifest) / run.sequence_length if stream else manifest["rows"]
            return Rows(rows, manifest["tokens_useful"])
        if run.budget.kind == "useful_tokens":
            useful = fewest_useful(run, stream)
            return Rows(1, useful, "the fewest useful tokens of a row") if useful else None
        documents, tokens, source = self._size(run, store)
        rows = most_rows(run, stream, documents, tokens)
        return Rows(rows, 0, f"the most rows of an epoch, by {source}") if rows else None

    def _size(self, run: RunSettings, store: StoreSettings) -> tuple[int | None, int | None, str]:
        """(documents, tokens, source) of the text that a run reads: upper bounds, None where there are none.

        The source is another store of the same text, the corpus, or what the configuration declares of the corpus.
        """
        corpus = run.corpus
        if (like := self._like(corpus.name, run.tokenizer.name, store)) is not None:
            return like["documents"], _tokens(like), "another store of the text"
        built = self._manifest("corpus", corpus.name)
        try:
            split = built["splits"]["train"]
            # no tokenizer makes more tokens than bytes; beside them two control tokens for each text of a pair
            return split["rows"], split["utf8_bytes"] + 4 * split["rows"], "the corpus"
        except (TypeError, KeyError):  # not there, or of another kind
            source = corpus.source
            stated = [n for n in (source.documents, source.published_documents, source.maximum_documents) if n]
            return min(stated, default=None), None, "what the configuration says of the corpus"

    def _like(self, corpus: str, tokenizer: str, store: StoreSettings) -> dict[str, Any] | None:
        """The manifest of any store of the same documents and the same ids."""
        for folder in sorted((self._results / "tokens" / corpus / tokenizer).glob("*/")):
            manifest = self._manifest("tokens", corpus, tokenizer, folder.name)
            options = (manifest or {}).get("options", {})
            if options.get("split") == store.split and options.get("eos") == store.eos and "tokens_useful" in manifest:
                return manifest
        return None

    def _manifest(self, *where: str) -> dict[str, Any] | None:
        """A manifest below results, as it is: to price a run it need not be checked. None where there is none."""
        path = self._results.joinpath(*where, "manifest.json")
        if path not in self._manifests:
            try:
                self._manifests[path] = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                self._manifests[path] = None
        return self._manifests[path]


def _tokens(manifest: dict[str, Any]) -> int:
    """Tokens of a store's documents: a document of n brings n - 1 useful ones, less what is cut."""
    return manifest["tokens_useful"] + manifest["tokens_cut"] + manifest["documents"]
