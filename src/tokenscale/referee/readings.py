"""How often runs read their text: sizes of texts from manifests, rows and passes from a run's
settings.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json
from tokenscale.settings.run import RunSettings

#: (corpus, tokenizer, eos)
Text = tuple[str, str, bool]
#: approaches whose rows are one document each, padded
PADDED = ("padded", "pretokenized-padded", "length-bucketed")


@dataclass(frozen=True)
class CorpusSize:
    """Size of a corpus in a tokenizer's ids: documents and tokens that are trained on, rows of each
    store that exists, and held-out documents; None where they are not known.
    """

    documents: int | None = None
    tokens: float | None = None
    rows: Mapping[str, int] = field(default_factory=dict)
    held_out: int | None = None


class Reading(NamedTuple):
    """How a run reads a corpus: sequences of the run, the corpus's share of them, rows and number
    of its passes, passes that are allowed; None where they are not known.
    """

    corpus: str
    sequences: int
    share: float | None
    rows: float | None
    passes: float | None
    limit: float | None

    @property
    def is_refused(self) -> bool:
        """Whether a mixture reads the corpus more often than it may."""
        return self.limit is not None and (self.passes or 0) > self.limit


def read_texts(
    run: RunSettings, texts: Mapping[Text, CorpusSize], steps: int | None = None
) -> list[Reading]:
    """Return how a run reads each of its corpora; `steps` are those that it made, where its budget
    does not say them.

    A padded row holds one document. Rows of streams and packed rows hold as many tokens as
    positions; packed rows that are not built yet are assumed to be full.
    """
    steps = run.budget.steps if run.budget.kind == "steps" else steps
    sequences = (steps or 0) * run.global_batch
    shares = {run.corpus.name: 1.0}
    limits = {}
    if run.mixture is not None:
        shares = run.mixture.shares(sequences, run.sequence_length) if sequences else {}
        limits = {source.corpus.name: source.maximum_repetitions for source in run.mixture.sources}
    found = []
    for name in (corpus.name for corpus in run.trained_corpora):
        text = texts.get((name, run.tokenizer.name, run.eos), CorpusSize())
        share = shares.get(name)
        rows = (
            text.documents
            if run.approach in PADDED
            else text.tokens and text.tokens / run.sequence_length
        )
        if run.approach == "packed" and run.store is not None:
            rows = text.rows.get(run.store.directory, rows)
        passes = (
            share * sequences / rows
            if rows and sequences and share is not None
            else run.budget.epochs
        )
        found.append(
            Reading(
                corpus=name,
                sequences=sequences,
                share=share,
                rows=rows,
                passes=passes,
                limit=limits.get(name),
            )
        )
    return found


def read_sizes(
    runs: Iterable[RunSettings], stores: Sequence[Path], corpora: Sequence[Path]
) -> dict[Text, CorpusSize]:
    """Return the size of each text that runs read, from manifests
    `…/<corpus>/<tokenizer>/<store>/manifest.json` of token stores and `…/<corpus>/manifest.json` of
    corpora; one that cannot be read (it is being written) is left out.

    Without a store of the training text, its tokens are estimated from its bytes, as the held-out
    text has them.
    """
    keys = {(corpus.name, run.tokenizer.name, run.eos) for run in runs for corpus in run.corpora}
    named = {key[0] for key in keys}
    texts = {
        path.parent.name: _read_manifest(path).get("splits", {})
        for path in corpora
        if path.parent.name in named
    }
    found = {}
    for key in sorted(keys):
        size = CorpusSize()
        held_out_tokens = 0
        for path in stores:
            manifest = _read_manifest(path) if path.parts[-4:-2] == key[:2] else {}
            try:
                if manifest["options"]["eos"] != key[2]:
                    continue
                documents = manifest["documents"]
                tokens = manifest["tokens_useful"] + manifest.get("tokens_cut", 0) + documents
                rows = {**size.rows, path.parent.name: manifest["rows"]}
                if manifest["split"] == "train":
                    size = replace(size, documents=documents, tokens=tokens, rows=rows)
                else:
                    size = replace(size, held_out=documents, rows=rows)
                    held_out_tokens = tokens
            except (KeyError, TypeError):
                continue
        train, validation = (
            texts.get(key[0], {}).get(split, {}) for split in ("train", "validation")
        )
        if size.documents is None and train:
            bytes_ = validation.get("utf8_bytes")
            tokens = None
            if held_out_tokens and bytes_:
                tokens = train["utf8_bytes"] * held_out_tokens / bytes_
            size = replace(size, documents=train["rows"], tokens=tokens)
        if size != CorpusSize():
            found[key] = size
    return found


def _read_manifest(manifest: Path) -> dict[str, Any]:
    try:
        found = read_json(manifest)
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}
