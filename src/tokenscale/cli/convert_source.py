"""What `convert` reads, checked against what is stated of it: a store of ours, or a foreign format."""

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import read_json, sha256_file
from tokenscale.base.progress import Progress
from tokenscale.cli.convert_target import Target, manifest_of
from tokenscale.data.stores.documents import Documents, Origin
from tokenscale.data.stores.foreign.from_store import StoreDocuments
from tokenscale.data.stores.foreign.record import compare, read_record
from tokenscale.data.stores.foreign.reframe import Counts, Framing, Reframed
from tokenscale.data.stores.manifest import open_store, read_store_manifest, reader_of
from tokenscale.data.tokenizers.manifest import read_manifest as read_tokenizer
from tokenscale.data.tokenizers.named import BUILT
from tokenscale.settings import flags
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.options import option
from tokenscale.settings.registry import FOREIGN, FORMATS

Say = Callable[[str], None]


IDS = ("vocabulary_size", "bos_id", "eos_id", "pad_id")


HELP = "python -m tokenscale convert --help"


@dataclass(frozen=True)
class ConvertSettings:
    """What to convert into what, and what files cannot say."""

    to: str = option(
        "",
        "megatron, nanogpt, hf-datasets; or a store by its name: packed, token-list-dtype=int64, "
        "packed-sequence_length=2048",
        metavar="FORMAT",
    )
    from_format: Literal["store", "megatron", "nanogpt", "hf-datasets"] | None = option(
        None, "where the source does not show it"
    )
    sequence_length: int | None = option(None, "of the store to write", ge=1)
    eos: bool | None = option(None, "stores to write: end each document with EOS (default: a store as it is; else no)")
    tokenizer: str | None = option(
        None, "that made the source's ids: its folder, or its name below results/tokenizers", metavar="FOLDER"
    )
    tokenizer_name: str | None = option(None, "where the tokenizer is not here: its name, for the manifest")
    vocabulary_size: int | None = option(None, "where the tokenizer is not here: its ids", ge=1)
    bos_id: int | None = option(None, "the same: the id before each document", ge=0)
    eos_id: int | None = option(None, "the same: the id that ends one, where there is one", ge=0)
    pad_id: int | None = option(None, "the same: of padding (default EOS, else BOS; never compared with)", ge=0)
    document_end: int | None = option(
        None, "the id that ends documents in the foreign file (default EOS): taken off, or added", ge=0, metavar="ID"
    )
    bos: Literal["keep", "drop"] | None = option(
        None, "foreign formats to write: the BOS of each document (default: keep; of nanogpt: drop)"
    )
    dtype: Literal["uint16", "uint32"] | None = option(
        None, "of a nanogpt source (default: by vocabulary, uint16 up to 65,536)"
    )
    column: str | None = option(None, "of a hf-datasets source (default input_ids, else tokens)", metavar="NAME")
    force: bool = option(False, "replace what lies at TARGET, if it is of the same kind")


FLAGS = flags.leaves(ConvertSettings, words={"from_format": ("--from",)})


@dataclass(frozen=True)
class Source:
    """What to read, checked."""

    documents: Documents
    facts: dict[str, Any]  # for the record of what is written
    framing: Framing | None = None  # of a foreign source
    counts: Counts | None = None


def of_store(settings: ConvertSettings, path: Path, goal: Target, say: Say) -> Source:
    """A store of ours, opened. UserError where documents cannot be had back from it."""
    where = manifest_of(path)
    manifest = read_store_manifest(where)
    if manifest["format"] not in FORMATS:
        raise unknown("format of a store", manifest["format"], FORMATS, store=path)
    reader = reader_of(manifest["format"])
    if not hasattr(reader, "chunks"):
        raise UserError(
            f"documents cannot be had back from the format {manifest['format']}.",
            store=path,
            reason=f"{manifest['documents_cut']:,} of its {manifest['documents']:,} documents were cut: "
            f"{manifest['tokens_cut']:,} tokens are not in it",
            next="convert a token-list or packed store of the same text",
        )
    store = StoreSettings(manifest["format"], **manifest["options"])
    manifest = open_store(where, store, asked_by="this conversion")
    eos = _eos(settings, goal, store.eos)
    _check_eos(eos, manifest["eos_id"])
    say(
        f"{path} is a store: {store.directory}, {manifest['documents']:,} documents, "
        f"{manifest['tokens_in_documents']:,} ids, BOS {manifest['bos_id']}"
        + (f", EOS {manifest['eos_id']}" if store.eos else "")
    )
    if eos != store.eos:
        say(f"  EOS {manifest['eos_id']} {'added to' if eos else 'taken off'} each document")
    facts = {"format": store.format, "ids_digest": manifest["ids_digest"], "eos": eos}
    return Source(StoreDocuments(reader(where, manifest), manifest, eos), facts)


