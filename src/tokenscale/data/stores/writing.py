"""Write token stores, of documents and of a corpus, at once or in parts; the manifest is written
last.

A part is a store of a range of documents in `parts/NNNNN`, written by a job of its own. Its
manifest also has the groups of the ids digest and the number of occurrences of each id. Merging
reads only manifests and occurrences: the store's manifest names the files of its parts, and has the
counts and the `ids_digest` of a store that is written at once. Rows of a packed store are packed
and shuffled within each part, so that its rows differ.
"""

import platform
import sys
import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale import __version__
from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    move_files,
    read_record,
    remove_manifest,
    remove_tree,
    sha256_file,
    utc_now,
    write_sealed,
)
from tokenscale.base.manifests import check_file, open_checked
from tokenscale.costs.data import measure_quantiles
from tokenscale.data.corpus.raw_text import read_corpus_manifest
from tokenscale.data.parts import part_folder, remove_surplus_parts
from tokenscale.data.records import smallest_dtype
from tokenscale.data.stores.documents import Chunk, DocumentRange, Documents, IdsDigest
from tokenscale.data.stores.manifest import (
    SEAL,
    VERSION,
    SingleFile,
    build_record_path,
    load_writer,
    read_store_manifest,
    rebuild_command,
)
from tokenscale.data.stores.text import EngineDiffers, TextDocuments
from tokenscale.data.tokenizers.backends import REFERENCE
from tokenscale.data.tokenizers.base import SPECIAL_TOKEN_POLICY, Tokenizer
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.data.tokenizers.losses import describe
from tokenscale.settings.data import StoreSettings

#: int64 [V], how often each id occurs in a part
OCCURRENCES = "occurrences.npy"


class StoreWriter:
    """Reader of the documents to write and manifest builder, common to all formats."""

    def __init__(self, store: StoreSettings, documents: Documents, folder: Path):
        self.store = store
        self.documents = documents
        self.folder = folder
        self.manifest: dict[str, Any] | None = None
        #: digest of the documents read so far
        self.digest = IdsDigest()
        #: occurrences of each id in them, int64 [V]
        self.occurrences = np.zeros(documents.origin.vocabulary_size, dtype=np.int64)

    def chunks(self, first: int = 0, last: int | None = None) -> Iterator[Chunk]:
        """Yield documents [first, last), by default all. Ranges must be read in order."""
        count = len(self.occurrences)
        for chunk in self.documents.chunks(first, len(self.documents) if last is None else last):
            if chunk.ids.size and not 0 <= chunk.ids.min() <= chunk.ids.max() < count:
                raise ValueError(f"ids outside the vocabulary of {count}")
            self.digest.add(chunk)
            self.occurrences += np.bincount(chunk.ids, minlength=count)
            yield chunk

    def finish(
        self,
        names: list[str],
        facts: dict[str, Any],
        hashes: dict[str, str] | None = None,
        checks: str | None = None,
        records: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Build and return the manifest of the files `names`.

        `facts` are the format's counts, including `tokens_stored` and `places` (capacity of all
        rows in tokens, including padding). `hashes` are known SHA-256 hashes. `checks` is the file
        of checksums with which readers verify the largest file block by block instead of hashing it
        at once. `records` are the entries of records files.
        """
        self.documents.confirm()
        origin = self.documents.origin
        groups = self.digest.close()
        with ThreadPoolExecutor(2) as pool:
            files = list(
                pool.map(
                    lambda name: _describe_file(
                        self.folder / name, sha256=(hashes or {}).get(name)
                    ),
                    names,
                )
            )
        if checks is not None:
            files[0]["checked_by"] = checks
        self.manifest = {
            "schema_version": VERSION,
            "format": self.store.format,
            "options": self.store.options(),
            "split": self.store.split,
            "tokenizer": origin.tokenizer,
            "vocabulary_size": origin.vocabulary_size,
            "bos_id": origin.bos_id,
            "eos_id": origin.eos_id,
            "document_rule": "one BOS, the text" + (", one EOS" if self.store.eos else "; no EOS"),
            "special_token_policy": SPECIAL_TOKEN_POLICY,
            "padding": {"side": "right", "id": origin.pad_id},
            **origin.source,
            "documents": len(self.documents),
            "tokens_in_documents": int(self.occurrences.sum()),
            **facts,
            "fill": round(facts["tokens_stored"] / facts["places"], 6),
            "ids_digest": {"algorithm": IdsDigest.ALGORITHM, "value": IdsDigest.combine(groups)},
            "bits_per_token": measure_bits(files, occurrences=self.occurrences),
            "files": files,
        }
        if records:
            self.manifest["records"] = {
                "dtype": smallest_dtype(origin.vocabulary_size).name,
                "files": records,
            }
        if isinstance(part := self.documents, DocumentRange):
            np.save(self.folder / OCCURRENCES, self.occurrences)
            self.manifest["part"] = {
                "number": part.number,
                "parts": part.parts,
                "first_document": part.first,
                "groups": [group.hex() for group in groups],
                "occurrences": _describe_file(self.folder / OCCURRENCES),
            }
        return self.manifest


def _describe_file(path: Path, sha256: str | None = None) -> dict[str, Any]:
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256 or sha256_file(path)}


def measure_bits(files: list[dict[str, Any]], occurrences: np.ndarray) -> dict[str, float]:
    """Return the bits per token of the files, and the entropy of single ids; `occurrences` of each
    id, int64 [V].
    """
    tokens = int(occurrences.sum())
    shares = occurrences[occurrences > 0] / max(1, tokens)
    return {
        "stored": round(8 * sum(file["bytes"] for file in files) / max(1, tokens), 4),
        "order_0_entropy": round(float(-(shares * np.log2(shares)).sum()), 4),
    }


def list_files(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of all files of a store: Parquet or binary, records, and those of a
    part.
    """
    occurrences = manifest.get("part", {}).get("occurrences")
    more = [occurrences] if occurrences else []
    return [*manifest["files"], *manifest.get("records", {}).get("files", []), *more]


