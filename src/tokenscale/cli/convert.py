"""Convert token stores from and to the formats of Megatron-LM, nanoGPT, Hugging Face datasets,
litdata and MosaicML.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import lock_folder, read_json, remove_tree, sha256_file
from tokenscale.base.progress import Progress
from tokenscale.data.stores.documents import Documents, Origin
from tokenscale.data.stores.foreign import reframe
from tokenscale.data.stores.foreign.hf_datasets import HfDatasets
from tokenscale.data.stores.foreign.id_files import Megatron, NanoGpt
from tokenscale.data.stores.foreign.shards import Litdata, Mds
from tokenscale.data.stores.manifest import (
    SingleFile,
    load_reader,
    load_writer,
    open_store,
    read_store_manifest,
    resolve_store,
)
from tokenscale.data.tokenizers.base import read_tokenizer_manifest as read_tokenizer
from tokenscale.data.tokenizers.huggingface import BUILT
from tokenscale.settings import flags
from tokenscale.settings.data import StoreSettings, unknown_format_error
from tokenscale.settings.options import option, settings_class
from tokenscale.settings.registry import TOKEN_FORMATS

Log = Callable[[str], None]
#: format of another project → class that reads and writes it
FOREIGN: dict[str, Any] = {
    "megatron": Megatron,
    "nanogpt": NanoGpt,
    "hf-datasets": HfDatasets,
    "litdata": Litdata,
}
FOREIGN["mds"] = Mds
IDS = ("vocabulary_size", "bos_id", "eos_id", "pad_id")
HELP = "tokenscale convert --help"


@settings_class
class ConvertSettings:
    """Formats of a conversion, and facts that the files do not contain."""

    to: str = option(
        "",
        description=f"{', '.join(FOREIGN)}; or a store, such as packed-sequence_length=2048",
        metavar="FORMAT",
    )
    from_format: Literal["store", *FOREIGN] | None = option(  # type: ignore[valid-type]
        None, description="format of the source (default: detected)", metavar="FORMAT"
    )
    sequence_length: int | None = option(
        None, description="sequence length of the store to write", ge=1
    )
    eos: bool | None = option(
        None,
        description="target stores: end documents with EOS (default: as a source store does; else no)",
    )
    tokenizer: str | None = option(
        None,
        description=f"tokenizer of the source's ids: a folder, or its name below {BUILT}",
        metavar="FOLDER",
    )
    tokenizer_name: str | None = option(
        None, description="without the tokenizer: its name, for the manifest"
    )
    vocabulary_size: int | None = option(
        None, description="without the tokenizer: the number of its ids", ge=1
    )
    bos_id: int | None = option(
        None, description="without the tokenizer: the id before each document", ge=0
    )
    eos_id: int | None = option(
        None,
        description="without the tokenizer: the id that ends a document, if there is one",
        ge=0,
    )
    pad_id: int | None = option(
        None, description="without the tokenizer: the padding id (default EOS, else BOS)", ge=0
    )
    document_end: int | None = option(
        None,
        description="id that ends documents in the foreign file, removed or added (default EOS)",
        ge=0,
        metavar="ID",
    )
    bos: Literal["keep", "drop"] | None = option(
        None, description="foreign targets: each BOS (default: keep; nanogpt: drop)"
    )
    dtype: Literal["uint16", "uint32", "int32", "int64"] | None = option(
        None,
        description=(
            "of a nanogpt source (default: uint16 up to 65,536 ids), or of an mds column of bytes "
            "(default: int64)"
        ),
    )
    column: str | None = option(
        None,
        description="column of ids in hf-datasets and mds (default: input_ids, tokens, or the only one)",
        metavar="NAME",
    )
    force: bool = option(False, description="replace TARGET if it is of the same kind")


@dataclass(frozen=True)
class Target:
    """Output of a conversion: a foreign format by its class (`layout`), or a store, in a folder or
    as one file.
    """

    path: Path
    format: str
    store: StoreSettings | None = None
    single: SingleFile | None = None
    command: str = ""  # command that writes it again

    @property
    def layout(self) -> Any:
        return FOREIGN.get(self.format)

    def list_outputs(self) -> list[Path]:
        """Return the paths that are written: files, or the folder of a store."""
        if self.layout:
            return self.layout.list_outputs(self.path)
        return self.single.list_files(self.path.parent) if self.single else [self.path]


@dataclass(frozen=True)
class Source:
    """Validated input of a conversion."""

    documents: Documents
    facts: dict[str, Any]  # for the record of what is written
    framing: reframe.Framing | None = None  # for a foreign source
    counts: reframe.Counts | None = None


FLAGS = flags.build_flags(ConvertSettings, aliases={"from_format": ("--from",)})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s SOURCE TARGET --to FORMAT [options]"
    kinds = {"source": "store, prefix of a Megatron-LM pair, .bin file, or folder of a data set"}
    kinds["target"] = "output of the same kinds; for padded and token-list also FILE.parquet"
    for name, text in kinds.items():
        parser.add_argument(name, type=Path, metavar=name.upper(), help=text)
    flags.add_flags(parser, flags=FLAGS)


def run(arguments: argparse.Namespace) -> None:
    """Convert the source and report the result."""
    settings = ConvertSettings(**flags.parse_flags(arguments, flags=FLAGS))
    convert(
        settings,
        source=arguments.source,
        target=arguments.target,
        command=shlex.join(["tokenscale", *sys.argv[1:]]),
    )


def convert(
    settings: ConvertSettings, source: Path, target: Path, log: Log = print, command: str = ""
) -> None:
    """Write TARGET from SOURCE. `log` receives a line for each finding and result; build records
    hold `command`.

    Raise UserError for a source of unknown format, a source that is inconsistent or contradicts the
    flags, flags that do not apply, and an existing TARGET.
    """
    goal = _parse_target(settings, path=target, command=command)
    kind = settings.from_format or _detect_format(source)
    _check_flags(settings, kind, goal=goal)
    check_target_free(
        goal,
        source,
        kind=kind,
        force=settings.force,
    )
    found = (open_own_store if kind == "store" else open_foreign)(settings, source, kind, goal, log)
    if not len(found.documents):
        raise UserError("the source holds no documents.", source=source, next="name another source")
    if goal.layout:
        write_foreign(
            settings,
            found,
            goal=goal,
            log=log,
        )
    else:
        assert goal.store is not None  # as of every goal that is no foreign format
        write_store(
            found, goal=replace(goal, store=replace(goal.store, eos=found.facts["eos"])), log=log
        )


def _parse_target(settings: ConvertSettings, path: Path, command: str) -> Target:
    names = [*FOREIGN, *TOKEN_FORMATS]
    if not settings.to:
        raise UserError("--to is missing.", allowed=", ".join(names), next=HELP)
    if settings.to in FOREIGN:
        return Target(path, format=settings.to)
    # a damaged store must be replaced
    command = command if settings.force or not command else f"{command} --force"
    if not any(settings.to == name or settings.to.startswith(f"{name}-") for name in TOKEN_FORMATS):
        raise unknown_format_error(settings.to.partition("-")[0], allowed=names, flag="--to")
    store = StoreSettings.parse(settings.to)
    if settings.sequence_length is not None:
        if "sequence_length" not in store.options():
            what = f"the format {store.format} has no rows of one length."
            raise UserError(what, flag="--sequence-length", next="leave it out")
        store = replace(store, sequence_length=settings.sequence_length)
    single = SingleFile(path.stem, command) if path.suffix == ".parquet" else None
    if single and store.format not in ("padded", "token-list"):
        raise UserError(
            f"the format {store.format} is a folder of files, not one.",
            target=path,
            next="name a folder",
        )
    return Target(
        path=path,
        format=store.format,
        store=store,
        single=single,
        command=command,
    )


def _detect_format(path: Path) -> str:
    manifest = find_manifest(path)
    # corpora and tokenizers have none
    if manifest.is_file() and "format" in read_json(manifest, what="manifest"):
        return "store"
    for kind, layout in FOREIGN.items():
        if layout.detect(path):
            return kind
    if path.exists() or any(
        path.with_name(path.name + ending).exists() for ending in (".bin", ".idx")
    ):
        expected = (
            "a store's folder, PREFIX of .bin and .idx, a .bin, or a folder of datasets, litdata "
            "or MDS"
        )
        next_step = (
            f"--from {{store,{','.join(FOREIGN)}}} tries one format and reports what is missing\n"
        )
        next_step += "tokenscale pretokenize --help, for text"
        raise UserError(
            "the format of the source is unknown.", source=path, expected=expected, next=next_step
        )
    raise UserError("the source is missing.", source=path, next="correct the path")


def _check_flags(settings: ConvertSettings, kind: str, goal: Target) -> None:
    """Raise UserError for a flag that does not apply to this conversion."""
    of_foreign = ("tokenizer", "tokenizer_name", *IDS)
    own = kind == "store"
    means = dict.fromkeys(of_foreign, not own) | dict.fromkeys(
        ("eos", "sequence_length"), goal.store is not None
    )
    means |= {"bos": goal.store is None, "document_end": goal.store is None or not own}
    means |= {"dtype": kind in ("nanogpt", "mds"), "column": kind in ("hf-datasets", "mds")}
    for name, used in means.items():
        if not used and getattr(settings, name) is not None:
            what = f"{flags.spell(name)} does not apply from {kind} to {goal.format}."
            known = "the store's manifest holds this value" if own and name in of_foreign else None
            raise UserError(what, reason=known, next="leave it out")


def find_manifest(path: Path) -> Path:
    """Return the manifest path of a store, given by its folder, its manifest, or its single Parquet
    file.
    """
    return (
        path.with_suffix(".manifest.json") if path.suffix == ".parquet" else resolve_store(path)[1]
    )


def check_target_free(goal: Target, source: Path, kind: str, force: bool) -> None:
    """Refuse to overwrite anything without --force, and files that this command would not write
    with it.
    """
    path = goal.path
    outputs = goal.list_outputs()
    parent = next(p for p in path.absolute().parents if p.exists())
    if not parent.is_dir():
        raise UserError(
            "the target's folder is a file.", target=path, folder=parent, next="correct the path"
        )
    theirs = [source] if kind == "store" else FOREIGN[kind].list_outputs(source)
    if {p.resolve() for p in outputs} & {p.resolve() for p in theirs}:
        raise UserError(
            "the target would replace its own source.", target=path, next="name another target"
        )
    is_store = not goal.layout and not goal.single
    there = [p for p in outputs if p.exists() and not (is_store and _is_empty_folder(p))]
    if there:
        _check_replaceable(goal, there, force=force)


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(_list_visible(path))


def _check_replaceable(goal: Target, there: list[Path], force: bool) -> None:
    """Refuse to replace outputs that exist: of another kind, beside other files, or without
    --force.
    """
    known, files = _recognise(goal, there)
    if files is not None and (
        strange := sorted(p.name for p in _list_visible(goal.path) if p.name not in files)
    ):
        what = (
            f"the target's folder holds more than {goal.layout.NAME if goal.layout else 'a store'}."
        )
        raise UserError(
            what, target=goal.path, found=", ".join(strange[:5]), next="name another folder"
        )
    if not known:
        what = f"the existing target is not a {goal.format if goal.layout else 'token store'}."
        raise UserError(
            what, target=there[0], next="name another target; --force replaces only the same kind"
        )
    if not force:
        raise UserError("the target already exists.", target=there[0], next="--force replaces it")


def _recognise(goal: Target, there: list[Path]) -> tuple[bool, list[str] | None]:
    """Return whether the outputs that exist are of the target's kind, and the names of all files
    that its folder may hold; None where other files may lie beside them.
    """
    path = goal.path
    if goal.single:
        return find_manifest(path).is_file(), None
    if goal.layout:
        of_folder = issubclass(goal.layout, reframe.ForeignFolder)
        known = goal.layout.detect(path) if of_folder else all(p.is_file() for p in there)
        if known and hasattr(goal.layout, "list_files"):
            return known, [*goal.layout.list_files(path), "tokenscale.json"]
        return known, None
    if not (path / "manifest.json").is_file():
        return False, None
    # a store's writer deletes token files that it does not know
    manifest = read_json(path / "manifest.json", what="manifest")
    listed = [*manifest.get("files", []), *manifest.get("records", {}).get("files", [])]
    return True, ["manifest.json", "build.json", *(file["name"] for file in listed)]


def _list_visible(folder: Path) -> Iterator[Path]:
    return (p for p in folder.iterdir() if not p.name.startswith("."))


def open_own_store(
    settings: ConvertSettings, path: Path, kind: str, goal: Target, log: Log
) -> Source:
    """Open a token store. Raise UserError if its documents cannot be recovered."""
    where = find_manifest(path)
    manifest = read_store_manifest(where)
    reader = load_reader(manifest["format"])
    if not hasattr(reader, "chunks"):
        reason = "it holds lengths alone"
        if manifest["tokens_cut"]:
            cut = f"{manifest['documents_cut']:,} of its {manifest['documents']:,} documents"
            reason = f"{cut} were cut: {manifest['tokens_cut']:,} tokens are missing"
        what = f"documents cannot be recovered from the format {manifest['format']}."
        next_step = "convert a token-list or packed store of the same text"
        raise UserError(
            what,
            store=path,
            reason=reason,
            next=next_step,
        )
    store = StoreSettings(manifest["format"], **manifest["options"])
    manifest = open_store(where, expected=store, requested_by="this conversion")
    eos = _resolve_eos(
        settings,
        goal,
        as_it_is=store.eos,
        eos_id=manifest["eos_id"],
    )
    size = f"{manifest['documents']:,} documents, {manifest['tokens_in_documents']:,} ids"
    ends = f", EOS {manifest['eos_id']}" if store.eos else ""
    log(f"{path} is a store: {store.directory}, {size}, BOS {manifest['bos_id']}{ends}")
    if eos != store.eos:
        log(f"  EOS {manifest['eos_id']} {'added to' if eos else 'removed from'} each document")
    facts = {"format": store.format, "ids_digest": manifest["ids_digest"], "eos": eos}
    return Source(
        reframe.StoreDocuments(reader=reader(where, manifest), manifest=manifest, eos=eos), facts
    )


def open_foreign(
    settings: ConvertSettings, path: Path, kind: str, goal: Target, log: Log
) -> Source:
    """Open a foreign source, and read it once to count it. Raise UserError if it contradicts the
    flags.
    """
    layout = FOREIGN[kind]
    record = reframe.read_record(layout.record_path(path))
    known = _read_tokenizer(settings.tokenizer)
    tokenizer, ids = _resolve_tokenizer(
        settings,
        known,
        record=record,
        source=path,
    )
    document_end = settings.document_end
    if document_end is None:
        document_end = (
            record["document_end"]
            if record and record["document_end"] is not None
            else ids["eos_id"]
        )
    _check_id("--document-end", value=document_end, vocabulary_size=ids["vocabulary_size"])
    stated = {i for i in (known.get("pad_id"), known.get("mask_id")) if i is not None}
    others = tuple(stated - {ids["bos_id"], ids["eos_id"], document_end})
    framing = reframe.Framing(
        vocabulary_size=ids["vocabulary_size"],
        bos_id=ids["bos_id"],
        eos_id=ids["eos_id"],
        document_end=document_end,
        others=others,
    )
    eos = _resolve_eos(
        settings,
        goal,
        as_it_is=bool(record and record["eos"] and goal.store),
        eos_id=ids["eos_id"],
    )
    options = {"document_end": document_end, "dtype": settings.dtype, "column": settings.column}
    reader = layout(path, vocabulary_size=framing.vocabulary_size, **options)
    documents = reframe.ReframedDocuments(reader=reader, framing=framing, eos=eos)
    hashes = {file: sha256_file(file) for file in reader.files}
    if record is not None:
        reframe.check_record(record, hashes, path=layout.record_path(path))
    progress = Progress(f"checking {path.name}", total=len(documents))
    counts = documents.scan(progress)
    progress.close()
    log(
        f"{path} is {layout.NAME}: {counts.documents:,} documents, {counts.tokens:,} ids of "
        f"{reader.dtype}"
    )
    if reader.note:
        log(f"  {reader.note}")
    if reader.padding_dropped:
        log(f"  padding removed, by its attention mask: {reader.padding_dropped:,} ids")
    of = f" ({counts.documents:,} documents)"
    if document_end is not None:
        log(f"  removed from the ends: {counts.document_ends_stripped:,} of id {document_end}{of}")
    log(f"  removed from the beginnings: {counts.bos_stripped:,} of BOS {framing.bos_id}{of}")
    if counts.empty_documents:
        log(f"  documents without text tokens: {counts.empty_documents:,}, kept")
    if goal.store:
        log(
            f"  added: BOS {framing.bos_id} before each document"
            + (f", EOS {framing.eos_id} behind" if eos else "")
        )
    files = []
    for file in reader.files:
        inside = file != path and file.is_relative_to(path)
        name = file.relative_to(path).as_posix() if inside else file.name
        files.append({"name": name, "bytes": file.stat().st_size, "sha256": hashes[file]})
    converted = {
        "format": kind,
        "files": files,
        "dtype": reader.dtype,
        "document_end_id": document_end,
    }
    converted |= {"padding_dropped": reader.padding_dropped, **asdict(counts)}
    made = {
        "corpus_manifest_sha256": None,
        "text_sha256": None,
        "special_token_policy": "as the makers of the source had it",
        "converted_from": converted,
    }
    documents.origin = Origin(tokenizer, **ids, source=made, engine=f"converted from {kind}")
    return Source(
        documents=documents,
        facts=converted | {"eos": eos},
        framing=framing,
        counts=counts,
    )


def _resolve_tokenizer(
    settings: ConvertSettings, known: dict[str, Any], record: dict[str, Any] | None, source: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (tokenizer as a manifest names it, {name of IDS: id}) from --tokenizer (`known`), the
    record and flags.

    Raise UserError if two of them contradict each other, and if none gives a required id.
    """
    made = record["tokenizer"] if record is not None else None
    tokenizer = made or {
        "name": settings.tokenizer_name or "unknown",
        "kind": "unknown",
        "file_sha256": None,
    }
    stated: list[tuple[str, dict[str, Any]]] = []
    if known:
        tokenizer = {
            "name": known["name"],
            "kind": known["kind"],
            "file_sha256": known["file"]["sha256"],
        }
        stated.append((f"--tokenizer {settings.tokenizer}", known))
        _check_same_tokenizer(made, tokenizer, source=source)
    if record is not None:
        stated.append(("the source's record", record))
    ids = _merge_ids(settings, stated)
    if missing := [f"{flags.spell(name)} N" for name in IDS[:2] if ids.get(name) is None]:
        next_step = "--tokenizer FOLDER, if the tokenizer that made it is here\n"
        next_step += "--vocabulary-size N --bos-id N, and --eos-id N if it has one, otherwise"
        facts = {"source": source, "missing": " ".join(missing)}
        raise UserError("the ids of the source's tokenizer are unknown.", **facts, next=next_step)
    ids["eos_id"] = ids.get("eos_id")
    if ids.get("pad_id") is None:
        ids["pad_id"] = ids["bos_id"] if ids["eos_id"] is None else ids["eos_id"]
    for name in IDS[1:]:
        _check_id(flags.spell(name), value=ids[name], vocabulary_size=ids["vocabulary_size"])
    if settings.tokenizer_name not in (None, tokenizer["name"]):
        facts = {"stated": tokenizer["name"], "requested": settings.tokenizer_name}
        raise UserError(
            "--tokenizer-name contradicts the known name of the tokenizer.",
            **facts,
            next="leave it out",
        )
    return tokenizer, {name: ids[name] for name in IDS}


