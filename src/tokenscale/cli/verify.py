"""Verify results and reports: files against the lists that name them, and what follows from other files against these.

Tables are made again from the logs, figures and claims from the tables, and the page from all of them. Exit code 0: all
agree. 1: a file differs. 3: nothing differs, but something could not be checked, such as tables without their logs.
"""

import argparse
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, report_malformed
from tokenscale.base.manifests import UNLISTED, walk
from tokenscale.data.corpus.raw_text import RawText
from tokenscale.data.corpus.raw_text import read_corpus_manifest as read_corpus
from tokenscale.data.corpus.raw_text import rebuild_command as rebuild_corpus
from tokenscale.data.mixtures import read_mixture
from tokenscale.data.records import Records, part_folder
from tokenscale.data.stores.manifest import open_records, open_store, read_store_manifest
from tokenscale.data.stores.manifest import rebuild_command as rebuild_store
from tokenscale.data.stores.writing import list_files
from tokenscale.data.tokenizers.base import read_tokenizer_manifest as read_tokenizer
from tokenscale.data.tokenizers.base import rebuild_command as restore_tokenizer
from tokenscale.report import verification
from tokenscale.runs.records.provenance import read_sealed
from tokenscale.settings.data import StoreSettings, state_held_out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the files to verify and the tables."""
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a report's folder, or a file in it; or a folder of results, of which all stores, weights, logs, tables "
        "and reports are checked",
    )
    parser.add_argument(
        "--signers",
        type=Path,
        metavar="FILE",
        help="the signers whom you trust (ALLOWED SIGNERS of ssh-keygen): a report must be signed by one of them",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; return the exit code."""
    codes = set()
    for path in arguments.files:
        if is_results(path):
            found, counts = verify_results(path)
            print(format_summary(path, found, counts))
            codes.add(1 if any(not f.note for f in found) else 3 if any(f.unchecked for f in found) else 0)
        else:
            chain = verification.verify(path, arguments.signers)
            print(chain)
            codes.add(chain.code)
    return next((code for code in (1, 3) if code in codes), 0)


#: files beside those that a manifest lists
BESIDE = {"manifest.json", "build.json", ".lock"}
#: entries of a run's folder, beside its attempts
OF_RUN = {"run.json", "done.json", "status.json", "dirty.diff", ".lock", "checkpoints", "superseded"}
RESTORE_RUN = "restore it from a copy, or train the run again"
#: endings of what a killed writer leaves
LEFT_OVER = (".partial", ".damaged", ".old", ".building", ".tmp", ".part")


@dataclass(frozen=True)
class Finding:
    """One file that is not as it was written. A `note` is no fault, such as a run that has not ended."""

    what: str
    note: bool = False
    unchecked: bool = False


def is_results(path: Path) -> bool:
    """Return whether a folder holds results: at least one of the kinds that are verified here."""
    kinds = ("tables", *(name for name, *_ in KINDS))
    return not verification.is_report(path) and any((path / name).is_dir() for name in kinds)


def verify_results(results: Path) -> tuple[list[Finding], Counter[str]]:
    """Return (findings, number of records read of each kind). Damage never raises; it is a finding."""
    found: list[Finding] = []
    counts: Counter[str] = Counter()
    for name, pattern, check in KINDS:
        for path in sorted((results / name).glob(pattern)):
            counts[name] += 1
            try:
                found += check(path.parent)
            except UserError as error:
                found.append(_finding_from_error(error))
        found += _find_unknown_entries(results / name, pattern)
    for path in sorted(results.glob("tables/*/manifest.json")):
        counts["tables"] += 1
        link = verification.check_tables(path.parent, results)
        found += (Finding(f"{text}; next {link.next}") for text in link.differs)
        found += (Finding(f"not checked because {text}", note=True, unchecked=True) for text in link.unchecked)
        found += (Finding(text, note=True) for text in link.notes)
    found += _find_unknown_entries(results / "tables", "*/manifest.json")
    for path in sorted(path for path in results.iterdir() if verification.is_report(path)):
        counts["report"] += 1
        found += _verify_report(path, results)
    return found, counts


def _verify_report(report: Path, results: Path) -> Iterator[Finding]:
    try:
        chain = verification.verify(report, results=results)
    except UserError as error:
        yield _finding_from_error(error)
        return
    for name, link in chain.links.items():
        if str(link) != "agrees":
            yield Finding(f"{report}: {name} {link}", note=not link.differs, unchecked=not link.differs)
    yield from (Finding(f"{report}: {note}", note=True) for note in chain.notes)


