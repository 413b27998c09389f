"""Properties of any data loader, found by reading it at several world sizes, epochs and states.

A loader is what `make_loader(rank=…, world_size=…, epoch=…, seed=…, step=…, batch_size=…)` returns: an
iterable of batches. It takes those of these arguments that it has a name for. A batch is a mapping
with `input_ids`, a pair (inputs, labels) whose inputs may be a mapping, or an array of ids, each
[rows, T].

Samples are known by their content: what a pass reads is the multiset of its ids without padding, and
a row is the hash of its ids.
"""

import contextlib
import copy
import inspect
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, TypeGuard

import numpy as np
from xxhash import xxh3_64_intdigest

from tokenscale.base.errors import UserError
from tokenscale.data.stores.documents import IGNORED

#: names that loaders use for what they are given
PARAMETERS = {
    "rank": ("rank", "process_index", "local_rank"),
    "world_size": ("world_size", "num_replicas", "process_count", "world"),
    "epoch": ("epoch",),
    "seed": ("seed",),
    "step": ("step", "start_step", "skip_batches"),
    "batch_size": ("batch_size", "rows", "micro_batch"),
}
INPUTS = ("input_ids", "tokens", "inputs", "input", "x")
LABELS = ("labels", "targets", "y")
MASKS = ("attention_mask", "mask")
DOCUMENTS = ("document_ids", "sequence_ids", "doc_ids", "seq_idx")
HELD = "yes"
FAILED = "no"
UNKNOWN = "not checked"


#: property → how it reads where it holds
TITLES = {
    "ranks": "every rank has as many batches",
    "pass": "every world size reads the same text in a pass",
    "samples": "a pass reads every sample once",
    "batches": "same global batches at every world size",
    "seed": "the same seed gives the same batches",
    "epochs": "the next epoch has the same text in another order",
    "resume": "a resumed loader goes on where it stopped",
    "labels": "labels are the next tokens",
    "padding": "no label counts on padding",
    "vocabulary": "ids lie in the vocabulary",
    "documents": "no label crosses documents",
}


@dataclass(frozen=True)
class AuditSettings:
    """How a loader is read."""

    worlds: tuple[int, ...] = (1, 2, 3, 8)
    global_batch: int = 24  # rows over all ranks, for loaders that take `batch_size`
    seed: int = 0
    vocabulary_size: int | None = None
    pad_id: int | None = None  # for loaders without an attention mask
    most_batches: int = 10_000  # of a pass; a loader with more is a stream without end
    timeout_s: int = 120  # for one batch


@dataclass(frozen=True)
class Rows:
    """A rank's batch."""

    ids: np.ndarray  # int64 [rows, T]
    real: np.ndarray  # bool [rows, T]: no padding
    labels: np.ndarray | None  # int64 [rows, T], −100 where ignored
    documents: np.ndarray | None  # int64 [rows, T], number of each token's document in its row

    def hashes(self) -> list[int]:
        """Return the hash of each row's ids without padding."""
        return [
            xxh3_64_intdigest(np.ascontiguousarray(row[real]).tobytes())
            for row, real in zip(self.ids, self.real, strict=True)
        ]


@dataclass(frozen=True)
class Verdict:
    """Whether a property holds: `yes`, `no` or `not checked`, and where or why."""

    name: str  # of `TITLES`
    answer: str
    reason: str = ""


