"""Verify results and reports: files against the lists that name them, and what follows from other
files against these.

Tables are made again from the logs, figures and claims from the tables, and the page from all of
them. Exit code 0: all agree. 1: a file differs. 3: nothing differs, but something could not be
checked, such as tables without their logs.
"""

import argparse
import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, read_record, report_malformed
from tokenscale.base.manifests import UNLISTED, walk
from tokenscale.base.wording import count
from tokenscale.data.corpus.raw_text import RawText
from tokenscale.data.corpus.raw_text import read_corpus_manifest as read_corpus
from tokenscale.data.corpus.raw_text import rebuild_command as rebuild_corpus
from tokenscale.data.mixtures import read_mixture
from tokenscale.data.parts import RECORD as FINISHED
from tokenscale.data.parts import part_folder
from tokenscale.data.records import Records
from tokenscale.data.stores.manifest import open_records, open_store, read_store_manifest
from tokenscale.data.stores.manifest import rebuild_command as rebuild_store
from tokenscale.data.stores.writing import list_files
from tokenscale.data.tokenizers.base import read_tokenizer_manifest as read_tokenizer
from tokenscale.data.tokenizers.base import rebuild_command as restore_tokenizer
from tokenscale.report import verification
from tokenscale.runs.launch.attempts import mark_end
from tokenscale.runs.records.provenance import read_sealed
from tokenscale.settings.data import StoreSettings, state_cleaning