def of_foreign(settings: ConvertSettings, path: Path, kind: str, goal: Target, say: Say) -> Source:
    """What others wrote, read once and counted. UserError where it contradicts what is stated of it."""
    module = importlib.import_module(FOREIGN[kind])
    record = read_record(module.record_path(path))
    tokenizer, ids = _facts(settings, record, path)
    document_end = settings.document_end
    if document_end is None:
        document_end = record["document_end"] if record and record["document_end"] is not None else ids["eos_id"]
    if document_end is not None and document_end >= ids["vocabulary_size"]:
        raise outside("--document-end", document_end, ids["vocabulary_size"])
    framing = Framing(ids["vocabulary_size"], ids["bos_id"], ids["eos_id"], document_end)
    eos = _eos(settings, goal, bool(record and record["eos"] and goal.store))
    _check_eos(eos, ids["eos_id"])
    reader = module.Reader(
        path,
        vocabulary_size=framing.vocabulary_size,
        document_end=document_end,
        dtype=settings.dtype,
        column=settings.column,
    )
    documents = Reframed(reader, framing, eos)
    hashes = {file.name: sha256_file(file) for file in reader.files}
    if record is not None:
        compare(record, hashes, module.record_path(path))
    progress = Progress(f"checking {path.name}", total=len(documents))
    counts = documents.scan(progress)
    progress.close()
    for line in _told(path, module.NAME, reader, framing, counts):
        say(line)
    if goal.store:
        say(f"  put on: BOS {framing.bos_id} before each document" + (f", EOS {framing.eos_id} behind" if eos else ""))
    documents.origin = Origin(
        tokenizer=tokenizer,
        **ids,
        source={
            "corpus_manifest_sha256": None,
            "text_sha256": None,
            "special_token_policy": "as the makers of the source had it",  # ours is not theirs
            "converted_from": {
                "format": kind,
                "files": [
                    {"name": file.name, "bytes": file.stat().st_size, "sha256": hashes[file.name]}
                    for file in reader.files
                ],
                "dtype": reader.dtype,
                "document_end_id": document_end,
                "padding_dropped": reader.padding_dropped,
                **dataclasses.asdict(counts),
            },
        },
        engine=f"converted from {kind}",
    )
    return Source(documents, documents.origin.source["converted_from"] | {"eos": eos}, framing, counts)