def _check_same_tokenizer(
    made: dict[str, Any] | None, tokenizer: dict[str, Any], source: Path
) -> None:
    """Refuse a tokenizer that is another than the one that `made` the source, where that is
    recorded.
    """
    if made is None or made["file_sha256"] in (None, tokenizer["file_sha256"]):
        return
    has, requested = (f"{of['name']}, sha256 {of['file_sha256']}" for of in (made, tokenizer))
    facts = {"source": source, "has": has, "requested": f"{requested}  (--tokenizer)"}
    next_step = "leave --tokenizer out: the record holds the tokenizer's facts"
    raise UserError("another tokenizer made the source.", **facts, next=next_step)


def _merge_ids(
    settings: ConvertSettings, stated: list[tuple[str, dict[str, Any]]]
) -> dict[str, Any]:
    """Return {name of IDS: id} from what is `stated`, by who states it, and from the flags that are
    given. Raise UserError if two of them differ.
    """
    flagged = [(name, getattr(settings, name)) for name in IDS]
    values = [(name, facts[name]) for _, facts in stated for name in IDS]
    values += [(name, value) for name, value in flagged if value is not None]
    ids: dict[str, Any] = {}
    for name, value in values:
        if ids.setdefault(name, value) != value:
            what = f"{flags.spell(name)} contradicts {stated[0][0]}."
            raise UserError(what, stated=f"{ids[name]}", requested=f"{value}", next="leave it out")
    return ids