#: files beside those that a manifest lists
BESIDE = {"manifest.json", "build.json", ".lock"}
#: entries of a run's folder, beside its attempts
OF_RUN = {
    "run.json",
    "done.json",
    "status.json",
    "dirty.diff",
    ".lock",
    "checkpoints",
    "superseded",
}
RESTORE_RUN = "restore it from a copy, or train the run again"
#: endings of what a killed writer leaves
LEFT_OVER = (".partial", ".damaged", ".old", ".building", ".tmp", ".part")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of_files = (
        "a report's folder, or a file in it; or a folder of results, with all that lies there"
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=of_files)
    of_signers = (
        "the signers whom you trust (ALLOWED SIGNERS of ssh-keygen): a report must be signed by "
        "one of them"
    )
    parser.add_argument("--signers", type=Path, metavar="FILE", help=of_signers)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; return the exit code."""
    codes = set()
    for path in arguments.files:
        if verification.is_report(path) or not any(
            (path / name).is_dir() for name in ("tables", *KINDS)
        ):
            chain = verification.verify(path, arguments.signers)
            print(chain)
            codes.add(chain.code)
            continue
        found, counts = verify_results(path)
        for finding in found:
            print(f"{'note  ' if finding.note else 'fault '} {finding.what}")
        faults = sum(not finding.note for finding in found)
        read = ", ".join(f"{name} {n}" for name, n in counts.items()) or "nothing"
        print(f"{path}: read {read}; {count(faults, 'fault') if faults else 'no faults'}")
        if faults:
            codes.add(1)
        elif any(finding.unchecked for finding in found):
            codes.add(3)
        else:
            codes.add(0)
    return next((code for code in (1, 3) if code in codes), 0)


class Finding(NamedTuple):
    """File that differs from what was written. A `note` is no fault, such as an unfinished run."""

    what: str
    note: bool = False
    unchecked: bool = False


def verify_results(results: Path) -> tuple[list[Finding], Counter[str]]:
    """Return (findings, number of records read of each kind). Damage never raises; it is a
    finding.
    """
    found: list[Finding] = []
    counts: Counter[str] = Counter()
    for name, (pattern, check) in KINDS.items():
        for path in sorted((results / name).glob(pattern)):
            counts[name] += 1
            found += _errors_as_findings(check(path.parent))
        found += _find_unknown_entries(results / name, pattern)
    for path in sorted(results.glob("tables/*/manifest.json")):
        counts["tables"] += 1
        link = verification.check_tables(path.parent, results)
        found += (Finding(f"{text}; next {link.next}") for text in link.differs)
        found += (
            Finding(f"not checked because {text}", note=True, unchecked=True)
            for text in link.unchecked
        )
        found += (Finding(text, note=True) for text in link.notes)
    found += _find_unknown_entries(results / "tables", pattern="*/manifest.json")
    for path in sorted(path for path in results.iterdir() if verification.is_report(path)):
        counts["report"] += 1
        found += _errors_as_findings(_verify_report(path, results))
    return found, counts


def _errors_as_findings(found: Iterable[Finding]) -> Iterator[Finding]:
    try:
        yield from found
    except UserError as error:
        yield _finding(error)


def _verify_by_reading(read: Callable[..., object], *arguments: object) -> Iterator[Finding]:
    try:
        read(*arguments)
    except UserError as error:
        yield _finding(error)


def _finding(error: UserError) -> Finding:
    facts = dict(error.facts)
    where = [
        facts.pop(name) for name in ("file", "manifest", "path", "checkpoint") if name in facts
    ]
    return Finding(
        f"{', '.join(where)}: {error.what} "
        f"{'; '.join(f'{name} {text}' for name, text in facts.items())}"
    )


def _extra(path: Path) -> Finding:
    begun = path.name.endswith(LEFT_OVER)
    return Finding(
        f"{path}: {'left over from a killed writer' if begun else 'not in any manifest'}",
        note=begun,
    )


def _find_unknown_entries(folder: Path, pattern: str) -> Iterator[Finding]:
    """Yield folders without a record, and files where only such folders should be."""
    parents, record = pattern.rsplit("/", 1)
    # or folders of several levels
    for path in sorted(folder.glob(parents)) if "**" not in pattern else ():
        if not path.is_dir():
            yield _extra(path)
        elif not (path / record).is_file():
            yield Finding(f"{path}: holds no {record}", note=record != "manifest.json")


def _verify_report(report: Path, results: Path) -> Iterator[Finding]:
    chain = verification.verify(report, results=results)
    for name, link in chain.links.items():
        yield from (Finding(f"{report}: {name} differs at {text}") for text in link.differs)
        if not link.differs and str(link) != "agrees":
            yield Finding(f"{report}: {name} {link}", note=True, unchecked=True)
    yield from (Finding(f"{report}: {note}", note=True) for note in chain.notes)


def _verify_files(
    folder: Path, files: list[dict[str, Any]], what: str, next: str, beside: Iterable[str] = ()
) -> Iterator[Finding]:
    """Check the files of a manifest byte by byte, and find files that it does not list."""
    for name, fault in walk(folder, files, beside=BESIDE.union(beside)):
        listed = Finding(f"{folder / name}: a file of the {what} is {fault}; next {next}")
        yield _extra(folder / name) if fault == UNLISTED else listed


def _verify_records(records: Records | None) -> Iterator[Finding]:
    return map(_finding, records.verify() if records is not None else ())


def _compare_entries(
    folder: Path, part: Path, files: list[dict[str, Any]], merged: list[dict[str, Any]], next: str
) -> Iterator[Finding]:
    """Yield the files of a part whose hash differs in the manifest that was merged from the
    parts.
    """
    listed = {file["name"]: file for file in merged}
    for file in files:
        if (
            listed.get(f"{part.relative_to(folder)}/{file['name']}", file)["sha256"]
            != file["sha256"]
        ):
            yield Finding(
                f"{part / file['name']}: the part was built again with other content; next {next}"
            )


def _verify_download(folder: Path) -> Iterator[Finding]:
    path = folder / "manifest.json"
    next_step = f"snakemake -f {path}"
    manifest = read_record(path, what="manifest of the download", next=next_step)
    with report_malformed(path, what="manifest of the download", next=next_step):
        files = [
            file for listed in manifest.values() if isinstance(listed, list) for file in listed
        ]
        yield from _verify_files(
            folder,
            files,
            what="download",
            next=next_step,
            beside=["hashes.json"],
        )


def _verify_corpus(folder: Path) -> Iterator[Finding]:
    manifest = read_corpus(folder)
    parts = [part_folder(folder, number) for number in range(manifest.get("parts", 0))]
    for note in state_cleaning(manifest):
        yield Finding(note, note=True)
    beside = ["records", *(["parts"] if parts else [])]
    yield from _verify_files(
        folder,
        files=_list_corpus_files(manifest),
        what="corpus",
        next=rebuild_corpus(folder),
        beside=beside,
    )
    merged = [file for split in manifest["splits"].values() for file in split["files"]]
    for part in parts:
        yield from _errors_as_findings(_verify_corpus_part(folder, part, merged=merged))
    records = RawText(folder, verify=False).open_records()
    if records is None and (left := folder / "records").exists():
        yield Finding(
            f"{left}: records without their manifest; next rm -r {left} && {rebuild_corpus(folder)}"
        )
    yield from _verify_records(records)


def _verify_corpus_part(
    folder: Path, part: Path, merged: list[dict[str, Any]]
) -> Iterator[Finding]:
    path = part / "manifest.json"
    next_step = rebuild_corpus(part)
    with report_malformed(path, what="manifest of the part", next=next_step):
        files = _list_corpus_files(read_json(path, what="manifest of the part", next=next_step))
        yield from _verify_files(
            part,
            files,
            what="corpus",
            next=next_step,
            beside=[FINISHED],
        )
        yield from _compare_entries(
            folder,
            part,
            files=files,
            merged=merged,
            next=rebuild_corpus(folder),
        )


def _list_corpus_files(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the files of a corpus or a part that no manifest of another part lists."""
    files = [
        file
        for split in manifest["splits"].values()
        for file in (*split["files"], *split.get("tables", []))
    ]
    return [file for file in files if not file["name"].startswith("parts/")]