@contextmanager
def open_store_writer(
    store: StoreSettings, documents: Documents, directory: Path, single: SingleFile | None = None
) -> Iterator[StoreWriter]:
    """Yield a writer into a temporary folder; on success its files replace the old ones, the
    manifest last.

    With `single`, the store is one Parquet file and its records, and other stores in `directory`
    are not touched. Raises UserError if there are no documents.
    """
    directory = Path(directory)
    if len(documents) == 0:
        what = f"the corpus has no {store.split} documents."
        raise UserError(
            what, store=store.directory, directory=directory, next="use a larger corpus"
        )
    started = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    folder = directory / (f".{single.name}.building" if single else ".building")
    manifest = directory / (f"{single.name}.manifest.json" if single else "manifest.json")
    remove_tree(folder)  # of a killed writer
    folder.mkdir()
    writer = StoreWriter(store=store, documents=documents, folder=folder)
    try:
        yield writer
    except BaseException:
        remove_tree(folder)
        raise
    if writer.manifest is None:
        raise RuntimeError("a format's writer ended without finish()")
    names = {file["name"] for file in list_files(writer.manifest)}
    remove_manifest(manifest)
    if single is None:
        _remove_data(directory, keep=names)
        remove_tree(directory / "parts")  # of an earlier store in parts
    move_files(folder, directory, names=sorted(names))
    remove_tree(folder)
    command = single.command if single else documents.origin.command
    write_build_record(
        manifest,
        duration_s=time.monotonic() - started,
        engine=documents.origin.engine,
        command=command,
    )
    write_sealed(manifest, record=writer.manifest, key=SEAL)


def _remove_data(directory: Path, keep: Container[str] = ()) -> None:
    for path in directory.iterdir():
        if path.suffix in (".parquet", ".bin", ".npy") and path.name not in keep:
            path.unlink()


def write_build_record(
    manifest: Path, duration_s: float | None, engine: str, command: str | None = None
) -> None:
    """Write the build record of a store: when, where, with which versions and with which command it
    was written.
    """
    record = {
        "created_utc": utc_now(),
        "duration_s": duration_s,
        "engine": engine,
        "tokenscale": __version__,
        "python": sys.version,
        "numpy": np.__version__,
        "machine": platform.node(),
        "manifest": manifest.name,
    }
    write_sealed(
        build_record_path(manifest), record=record | ({"command": command} if command else {})
    )


#: counts that are added over parts
SUMMED = (
    *(
        "documents",
        "tokens_in_documents",
        "rows",
        "pieces",
        "tokens_useful",
        "tokens_total",
        "tokens_stored",
        "places",
    ),
    *("tokens_cut", "documents_cut", "documents_split"),
)
#: facts that are computed from the facts of the parts
COMPUTED = ("fill", "ids_digest", "bits_per_token", "files", "records", "part", "quantiles")


