"""Check which of logs → tables → figures → page agree: each is rebuilt from its predecessor, and
bytes are compared.

Whoever edits a file can renew its checksums and seals, but not what follows from another file:
tables follow from sealed logs, figures, data and claims from tables, and the page from all of them.
The folder of a report has its logs (`packed_logs.py`), so nothing else is needed to check it.
"""

import lzma
import platform
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq

from tokenscale.analysis import tables
from tokenscale.analysis.ingest import read_inputs
from tokenscale.base.errors import UserError, few
from tokenscale.base.facts import clear_unknown
from tokenscale.base.files import (
    canonical_json,
    check_file_name,
    check_types,
    read_file,
    read_json,
    report_malformed,
    write_text,
)
from tokenscale.base.manifests import SUMS, read_sums, walk
from tokenscale.report import bundle
from tokenscale.report.claims import read_claims
from tokenscale.report.packed_logs import LOGS, make_tables, restore
from tokenscale.runs.records.provenance import name_differences, read_sealed

#: what a signature is for, so that one made for something else is none
NAMESPACE = "tokenscale"
#: where a project has its claims, and those of the source studies
LEDGER = Path("config/claims.yaml")
REPLICATION = Path("config/replication.yaml")
RECORD = "provenance.json"
#: endings of files whose bytes depend on the releases of `bundle.DRAWING`; of pages, the drawings in
#: them
DRAWN = (".svg", ".png", ".pdf", ".html", ".parquet")
#: a drawing within a page
DRAWING = re.compile(rb"<svg\b.*?</svg>", re.DOTALL)
LINKS = ("logs", "tables", "figures", "page")


@dataclass
class Link:
    """What was found of one link of the chain: where it differs, or why nobody can tell, and what
    makes it again.
    """

    differs: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    # why bytes may be others here → files
    unsure: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    next: str = ""

    def __str__(self) -> str:
        if self.differs:
            more = [f"and {len(self.differs) - 50:,} more"] if len(self.differs) > 50 else []
            lines = [*self.differs[:50], *more]
            return "differs at" + (
                f" {lines[0]}" if len(lines) == 1 else "".join(f"\n    {line}" for line in lines)
            )
        why = self.unchecked + [f"{why} ({few(files)})" for why, files in self.unsure.items()]
        return f"not checked because {'; '.join(why)}" if why else "agrees"


@dataclass
class Chain:
    """What was found of a report: a link for each of `LINKS`, and notes, which are no faults."""

    what: str
    links: dict[str, Link] = field(default_factory=lambda: {name: Link() for name in LINKS})
    notes: list[str] = field(default_factory=list)
    #: ending of files → why their bytes may be others here; "": of all
    unsure: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> Link:
        """Return the link that a file of a report belongs to."""
        drawn = name.startswith(("figures/", "data/", "sql/", "tables/", "claims."))
        if name == LOGS:
            return self.links["logs"]
        return self.links["figures" if drawn else "page"]

    def add(self, link: Link, name: str, difference: str, ending: str = "") -> None:
        """Add a difference from what was made again; where another release may be its cause, that
        it is not known.

        Rows do not depend on releases, but the bytes of equal rows do, which is an empty
        difference.
        """
        rows = name.endswith(".parquet")
        why = "" if rows and difference else self.unsure.get(ending or Path(name).suffix, "")
        if rows and why:
            return
        if why := why or self.unsure.get("", ""):
            link.unsure.setdefault(why, []).append(name)
        else:
            link.differs.append(f"{name}: {difference or 'equal rows in other bytes'}")

    @property
    def code(self) -> int:
        """0: all links agree; 1: one differs; 3: none differs, but not all could be checked."""
        links = self.links.values()
        unsure = any(link.unchecked or link.unsure for link in links)
        if any(link.differs for link in links):
            return 1
        if unsure:
            return 3
        return 0

    def __str__(self) -> str:
        lines = [
            *(f"{name}: {link}" for name, link in self.links.items()),
            *(f"note: {note}" for note in self.notes),
        ]
        steps = dict.fromkeys(
            link.next for link in self.links.values() if link.differs and link.next
        )
        return "\n  ".join([self.what, *lines, *(f"next: {step}" for step in steps)])