@dataclass
class Audit:
    """Verdicts on a loader, and what one rank was seen to read."""

    verdicts: list[Verdict] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class Loader:
    """A user's function that makes loaders, and how it is called."""

    def __init__(self, make: Callable[..., Any], settings: AuditSettings):
        self._make = make
        self._settings = settings
        names = inspect.signature(make).parameters
        self._names = {
            role: next((name for name in known if name in names), None)
            for role, known in PARAMETERS.items()
        }
        known = {name for name in self._names.values() if name}
        for name, parameter in names.items():
            plain = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if plain and name not in known and parameter.default is parameter.empty:
                raise UserError(
                    f"the loader has an argument that audit cannot give: {name}.",
                    expected=", ".join(name for known in PARAMETERS.values() for name in known),
                    next=f"give {name} a default, or write a function that calls the loader",
                )

    def takes(self, role: str) -> bool:
        """Return whether the loader has an argument for this."""
        return self._names[role] is not None

    def open(self, world_size: int = 1, **arguments: int) -> Any:
        """Return what the user's function makes. Raises UserError for whatever it raises."""
        rows = max(1, self._settings.global_batch // world_size)
        given = dict.fromkeys(PARAMETERS, 0) | {
            "seed": self._settings.seed,
            "world_size": world_size,
            "batch_size": rows,
        }
        words = {
            name: value
            for role, value in (given | arguments).items()
            if (name := self._names[role]) is not None
        }
        with _reporting("could not be made", words):
            return self._make(**words)

    def read(self, opened: Any, words: str = "") -> Iterator[Rows]:
        """Yield the batches of a loader, at most `most_batches` and one. Raises UserError for
        whatever it raises, and for a batch that is none.
        """
        with _reporting("cannot be iterated over", words), self._limit():
            batches = iter(opened)
        for number in range(self._settings.most_batches + 1):
            with _reporting(f"failed at batch {number}", words), self._limit():
                batch = next(batches, None)
            if batch is None:
                return
            yield read_rows(batch, self._settings.pad_id)

    @contextlib.contextmanager
    def _limit(self) -> Iterator[None]:
        """End a batch that never comes."""

        def end(*_: Any) -> None:
            raise TimeoutError(f"no batch in {self._settings.timeout_s} s")

        before = signal.signal(signal.SIGALRM, end)
        signal.alarm(self._settings.timeout_s)
        try:
            yield
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _reporting(what: str, words: Any) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"the loader {what}.",
            called_with=str(words) if words else "no arguments",
            reason=f"{type(error).__name__}: {error}".splitlines()[0],
            next="call it in Python with these arguments, and mend it",
        ) from error


def read_samples(make: Callable[[], Any]) -> list[np.ndarray]:
    """Return what a user's function gives as the ids of each sample, int64 [tokens]. Raises UserError
    for whatever it raises, and for anything else that it gives.
    """
    try:
        given = [_as_array(sample) for sample in make()]
    except (Exception, SystemExit) as error:
        raise UserError(
            "the function of samples failed.",
            reason=f"{type(error).__name__}: {error}".splitlines()[0],
            next="call it in Python, and mend it",
        ) from error
    samples = [array.astype(np.int64) for array in given if _are_ids(array, dimensions=1)]
    if not given or len(samples) < len(given):
        wrong = next((array for array in given if not _are_ids(array, dimensions=1)), None)
        raise UserError(
            "the function of samples gives none.",
            expected="a list with the ids of each sample: integers [tokens]",
            found=_describe_inputs(wrong, wrong) if given else "nothing",
            next="return a list of arrays of ids, or of lists",
        )
    return samples


def _are_ids(array: np.ndarray | None, dimensions: int) -> TypeGuard[np.ndarray]:
    if array is None or array.ndim != dimensions:
        return False
    return np.issubdtype(array.dtype, np.integer)


