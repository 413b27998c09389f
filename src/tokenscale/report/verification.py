"""Check which of logs → tables → figures → page agree: each is made again from the one before, and bytes are compared.

Checksums and seals can be renewed by whoever edits a file. What follows from another file cannot: tables follow from
sealed logs, figures, data and claims from tables, and the page from all of them.
"""

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
from tokenscale.base.files import check_file_name, check_types, read_json, report_malformed, sha256_file
from tokenscale.base.manifests import SUMS, read_sums, walk
from tokenscale.runs.records.provenance import find_versions, list_installed, name_differences, read_sealed

#: what a signature is for, so that one made for something else is none
NAMESPACE = "tokenscale"
#: where a project has its claims
LEDGER = Path("config/claims.yaml")
LINKS = ("logs", "tables", "figures", "page")


@dataclass
class Link:
    """What was found of one link of the chain: where it differs from what it follows from, or why nobody can tell, and
    the commands that make it again."""

    differs: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    next: str = ""

    def __str__(self) -> str:
        if self.differs:
            return f"differs at {few(self.differs, 5)}"
        return f"not checked because {'; '.join(self.unchecked)}" if self.unchecked else "agrees"


@dataclass
class Chain:
    """What was found of a report: a link for each of `LINKS`, and notes, which are no faults."""

    what: str
    links: dict[str, Link] = field(default_factory=lambda: {name: Link() for name in LINKS})
    notes: list[str] = field(default_factory=list)

    def of(self, name: str) -> Link:
        """Return the link that a file of a report belongs to."""
        drawn = name.startswith(("figures/", "data/", "sql/", "tables/", "claims."))
        return self.links["figures" if drawn else "page"]

    @property
    def code(self) -> int:
        """0: all links agree; 1: one differs; 3: none differs, but not all could be checked."""
        found = self.links.values()
        return 1 if any(link.differs for link in found) else 3 if any(link.unchecked for link in found) else 0

    def __str__(self) -> str:
        lines = [self.what, *(f"  {name}: {link}" for name, link in self.links.items())]
        lines += [f"  note: {note}" for note in self.notes]
        steps = dict.fromkeys(link.next for link in self.links.values() if link.differs and link.next)
        return "\n".join([*lines, *(f"  next: {step}" for step in steps)])


# --- tables ---------------------------------------------------------------------------------------------------------


def check_tables(folder: Path, results: Path) -> Link:
    """Ingest the logs below `results` again, and compare every table of the folder with them, byte by byte."""
    link = Link(next=tables.restore_command(folder))
    try:
        files = tables.read_manifest(folder)["files"]
    except UserError as error:
        (link.differs if folder.is_dir() else link.unchecked).append(_one_line(error))
        return link
    if faults := [f"{folder / name}: {fault}" for name, fault in walk(folder, files)]:
        link.differs += faults
        return link
    runs = pq.read_table(folder / "runs.parquet", columns=["run_id", "status"], use_threads=False).to_pylist()
    ended = [run["run_id"] for run in runs if run["status"] != "missing"]
    inputs = read_inputs(folder)
    with TemporaryDirectory() as temporary:
        again = Path(temporary, folder.name)
        try:
            inputs.ingest(results, again)
        except UserError as error:  # an input that is at hand and cannot be read is not the one of these tables
            at_hand = all((results / name).is_file() for name in inputs.names())
            (link.differs if at_hand else link.unchecked).append(_one_line(error))
            return link
        if ended and not any((results / "runs" / run / "run.json").is_file() for run in ended):
            link.unchecked.append(f"logs are not at hand in {results / 'runs'}: tables of {folder.name} not proven")
            return link
        _compare_tables(link, folder, again)
    going = [run["run_id"] for run in runs if _goes_on(results / "runs" / run["run_id"] / "run.json")]
    if link.differs and going:
        link.unchecked.append(f"runs have not ended, and tables may be older than their logs: {few(going)}")
        link.differs.clear()
    return link


def _goes_on(path: Path) -> bool:
    """Return whether a run has a record that is not sealed."""
    with suppress(UserError):
        record = read_json(path)
        return isinstance(record, dict) and "seal" not in record
    return False