def check_tables(folder: Path, results: Path) -> Link:
    """Ingest the logs below `results` again, and compare every table of the folder with them, byte
    by byte.
    """
    link = Link(next=tables.restore_command(folder))
    _check_manifest(link, folder)
    if link.differs or link.unchecked:
        return link
    runs = pq.read_table(
        folder / "runs.parquet", columns=["run_id", "status"], use_threads=False
    ).to_pylist()
    records = {run["run_id"]: results / "runs" / run["run_id"] / "run.json" for run in runs}
    has_logs = any(path.is_file() for path in records.values())
    without_logs = all(run["status"] == "missing" for run in runs)
    inputs = read_inputs(folder)
    with TemporaryDirectory() as temporary:
        again = Path(temporary, folder.name)
        try:
            make_tables(inputs, results, folder=again)
        # an input that is at hand and cannot be read is not the one of these tables
        except UserError as error:
            at_hand = all((results / name).is_file() for name in inputs.names())
            (link.differs if at_hand else link.unchecked).append(_one_line(error))
            return link
        if not has_logs and not without_logs:
            link.unchecked.append(
                f"logs are not at hand in {results / 'runs'}: tables of {folder.name} not proven"
            )
            return link
        _compare_tables(link, folder, again)
    going = [run for run, path in records.items() if _is_going(path)]
    if link.differs and going:
        link.unchecked.append(
            f"runs have not ended, and tables may be older than their logs: {few(going)}"
        )
        link.differs.clear()
    return link


def _check_manifest(link: Link, folder: Path) -> None:
    """Compare the tables with the checksums of their manifest."""
    at_hand = folder.is_dir()
    try:
        files = [*tables.read_manifest(folder)["files"], *tables.read_verdict(folder)["files"]]
        link.differs += (f"{folder / n}: {fault}" for n, fault in walk(folder, files=files))
    except UserError as error:
        (link.differs if at_hand else link.unchecked).append(_one_line(error))


def _compare_tables(link: Link, folder: Path, again: Path) -> None:
    """Compare each table with the one made again; equal values in other bytes are a note."""
    for path, other in ((folder / name, again / name) for name in tables.file_names()):
        if path.name == tables.RECOUNTS or _is_equal(path, other):
            continue
        if difference := _name_difference(path, again=other):
            link.differs.append(f"{path}: {difference}")
        else:
            link.notes.append(
                f"{path}: equal values in other bytes: another pyarrow, or inputs of runs were at "
                "hand then or are now"
            )


def _is_going(record: Path) -> bool:
    """Return whether a run has begun and its record is not sealed."""
    return record.is_file() and b'"seal"' not in read_file(record)


def is_report(folder: Path) -> bool:
    """Return whether a folder is a report's, or holds packed logs and claims alone."""
    return any((folder / name).is_file() for name in (SUMS, RECORD, LOGS))


def verify(path: Path, signers: Path | None = None, results: Path | None = None) -> Chain:
    """Check the report that a path is, or is a file of: files against checksums, logs against seals
    of the runs, and all that follows from the logs against what they give again. A report must be
    signed by one of the `signers`, if they are given. Drawings of `results` are compared, too,
    while its tables are those of the report.

    Of a folder with packed logs and `claims.json` alone, these are checked, with the claims of the
    project. Raises UserError for a path that is no report.
    """
    report = next(
        (folder for folder in (path, *path.absolute().parents[:5]) if is_report(folder)), None
    )
    if report is None or not path.exists():
        what = (
            "this is no report, and no file of one." if path.exists() else "there is no such file."
        )
        expected = f"the folder of a report: {SUMS} and {LOGS} lie in it"
        following = "build one first: snakemake report  (writes results/report)"
        raise UserError(what, file=path, expected=expected, next=following)
    with TemporaryDirectory() as temporary:
        if not (report / SUMS).is_file() and not (report / RECORD).is_file():
            return _check_claims(report, results=Path(temporary))
        return _check_report(
            report,
            again=Path(temporary),
            signers=signers,
            results=results,
        )


