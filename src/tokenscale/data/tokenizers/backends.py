"""Tokenizer engines, the packages that encode text: choice of the fastest whose ids are exact on
fuzz texts.
"""

import base64
import importlib
import json
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tokenscale.base.errors import UserError, first_line, unknown
from tokenscale.base.files import read_json
from tokenscale.data.tokenizers.base import (
    ROLES,
    Texts,
    Tokenizer,
    join_ids,
    open_tokenizer_file,
    read_tokenizer_file,
    split_ids,
    to_strings,
)
from tokenscale.settings.registry import TOKENIZERS

#: number of fuzz texts that every engine is tested on
FUZZ_TEXTS = 2000
#: texts per call in the test of small batches
FEW = 32
#: control tokens of well-known tokenizers, whose text must stay text inside documents
CONTROL_TEXTS = (
    "<s>",
    "</s>",
    "<unk>",
    "<pad>",
    "[INST]",
    "[/INST]",
    "[IMG]",
    "[TOOL_CALLS]",
    "<|endoftext|>",
    "<|im_start|>",
    "<|begin_of_text|>",
    "<SPECIAL_20>",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "<mask>",
    "<bos>",
    "<eos>",
)
#: (first, last) code points of many scripts, where the patterns of pre-tokenizers split or join
_RANGES = (
    (0x20, 0x7E),
    (0x09, 0x0D),
    (0xA0, 0xFF),
    (0x100, 0x17F),
    (0x300, 0x36F),
    (0x370, 0x3FF),
    (0x400, 0x45F),
    (0x5D0, 0x5EA),
    (0x600, 0x6FF),
    (0x900, 0x97F),
    (0xE00, 0xE5B),
    (0x1100, 0x11FF),
    (0x2000, 0x206F),
    (0x2150, 0x218B),
    (0x2200, 0x22FF),
    (0x3000, 0x30FF),
    (0x4E00, 0x4EFF),
    (0xAC00, 0xACFF),
    (0xFE00, 0xFE0F),
    (0xFF00, 0xFF5E),
    (0x10330, 0x1034A),
    (0x1D400, 0x1D44F),
    (0x1F300, 0x1F64F),
    (0x1F1E6, 0x1F1FF),
    (0xE0020, 0xE007F),
    (0x00, 0x1F),
)
_PIECES = (
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    " \n ",
    "\u00a0",
    "\u2028",
    "\ufeff",
    "\u200d",
    "\u0000",
    "'s",
    "'LL",
    "’re",
    "don't",
    "I'M",
    "1",
    "12",
    "123",
    "1234567",
    "3.14",
    "٣٤",
    "²",
    "½",
    "Ⅷ",
    "HTTPServer",
    "camelCase",
    "snake_case",
    "ǅ",
    "ß",
    "İ",
    "ﬁ",
    "e\u0301",
    "👩\u200d👩\u200d👧",
    "🇩🇪",
    "://",
    "...",
    "—",
    "/*",
    "*/",
    "{{",
    "}}",
    "</",
    "\\n",
    "日本",
    "한국어",
    "ไทย",
    "हिन्दी",
    "עברית",
    "العربية",
    "a" * 40,
    "=" * 33,
    " " * 17,
    "\n" * 9,
    "0" * 21,
)
#: fewer texts, as in training, are encoded one by one by gigatoken: a batch costs about 0.5 ms for
#: arrays and threads
FEW_TEXTS = 64
#: file of Tekken's ranks in tiktoken's format
RANKS = "ranks.tiktoken"
#: gigatoken's name for the pre-tokenizer pattern of Tekken
TEKKENS_PATTERN = "nemotron"
#: engine whose ids are correct by definition
REFERENCE = "tokenizers"


class Engine(NamedTuple):
    """Tokenizer loaded by one package. `encode` returns (ids, lengths), as
    `base.Tokenizer.encode`.
    """

    version: str
    encode: Callable[[Texts], tuple[np.ndarray, np.ndarray]]


class LibraryPanic(Exception):
    """Panic of a library in Rust."""