def _compare_tables(link: Link, folder: Path, again: Path) -> None:
    for path, other in ((folder / name, again / name) for name in tables.file_names()):
        if path.read_bytes() == other.read_bytes():
            continue
        if path.suffix != ".parquet":
            link.differs.append(f"{path}: not what the logs give")
        elif difference := tables.first_difference(path, other):
            link.differs.append(f"{path}: {difference}")
        else:
            why = "another release of pyarrow, or inputs of runs that are at hand now and were not then, or the reverse"
            link.notes.append(f"{path}: equal values in other bytes: {why}")


# --- reports --------------------------------------------------------------------------------------------------------


def verify(path: Path, results: Path, ledger: Path = LEDGER, signers: Path | None = None) -> Chain:
    """Check the report that a path is, or is a file of (by name, or by its hash in the report's SHA256SUMS).

    `results` holds logs and tables; claims are judged again by the `ledger`. The report must be signed by one of the
    `signers`, if they are given. Raises UserError where a file is missing, or belongs to no report at hand.
    """
    if path.is_dir() or path.name in (SUMS, "index.html"):
        return check_report(path if path.is_dir() else path.parent, results, ledger, signers)
    if not path.is_file():
        raise UserError("there is no such file.", file=path, next="correct the path")
    places = [folder for folder in [*path.resolve().parents[:4], results / "report"] if (folder / SUMS).is_file()]
    if not places:
        reason = "no report at hand lists it"
        raise UserError("the file cannot be verified.", file=path, reason=reason, next="--results names the folder")
    sha256 = sha256_file(path)
    for report in places:
        names = [name for name, listed in read_sums(report).items() if listed == sha256]
        if names:
            chain = check_report(report, results, ledger, signers)
            chain.notes.insert(0, f"{path} is {' and '.join(names)} of this report")
            return chain
    chain = check_report(places[0], results, ledger, signers)
    fault = f"{path}: no file of {places[0]} has its hash"
    chain.links["figures" if path.suffix in (".svg", ".png", ".csv", ".parquet") else "page"].differs.insert(0, fault)
    return chain


def check_report(
    report: Path,
    results: Path,
    ledger: Path = LEDGER,
    signers: Path | None = None,
    *,
    checked: dict[str, Link] | None = None,
    figures: Path | None = None,
) -> Chain:
    """Check the folder of a report. `checked` are the links of tables that are known; `figures` are the drawings that
    the report was made of, to be compared, too."""
    listed, chain = read_sums(report), Chain(str(report))
    record = read_json(report / "provenance.json", "record of the report's origin", next="snakemake report")
    with report_malformed(report / "provenance.json", "record of the report's origin", next="snakemake report"):
        check_types(record, {"order": list, "experiments": dict, "code": dict, "packages": dict, "git": dict})
        experiments = [check_file_name(name) for name in record["order"]]
        runs = {check_file_name(run): dict(facts) for name in experiments
                for run, facts in record["experiments"][name]["runs"].items()}  # fmt: skip
        _note_environments(chain, record, runs)
    _check_signature(chain, report, signers)
    _check_files(chain, report, listed)
    _check_logs(chain.links["logs"], {run: facts.get("seal") for run, facts in runs.items()}, results / "runs")
    for name in experiments:
        link = (checked or {}).get(name) or check_tables(results / "tables" / name, results)
        chain.links["tables"].differs += link.differs
        chain.links["tables"].unchecked += link.unchecked
        chain.links["tables"].next = chain.links["tables"].next or link.next * bool(link.differs)
        chain.notes += link.notes
    _check_rebuilt(chain, report, record, listed, results, ledger, figures)
    return chain