def _check_claims(report: Path, results: Path) -> Chain:
    """Check packed logs that have no report beside them, and the claims that were judged by
    them.
    """
    from tokenscale.report import build

    logs = Link()
    claims = Link()
    path = report / build.CLAIMS
    chain = Chain(str(report), links={"logs": logs, "claims": claims})
    try:
        experiments = restore(report / LOGS, output=results)
    except UserError as error:
        logs.differs.append(_one_line(error))
        claims.unchecked.append(f"{LOGS} is damaged")
        return chain
    _check_logs(logs, results, record={})
    ledger = _find_ledger(path)
    if missing := [str(file) for file in (path, ledger) if not file.is_file()]:
        claims.unchecked.append(f"there is no {missing[0]}")
    elif not _is_equal(
        path,
        judged := build.judge(
            ledger,
            tables=results / "tables",
            experiments=experiments,
            output=results,
        ),
    ):
        claims.differs.append(f"{build.CLAIMS}: {_name_difference(path, judged)}")
    return chain


def _find_ledger(judged: Path) -> Path:
    """Return the project's file of the claims that were judged: the source studies', or its own."""
    try:
        of_studies = any(claim["study"] for claim in read_claims(judged))
    except (UserError, LookupError, TypeError):  # the comparison says what is wrong with it
        return LEDGER
    return REPLICATION if of_studies else LEDGER


def _check_report(report: Path, again: Path, signers: Path | None, results: Path | None) -> Chain:
    """Check a report, which is made again below the folder `again`."""
    chain = Chain(str(report))
    record = _check_record(chain, report)
    faults = _check_sums(chain, report)
    _check_signature(chain, report, signers)
    faults |= _check_packed_logs(chain, report, again, record=record)
    if not faults.get(bundle.README):
        _check_readme(chain, report, record)
    made = {
        path.relative_to(again / "report").as_posix()
        for path in (again / "report").rglob("*")
        if path.is_file()
    }
    for name in sorted(faults.keys() | made - {SUMS}):
        path = report / name
        other = again / "report" / name
        if fault := faults.get(name):
            equal = name in made and path.is_file() and _is_equal(path, other)
            _add_fault(
                chain,
                name,
                fault.partition(":")[0],
                equal=equal,
                copied=path.is_file() and name.startswith(bundle.COPIED),
            )
        elif made and name != bundle.README:
            _compare_file(
                chain,
                name,
                path=path,
                other=other if name in made else None,
            )
    if results is not None and record:
        _compare_results(chain, record, results=results, again=again)
    return chain


def _check_record(chain: Chain, report: Path) -> dict[str, Any]:
    """Return the record of the report's origin; empty if it cannot be read, which is a fault."""
    record = dict[str, Any]()
    try:
        record = _read_record(report / RECORD)
        installed = record["installed"]
        chain.links["page"].differs += [
            f"{RECORD}: packages have {name} {version}, installed is {installed[name]}"
            for name, version in record["packages"].items()
            if installed.get(name, version) != version
        ]
        _note_environments(chain, record)
    except UserError as error:
        chain.links["page"].differs.append(f"{RECORD}: {error.what}")
    return record


def _check_readme(chain: Chain, report: Path, record: dict[str, Any]) -> None:
    """Compare the README with the text that follows from the record of the report's origin: also in
    a folder without logs, of which nothing else can be made again.
    """
    path = report / bundle.README
    link = chain.links["page"]
    if not record or not path.is_file():
        return
    try:
        with report_malformed(
            report / RECORD, what="record of the report's origin", next="take the report again"
        ):
            cited = (report / "CITATION.cff").is_file()
            made = bundle.render_readme(record, cited=cited).encode()
    except UserError as error:
        link.differs.append(f"{RECORD}: {error.what}")
        return
    if (found := read_file(path)) != made:
        link.differs.append(f"{bundle.README}: {_name_first_byte(found, made)}")


def _check_sums(chain: Chain, report: Path) -> dict[str, str]:
    """Return file → fault ("": none) of the files with a checksum, and of those that lack one."""
    try:
        files = [{"name": name, "sha256": sha256} for name, sha256 in read_sums(report).items()]
        inside = sorted(entry.name for entry in report.iterdir() if is_report(entry))
        chain.notes += [f"{name}/ is a report of its own, not checked here" for name in inside]
        beside = {SUMS, f"{SUMS}.sig", *inside}
        return {file["name"]: "" for file in files} | dict(walk(report, files, beside))
    except UserError as error:
        chain.links["page"].differs.append(f"{SUMS}: {error.what}")
    return {}