def _read_tokenizer(text: str | None) -> dict[str, Any]:
    """Return the manifest of the tokenizer of --tokenizer; empty without the flag."""
    for folder in () if text is None else (Path(text), BUILT / text):
        if (folder / "manifest.json").is_file() and "kind" in read_json(folder / "manifest.json"):
            return read_tokenizer(folder)
    if text is None:
        return {}
    facts = {
        "flag": "--tokenizer",
        "expected": f"a folder with a tokenizer's manifest.json, or a name below {BUILT}",
    }
    if known := sorted(path.parent.name for path in BUILT.glob("*/manifest.json")):
        raise unknown(
            "tokenizer",
            word=text,
            words=known,
            **facts,
        )
    next_step = "name its folder, or give --vocabulary-size, --bos-id and --eos-id"
    raise UserError(f"there is no tokenizer {text!r} here.", **facts, next=next_step)


def _check_id(flag: str, value: int | None, vocabulary_size: int) -> None:
    if value is not None and value >= vocabulary_size:
        what = f"{flag} is outside the vocabulary."
        expected = f"0 … {vocabulary_size - 1}"
        raise UserError(
            what, found=value, expected=expected, next="correct it, or --vocabulary-size"
        )


def _resolve_eos(
    settings: ConvertSettings, goal: Target, as_it_is: bool, eos_id: int | None
) -> bool:
    """Return whether documents end with EOS: by flag, by the name of the target store, or as in the
    source.
    """
    eos = (
        settings.eos
        if settings.eos is not None
        else as_it_is or (goal.store is not None and goal.store.eos)
    )
    if eos and eos_id is None:
        raise UserError(
            "the tokenizer has no EOS.", flag="--eos", next="leave it out, or --eos-id N"
        )
    return eos