def _check_logs(link: Link, seals: dict[str, str | None], runs: Path) -> None:
    """Compare the sealed records of runs with those that the report names, and their logs with the records."""
    link.next = "restore the folders of runs from a copy, or train the runs again"
    found = {run: runs / run for run in seals if (runs / run / "run.json").is_file()}
    if seals and not found:
        link.unchecked.append(f"logs are not at hand in {runs}")
        return
    link.differs += [f"{runs / run}: the run is gone" for run in sorted(seals.keys() - found.keys())]
    for run, folder in sorted(found.items()):
        record = read_sealed(folder / "run.json")
        if seals[run] is None:
            if record is not None:
                link.differs.append(f"{folder}: sealed since the report was built")
        elif record is None:
            link.differs.append(f"{folder / 'run.json'}: edited after it was sealed")
        elif record["seal"] != seals[run]:
            link.differs.append(f"{folder / 'run.json'}: another sealed record than the report's")
        elif "logs" in record["outcome"]:  # records of other programs may lack hashes: their tables are compared
            link.differs += check_sealed(folder, record)


def check_sealed(folder: Path, record: dict[str, Any]) -> list[str]:
    """Return what is wrong with the files that a run's sealed record names: its logs and its diff."""
    with report_malformed(folder / "run.json", "run's record", "train the run again"):
        files = [{"name": name, "sha256": sha256} for name, sha256 in (record["outcome"].get("logs") or {}).items()]
        if digest := (record.get("git") or {}).get("diff_sha256"):
            files.append({"name": "dirty.diff", "sha256": digest})
    listed = {file["name"] for file in files}
    logs = (path.relative_to(folder).as_posix() for path in sorted(folder.glob("attempt=*/rank=*/*.jsonl")))
    extra = [f"{folder / name}: a log that is not in the sealed record" for name in logs if name not in listed]
    return [f"{folder / name}: {fault}" for name, fault in walk(folder, files)] + extra


def _check_files(chain: Chain, report: Path, listed: dict[str, str]) -> None:
    """Compare the files of a report with its checksums, and find files in its folders that have none."""
    from tokenscale.report.bundle import FOLDERS

    others = {path.name for path in report.iterdir() if path.name not in FOLDERS}
    files = [{"name": name, "sha256": sha256} for name, sha256 in listed.items()]
    for name, fault in walk(report, files, others):
        chain.of(name).differs.append(f"{name}: {fault}")


def _check_rebuilt(
    chain: Chain,
    report: Path,
    record: dict[str, Any],
    listed: dict[str, str],
    results: Path,
    ledger: Path,
    figures: Path | None,
) -> None:
    """Build the report again from the tables at hand, and compare every file."""
    from tokenscale.report import build

    chain.links["figures"].next = chain.links["page"].next = (
        f"python -m tokenscale report all --experiments {' '.join(record['order'])} --tables {results / 'tables'} "
        f"--figures {results / 'figures'} --output {report}"
    )
    edited = {text.partition(": ")[0] for link in chain.links.values() for text in link.differs}
    with TemporaryDirectory() as temporary:
        again = Path(temporary, "report")
        try:
            build.write(
                record["order"],
                results / "tables",
                Path(temporary, "figures"),
                again,
                ledger=ledger if (report / build.CLAIMS).is_file() else None,
                workflow=report / "workflow/Snakefile",
                citation=report / "CITATION.cff",
            )
        except UserError as error:
            for name in ("figures", "page"):
                chain.links[name].unchecked.append(_one_line(error))
            return
        for name in sorted(listed.keys() - edited - {"provenance.json", "ro-crate-metadata.json"}):
            chain.of(name).differs += _compare(name, report / name, again / name)
        for other in sorted(Path(temporary, "figures").rglob("*.*")) if figures else ():
            path = Path(figures or "") / other.relative_to(Path(temporary, "figures"))
            if path.is_file():
                chain.links["figures"].differs += _compare(str(path), path, other)
        now = read_json(again / "provenance.json")
    stale = [n for n, part in now["experiments"].items() if record["experiments"][n].get("tables") != part["tables"]]
    if stale:
        chain.notes.append(f"the tables have changed since the report was built: {few(stale)}")
    elif record["experiments"] != now["experiments"] and "provenance.json" not in edited:
        chain.links["page"].differs.append("provenance.json: its runs are not those of the tables")
    code = record["code"]
    changed = sorted(name for name in code.keys() | now["code"].keys() if code.get(name) != now["code"].get(name))
    if changed:
        commit = record["git"].get("commit")
        remedy = f"; git checkout {commit} makes it as it was" if commit else ""
        chain.notes.append(f"source files have changed since the report was built: {few(changed, 5)}{remedy}")