def _check_packed_logs(
    chain: Chain, report: Path, again: Path, record: dict[str, Any]
) -> dict[str, str]:
    """Check the packed logs, and build the report again from them below `again`. Return their fault
    by their name, if they are damaged.
    """
    logs = chain.links["logs"]
    faults = {}
    try:
        experiments = restore(report / LOGS, output=again)
        chain.notes.append("tokens are not counted again: a report has no token stores")
        _check_logs(logs, results=again, record=record)
        _make_again(
            chain,
            report,
            results=again,
            experiments=experiments,
            record=record,
        )
    except UserError as error:
        why = _one_line(error)
        restored = (again / "tables").exists()
        left_out = record.get("logs", {}).get("left_out")
        if left_out is not None and not (report / LOGS).is_file():
            why = f"the report has no logs: {left_out}"
            logs.unchecked.append(why)
        elif not restored:
            faults[LOGS] = f"{error.what} {error.facts.get('reason', '')}"
        if restored:  # the logs are sound, and what is beside them is not
            chain.add(chain.links["figures"], "claims and figures", why, ".svg")
        for name in LINKS[1:]:
            chain.links[name].unchecked.append(why)
    return faults


def _add_fault(chain: Chain, name: str, fault: str, equal: bool, copied: bool) -> None:
    """Add what is wrong with a file or with its checksum: the file is sound if it is made again
    `equal`, which tells nothing of one that is only copied.
    """
    if copied:
        chain.of(name).differs.append(f"{name}: {fault} (or {SUMS} is)")
    elif equal:
        chain.links["page"].differs.append(f"{SUMS}: its checksum of {name} ({fault})")
    else:
        chain.of(name).differs.append(f"{name}: {fault}")


def _compare_file(chain: Chain, name: str, path: Path, other: Path | None) -> None:
    """Compare a file of the report with the one made again; None if there is none."""
    if not path.is_file():
        chain.of(name).differs.append(f"{name}: missing")
    elif other is None:
        chain.add(chain.of(name), name, "the logs give no such file", ending=".txt")
    elif not _is_equal(path, other):
        text, made = (DRAWING.sub(b"<svg>", read_file(page)) for page in (path, other))
        if path.suffix == ".html" and text != made:  # text is the same with every release
            chain.add(chain.of(name), name, _name_first_byte(text, made), ending=".txt")
        else:
            chain.add(chain.of(name), name, _name_difference(path, again=other))


def _compare_results(chain: Chain, record: dict[str, Any], results: Path, again: Path) -> None:
    """Compare drawings of `results` with those made again, while its tables are the report's."""
    stale = [
        name
        for name in record["order"]
        if _is_stale(results / "tables" / name, digest=record["experiments"][name]["tables"])
    ]
    if stale:
        chain.notes.append(f"tables have changed since it was built: {few(stale)}")
        return
    for other in sorted((again / "figures").rglob("*.*")):
        path = results / other.relative_to(again)
        if path.is_file() and not _is_equal(path, other):
            chain.add(chain.links["figures"], str(path), _name_difference(path, again=other))


def _is_stale(folder: Path, digest: str) -> bool:
    """Return whether a folder has other tables than those of this digest."""
    if not (folder / tables.VERDICT).is_file():
        return False
    try:
        return tables.digest(folder) != digest
    except UserError:
        return True


def _read_record(path: Path) -> dict[str, Any]:
    record = read_json(path, what="record of the report's origin")
    with report_malformed(path, what="record of the report's origin", next="take the report again"):
        built = {
            "tokenscale": str,
            "git": dict,
            "packages": dict,
            "installed": dict,
            "zlib": str,
            "code": dict,
        }
        check_types(record, fields={"order": list, "experiments": dict, "logs": dict, **built})
        for name in record["order"]:
            check_types(
                record["experiments"][check_file_name(name)], fields={"tables": str, "runs": dict}
            )
            for facts in record["experiments"][name]["runs"].values():
                check_types(facts, fields={"packages": dict})
    return record