def write_store(found: Source, goal: Target, log: Log) -> None:
    store = goal.store
    assert store is not None  # see `Target`
    path = goal.path
    progress = Progress(f"writing {path.name}", total=len(found.documents))
    found.documents.report = progress
    found.documents.origin = replace(found.documents.origin, command=goal.command)
    with _lock_target(goal):
        write = load_writer(store.format)
        folder, how = (path.parent, {"single": goal.single}) if goal.single else (path, {})
        manifest = write(store, found.documents, folder, **how)
    progress.close()
    fill = f"{manifest['tokens_in_documents']:,} ids, fill {manifest['fill']:.2%}"
    if lost := manifest["tokens_cut"]:
        fill += f", {lost:,} ids of {manifest['documents_cut']:,} documents cut"
    digest = f"ids_digest {manifest['ids_digest']['value'][:16]}"
    log(
        f"{progress.line()}\n{path}: {store.directory}, {manifest['rows']:,} rows, {fill}; {digest}"
    )


@contextmanager
def _lock_target(goal: Target) -> Iterator[None]:
    """Lock the target's folder. On failure, remove the folder unless something was begun in it."""
    path = goal.path
    place = path.parent / f".{path.stem}.converting" if goal.single else path
    new = not goal.single and not path.exists()
    with lock_folder(place, what=str(path)):
        try:
            yield
        except BaseException:
            if new and not (path / ".building").exists():
                remove_tree(path)
            raise
        finally:
            if goal.single:
                remove_tree(place)