def merge_store(
    store: StoreSettings, corpus_directory: Path, directory: Path, parts: int
) -> dict[str, Any]:
    """Merge the parts of a store and return its manifest. Raises UserError unless all parts are
    there and fit.
    """
    directory = Path(directory)
    filled = _read_parts(directory, parts, corpus_directory=Path(corpus_directory))
    documents = sum(manifest["documents"] for manifest in filled.values())
    expected = read_corpus_manifest(Path(corpus_directory))["splits"][store.split]["rows"]
    if not filled or documents != expected:
        what = "the parts of the token store do not have all documents."
        whole = f"{expected:,} documents of the split"
        next_step = f"rm -r {directory}, and build it again: {rebuild_command(directory)}"
        found = f"{documents:,} in {parts} parts"
        raise UserError(
            what, store=directory, expected=f"{whole} {store.split}", found=found, next=next_step
        )
    merged = _merge_manifests(directory, filled)
    if store.format == "packed":
        merged["rows_packed_within"] = "part"
    if store.format == "lengths":
        lengths = [_read_array(directory, file) for file in merged["files"]]
        merged["quantiles"] = measure_quantiles(np.concatenate(lengths))
    path = directory / "manifest.json"
    remove_manifest(path)
    _remove_data(directory)  # of an earlier store in one part
    remove_surplus_parts(directory, parts)
    _merge_build_records(directory, names=[part["folder"] for part in merged["parts"]])
    write_sealed(path, record=merged, key=SEAL)
    return merged


def _read_parts(directory: Path, parts: int, corpus_directory: Path) -> dict[int, dict[str, Any]]:
    """Return the checked manifests of the parts with documents, by number."""
    corpus = sha256_file(corpus_directory / "manifest.json")
    first: dict[str, Any] | None = None
    filled: dict[int, dict[str, Any]] = {}
    documents = 0
    for number in range(parts):
        folder = part_folder(directory, number)
        manifest = read_store_manifest(folder)
        _check_part(
            folder,
            manifest,
            expected=(number, parts, documents),
            corpus=corpus,
            first=first,
        )
        documents += manifest["documents"]
        if manifest["documents"]:
            first = first or manifest
            filled[number] = manifest
    return filled


