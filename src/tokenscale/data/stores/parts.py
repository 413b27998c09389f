"""Token stores written in parts: one job for each range of documents, and one job that merges their manifests.

A part is a store of its documents in `parts/NNNNN`. Its manifest also has the groups of the ids digest and the number
of occurrences of each id. Merging reads only manifests and occurrences: the store's manifest names the files of its
parts, and has the counts and the `ids_digest` of a store that is written at once. Rows of a packed store are packed
and shuffled within each part, so that its rows differ.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, remove_manifest, sha256_file
from tokenscale.data.corpus.raw_text import check_file, read_corpus_manifest
from tokenscale.data.records import part_folder, remove_other_parts
from tokenscale.data.stores.documents import IdsDigest
from tokenscale.data.stores.manifest import (
    VERSION,
    build_record_path,
    read_store_manifest,
    rebuild_command,
    write_sealed,
)
from tokenscale.data.stores.writing import ENDINGS, measure_bits, write_build_record
from tokenscale.settings.data import StoreSettings

#: counts that are added over parts
SUMMED = (
    *("documents", "tokens_in_documents", "rows", "pieces", "tokens_useful", "tokens_total", "tokens_stored", "places"),
    *("tokens_cut", "documents_cut", "documents_split"),
)
#: facts that are computed from the facts of the parts
COMPUTED = ("fill", "ids_digest", "bits_per_token", "files", "records", "part")


def merge_store(store: StoreSettings, corpus_directory: Path, directory: Path, parts: int) -> dict[str, Any]:
    """Merge the parts of a store in `directory` and return its manifest. Raises UserError for a missing, damaged or
    foreign part, and without documents.
    """
    directory = Path(directory)
    corpus = sha256_file(Path(corpus_directory) / "manifest.json")
    first: dict[str, Any] | None = None
    merged: dict[str, Any] = {}
    listed, documents, occurrences = [], 0, np.zeros(0, dtype=np.int64)
    groups: list[bytes] = []
    for number in range(parts):
        folder = part_folder(directory, number)
        manifest = read_store_manifest(folder)
        _check_part(folder, manifest, (number, parts, documents), corpus, first)
        documents += manifest["documents"]
        if manifest["documents"] == 0:
            continue
        name = f"parts/{number:05d}"
        if first is None:
            first = manifest
            merged = {key: value for key, value in manifest.items() if key not in COMPUTED}
            merged["files"], occurrences = [], np.zeros(manifest["vocabulary_size"], dtype=np.int64)
        else:
            merged |= {key: merged[key] + manifest[key] for key in SUMMED if key in merged}
        groups += [bytes.fromhex(group) for group in manifest["part"]["groups"]]
        occurrences += _read_occurrences(folder, manifest)
        merged["files"] += [_move(file, name) for file in manifest["files"]]
        if "records" in manifest:
            merged.setdefault("records", {"dtype": manifest["records"]["dtype"], "files": []})
            merged["records"]["files"] += [_move(file, name) for file in manifest["records"]["files"]]
        listed.append({"folder": name, "rows": manifest["rows"], "documents": manifest["documents"]})
    expected = read_corpus_manifest(Path(corpus_directory))["splits"][store.split]["rows"]
    if first is None or documents != expected:
        raise UserError(
            "the parts of the token store do not have all documents.",
            store=directory,
            expected=f"{expected:,} documents of the split {store.split}",
            found=f"{documents:,} in {parts} parts",
            next=f"rm -r {directory}, and build it again: {rebuild_command(directory)}",
        )
    merged["fill"] = round(merged["tokens_stored"] / merged["places"], 6)
    merged["ids_digest"] = {"algorithm": IdsDigest.ALGORITHM, "value": IdsDigest.combine(groups)}
    merged["bits_per_token"] = measure_bits(merged["files"], occurrences)
    merged["parts"] = listed
    if store.format == "packed":
        merged["rows_packed_within"] = "part"
    remove_manifest(directory / "manifest.json")
    for path in directory.iterdir():  # files of an earlier store in one part
        if path.suffix in ENDINGS:
            path.unlink()
    remove_other_parts(directory, parts)
    path = directory / "manifest.json"
    records = [read_build_record(directory / part["folder"]) for part in listed]
    seconds = [record.get("duration_s") for record in records]
    write_build_record(
        path,
        None if None in seconds else sum(seconds),  # of all jobs together
        ", ".join(sorted({record.get("engine", "") for record in records} - {""})),
    )
    write_sealed(path, merged)
    return merged


def write_empty_part(
    store: StoreSettings, corpus_directory: Path, directory: Path, number: int, parts: int
) -> dict[str, Any]:
    """Write and return the manifest of a part without documents, where there are fewer groups of them than parts."""
    directory = Path(directory)
    shutil.rmtree(directory / ".building", ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    remove_manifest(directory / "manifest.json")
    for path in directory.iterdir():  # of an earlier part with documents
        if path.suffix in ENDINGS:
            path.unlink()
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
    write_sealed(directory / "manifest.json", manifest)
    return manifest


def _check_part(
    folder: Path,
    manifest: dict[str, Any],
    expected: tuple[int, int, int],
    corpus: str,
    first: dict[str, Any] | None,
) -> None:
    """Raise UserError if a part does not continue the previous parts, or differs from the first part in its facts."""
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
            raise UserError(
                "a part does not belong to the token store.",
                part=folder,
                expected=f"{name}: {wanted}",
                found=f"{name}: {found}",
                next=rebuild_command(folder),
            )
    for file in manifest["files"]:
        next = rebuild_command(folder)
        check_file(folder / file["name"], file["bytes"], "", what="token store", next=next, content=False)


def _read_occurrences(folder: Path, manifest: dict[str, Any]) -> np.ndarray:
    file = manifest["part"]["occurrences"]
    path, next = folder / file["name"], rebuild_command(folder)
    check_file(path, file["bytes"], file["sha256"], what="token store", next=next, content=True)
    return np.load(path)


def read_build_record(folder: Path) -> dict[str, Any]:
    path = build_record_path(folder / "manifest.json")
    return read_json(path, "build record of the part", rebuild_command(folder)) if path.is_file() else {}


def _move(file: dict[str, Any], folder: str) -> dict[str, Any]:
    moved = file | {"name": f"{folder}/{file['name']}"}
    return moved | {"checked_by": f"{folder}/{file['checked_by']}"} if "checked_by" in file else moved
