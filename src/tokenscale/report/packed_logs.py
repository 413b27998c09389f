"""One archive of all that the tables of experiments are made of: pack it, and make the tables again
from it alone.
"""

import hashlib
import json
import lzma
import os
import shutil
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import pyarrow.parquet as pq

from tokenscale.analysis import tables
from tokenscale.analysis.ingest import TableInputs, read_inputs
from tokenscale.base.errors import UserError, few
from tokenscale.base.files import (
    RATIO,
    TEMPORARY,
    UNPACKED,
    atomic,
    check_file_name,
    check_relative_path,
    check_types,
    create_inside,
    naming,
    open_inside,
    parse_json,
    read_file,
    read_record,
    remove_inside,
    report_malformed,
    sha256_file,
    write_sealed,
)
from tokenscale.referee.validity import judge_tables

#: name of the archive in the folder of a report
LOGS = "logs.json.xz"
#: in a folder that was made from an archive: the sealed list of its files with their hashes
INDEX = "archive.json"
#: bytes that are no text, as in a damaged log, come back as they were
ENCODING = ("utf-8", "surrogateescape")
#: files of a run that tables are made of, and those that its seal covers
OF_RUN = ("run.json", "done.json", "dirty.diff", "**/attempt.json", "**/rank=*/*.jsonl")
#: what the referee says of a run after a comparison with its token stores, which are not in the
#: archive
JUDGED = ("validity", "reasons", "cautions", "unchecked")
#: words of `validity`, the worst last
SEVERITY = ("valid", "suspect", "invalid")
#: words of why inputs were not counted again, which they may have been where the logs were packed
NOT_RECOUNTED = ("at hand", "were not read again", "by another version of the code")


def pack(experiments: Sequence[str], folder: Path, output: Path) -> int:
    """Write the archive of the experiments' tables in `folder`; return the number of runs in it.

    Raises UserError for an input that is missing or outside of the parent of `folder`, and for a
    file that names the project's or the user's folder. Equal logs give equal archives.
    """
    found = [read_inputs(folder / name) for name in experiments]
    results = folder.parent
    names = set[str]()
    judged = {}
    runs = set[str]()
    for inputs in found:
        builds = (str(Path(store).with_name("build.json")) for store in inputs.stores)
        names |= {*inputs.names(), *(name for name in builds if (results / name).is_file())}
        rows = _read_judged(folder / inputs.experiment)
        judged[inputs.experiment] = rows
        runs |= {run for run, row in rows.items() if row["validity"] != "missing"}
    _check_inside(results, names)
    names |= {f"runs/{run}/run.json" for run in runs}
    names |= _list_run_files(results, runs={run for rows in judged.values() for run in rows})
    head = {"experiments": [asdict(inputs) for inputs in found], "judged": judged, "schema": 1}
    with (
        atomic(output) as temporary,
        lzma.open(temporary, "wb", preset=9 | lzma.PRESET_EXTREME) as archive,
    ):
        archive.write(json.dumps(head, sort_keys=True)[:-1].encode() + b', "files": {')
        # one after the other: logs of many runs exceed the memory
        for number, name in enumerate(sorted(names)):
            text = json.dumps(_read_member(results, name).decode(*ENCODING))
            archive.write(f"{', ' * bool(number)}{json.dumps(name)}: {text}".encode())
        archive.write(b"}}")
    return len(runs)


def _check_inside(results: Path, names: set[str]) -> None:
    if outside := [name for name in sorted(names) if ".." in Path(name).parts]:
        what = "an input of the tables lies outside of the folder of results."
        next_step = "move it there, and ingest again"
        raise UserError(what, path=results / outside[0], next=next_step)


def _read_judged(folder: Path) -> dict[str, dict[str, Any]]:
    """Return run → what the referee says of it, of an experiment's tables."""
    path = folder / f"{tables.JUDGED}.parquet"
    with naming(path):
        rows = pq.read_table(path, columns=["run_id", *JUDGED], use_threads=False)
    return {row.pop("run_id"): row for row in rows.to_pylist()}


def _list_run_files(results: Path, runs: set[str]) -> set[str]:
    """Return the files of runs that tables are made of, by their paths below `results`."""
    return {
        path.relative_to(results).as_posix()
        for run in runs
        for path in list_run_files(results / "runs" / run)
    }