def _facts(
    settings: ConvertSettings, record: dict[str, Any] | None, source: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tokenizer as a manifest names it, `vocabulary_size`, `bos_id`, `eos_id` and `pad_id`) from flags, the folder of
    a tokenizer, and the record; UserError where two of them differ, and where nothing says it."""
    tokenizer, stated = None, []
    if settings.tokenizer is not None:
        found = read_tokenizer(_tokenizer_folder(settings.tokenizer))
        tokenizer = {"name": found["name"], "kind": found["kind"], "file_sha256": found["file"]["sha256"]}
        stated.append((f"--tokenizer {settings.tokenizer}", {name: found[name] for name in IDS}))
    if record is not None:
        stated.append(("the source's record", {name: record[name] for name in IDS}))
        if tokenizer is None:
            tokenizer = record["tokenizer"]
        elif record["tokenizer"]["file_sha256"] not in (None, tokenizer["file_sha256"]):
            raise UserError(
                "another tokenizer made the source.",
                source=source,
                has=f"{record['tokenizer']['name']}, sha256 {record['tokenizer']['file_sha256']}",
                asked=f"{tokenizer['name']}, sha256 {tokenizer['file_sha256']}  (--tokenizer)",
                next="leave --tokenizer out: the record says all of it",
            )
    of_flags = {name: getattr(settings, name) for name in IDS if getattr(settings, name) is not None}
    ids: dict[str, Any] = {}
    for facts in (*(facts for _, facts in stated), of_flags):
        for name, value in facts.items():
            if ids.setdefault(name, value) != value:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(
                    f"{flag} contradicts {stated[0][0]}.", stated=f"{ids[name]}", asked=f"{value}", next="leave it out"
                )
    missing = [f"--{name.replace('_', '-')} N" for name in ("vocabulary_size", "bos_id") if ids.get(name) is None]
    if missing:
        raise UserError(
            "the source does not say which ids its tokenizer has.",
            source=source,
            missing=" ".join(missing),
            next="--tokenizer FOLDER, where the tokenizer that made it is here\n"
            "--vocabulary-size N --bos-id N, and --eos-id N where it has one, where it is not",
        )
    ids["eos_id"] = ids.get("eos_id")
    if ids.get("pad_id") is None:
        ids["pad_id"] = ids["bos_id"] if ids["eos_id"] is None else ids["eos_id"]
    for name in IDS[1:]:
        if ids[name] is not None and ids[name] >= ids["vocabulary_size"]:
            raise outside(f"--{name.replace('_', '-')}", ids[name], ids["vocabulary_size"])
    if tokenizer is None:
        tokenizer = {"name": settings.tokenizer_name or "unknown", "kind": "unknown", "file_sha256": None}
    elif settings.tokenizer_name not in (None, tokenizer["name"]):
        raise UserError(
            "--tokenizer-name contradicts what is known of the tokenizer.",
            stated=tokenizer["name"],
            asked=settings.tokenizer_name,
            next="leave it out",
        )
    return tokenizer, {name: ids[name] for name in IDS}


def _tokenizer_folder(text: str) -> Path:
    for folder in (Path(text), BUILT / text):
        if (folder / "manifest.json").is_file() and "kind" in read_json(folder / "manifest.json"):
            return folder
    known = sorted(path.parent.name for path in BUILT.glob("*/manifest.json"))
    facts = {
        "flag": "--tokenizer",
        "expected": "a folder with a tokenizer's manifest.json, or a name below " + str(BUILT),
    }
    if known:
        raise unknown("tokenizer", text, known, **facts)
    what = f"there is no tokenizer {text!r} here."
    raise UserError(what, **facts, next="name its folder, or say --vocabulary-size, --bos-id and --eos-id")


def outside(flag: str, value: int, vocabulary_size: int) -> UserError:
    """The error of an id that is none."""
    return UserError(
        f"{flag} lies outside the vocabulary.",
        found=value,
        expected=f"0 … {vocabulary_size - 1}",
        next="mend it, or --vocabulary-size",
    )


def _eos(settings: ConvertSettings, goal: Target, as_it_is: bool) -> bool:
    """Whether documents shall end with EOS: by flag, by the name of the store to write, or as the source has it."""
    return settings.eos if settings.eos is not None else as_it_is or (goal.store is not None and goal.store.eos)


def _check_eos(eos: bool, eos_id: int | None) -> None:
    if eos and eos_id is None:
        raise UserError(
            "the tokenizer has no EOS to end documents with.", flag="--eos", next="leave it out, or --eos-id N"
        )


def _told(path: Path, name: str, reader: Any, framing: Framing, counts: Counts) -> Iterator[str]:
    yield f"{path} is {name}: {counts.documents:,} documents, {counts.tokens:,} ids of {reader.dtype}"
    if reader.note:
        yield f"  {reader.note}"
    if reader.padding_dropped:
        yield f"  padding left out, by its attention mask: {reader.padding_dropped:,} ids"
    of = f" ({counts.documents:,} documents)"
    if framing.document_end is not None:
        yield f"  taken off the ends: {counts.document_ends_stripped:,} of id {framing.document_end}{of}"
    yield f"  taken off the beginnings: {counts.bos_stripped:,} of BOS {framing.bos_id}{of}"
    if counts.empty_documents:
        yield f"  documents without a token of text: {counts.empty_documents:,}, kept"