def format_summary(results: Path, found: list[Finding], counts: Counter[str]) -> str:
    """Return the text that `verify` prints."""
    read = ", ".join(f"{name} {n}" for name, n in counts.items()) or "nothing"
    faults = sum(not finding.note for finding in found)
    lines = [f"{'note  ' if finding.note else 'fault '} {finding.what}" for finding in found]
    return "\n".join([*lines, f"{results}: read {read}; {faults or 'no'} fault{'s' * (faults != 1)}"])


# --- stations -----------------------------------------------------------------------------------------------------


def _verify_corpus(folder: Path) -> Iterator[Finding]:
    manifest = read_corpus(folder)
    parts = [part_folder(folder, number) for number in range(manifest.get("parts", 0))]
    if overlap := state_held_out(manifest):
        yield Finding(overlap, note=True)
    beside = frozenset({"records", "parts"} if parts else {"records"})
    yield from _verify_files(folder, _list_corpus_files(manifest), "corpus", rebuild_corpus(folder), beside)
    listed = {file["name"]: file for split in manifest["splits"].values() for file in split["files"]}
    for part in parts:
        try:
            path = part / "manifest.json"
            with report_malformed(path, "manifest of the part", rebuild_corpus(part)):
                files = _list_corpus_files(read_json(path, "manifest of the part", rebuild_corpus(part)))
                yield from _verify_files(part, files, "corpus", rebuild_corpus(part))
                yield from _compare_entries(folder, part, files, listed, rebuild_corpus(folder))
        except UserError as error:
            yield _finding_from_error(error)
    yield from _verify_records(RawText(folder, verify=False).open_records())