@contextmanager
def catch_panics() -> Iterator[None]:
    """Raise LibraryPanic for a panic of a library in Rust, which is no Exception in Python."""
    # each panic would print its stack; the library reads this at the first
    os.environ.setdefault("RUST_BACKTRACE", "0")
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise LibraryPanic(str(error)) from None


@contextmanager
def report_panics(package: str, path: Path) -> Iterator[None]:
    """Raise UserError for a panic of a library that works with the file of a tokenizer."""
    try:
        with catch_panics():
            yield
    except LibraryPanic as error:
        raise UserError(
            f"the package {package} breaks off with the tokenizer's file.",
            file=path,
            reason=first_line(error),
            next="simplify the patterns of the file, or use another tokenizer",
        ) from None


def open_engine(name: str, folder: Path, manifest: dict[str, Any]) -> Engine:
    """Open an engine with the files named in a manifest. Raises Unavailable; and UserError for a
    file on which the library panics, then or when it encodes.
    """
    path = folder / manifest["file"]["name"]
    with report_panics(name, path):
        opened = ENGINES[name](folder, manifest)

    def encode(texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        with report_panics(name, path):
            return opened.encode(texts)

    return Engine(opened.version, encode)


class Unavailable(Exception):
    """Engine cannot be used here; the message is a short reason."""


def parse_fast_json(content: bytes) -> dict[str, Any]:
    """Parse a tokenizer.json without template, truncation, padding and dropout of merges: ids depend
    on text alone.
    """
    data = json.loads(content)
    data["model"] |= {"dropout": None} if "dropout" in data["model"] else {}
    data["added_tokens"] = data.get("added_tokens") or []
    return data | {"post_processor": None, "truncation": None, "padding": None}


def find_control(data: dict[str, Any], manifest: dict[str, Any]) -> dict[int, str]:
    """Return {id: text} of a tokenizer.json's control tokens: the special ones, and BOS, EOS, PAD
    and MASK in any case.

    Some files do not flag the tokens of these roles as special, or have them in the model's
    vocabulary only.
    """
    found = {
        token["id"]: token["content"] for token in data["added_tokens"] if token.get("special")
    }
    roles = {manifest.get(role) for role in ROLES} - {None, *found}
    entries = data["model"]["vocab"]
    named = (
        ((e[0], i) for i, e in enumerate(entries)) if isinstance(entries, list) else entries.items()
    )
    found |= {i: text for text, i in named if i in roles} if roles else {}
    return found | {
        token["id"]: token["content"] for token in data["added_tokens"] if token["id"] in roles
    }


def find_unknown(model: dict[str, Any]) -> int | None:
    """Return the id of the unknown token of a model of a tokenizer.json, or None if it has none."""
    return model["unk_id"] if "unk_id" in model else model["vocab"].get(model.get("unk_token"))


def remove_control(data: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json that makes no control token from text: neither an added token nor an
    entry of its model.

    As in SentencePiece, where control symbols match no text. The unknown token stays, unless it
    also has a role. The model then has no unknown token, and drops or refuses what it does not
    know.
    """
    control = find_control(data, manifest)
    model = dict(data["model"])
    roles = {manifest.get(role) for role in ROLES}
    unknown = find_unknown(model)
    if unknown in roles:
        _remove_unknown(model)
        unknown = None
    # other letters stay letters
    silent = {i for i, text in control.items() if len(text) > 1 or i in roles}
    # the package `tokenizers` takes the ids of added tokens from the model, and otherwise counts
    # from its size
    added = [token for token in data["added_tokens"] if token["id"] not in control]
    # Unigram: ids are places in the list, and an empty piece matches nothing
    if isinstance(model["vocab"], list):
        model["vocab"] = _silence_pieces(model["vocab"], silent, added=added)
    else:
        _remove_entries(model, ids=silent - {unknown})
        model["vocab"] |= {token["content"]: token["id"] for token in added}
    return data | {"added_tokens": added, "model": model}


def _remove_unknown(model: dict[str, Any]) -> None:
    """Let a model of a tokenizer.json have no unknown token."""
    if "unk_id" in model:
        model["unk_id"] = None
    else:
        model["unk_token"] = None if model["type"] == "BPE" else ""


def _silence_pieces(
    vocabulary: list[list[Any]], silent: set[int], added: list[dict[str, Any]]
) -> list[list[Any]]:
    """Return Unigram's pieces with added tokens at their ids and empty ones for silent ids."""
    beyond = {token["id"]: token["content"] for token in added}
    least = min((score for _, score in vocabulary), default=0.0)
    new_ids = range(len(vocabulary), max(beyond, default=-1) + 1)
    pieces = [*vocabulary, *([beyond.get(i, ""), least] for i in new_ids)]
    return [["" if i in silent else text, score] for i, (text, score) in enumerate(pieces)]


def _remove_entries(model: dict[str, Any], ids: set[int]) -> None:
    """Remove entries of a model that has ids by text, and the merges that need them."""
    names = {text for text, i in model["vocab"].items() if i in ids}
    model["vocab"] = {text: i for text, i in model["vocab"].items() if text not in names}
    if "merges" in model and names:
        model["merges"] = _merges_without(names, model)


def _merges_without(names: set[str], model: dict[str, Any]) -> list[list[str]]:
    """Return the merges of BPE that neither use nor make one of the names."""
    prefix = model.get("continuing_subword_prefix") or ""
    kept = []
    for merge in model["merges"]:
        pair = merge if isinstance(merge, list) else merge.split(" ")
        made = pair[0] + pair[1].removeprefix(prefix)
        if names.isdisjoint((*pair, made)):
            kept.append(pair)
    return kept


def load_fast_json(folder: Path, manifest: dict[str, Any]) -> str:
    """Return the tokenizer.json that engines load: ids depend on text alone, and no control token
    comes from it.
    """
    # written by tokenscale in this form; parsing megabytes of JSON is slow
    if "derived" in manifest:
        return read_tokenizer_file(folder, manifest, name="tokenizer.json").decode("utf-8")
    data = parse_fast_json(read_tokenizer_file(folder, manifest))
    return json.dumps(remove_control(data, manifest))


def count_threads() -> int:
    """Return the number of threads for an engine: RAYON_NUM_THREADS, otherwise the cores available
    to this process.
    """
    configured = os.environ.get("RAYON_NUM_THREADS", "")
    if configured.isdigit() and int(configured) > 0:
        return int(configured)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise Unavailable(f"no package {package} ({error})") from None


def import_library(kind: str) -> Any:
    """Import and return the package `tokenizers`. Raises UserError if it is not installed."""
    try:
        return _import("tokenizers")
    except Unavailable as error:
        next_step = "install tokenizers (environment.yml)"
        raise UserError(f"tokenizers of kind {kind} need it: {error}.", next=next_step) from None


def open_gigatoken(folder: Path, manifest: dict[str, Any]) -> Engine:
    """Open gigatoken, tens of times as fast as `tokenizers`: a tokenizer.json, or the ranks of
    Tekken.
    """
    gigatoken = _import("gigatoken")
    first_id = 0
    try:
        if manifest["kind"] == "tekken":  # loading ranks takes a third of the time
            first_id = manifest["control_ids"]
            with open_tokenizer_file(folder, manifest, name=RANKS) as file:
                tokenizer = gigatoken.Tokenizer.from_tiktoken(
                    f"/dev/fd/{file.fileno()}", pretokenizer=TEKKENS_PATTERN
                )
        else:
            tokenizer = gigatoken.Tokenizer.from_json(load_fast_json(folder, manifest))
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        raise Unavailable(
            f"gigatoken cannot read this tokenizer ({str(error).splitlines()[0]})"
        ) from None
    lock = threading.Lock()

    def encode(texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Encode without the GIL; Arrow arrays are not copied."""
        if len(texts) == 0:
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
        with lock:  # comparison and writer may call at once; the package rejects concurrent calls
            if len(texts) < FEW_TEXTS and not isinstance(texts, pa.Array):
                ids, lengths = join_ids(
                    [tokenizer.encode(text).view(np.int32) for text in to_strings(texts)]
                )
                return ids + np.int32(first_id), lengths
            inputs = _to_awkward(texts) if isinstance(texts, pa.Array) else to_strings(texts)
            layout = tokenizer.encode_batch(inputs, parallel=count_threads() > 1).layout
        offsets = np.asarray(layout.offsets.data, dtype=np.int64)
        ids = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        ids = ids.view(np.int32)
        return (ids + np.int32(first_id) if first_id else ids), np.diff(offsets)

    return Engine(version("gigatoken"), encode)


def _to_awkward(texts: pa.Array) -> Any:
    """Return an Arrow string array as an awkward array with 64-bit offsets, without copying the
    bytes.
    """
    import awkward

    if texts.null_count:
        raise ValueError("a document is null")
    texts = texts if pa.types.is_large_string(texts.type) else texts.cast(pa.large_string())
    _, offsets, data = texts.buffers()
    first = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    content = (
        np.frombuffer(data, dtype=np.uint8)
        if data is not None and data.size
        else np.zeros(0, dtype=np.uint8)
    )
    characters = awkward.contents.NumpyArray(content, parameters={"__array__": "char"})
    index = awkward.index.Index64(first)
    return awkward.Array(
        awkward.contents.ListOffsetArray(index, characters, parameters={"__array__": "string"})
    )


def open_tiktoken(folder: Path, manifest: dict[str, Any]) -> Engine:
    """Open tiktoken for a Tekken file. Its table has no control tokens, so their text stays
    text.
    """
    tiktoken = _import("tiktoken")
    data = json.loads(read_tokenizer_file(folder, manifest))
    control_ids = data["config"]["default_num_special_tokens"]
    ordinary = manifest["vocabulary_size"] - control_ids
    ranks = {
        base64.b64decode(token["token_bytes"]): token["rank"] for token in data["vocab"][:ordinary]
    }
    encoding = tiktoken.Encoding(
        "tekken", pat_str=data["config"]["pattern"], mergeable_ranks=ranks, special_tokens={}
    )

    def encode(texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        documents = to_strings(texts)
        if count_threads() > 1 and len(documents) > 1:
            found = encoding.encode_ordinary_batch(documents, num_threads=count_threads())
        else:
            found = [encoding.encode_ordinary(text) for text in documents]
        ids, lengths = join_ids(found)
        return ids + np.int32(control_ids), lengths

    return Engine(version("tiktoken"), encode)


def open_tokenizers(folder: Path, manifest: dict[str, Any]) -> Engine:
    """Open Hugging Face's `tokenizers`, the reference for all other engines, for a
    tokenizer.json.
    """
    tokenizer = _import("tokenizers").Tokenizer.from_str(load_fast_json(folder, manifest))
    if "TOKENIZERS_PARALLELISM" not in os.environ:
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if count_threads() > 1 else "false"

    def encode(texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        return join_ids(
            [
                e.ids
                for e in tokenizer.encode_batch_fast(to_strings(texts), add_special_tokens=False)
            ]
        )

    return Engine(version("tokenizers"), encode)


def open_mistral_common(folder: Path, manifest: dict[str, Any]) -> Engine:
    """Open Mistral's own reader of Tekken, for comparison. The slowest engine, with heavy
    imports.
    """
    library = _import("mistral_common.tokens.tokenizers.tekken")
    with open_tokenizer_file(folder, manifest, name=manifest["file"]["name"]) as file:
        tokenizer = library.Tekkenizer.from_file(f"/dev/fd/{file.fileno()}")

    def encode(texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        return join_ids(
            [tokenizer.encode(text, bos=False, eos=False) for text in to_strings(texts)]
        )

    return Engine(version("mistral-common"), encode)


#: engine → function that opens it with the files named in a manifest, or raises Unavailable
ENGINES = {
    "gigatoken": open_gigatoken,
    "tiktoken": open_tiktoken,
    "tokenizers": open_tokenizers,
    "mistral-common": open_mistral_common,
}


def make_fuzz_texts(own: Sequence[str] = (), count: int = FUZZ_TEXTS, seed: int = 0) -> list[str]:
    """Return deterministic fuzz texts: mixed scripts, white space, digits, broken words,
    control-token text.

    `own` adds tokens of the tokenizer to the well-known ones.
    """
    generator = random.Random(seed)
    names = [*CONTROL_TEXTS, *own]

    def piece() -> str:
        kind = generator.random()
        if kind < 0.45:
            first, last = _RANGES[min(int(generator.expovariate(0.25)), len(_RANGES) - 1)]
            return "".join(
                chr(generator.randint(first, last)) for _ in range(generator.randint(1, 9))
            )
        if kind < 0.60:
            first, last = generator.choice(_RANGES)
            return "".join(
                chr(generator.randint(first, last)) for _ in range(generator.randint(1, 4))
            )
        if kind < 0.93:
            return generator.choice(_PIECES)
        name = generator.choice(names)
        return name if generator.random() < 0.7 else name[: generator.randint(1, len(name))]

    texts = ["", " ", "\n", *names, *_PIECES]
    while len(texts) < count:
        texts.append("".join(piece() for _ in range(generator.randint(1, 24))))
    return texts[:count]


def find_difference(
    engine: Engine, reference: Engine, texts: Sequence[str]
) -> dict[str, str] | None:
    """Return the first text whose ids differ and both id lists near the difference, or None if all
    ids are equal.

    Tests both uses of an engine: all texts at once as an Arrow array, as in writing stores, and
    `FEW` texts at a time as str, as in training.
    """
    right = split_ids(*reference.encode(texts))
    few = (engine.encode(texts[first : first + FEW]) for first in range(0, len(texts), FEW))
    for found in (
        split_ids(*engine.encode(to_arrow(texts))),
        [ids for batch in few for ids in split_ids(*batch)],
    ):
        for text, *arrays in zip(texts, found, right, strict=True):
            ids, expected = (array.tolist() for array in arrays)
            if ids != expected:
                differs = (k for k, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b)
                first = max(0, next(differs, 0) - 2)
                return {
                    "text": repr(text[:80]),
                    "expected": f"{expected[first : first + 5]} from id {first} on, {len(expected)} ids",
                    "found": f"{ids[first : first + 5]}, {len(ids)} ids",
                }
    return None


def to_arrow(texts: Sequence[str]) -> pa.Array:
    """Return the texts as an Arrow string array. Unlike `pa.array`, this does not import pandas."""
    encoded = [text.encode("utf-8") for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(
        len(encoded), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))
    )


class EngineTokenizer(Tokenizer):
    """Tokenizer backed by an engine. `notes` lists the faster engines that were skipped, with
    reasons.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], requested: str = "auto"):
        super().__init__(manifest)
        self.notes: list[str] = []
        self.path = path
        self.manifest = manifest
        self._engines = TOKENIZERS[self.kind].engines
        self.engine, self._engine = self._choose(requested)
        self.engine_version = self._engine.version

    def read(self) -> bytes:
        """Return the content of the tokenizer's file."""
        return read_tokenizer_file(self.path.parent, self.manifest)

    def encode(self, texts: Texts) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts; see `Tokenizer.encode`. Raises UserError for text that the engine
        refuses.
        """
        try:
            return self._engine.encode(texts)
        except UserError:
            raise
        except Exception as error:  # engines have no error of their own
            raise UserError(
                f"the tokenizer {self.name} cannot encode this text.",
                engine=f"{self.engine} {self.engine_version}",
                reason=str(error).splitlines()[0] if str(error) else type(error).__name__,
                next=(
                    "add an unknown token to the model of its tokenizer.json, or use another "
                    "tokenizer"
                ),
            ) from error

    def difference(self, texts: Sequence[str]) -> dict[str, str] | None:
        """Return where this engine differs from the reference, as `find_difference`; None for the
        reference itself.
        """
        if self.engine == REFERENCE:
            return None
        return find_difference(self._engine, reference=self._open(REFERENCE), texts=texts)

    def _choose(self, requested: str) -> tuple[str, Engine]:
        """Return the requested engine with its name; for auto, the fastest that is installed and
        exact.
        """
        if requested not in ("auto", *self._engines):
            raise unknown(
                f"engine for tokenizers of kind {self.kind}",
                requested,
                self._engines,
                tokenizer=self.name,
            )
        for name in self._engines if requested == "auto" else (requested,):
            try:
                engine = self._open(name)
            except Unavailable as error:
                self.notes.append(f"not {name}: {error}")
                continue
            if name in (REFERENCE, requested) or self._is_exact(name, engine):
                return name, engine
            self.notes.append(
                f"not {name} {engine.version}: its ids differ from those of {REFERENCE}"
            )
        what = f"the engine {requested} cannot be used here."
        next_step = (
            "install it (environment.yml), or choose another: "
            f"{', '.join(['auto', *self._engines])}"
        )
        raise UserError(what, tokenizer=self.name, tried="; ".join(self.notes), next=next_step)

    def _is_exact(self, name: str, engine: Engine) -> bool:
        """Return whether the engine is exact: as recorded by the build for this version, otherwise
        tested now.
        """
        path = self.path.parent / "build.json"
        known = (
            read_json(path, what="record of the tokenizer's build").get("engines", {})
            if path.is_file()
            else {}
        )
        if known.get(name, {}).get("version") == engine.version:
            return bool(known[name]["exact"])
        try:
            reference = self._open(REFERENCE)
        except Unavailable:
            return False
        return (
            find_difference(
                engine, reference, texts=_list_encodable(reference, texts=make_fuzz_texts())
            )
            is None
        )

    def _open(self, name: str) -> Engine:
        return open_engine(name, folder=self.path.parent, manifest=self.manifest)


def _list_encodable(engine: Engine, texts: list[str]) -> list[str]:
    """Return the texts that an engine encodes. One without an unknown token refuses what its
    vocabulary lacks.
    """

    def encodes(some: list[str]) -> bool:
        try:
            engine.encode(some)
        except UserError:  # a panic, as of every such text
            raise
        except Exception:  # engines have no error of their own
            return False
        return True

    return texts if encodes(texts) else [text for text in texts if encodes([text])]


def compare_engines(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Compare every installed engine of the kind with the reference on fuzz texts, for the build
    record.

    Returns {name: {version, exact, texts, first_difference}}, or {name: {unavailable}}. Raises
    UserError if the reference gives other ids a second time.
    """
    reference = open_engine(REFERENCE, folder, manifest=manifest)
    names = {}
    if "derived" not in manifest:  # those of Tekken are known
        data = parse_fast_json(read_tokenizer_file(folder, manifest))
        names = find_control(data, manifest) | {
            token["id"]: token["content"] for token in data["added_tokens"]
        }
    texts = _list_encodable(reference, texts=make_fuzz_texts(list(names.values())))
    if difference := find_difference(reference, reference, texts=texts):
        raise random_error(manifest["name"], **difference)
    results: dict[str, Any] = {}
    for name in TOKENIZERS[manifest["kind"]].engines:
        try:
            engine = open_engine(name, folder, manifest=manifest)
        except Unavailable as error:
            results[name] = {"unavailable": str(error)}
            continue
        if name == REFERENCE:
            results[name] = {"version": engine.version, "exact": True}
            continue
        difference = find_difference(engine, reference, texts=texts)
        results[name] = {
            "version": engine.version,
            "exact": difference is None,
            "texts": len(texts),
        }
        if difference:
            results[name]["first_difference"] = difference
    return results


def random_error(name: str, **facts: object) -> UserError:
    """Return the error for a tokenizer that encodes the same text differently a second time."""
    what = f"the tokenizer {name} gives other ids for the same text: it is no function of the text."
    next_step = (
        "remove what is random from its files (dropout or sampling), or use another tokenizer"
    )
    return UserError(what, **facts, next=next_step)