@contextmanager
def _removing_on_failure(outputs: list[Path]) -> Iterator[None]:
    """Remove what was made of these files and folders if not all is: the next call would find them
    in its way.
    """
    try:
        yield
    except BaseException:
        for output in outputs:
            if output.is_dir():
                remove_tree(output)
            else:
                output.unlink(missing_ok=True)
        raise


def _describe_export(
    goal: Target, found: Source, rule: reframe.ExportFraming, count: reframe.ExportCounts
) -> dict[str, Any]:
    """Return the facts that the files of a foreign format do not contain."""
    origin = found.documents.origin
    return {
        "format": goal.format,
        "tokenizer": origin.tokenizer,
        **{name: getattr(origin, name) for name in IDS},
        "eos": found.facts["eos"],
        "documents": count.documents,
        "tokens": count.tokens,
        "bos": "keep" if rule.keep_bos else "drop",
        "document_end": rule.document_end,
        "source": found.facts,
    }


def write_foreign(settings: ConvertSettings, found: Source, goal: Target, log: Log) -> None:
    """Write a foreign format, and the record of the facts that its files do not contain."""
    rule = _choose_rule(settings, found, goal=goal)
    layout = goal.layout
    documents = found.documents
    progress = Progress(f"writing {goal.path.name}", total=len(documents))
    count = reframe.ExportCounts()
    documents.report = progress
    new = [output for output in goal.list_outputs() if not output.exists()]
    with _removing_on_failure(new):
        hashes = layout.write(documents, goal.path, rule, count)
        # an old record does not match new files and is ignored
        facts = _describe_export(goal, found, rule, count)
        reframe.write_record(layout.record_path(goal.path), hashes, facts)
    origin = documents.origin
    progress.close()
    log(progress.line())
    size = sum(file.stat().st_size for file in hashes)
    log(
        f"{goal.path}: {goal.format}, {count.documents:,} documents, {count.tokens:,} ids, "
        f"{size:,} bytes"
    )
    if count.bos_dropped and (found.counts is None or found.counts.bos_stripped):
        log(f"  removed: {count.bos_dropped:,} of BOS {origin.bos_id}")
    if rule.document_end is not None:
        log(f"  added after documents: {count.document_ends_added:,} of id {rule.document_end}")
    for note in layout.notes(origin, ended=rule.document_end is not None or found.facts["eos"]):
        log(f"  {note}")


def _choose_rule(settings: ConvertSettings, found: Source, goal: Target) -> reframe.ExportFraming:
    """Return how documents are framed in the target: between foreign formats as before, if the
    format allows it.
    """
    origin = found.documents.origin
    end = settings.document_end
    if end is None and goal.format == "nanogpt":
        end = found.framing.document_end if found.framing else origin.eos_id
        if end is None:
            what = "nanoGPT's format needs an id that ends documents, but the tokenizer has none."
            raise UserError(what, tokenizer=origin.tokenizer["name"], next="--document-end ID")
    if end is None and found.counts is not None and found.counts.document_ends_stripped:
        assert found.framing is not None  # what the counts are of
        end = found.framing.document_end
    _check_id("--document-end", value=end, vocabulary_size=origin.vocabulary_size)
    keep = goal.layout.KEEPS_BOS and (found.counts is None or found.counts.bos_stripped > 0)
    return reframe.ExportFraming(keep if settings.bos is None else settings.bos == "keep", end)