def _note_environments(chain: Chain, record: dict[str, Any]) -> None:
    """Note in what this environment is another than that of the report and its runs, and what that
    leaves unsure.
    """
    now = bundle.built_by()
    then = _list_versions(record)
    here = _list_versions(now)
    with_system = here | {"system": f"{platform.system()} {platform.machine()}"}
    commit = clear_unknown(record["git"].get("commit"))
    at_commit = f" at commit {commit}" if commit else ""
    changed = _list_different(record["code"], now["code"])
    runs = {
        run: facts for part in record["experiments"].values() for run, facts in part["runs"].items()
    }
    packages = [facts["packages"] | {"tokenscale": now["tokenscale"]} for facts in runs.values()]
    going = sorted(run for run, facts in runs.items() if facts.get("seal") is None)
    for what, found in (
        ("the report was built with other packages", name_differences(then, now=here)),
        (
            "runs were trained with other packages",
            [text for of in packages for text in name_differences(of, now=with_system)],
        ),
        (f"source files have changed since the report was built{at_commit}", changed),
        ("runs had not ended when the report was built", going),
    ):
        if found:
            chain.notes.append(f"{what}: {few([*dict.fromkeys(found)], 5)}")
    chain.unsure = _list_unsure(then, here, changed)
    chain.unsure[""] = f"runs had not ended: {few(going)}" if going else ""


def _list_unsure(then: dict[str, str], here: dict[str, str], changed: list[str]) -> dict[str, str]:
    """Return ending of files → the releases and `changed` source files that may be why their bytes
    are others here; "" if there are none.
    """
    drawing = name_differences(
        {name: then[name] for name in bundle.DRAWING if name in then}, now=here
    )
    if changed or then["tokenscale"] != here["tokenscale"]:
        version = f"tokenscale {then['tokenscale']} then, {here['tokenscale']} now"
        drawing.append(f"{version}, {few(changed, 1)}" if changed else version)
    rows = [text for text in drawing if text.startswith(("pyarrow ", "tokenscale "))]
    return dict.fromkeys(DRAWN, few(drawing, shown=5)) | {".parquet": few(rows, shown=5)}


def _list_versions(built: dict[str, Any]) -> dict[str, str]:
    """Return package → version of what a report was built with."""
    return (
        built["packages"]
        | built["installed"]
        | {name: built[name] for name in ("zlib", "tokenscale")}
    )