def _merge_manifests(directory: Path, filled: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest of the whole store: facts of the first part, sums, and lists of files."""
    manifests = list(filled.values())
    first = manifests[0]
    merged = {key: value for key, value in first.items() if key not in COMPUTED}
    for manifest in manifests[1:]:
        merged |= {key: merged[key] + manifest[key] for key in SUMMED if key in merged}
    files = []
    records = []
    listed = []
    groups: list[bytes] = []
    occurrences = np.zeros(first["vocabulary_size"], dtype=np.int64)
    for number, manifest in filled.items():
        name = f"parts/{number:05d}"
        groups += [bytes.fromhex(group) for group in manifest["part"]["groups"]]
        occurrences += _read_array(part_folder(directory, number), manifest["part"]["occurrences"])
        files += [_move_file(file, folder=name) for file in manifest["files"]]
        if "records" in manifest:
            records += [_move_file(file, folder=name) for file in manifest["records"]["files"]]
        listed.append(
            {"folder": name, "rows": manifest["rows"], "documents": manifest["documents"]}
        )
    merged["files"] = files
    if dtypes := [manifest["records"]["dtype"] for manifest in manifests if "records" in manifest]:
        merged["records"] = {"dtype": dtypes[0], "files": records}
    merged["fill"] = round(merged["tokens_stored"] / merged["places"], 6)
    merged["ids_digest"] = {"algorithm": IdsDigest.ALGORITHM, "value": IdsDigest.combine(groups)}
    merged["bits_per_token"] = measure_bits(files, occurrences)
    merged["parts"] = listed
    return merged


def _merge_build_records(directory: Path, names: list[str]) -> None:
    """Write the build record of the whole store: the time of all jobs together, and their
    engines.
    """
    built = []
    for name in names:
        path = build_record_path(directory / name / "manifest.json")
        what = "build record of the part"
        built.append(read_record(path, what=what, unsealed=True) if path.is_file() else {})
    seconds = [record.get("duration_s") for record in built]
    known = [duration for duration in seconds if duration is not None]
    engines = sorted({record.get("engine", "") for record in built} - {""})
    write_build_record(
        directory / "manifest.json",
        duration_s=sum(known) if len(known) == len(seconds) else None,
        engine=", ".join(engines),
    )


def write_empty_part(
    store: StoreSettings, corpus_directory: Path, directory: Path, number: int, parts: int
) -> dict[str, Any]:
    """Write and return the manifest of a part without documents, where there are fewer groups of
    them than parts.
    """
    directory = Path(directory)
    remove_tree(directory / ".building")
    directory.mkdir(parents=True, exist_ok=True)
    remove_manifest(directory / "manifest.json")
    _remove_data(directory)  # of an earlier part with documents
    manifest = {
        "schema_version": VERSION,
        "format": store.format,
        "options": store.options(),
        "split": store.split,
        "corpus_manifest_sha256": sha256_file(Path(corpus_directory) / "manifest.json"),
        "documents": 0,
        "files": [],
        "part": {"number": number, "parts": parts},
    }
    build_record_path(directory / "manifest.json").unlink(missing_ok=True)
    write_sealed(directory / "manifest.json", record=manifest, key=SEAL)
    return manifest


def _check_part(
    folder: Path,
    manifest: dict[str, Any],
    expected: tuple[int, int, int],
    corpus: str,
    first: dict[str, Any] | None,
) -> None:
    """Raise UserError if a part does not continue the previous parts, or differs from the first
    part in its facts.
    """
    part = manifest.get("part", {})
    facts: list[tuple[str, Any, Any]] = [
        ("part", f"{part.get('number')} of {part.get('parts')}", f"{expected[0]} of {expected[1]}"),
        ("corpus manifest, sha256", manifest["corpus_manifest_sha256"], corpus),
    ]
    if manifest["documents"]:
        facts.append(("first document", part.get("first_document"), expected[2]))
        if first is not None:
            same = [key for key in (*first, *manifest) if key not in (*SUMMED, *COMPUTED)]
            facts += [(key, manifest.get(key), first.get(key)) for key in same]
    for name, found, wanted in facts:
        if found != wanted:
            what = "a part does not belong to the token store."
            both = {"expected": wanted, "found": found}
            stated = {label: f"{name}: {value}" for label, value in both.items()}
            raise UserError(what, part=folder, **stated, next=rebuild_command(folder))
    for file in list_files(manifest):  # the readers of files compare the hashes
        check_file(
            folder,
            name=file["name"],
            size=file["bytes"],
            what="token store",
            next=rebuild_command(folder),
        )


def _read_array(folder: Path, file: dict[str, Any]) -> np.ndarray:
    """Return the array in a file of a part, copied. Raises UserError for a missing or changed
    file.
    """
    opened = open_checked(
        folder,
        name=file["name"],
        size=file["bytes"],
        sha256=file["sha256"],
        what="token store",
        next=rebuild_command(folder, file=file["name"]),
    )
    with opened as array:
        return np.load(array)


def _move_file(file: dict[str, Any], folder: str) -> dict[str, Any]:
    return file | {key: f"{folder}/{file[key]}" for key in ("name", "checked_by") if key in file}


def write_store(
    store: StoreSettings,
    corpus_directory: Path,
    tokenizer_directory: Path,
    directory: Path,
    report: Callable[[int, int], None] | None = None,
    *,
    engine: str = "auto",
    batch_documents: int | None = None,
    single: SingleFile | None = None,
    part: tuple[int, int] | None = None,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write the store and return its manifest.

    `engine` is the package that tokenizes. auto uses the fastest exact one, and starts over with
    the reference if a sample of this text gives other ids. The tokenizer gets `batch_documents` at
    a time, about 4 MiB by default. With `single` the store is this one file in `directory`; with
    `part` (k, n), it is part k of n, for `merge_store`. `report(documents, utf8_bytes)` is called
    for each batch, `log` for a slower engine and the reason. Raises UserError for a split without
    documents, and for a requested engine that is not installed or not exact.
    """
    write_documents = load_writer(store.format)
    options = {"single": single} if single else {}
    tokenizer = load_tokenizer(tokenizer_directory, engine)
    for note in getattr(tokenizer, "notes", []):
        log(f"tokenizer {tokenizer.name}: {note}; using {tokenizer.engine}")

    def write(tokenizer: Tokenizer) -> dict[str, Any]:
        documents: Documents
        documents = TextDocuments(
            corpus_directory=corpus_directory,
            tokenizer=tokenizer,
            split=store.split,
            eos=store.eos,
            report=report,
            batch_documents=batch_documents,
        )
        log(describe(tokenizer, found=documents.origin.source["text_sample"]))
        if part is not None and len(documents):
            documents = DocumentRange(documents, *part)
            if len(documents) == 0:
                return write_empty_part(store, corpus_directory, directory, *part)
        return write_documents(store, documents, directory, **options)

    try:
        return write(tokenizer)
    except EngineDiffers as error:
        if engine != "auto":
            raise
        log(f"{error.render()}\nstarting over with {REFERENCE}")
    return write(load_tokenizer(tokenizer_directory, engine=REFERENCE))


def describe_store(manifest: dict[str, Any]) -> str:
    """Return the counts of a store in one line."""
    tokens = f"{manifest['tokens_useful']:,} useful of {manifest['tokens_total']:,} tokens"
    return (
        f"{manifest['rows']:,} rows, {tokens} (fill {manifest['fill']:.2%}), "
        f"{manifest['tokens_cut']:,} cut"
    )