def read_rows(batch: Any, pad_id: int | None = None) -> Rows:
    """Return a user's batch as arrays. Raises UserError for anything that is no batch of ids."""
    labels = mask = documents = None
    inputs = batch
    if isinstance(batch, tuple | list) and _is_pair(batch):
        inputs, given = batch[:2]
        labels = _as_array(given)
    if isinstance(inputs, Mapping) or hasattr(inputs, "keys"):
        ids = _find_array(inputs, INPUTS)
        labels = _find_array(inputs, LABELS) if labels is None else labels
        mask = _find_array(inputs, MASKS)
        documents = _find_array(inputs, DOCUMENTS)
    else:
        ids = _as_array(inputs)
    if not _are_ids(ids, dimensions=2):
        raise UserError(
            "a batch of the loader holds no ids.",
            expected=f"integers [rows, T]: an array, (inputs, labels), or a mapping with one of {INPUTS}",
            found=_describe_inputs(inputs, ids),
            next="convert the batches in a function around the loader",
        )
    for name, array in (("labels", labels), ("mask", mask), ("documents", documents)):
        if array is not None and array.shape != ids.shape:
            raise UserError(
                f"the {name} of a batch have another shape than its ids.",
                expected=list(ids.shape),
                found=list(array.shape),
                next="convert the batches in a function around the loader",
            )
    real = np.ones(ids.shape, dtype=bool)
    if mask is not None:
        real = mask.astype(bool)
    elif pad_id is not None:
        real = ids != pad_id
    return Rows(ids.astype(np.int64), real, labels, documents)


def _is_pair(batch: Sequence[Any]) -> bool:
    """Whether a batch is inputs and labels; what stands behind them, such as the loader's state, is
    none of the batch's arrays.
    """
    if len(batch) <= 2:
        return len(batch) == 2
    inputs, labels, *others = (_are_ids(_as_array(part), dimensions=2) for part in batch)
    return inputs and labels and not any(others)


def _describe_inputs(inputs: Any, ids: np.ndarray | None) -> str:
    if ids is not None:
        return f"{ids.dtype} {list(ids.shape)}"
    if hasattr(inputs, "keys"):
        return f"a mapping with the keys {', '.join(map(repr, inputs.keys()))}"
    if isinstance(inputs, tuple):
        parts = [_describe_inputs(part, _as_array(part)) for part in inputs]
        return f"a tuple of {len(parts)}: {', '.join(parts)}"
    return type(inputs).__name__


def _find_array(batch: Any, names: tuple[str, ...]) -> np.ndarray | None:
    return next((_as_array(batch[name]) for name in names if name in batch), None)