def _verify_tokenizer(folder: Path) -> Iterator[Finding]:
    manifest = read_tokenizer(folder)
    files = [manifest["file"], *manifest.get("derived", [])]
    yield from _verify_files(
        folder,
        files,
        what="tokenizer",
        next=restore_tokenizer(folder),
    )


def _verify_store(folder: Path) -> Iterator[Finding]:
    manifest = read_store_manifest(folder)
    path = folder / "manifest.json"
    with report_malformed(path, what="manifest of the token store", next=f"snakemake -f {path}"):
        settings = StoreSettings(manifest["format"], **manifest["options"])
    open_store(folder, expected=settings)
    yield from _verify_store_files(folder, manifest)
    for entry in manifest.get("parts", []):
        yield from _errors_as_findings(
            _verify_store_part(folder, part=folder / entry["folder"], merged=manifest["files"])
        )
    if "records" in manifest:
        yield from _verify_records(open_records(folder, manifest))


def _verify_store_part(folder: Path, part: Path, merged: list[dict[str, Any]]) -> Iterator[Finding]:
    found = read_store_manifest(part)
    yield from _verify_store_files(part, manifest=found)
    yield from _compare_entries(
        folder,
        part,
        files=found["files"],
        merged=merged,
        next=rebuild_store(folder),
    )


def _verify_store_files(folder: Path, manifest: dict[str, Any]) -> Iterator[Finding]:
    """Check the files in the folder of a store or a part; the files in the folders of parts are
    left out.
    """
    listed = [file for file in list_files(manifest) if not file["name"].startswith("parts/")]
    beside = [file["name"] for file in listed] + (["parts"] if "parts" in manifest else [])
    beside += [FINISHED] if "part" in manifest else []
    hashed = [file for file in listed if "sha256" in file]
    yield from _verify_files(
        folder,
        files=hashed,
        what="token store",
        next=rebuild_store(folder),
        beside=beside,
    )


def _verify_run(folder: Path) -> Iterator[Finding]:
    """Check the seal of a run's record, its logs against the record, and its checkpoints."""
    path = folder / "run.json"
    done = folder / "done.json"
    record = read_json(path, what="run's record", next=RESTORE_RUN)
    if not done.is_file() and isinstance(record, dict) and "seal" not in record:
        yield Finding(f"{folder}: the run has not ended; its logs are not sealed", note=True)
    elif read_sealed(path) is None:
        yield Finding(f"{path}: edited after it was sealed; {RESTORE_RUN}")
    else:
        yield from (
            Finding(f"{fault}; {RESTORE_RUN}")
            for fault in verification.check_sealed(folder, record)
        )
        if not os.path.lexists(done):
            # logs of other trainers, as `judge` writes them, come from no job
            if "external" not in record:
                yield Finding(
                    f"{done}: missing; snakemake {done} writes it from the record", note=True
                )
        elif read_json(done, what="mark of a run's end") != mark_end(folder.name, record):
            yield Finding(f"{done}: belongs to another record than run.json")
    launched = isinstance(record, dict) and "digest" in record  # from the attempt's record
    for path in (attempt / "attempt.json" for attempt in sorted(folder.glob("attempt=*"))):
        if launched or os.path.lexists(path):
            yield from _verify_by_reading(read_record, path, "attempt's record", RESTORE_RUN)
    yield from _verify_checkpoints(folder / "checkpoints")
    for path in sorted(folder.iterdir()):
        if path.name not in OF_RUN and not path.name.startswith("attempt="):
            yield _extra(path)


def _verify_checkpoints(folder: Path) -> Iterator[Finding]:
    there = sorted(path for path in folder.glob("*") if path.is_dir())
    if there and importlib.util.find_spec("torch") is None:
        yield Finding(f"{folder}: not verified, because torch is not installed", note=True)
        return
    for path in there:
        left_over = path.name.endswith(LEFT_OVER)
        yield from [_extra(path)] if left_over else _errors_as_findings(_verify_checkpoint(path))


def _verify_checkpoint(path: Path) -> Iterator[Finding]:
    from tokenscale.train.checkpoint import Checkpoint  # torch

    names = set(Checkpoint(path).files) | {"tokenizer"}
    yield from _verify_tokenizer(path / "tokenizer") if (path / "tokenizer").is_dir() else ()
    yield from (_extra(file) for file in sorted(path.iterdir()) if file.name not in names)


#: folder of results → (pattern of its records, verifier of one record)
KINDS: dict[str, tuple[str, Callable[[Path], Iterator[Finding]]]] = {
    "downloads": ("*/manifest.json", _verify_download),
    "corpus": ("*/manifest.json", _verify_corpus),
    "tokenizers": ("*/manifest.json", _verify_tokenizer),
    "tokens": ("*/*/*/manifest.json", _verify_store),
    "mixtures": (
        "**/manifest.json",
        lambda folder: _verify_by_reading(read_mixture, folder / "manifest.json"),
    ),
    "runs": ("*/run.json", _verify_run),
}