def _list_corpus_files(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the files of a corpus or a part that no manifest of another part lists."""
    splits = manifest["splits"].values()
    files = [file for split in splits for file in (*split["files"], *split.get("tables", []))]
    return [file for file in files if not file["name"].startswith("parts/")]


def _verify_mixture(folder: Path) -> Iterator[Finding]:
    read_mixture(folder / "manifest.json")
    yield from ()


def _verify_download(folder: Path) -> Iterator[Finding]:
    next = f"snakemake -f {folder / 'manifest.json'}"
    manifest = read_json(folder / "manifest.json", "manifest of the download", next)
    with report_malformed(folder / "manifest.json", "manifest of the download", next):
        files = [file for listed in manifest.values() if isinstance(listed, list) for file in listed]
        yield from _verify_files(folder, files, "download", next, beside=frozenset({"hashes.json"}))


def _verify_tokenizer(folder: Path) -> Iterator[Finding]:
    manifest = read_tokenizer(folder)
    files = [manifest["file"], *manifest.get("derived", [])]
    yield from _verify_files(folder, files, "tokenizer", restore_tokenizer(folder))


def _verify_store(folder: Path) -> Iterator[Finding]:
    manifest = read_store_manifest(folder)
    path = folder / "manifest.json"
    with report_malformed(path, "manifest of the token store", f"snakemake -f {path}"):
        settings = StoreSettings(manifest["format"], **manifest["options"])
    open_store(folder, settings)
    yield from _verify_store_files(folder, manifest)
    listed = {file["name"]: file for file in manifest["files"]}
    for part in (folder / entry["folder"] for entry in manifest.get("parts", [])):
        try:
            found = read_store_manifest(part)
            yield from _verify_store_files(part, found)
            yield from _compare_entries(folder, part, found["files"], listed, rebuild_store(folder))
        except UserError as error:
            yield _finding_from_error(error)
    if "records" in manifest:
        yield from _verify_records(open_records(folder, manifest))


def _compare_entries(
    folder: Path, part: Path, files: list[dict[str, Any]], listed: dict[str, dict[str, Any]], next: str
) -> Iterator[Finding]:
    """Yield a finding for each file of a part whose hash differs in the manifest that was merged from the parts."""
    for file in files:
        merged = listed.get(f"{part.relative_to(folder)}/{file['name']}", file)
        if merged["sha256"] != file["sha256"]:
            yield Finding(f"{part / file['name']}: the part was built again with other content; next {next}")


def _verify_store_files(folder: Path, manifest: dict[str, Any]) -> Iterator[Finding]:
    """Check the files in the folder of a store or a part; the files in the folders of parts are left out."""
    listed = [file for file in list_files(manifest) if not file["name"].startswith("parts/")]
    hashed = [file for file in listed if "sha256" in file]
    beside = frozenset({file["name"] for file in listed} | ({"parts"} if "parts" in manifest else set()))
    yield from _verify_files(folder, hashed, "token store", rebuild_store(folder), beside)


def _verify_records(records: Records | None) -> Iterator[Finding]:
    yield from map(_finding_from_error, records.verify() if records is not None else ())


def _verify_files(
    folder: Path, files: list[dict[str, Any]], what: str, next: str, beside: frozenset[str] = frozenset()
) -> Iterator[Finding]:
    """Check the files of a manifest byte by byte, and find files that it does not list."""
    for name, fault in walk(folder, files, BESIDE | beside):
        if fault == UNLISTED:
            yield _extra_finding(folder / name)
        else:
            yield Finding(f"{folder / name}: a file of the {what} is {fault}; next {next}")


def _verify_run(folder: Path) -> Iterator[Finding]:
    """Check the seal of a run's record, its logs against the record, and its checkpoints."""
    record = read_json(folder / "run.json", "run's record", RESTORE_RUN)
    if not isinstance(record, dict) or "seal" not in record:
        yield Finding(f"{folder}: the run has not ended; its logs are not sealed", note=True)
    elif read_sealed(folder / "run.json") is None:
        yield Finding(f"{folder / 'run.json'}: edited after it was sealed; {RESTORE_RUN}")
    else:
        yield from _verify_sealed(folder, record)
    yield from _verify_checkpoints(folder / "checkpoints")
    for path in sorted(folder.iterdir()):
        if path.name not in OF_RUN and not path.name.startswith("attempt="):
            yield _extra_finding(path)


def _verify_sealed(folder: Path, record: dict[str, Any]) -> Iterator[Finding]:
    for fault in verification.check_sealed(folder, record):
        yield Finding(f"{fault}; {RESTORE_RUN}")
    if (folder / "done.json").is_file():
        done = read_json(folder / "done.json", "mark of a run's end", f"snakemake --touch {folder / 'done.json'}")
        if not isinstance(done, dict) or done.get("seal") != record["seal"]:
            yield Finding(f"{folder / 'done.json'}: belongs to another record than run.json")


def _verify_checkpoints(folder: Path) -> Iterator[Finding]:
    there = sorted(path for path in folder.glob("*") if path.is_dir())
    if there and importlib.util.find_spec("torch") is None:
        yield Finding(f"{folder}: not verified, because torch is not installed", note=True)
        return
    for path in there:
        if path.name.endswith(LEFT_OVER):
            yield _extra_finding(path)
            continue
        from tokenscale.train.checkpoint import Checkpoint  # torch

        try:
            names = set(Checkpoint(path).files) | {"tokenizer"}
            yield from _verify_tokenizer(path / "tokenizer") if (path / "tokenizer").is_dir() else ()
            yield from (_extra_finding(file) for file in sorted(path.iterdir()) if file.name not in names)
        except UserError as error:
            yield _finding_from_error(error)


# --- entries without an owner -------------------------------------------------------------------------------------


def _find_unknown_entries(folder: Path, pattern: str) -> Iterator[Finding]:
    """Find folders without a manifest, and files where only such folders should be."""
    if "**" in pattern:  # folders of several levels
        return
    depth = pattern.count("/")
    record = pattern.rsplit("/", 1)[1]
    for path in sorted(folder.glob("/".join(["*"] * depth))):
        if path.is_dir() and not (path / record).is_file():
            yield Finding(f"{path}: holds no {record}", note=record != "manifest.json")
        elif not path.is_dir():
            yield _extra_finding(path)


def _finding_from_error(error: UserError) -> Finding:
    """Convert an error to a finding of one line."""
    facts = dict(error.facts)
    where = [facts.pop(name) for name in ("file", "manifest", "path", "checkpoint") if name in facts]
    return Finding(f"{', '.join(where)}: {error.what} {'; '.join(f'{name} {text}' for name, text in facts.items())}")


def _extra_finding(path: Path) -> Finding:
    begun = path.name.endswith(LEFT_OVER)
    return Finding(f"{path}: {'left over from a killed writer' if begun else 'not in any manifest'}", note=begun)


#: (folder of results, pattern of its records, verifier of one record)
KINDS: tuple[tuple[str, str, Callable[[Path], Iterator[Finding]]], ...] = (
    ("downloads", "*/manifest.json", _verify_download),
    ("corpus", "*/manifest.json", _verify_corpus),
    ("tokenizers", "*/manifest.json", _verify_tokenizer),
    ("tokens", "*/*/*/manifest.json", _verify_store),
    ("mixtures", "**/manifest.json", _verify_mixture),
    ("runs", "*/run.json", _verify_run),
)