def _as_array(value: Any) -> np.ndarray | None:
    """Return an array of any library, or lists, as NumPy's; None for what is none."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    try:
        found = np.array(value)
    except (TypeError, ValueError):
        return None
    return found if found.dtype != object else None


@dataclass(frozen=True)
class Pass:
    """What all ranks read in a pass."""

    ranks: list[list[list[int]]]  # rank → batch → hashes of its rows
    tokens: Counter[int]  # of ids without padding
    batches: list[Rows]  # of rank 0, kept for one rank alone; else empty

    @property
    def lengths(self) -> list[int]:
        """Batches of each rank."""
        return [len(batches) for batches in self.ranks]

    def steps(self) -> list[list[list[int]]]:
        """Return step → rank → hashes of its rows; a rank that has ended has no rows."""
        return [
            [batches[n] if n < len(batches) else [] for batches in self.ranks]
            for n in range(max(self.lengths))
        ]

    def global_batches(self) -> list[Counter[int]]:
        """Return the rows of each step over all ranks."""
        return [Counter(chain.from_iterable(step)) for step in self.steps()]

    def order(self) -> list[int]:
        """Return the rows of all steps."""
        return [row for step in self.steps() for row in chain.from_iterable(step)]


def make_pass(ranks: Iterable[Iterable[Rows]], keep: bool = False) -> Pass:
    """Return what ranks read; `keep` the batches of the first."""
    hashes = []
    kept: list[Rows] = []
    tokens: Counter[int] = Counter()
    for rank, batches in enumerate(ranks):
        own = []
        for batch in batches:
            own.append(batch.hashes())
            ids, counts = np.unique(batch.ids[batch.real], return_counts=True)
            tokens.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
            kept += [batch] if keep and rank == 0 else []
        hashes.append(own)
    return Pass(hashes, tokens, kept)


def read_pass(loader: Loader, world_size: int, **arguments: int) -> Pass:
    """Read a pass of every rank of a world size; keep the batches of one rank alone."""
    ranks = (
        loader.read(
            loader.open(world_size=world_size, rank=rank, **arguments),
            f"rank {rank} of {world_size}",
        )
        for rank in range(world_size)
    )
    return make_pass(ranks, keep=world_size == 1)


def audit(
    make: Callable[..., Any],
    settings: AuditSettings,
    samples: Sequence[np.ndarray] | None = None,
) -> Audit:
    """Return the verdicts on a loader. `samples` are the ids of each sample of the text (int64
    [tokens]), as a pass should read them once. Raises UserError for a loader that fails, or yields no batches of ids.
    """
    loader = Loader(make, settings)
    ranked = loader.takes("rank") and loader.takes("world_size")
    worlds = sorted({1, *settings.worlds}) if ranked else [1]
    passes = {world: read_pass(loader, world) for world in worlds}
    one = passes[1]
    if not one.order():
        raise UserError(
            "the loader yields no rows.",
            called_with="rank 0 of 1",
            next="call it in Python, and look at its first batch",
        )
    found = Audit()
    found.facts = _describe_pass(one, settings) | time_loader(loader, one)
    of_ranks = "" if ranked else "the loader takes no rank and world size"
    of_pass = ""
    if max(one.lengths) > settings.most_batches:
        of_pass = f"a pass has more than {settings.most_batches:,} batches, or no end (--batches)"
    checks: dict[str, tuple[str, Callable[[], tuple[str, str]]]] = {
        "ranks": (of_ranks, lambda: _check_ranks(passes, settings.most_batches)),
        "pass": (of_ranks or of_pass, lambda: _check_text(passes)),
        "samples": (of_pass, lambda: _check_samples(one, samples)),
        "batches": (of_ranks, lambda: _check_batches(passes)),
        "seed": ("", lambda: _check_seed(loader, settings, one)),
        "epochs": (of_pass, lambda: _check_epochs(loader, one)),
        "resume": ("", lambda: _check_resume(loader, passes, endless=bool(of_pass))),
        "labels": ("", lambda: _check_labels(one)),
        "padding": ("", lambda: _check_padding(one)),
        "vocabulary": ("", lambda: _check_vocabulary(one, settings.vocabulary_size)),
        "documents": ("", lambda: _check_documents(one)),
    }
    for name, (missing, check) in checks.items():
        answer, reason = (UNKNOWN, missing) if missing else check()
        found.verdicts.append(Verdict(name, answer, reason))
    return found


def _check_ranks(passes: Mapping[int, Pass], most_batches: int) -> tuple[str, str]:
    for world, found in passes.items():
        if len(set(found.lengths)) > 1:
            rank = int(np.argmin(found.lengths))
            most = max(found.lengths)
            text = (
                f"at {world} ranks, rank {rank} has {found.lengths[rank]} batches, another {most}"
            )
            return FAILED, f"{text}: the others would wait for it forever"
    if max(passes[1].lengths) > most_batches:
        return HELD, f"none has ended within {most_batches:,}"
    return HELD, ""


def _describe_difference(found: Counter[int], expected: Counter[int], what: str) -> str:
    """Return how much of what is counted is lost and doubled; empty if nothing is."""
    lost = expected - found
    doubled = found - expected
    parts = []
    total = max(1, expected.total())
    if lost:
        parts.append(f"{lost.total():,} {what} are lost ({lost.total() / total:.2%})")
    if doubled:
        parts.append(f"{doubled.total():,} are read once too often ({doubled.total() / total:.2%})")
    return ", ".join(parts)


def _describe_other_text(found: Pass, expected: Pass) -> str:
    """Return what a pass loses and doubles: in rows where all are rows of the other pass; else in
    tokens, of which a lost one is made up for by an equal one that is doubled.
    """
    rows = Counter(found.order())
    expected_rows = Counter(expected.order())
    if rows.keys() <= expected_rows.keys():
        return _describe_difference(rows, expected_rows, "rows")
    return _describe_difference(found.tokens, expected.tokens, "tokens")


def _check_text(passes: Mapping[int, Pass]) -> tuple[str, str]:
    for world, found in passes.items():
        if text := _describe_other_text(found, passes[1]):
            shared = _find_shared_row(found)
            return FAILED, f"at {world} ranks {text} against one rank{shared}"
    return HELD, ""


def _find_shared_row(found: Pass) -> str:
    """Return the first row that two ranks read, in words."""
    owner: dict[int, int] = {}
    for number, step in enumerate(found.steps()):
        for rank, rows in enumerate(step):
            for row in rows:
                if owner.setdefault(row, rank) != rank:
                    text = f"step {number}: rank {rank} reads a row of rank {owner[row]}"
                    return f"; first at {text}"
    return ""


def _check_samples(one: Pass, samples: Sequence[np.ndarray] | None) -> tuple[str, str]:
    if samples is None:
        return UNKNOWN, "a tail that each pass drops is seen with --samples alone"
    expected = Counter(np.concatenate(samples).tolist())
    # control tokens that the loader adds are no part of a sample
    found = Counter({token: n for token, n in one.tokens.items() if token in expected})
    if text := _describe_difference(found, expected, "tokens"):
        rows = Counter(one.order())
        gone = [
            number
            for number, sample in enumerate(samples)
            if not rows[xxh3_64_intdigest(np.ascontiguousarray(sample).tobytes())]
        ]
        whole = len(samples) - len(gone)
        place = f"; first sample {gone[0]} of {len(samples):,}" if gone and whole else ""
        if (expected - found).total() == len(samples) and not found - expected:
            place = "; one of each: a last token that is a label alone is no part of a sample"
        return FAILED, f"of {len(samples):,} samples {text}{place}"
    return HELD, f"{len(samples):,} samples"


def _check_batches(passes: Mapping[int, Pass]) -> tuple[str, str]:
    expected = passes[1].global_batches()
    for world, found in passes.items():
        batches = found.global_batches()
        for step, (batch, of_one) in enumerate(zip(batches, expected, strict=False)):
            if batch == of_one:
                continue
            rank = _find_foreign_rank(found.steps()[step], of_one)
            sizes = ""
            if batch.total() != of_one.total():
                sizes = f": {batch.total()} rows instead of {of_one.total()}"
            return FAILED, f"first at step {step}, rank {rank} of {world}{sizes}"
        if len(batches) != len(expected):
            text = f"at {world} ranks a pass has {len(batches)} steps instead of {len(expected)}"
            return FAILED, text
    return HELD, f"world sizes {', '.join(map(str, passes))}"


def _find_foreign_rank(step: list[list[int]], expected: Counter[int]) -> int:
    """Return the first rank with a row that is not in the batch; 0 if there is none."""
    return next((n for n, rows in enumerate(step) if any(row not in expected for row in rows)), 0)


def _check_seed(loader: Loader, settings: AuditSettings, one: Pass) -> tuple[str, str]:
    place = _find_difference(read_pass(loader, 1).order(), one.order())
    if place is not None:
        return FAILED, f"a second loader differs, first at row {place}"
    if loader.takes("seed") and len(set(one.order())) > 1:
        other = read_pass(loader, 1, seed=settings.seed + 1)
        if other.order() == one.order():
            return FAILED, "another seed gives the same order"
    return HELD, ""


def _find_difference(found: list[Any], expected: list[Any]) -> int | None:
    if found == expected:
        return None
    pairs = zip(found, expected, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))


def _check_epochs(loader: Loader, one: Pass) -> tuple[str, str]:
    if loader.takes("epoch"):
        following = read_pass(loader, 1, epoch=1)
    else:
        opened = loader.open(rank=0)
        if iter(opened) is opened:
            return UNKNOWN, "the loader takes no epoch, and can be read once"
        list(loader.read(opened))
        following = make_pass([loader.read(opened)])
        if not following.order():
            return UNKNOWN, "the loader takes no epoch, and has no batch when it is read again"
    if text := _describe_other_text(following, one):
        return FAILED, f"in the second epoch {text}"
    if following.order() == one.order() and len(set(one.order())) > 1:
        return FAILED, "the second epoch has the order of the first"
    return HELD, ""


def _check_resume(loader: Loader, passes: Mapping[int, Pass], endless: bool) -> tuple[str, str]:
    world = max(passes)
    rank = min(1, world - 1)
    stateful = hasattr(loader.open(world_size=world, rank=rank), "load_state_dict")
    if not stateful and not loader.takes("step"):
        return UNKNOWN, "the loader has no load_state_dict and takes no step"
    expected = passes[world].ranks[rank]
    if len(expected) < 2:
        return UNKNOWN, f"rank {rank} of {world} has {len(expected)} batches"
    for stop in sorted({1, len(expected) // 2, len(expected) - 1}):
        resumed = _resume(loader, world, rank, stop, stateful)
        following = islice(resumed, len(expected) - stop if endless else None)
        found = [batch.hashes() for batch in following]
        if (place := _find_difference(found, expected[stop:])) is not None:
            text = f"rank {rank} of {world}, stopped after {stop} of {len(expected)} batches"
            return FAILED, f"{text}, {_describe_resume(found, expected, stop, place)}"
    return HELD, "stopped after the first batch, half of them, and all but one"


def _describe_resume(
    found: list[list[int]], expected: list[list[int]], stop: int, place: int
) -> str:
    """Return what a resumed loader does from the first batch that differs on."""
    if place == len(found):
        return f"ends {len(expected) - stop - place} batches too early"
    if place == len(expected) - stop:
        return f"reads {len(found) - place} batches too many"
    if found[place] in expected:
        other = expected.index(found[place])
        return f"reads batch {other} where batch {stop + place} follows (counted from 0)"
    return f"differs in batch {place} after the resume"


def _resume(loader: Loader, world: int, rank: int, stop: int, stateful: bool) -> Iterator[Rows]:
    if not stateful:
        return loader.read(loader.open(world_size=world, rank=rank, step=stop))
    words = f"rank {rank} of {world}"
    first = loader.open(world_size=world, rank=rank)
    list(islice(loader.read(first, words), stop))
    with _reporting("cannot say its state", words):
        state = copy.deepcopy(first.state_dict())
    second = loader.open(world_size=world, rank=rank)
    with _reporting("cannot load its state", words):
        second.load_state_dict(state)
    return loader.read(second, words)


def _check_labels(one: Pass) -> tuple[str, str]:
    """Compare labels with the next token of their row, or with their own: where a model shifts."""
    wrong = {"shifted by the loader": "", "equal to the ids: the model has to shift them": ""}
    seen = False
    for step, batch in enumerate(one.batches):
        if batch.labels is None:
            return UNKNOWN, "batches have no labels"
        counted = batch.labels != IGNORED
        seen = seen or bool(counted.any())
        inner = counted[:, :-1] & batch.real[:, 1:]
        differs = inner & (batch.labels[:, :-1] != batch.ids[:, 1:])
        own = counted & (batch.labels != batch.ids)
        for convention, places in zip(wrong, (differs, own), strict=True):
            if not wrong[convention] and places.any():
                row, column = np.argwhere(places)[0].tolist()
                share = f"{int(places.sum())} of {int(counted.sum())} of that batch"
                wrong[convention] = f"first at step {step}, row {row}, column {column}: {share}"
    if not seen:
        return FAILED, "no label counts"
    if held := [convention for convention, place in wrong.items() if not place]:
        return HELD, held[0]
    return FAILED, wrong["shifted by the loader"]


def _check_padding(one: Pass) -> tuple[str, str]:
    padded = False
    for step, batch in enumerate(one.batches):
        if batch.labels is None:
            return UNKNOWN, "batches have no labels"
        padded = padded or not batch.real.all()
        counted = batch.labels != IGNORED
        # the label of the last real token may be an end token that the padding stands for
        behind = ~batch.real & counted
        if behind.any():
            row, column = np.argwhere(behind)[0].tolist()
            return (
                FAILED,
                f"{int(behind.sum())} at step {step}, first in row {row}, column {column}",
            )
    if not padded:
        return UNKNOWN, "no padding was seen: --pad-id, or an attention mask, tells it"
    return HELD, ""


def _check_vocabulary(one: Pass, vocabulary_size: int | None) -> tuple[str, str]:
    if vocabulary_size is None:
        return UNKNOWN, "--vocabulary-size is not given"
    for step, batch in enumerate(one.batches):
        arrays = [("id", batch.ids)]
        if batch.labels is not None:
            arrays.append(("label", np.where(batch.labels == IGNORED, 0, batch.labels)))
        for what, values in arrays:
            outside = (values < 0) | (values >= vocabulary_size)
            if outside.any():
                row, column = np.argwhere(outside)[0].tolist()
                place = f"step {step}, row {row}, column {column}"
                return FAILED, f"{what} {values[row, column]} at {place}"
    return HELD, ""


def _check_documents(one: Pass) -> tuple[str, str]:
    if any(batch.documents is None for batch in one.batches):
        return UNKNOWN, "batches have no document ids: attention and labels may cross documents"
    for step, batch in enumerate(one.batches):
        if batch.labels is None:
            return UNKNOWN, "batches have no labels"
        assert batch.documents is not None  # as was seen above
        ends = batch.documents[:, :-1] != batch.documents[:, 1:]
        shifted = (batch.labels[:, :-1] == batch.ids[:, 1:]) & (batch.labels[:, :-1] != IGNORED)
        crossing = ends & shifted & batch.real[:, 1:]
        if crossing.any():
            row, column = np.argwhere(crossing)[0].tolist()
            return FAILED, f"{int(crossing.sum())} at step {step}, first row {row}, column {column}"
    return HELD, ""


def _describe_pass(one: Pass, settings: AuditSettings) -> dict[str, Any]:
    """Return what one rank reads in a pass."""
    positions = sum(batch.ids.size for batch in one.batches)
    real = sum(int(batch.real.sum()) for batch in one.batches)
    labels = [batch.labels for batch in one.batches if batch.labels is not None]
    documents = [
        1 + int((batch.documents[:, 1:] != batch.documents[:, :-1]).sum(axis=1).max(initial=0))
        for batch in one.batches
        if batch.documents is not None
    ]
    counted = sum(int((array != IGNORED).sum()) for array in labels)
    return {
        "batches": len(one.batches),
        "positions": positions,
        "padding": round(1 - real / max(1, positions), 6),
        "labels": counted if labels else None,
        "documents_in_a_row": max(documents, default=None),
        "global_batch": settings.global_batch,
    }


def time_loader(loader: Loader, one: Pass, most_s: float = 5.0) -> dict[str, Any]:
    """Return tokens a second of one rank, and of a copy of the same arrays."""
    opened = loader.open(rank=0)
    start = time.perf_counter()
    tokens = 0
    for batch in islice(iter(opened), len(one.batches)):
        tokens += read_rows(batch).ids.size
        if time.perf_counter() - start > most_s:
            break
    read_s = time.perf_counter() - start
    copied = 0
    start = time.perf_counter()
    for batch in one.batches:
        batch.ids.copy()
        copied += batch.ids.size
    copy_s = max(time.perf_counter() - start, 1e-9)
    return {
        "tokens_per_s": round(tokens / max(read_s, 1e-9)),
        "copy_tokens_per_s": round(copied / copy_s),
    }