def list_run_files(run: Path) -> Iterator[Path]:
    """Yield the files of a run's folder that tables are made of."""
    for pattern in OF_RUN:
        yield from run.glob(pattern)


def _read_member(results: Path, name: str) -> bytes:
    """Return the bytes of a file of the archive, which says nothing of the folders of this
    machine.
    """
    path = results / name
    if not path.is_file():
        raise UserError(
            "a file that the tables are made of is missing.", path=path, next=f"snakemake {path}"
        )
    content = read_file(path)
    places = {Path.cwd(), Path(os.environ.get("HOME", "/"))} - {Path("/")}
    if named := [f"{at}/" for at in places if f"{at}/".encode() in content]:
        next_step = (
            "name the corpus and other inputs by paths relative to the project, and run the "
            "experiment again"
        )
        raise UserError(
            "a file for the archive names a folder of this machine.",
            path=path,
            found=named[0],
            next=next_step,
        )
    return content


def restore(archive: Path, output: Path) -> list[str]:
    """Unpack the logs of an archive below `output`, laid out like `results/`, and ingest them;
    return the names of the experiments, in order.

    Raises UserError for a damaged archive.
    """
    experiments, files, judged = _unpack(archive)
    for name, content in files.items():
        with create_inside(output, name, durable=False) as file:
            file.write(content)
    for inputs in experiments:
        folder = output / "tables" / inputs.experiment
        make_tables(inputs, output, folder=folder)
        _add_judged(folder, judged=judged.get(inputs.experiment, {}))
    return [inputs.experiment for inputs in experiments]


def make_tables(inputs: TableInputs, results: Path, folder: Path) -> None:
    """Write the tables of the logs and files below `results` to a folder, and judge the runs."""
    inputs.ingest(results, output=folder)
    judge_tables(
        folder,
        experiment=results / inputs.table,
        runs=results / "runs",
        stores=inputs.paths(results, "stores"),
        corpora=inputs.paths(results, "corpora"),
    )


def check_replaceable(output: Path) -> dict[str, set[str]]:
    """Return the files of a folder that an earlier call put there: name → hashes that each may
    have. Raises UserError for a folder with anything else: a file that the list of `put_in_place`
    lacks, or that was changed since.
    """
    made: dict[str, set[str]] = {}
    with suppress(UserError, LookupError, TypeError, AttributeError):
        record = read_record(output / INDEX, what="list of files made")
        made = {name: set(hashes) for name, hashes in record["files"].items()}
    known = {INDEX} if made else set()
    others = [
        name
        for name in _list_names(output)
        if name not in known and not _is_file_with(output, name, made.get(name, set()))
    ]
    if others:
        _refuse(output, others)
    return made


def put_in_place(made: Path, output: Path) -> None:
    """Put the files below `made` into a folder that passes `check_replaceable`, in place of those
    that an earlier call put there. Raises UserError as it does.

    The list of all old and new files is written first. Wherever a call is killed, the next one
    knows by name and content what is not a user's.
    """
    old = check_replaceable(output)
    new = {name: {sha256_file(made / name)} for name in _list_names(made) if name != INDEX}
    both = {name: old.get(name, set()) | new.get(name, set()) for name in {*old, *new}}
    _write_index(output, files=both)
    for name in sorted(old.keys() - new.keys()):
        if not os.path.lexists(output / name) or _is_file_with(output, name, both[name]):
            remove_inside(output, name)
    for name in new:
        if os.path.lexists(output / name) and not _is_file_with(output, name, both[name]):
            _refuse(output, [name])
        with create_inside(output, name) as file, open(made / name, "rb") as source:
            shutil.copyfileobj(source, file)
    _write_index(output, files=new)


def _write_index(output: Path, files: dict[str, set[str]]) -> None:
    listed = {name: sorted(hashes) for name, hashes in files.items()}
    write_sealed(output / INDEX, record={"schema": 2, "files": listed})


def _refuse(output: Path, others: list[str]) -> NoReturn:
    raise UserError(
        "the folder for the evidence holds other files.",
        folder=output,
        found=few(others),
        next=f"name a new folder with --output, or remove this one: rm -r {output}",
    )