def _list_different(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names that have another value in one of two tables, or none."""
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


def _check_logs(link: Link, results: Path, record: dict[str, Any]) -> None:
    """Compare unpacked logs with the sealed records of their runs, and these with the seals that
    the report names.
    """
    runs = [run for part in record.get("experiments", {}).values() for run in part["runs"].items()]
    seals = {run: facts.get("seal") for run, facts in runs}
    found = {
        path.parent.name: path.parent for path in sorted((results / "runs").glob("*/run.json"))
    }
    link.differs += [f"{LOGS}: lacks runs/{run}" for run in sorted(seals.keys() - found.keys())]
    for run, folder in found.items():
        sealed = None
        path = folder / "run.json"
        with suppress(UserError):
            sealed = read_sealed(path)
        if sealed is None and b'"seal"' in read_file(path):
            faults = [f"{path}: edited after it was sealed"]
        elif run in seals and seals[run] != (sealed or {}).get("seal"):
            faults = [f"{path}: another sealed record than the report's"]
        else:  # records of other programs may lack hashes: their tables are compared
            faults = (
                check_sealed(folder, record=sealed)
                if sealed and "logs" in sealed["outcome"]
                else []
            )
        link.differs += [f"{LOGS}: {fault.replace(f'{results}/', '')}" for fault in faults]


def check_sealed(folder: Path, record: dict[str, Any]) -> list[str]:
    """Return what is wrong with the files that a run's sealed record names: its logs and its
    diff.
    """
    with report_malformed(folder / "run.json", what="run's record", next="train the run again"):
        files = [
            {"name": name, "sha256": sha256}
            for name, sha256 in (record["outcome"].get("logs") or {}).items()
        ]
        if digest := (record.get("git") or {}).get("diff_sha256"):
            files.append({"name": "dirty.diff", "sha256": digest})
    listed = {file["name"] for file in files}
    logs = (
        path.relative_to(folder).as_posix()
        for path in sorted(folder.glob("attempt=*/rank=*/*.jsonl"))
    )
    extra = [
        f"{folder / name}: a log that is not in the sealed record"
        for name in logs
        if name not in listed
    ]
    return [f"{folder / name}: {fault}" for name, fault in walk(folder, files)] + extra


def _make_again(
    chain: Chain, report: Path, results: Path, experiments: list[str], record: dict[str, Any]
) -> None:
    """Build the report again below `results`, and compare the digests of its tables."""
    from tokenscale.report import build

    ledger = report / "claims.yaml"
    again = results / "report"
    copied: dict[str, Any] = {
        "workflow": report / "workflow/Snakefile",
        "citation": report / "CITATION.cff",
    }
    copied |= {"ledger": ledger} if ledger.is_file() and (report / build.CLAIMS).is_file() else {}
    built = {name: record[name] for name in bundle.built_by()} if record else None
    build.write(
        experiments,
        tables=results / "tables",
        figures=results / "figures",
        output=again,
        **copied,
        built=built,
    )
    now = read_json(again / RECORD)
    for name, part in now["experiments"].items() if record else ():
        if part["tables"] != (stated := record["experiments"].get(name, {}).get("tables")):
            part["tables"] = stated
            chain.add(
                chain.links["tables"],
                f"{RECORD}: tables of {name}",
                "not what the logs give",
                ".parquet",
            )
    write_text(again / RECORD, text=canonical_json(now) + "\n")


def _is_equal(path: Path, other: Path) -> bool:
    """Compare bytes; of an archive those in it, which other releases of liblzma pack otherwise."""
    found = read_file(path)
    made = read_file(other)
    if found != made and path.name == LOGS:
        with suppress(lzma.LZMAError, EOFError):
            return lzma.decompress(found) == lzma.decompress(made)
    return found == made


def _name_difference(path: Path, again: Path) -> str:
    """Return where a file differs from the one made again; of Parquet files empty if all rows are
    equal.
    """
    if path.suffix == ".parquet":
        return tables.first_difference(path, other=again)
    if path.suffix in (".png", ".pdf", ".xz"):
        return "not what the logs give"
    return _name_first_byte(read_file(path), read_file(again))


def _name_first_byte(found: bytes, made: bytes) -> str:
    """Return in which line two texts differ first, with what stands there."""
    ends = next(
        (i for i, (a, b) in enumerate(zip(found, made, strict=False)) if a != b),
        min(len(found), len(made)),
    )
    shown = (
        content[max(ends - 30, 0) : ends + 30].decode(errors="replace") for content in (found, made)
    )
    return "line {} has {!r} where the logs give {!r}".format(
        found.count(b"\n", 0, ends) + 1, *shown
    )


def _check_signature(chain: Chain, report: Path, signers: Path | None) -> None:
    """Check who signed the list of checksums: `ssh-keygen -Y sign -n tokenscale -f KEY
    SHA256SUMS`.
    """
    sums = report / SUMS
    signature = report / f"{SUMS}.sig"
    link = chain.links["page"]
    if signers is None:
        if signature.is_file():
            chain.notes.append("signed; --signers FILE tells by whom, and whether it still fits")
        return
    if missing := [path for path in (signers, signature) if not path.is_file()]:
        link.differs.append(f"{sums}: not signed, there is no file {missing[0]}")
        return

    def ssh_keygen(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["ssh-keygen", "-Y", *arguments, "-s", str(signature), "-f", str(signers)]
        try:
            with open(sums, "rb") as signed:
                return subprocess.run(
                    command, stdin=signed, capture_output=True, encoding="utf-8", errors="replace"
                )
        except FileNotFoundError:
            next_step = "install OpenSSH 8.2 or newer"
            raise UserError("signatures need ssh-keygen.", file=signature, next=next_step) from None

    names = ssh_keygen("find-principals").stdout.splitlines()
    if not names:
        link.differs.append(f"{sums}: signed by nobody whom {signers} names")
    elif ssh_keygen("verify", "-n", NAMESPACE, "-I", names[0]).returncode:
        link.differs.append(f"{sums}: it is not what {names[0]} signed")
    else:
        chain.notes.append(f"signed by {names[0]}")


def _one_line(error: UserError) -> str:
    """Return an error as one line: where, what, and the next step."""
    where = ", ".join(
        error.facts[name] for name in ("file", "path", "folder") if name in error.facts
    )
    next_step = f"; next {error.facts['next']}" if "next" in error.facts else ""
    return f"{where}{': ' * bool(where)}{error.what.rstrip('.')}{next_step}"