def _compare(name: str, path: Path, again: Path) -> list[str]:
    """Return in what a file differs from the one made again; empty if it does not."""
    if not again.is_file():
        return [f"{name}: the tables give no such file"]
    found, made = path.read_bytes(), again.read_bytes()
    if found == made:
        return []
    if path.name == "claims.json":
        return [f"{name}: {_compare_claims(path, again)}"]
    if path.suffix in (".svg", ".png", ".pdf", ".parquet"):
        return [name]
    lines = zip(found.splitlines(), made.splitlines(), strict=False)
    number = next((number for number, (a, b) in enumerate(lines, 1) if a != b), "")
    return [f"{name} line {number}" if number else f"{name}: shorter or longer"]


def _compare_claims(path: Path, again: Path) -> str:
    """Name the claims that were judged otherwise, the verdict before all else."""
    from tokenscale.report.claims import read_claims

    try:
        before, now = ({row["id"]: row for row in read_claims(file)} for file in (path, again))
    except (UserError, KeyError, TypeError):
        return "it is not one that tokenscale writes"
    differing = []
    for name in sorted(before.keys() | now.keys()):
        one, two = before.get(name, {}), now.get(name, {})
        key = next((key for key in ("verdict", "number", *two, *one) if one.get(key) != two.get(key)), None)
        if key:
            differing.append(f"{name} has {key} {one.get(key)!r}; judged again, {two.get(key)!r}")
    return few(differing) or "its replication is not what the tables give"


def _check_signature(chain: Chain, report: Path, signers: Path | None) -> None:
    """Check who signed the list of checksums: `ssh-keygen -Y sign -n tokenscale -f KEY SHA256SUMS`."""
    sums, signature, link = report / SUMS, report / f"{SUMS}.sig", chain.links["page"]
    if signers is None:
        if signature.is_file():
            chain.notes.append("signed; --signers FILE tells by whom, and whether it still fits")
        return
    for path in (signers, signature):
        if not path.is_file():
            link.differs.append(f"{sums}: not signed, there is no file {path}")
            return

    def ssh_keygen(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = ["ssh-keygen", "-Y", *map(str, arguments), "-s", str(signature), "-f", str(signers)]
        try:
            with open(sums, "rb") as signed:
                return subprocess.run(command, stdin=signed, capture_output=True, encoding="utf-8", errors="replace")
        except FileNotFoundError:
            next = "install OpenSSH 8.2 or newer"
            raise UserError("signatures need ssh-keygen.", file=signature, next=next) from None

    names = ssh_keygen("find-principals").stdout.splitlines()
    if not names:
        link.differs.append(f"{sums}: signed by nobody whom {signers} names")
    elif ssh_keygen("verify", "-n", NAMESPACE, "-I", names[0]).returncode:
        link.differs.append(f"{sums}: it is not what {names[0]} signed")
    else:
        chain.notes.append(f"signed by {names[0]}")


def _note_environments(chain: Chain, record: dict[str, Any], runs: dict[str, dict[str, Any]]) -> None:
    """Note packages that differ between this environment and those of the report and its runs, which is no fault."""
    here = find_versions(tuple(record["packages"])) | find_versions() | list_installed()
    here["tokenscale"] = ""
    built = name_differences(record["packages"] | record.get("installed", {}) | {"tokenscale": ""}, here)
    trained = dict.fromkeys(
        text for facts in runs.values() for text in name_differences(facts["packages"] | {"tokenscale": ""}, here)
    )
    for what, packages in (("the report was built", built), ("runs were trained", [*trained])):
        if packages:
            chain.notes.append(f"{what} with other packages: {few(packages, 5)}")


def _one_line(error: UserError) -> str:
    """Return an error as one line: where, what, and the next step."""
    where = ", ".join(error.facts[name] for name in ("file", "path", "folder") if name in error.facts)
    next = f"; next {error.facts['next']}" if "next" in error.facts else ""
    return f"{where}: {error.what.rstrip('.')}{next}"