def _list_names(folder: Path) -> list[str]:
    """Return the sorted paths of all that is no folder below a folder, or of the file itself;
    without temporary files of ours.
    """
    if not folder.is_dir():
        return [folder.name] if os.path.lexists(folder) else []
    return sorted(
        Path(place, name).relative_to(folder).as_posix()
        for place, folders, files in os.walk(folder)
        for name in (*files, *(name for name in folders if Path(place, name).is_symlink()))
        if not name.startswith(TEMPORARY)
    )


def _is_file_with(folder: Path, name: str, hashes: Container[str]) -> bool:
    """Return whether a file below a folder, behind no link, has one of the hashes."""
    try:
        with open(open_inside(folder, name), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() in hashes
    except (UserError, ValueError, FileNotFoundError, NotADirectoryError):
        return False


def _unpack(archive: Path) -> tuple[list[TableInputs], dict[str, bytes], dict[str, Any]]:
    """Return experiments, file → content, and experiment → run → `JUDGED` of an archive."""
    next_step = "take the archive from where it came from again"
    try:
        packed = read_file(archive)
        unpacker = lzma.LZMADecompressor(memlimit=1 << 28)
        text = unpacker.decompress(packed, UNPACKED + RATIO * len(packed))
        if not unpacker.eof:
            raise EOFError(f"it is cut, or unpacks to more than {len(text):,} bytes")
        content = parse_json(text, errors=ENCODING[1])
    except FileNotFoundError:
        raise UserError(
            "there is no such archive.", path=archive, next="correct the path"
        ) from None
    except (lzma.LZMAError, EOFError, OSError, ValueError, RecursionError) as error:
        raise UserError(
            "the archive of logs cannot be read.", path=archive, reason=error, next=next_step
        ) from None
    with report_malformed(archive, what="archive of logs", next=next_step):
        if type(content["schema"]) is not int or content["schema"] != 1:
            raise ValueError(f"schema is {content['schema']!r}, and 1 is read")
        experiments = [TableInputs(**inputs) for inputs in content["experiments"]]
        for inputs in experiments:
            check_file_name(inputs.experiment)
            for name in inputs.names():
                check_relative_path(name)
        files = {
            check_relative_path(name): text.encode(*ENCODING)
            for name, text in content["files"].items()
        }
        judged = {name: dict(of) for name, of in content.get("judged", {}).items()}
        for row in (row for of in judged.values() for row in of.values()):
            check_types(row, fields=dict.fromkeys(row.keys() & {*JUDGED}, (str, type(None))))
        return experiments, files, judged


def _add_judged(folder: Path, judged: dict[str, dict[str, Any]]) -> None:
    """Add what a comparison with their token stores showed of runs when they were packed: more
    reasons and cautions, and a worse word. Nothing that the logs say is taken back.
    """
    path = folder / f"{tables.JUDGED}.parquet"
    with naming(path):
        rows = pq.read_table(path, use_threads=False).to_pylist()
    for row in rows:
        packed = judged.get(row["run_id"], {})
        if packed.keys() != {*JUDGED} or not {row["validity"], packed["validity"]} <= {*SEVERITY}:
            continue
        row["validity"] = max(row["validity"], packed["validity"], key=SEVERITY.index)
        row["reasons"] = _unite(row["reasons"], packed=packed["reasons"])
        row["cautions"] = _unite(row["cautions"], packed=packed["cautions"])
        row["unchecked"] = _unite(
            row["unchecked"], packed=packed["unchecked"], replaceable=NOT_RECOUNTED
        )
    tables.write_verdict(folder, rows, cautions=tables.read_verdict(folder)["cautions"])


def _unite(own: str | None, packed: str | None, replaceable: Sequence[str] = ()) -> str:
    """Return the packed text, followed by sentences of our own that it lacks; those that hold one
    of the `replaceable` words may be lacking.
    """
    given = (packed or "").split("; ")
    lacking = [
        sentence
        for sentence in (own or "").split("; ")
        if sentence not in given and not any(words in sentence for words in replaceable)
    ]
    return "; ".join(filter(None, [*given, *lacking]))
