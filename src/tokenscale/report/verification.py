"""Check whether a file of a report is what its data and its code draw. Draw everything again and name what differs.

A file is `identical` if nothing that its metadata name has changed and the same bytes are drawn again. It is `data
changed` or `code changed` if tables or source files are not those that the metadata name. It is `not ours` if it has no
metadata of tokenscale, or shows something else than they say.
"""

import io
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from pypdf import PdfReader

from tokenscale.base.errors import UserError
from tokenscale.base.files import check_file_name, read_json, report_malformed, sha256_file
from tokenscale.report import build, bundle, crate, pdf, save
from tokenscale.report.claims import read_claims
from tokenscale.report.pdf_pages import content, shown
from tokenscale.runs.records.provenance import find_versions, name_differences, read_sealed
from tokenscale.settings.closure import list_changes
from tokenscale.settings.registry import FIGURES

#: keys of a judged claim that the ledger states; all others follow from the tables
STATED = ("document", "where", "claim", "figure", "unit", "direction", "bound", "margin", "remark", "sql_sha256")
#: what a signature is for, so that one made for something else is none
NAMESPACE = "tokenscale"
#: where a project has its claims
LEDGER = Path("config/claims.yaml")
IDENTICAL, DATA, CODE, FOREIGN = "identical", "data changed", "code changed", "not ours"
#: names in a list that are printed
SHOWN = 5
_NEXT = {
    DATA: "snakemake report makes tables and report from the logs at hand; python -m tokenscale diff A B compares two",
    CODE: "snakemake report draws it with this code; git checkout of the commit in provenance.json draws it as it was",
    FOREIGN: "take the file from the report's folder, whose SHA256SUMS names all that belongs to it",
}


@dataclass
class Finding:
    """What was found of one file, or of one page of it: the verdicts, and what differs, in sentences."""

    what: str
    verdicts: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """All verdicts, most often one."""
        return ", ".join(dict.fromkeys(self.verdicts)) or IDENTICAL

    def add(self, verdict: str, *sentences: str) -> None:
        """One more thing that is not as it was."""
        self.verdicts.append(verdict)
        self.differs += sentences

    def lines(self) -> list[str]:
        """The verdict, then what differs."""
        return [f"{self.what}: {self.verdict}", *(f"  {line}" for line in (*self.differs, *self.notes))]


def text(findings: list[Finding]) -> str:
    """All findings as printed, and below them what to do about them."""
    verdicts = dict.fromkeys(verdict for finding in findings for verdict in finding.verdicts)
    lines = [line for finding in findings for line in finding.lines()]
    return "\n".join([*lines, *(f"next: {_NEXT[verdict]}" for verdict in verdicts)])


def queries(names: list[str]) -> str:
    return f"{'query' if len(names) == 1 else 'queries'} {few(names)}"


def few(names: list[str]) -> str:
    """The first few of them."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def verify(path: Path, results: Path, ledger: Path = LEDGER, signers: Path | None = None) -> list[Finding]:
    """Return the findings about a figure, a report's PDF, or a report's folder (also by `index.html` or `SHA256SUMS`).

    `results` holds the tables to draw from; claims are judged again by the `ledger`. The signature of a report's folder
    must be that of one of the `signers`, if they are given. Raises UserError where a file, the tables or, for a report
    with claims, the ledger are missing.
    """
    if path.is_dir() or path.name in (bundle.SUMS, "index.html"):
        return _folder(path if path.is_dir() else path.parent, results, ledger, signers)
    if path.suffix.lower() == ".pdf" and "report" in (save.read(path) or {}):
        return [_document(path, results, ledger)]
    return [_figure(path, results)]


# --- one figure -----------------------------------------------------------------------------------------------------


def _figure(path: Path, results: Path) -> Finding:
    """An SVG or PNG, or a figure's PDF."""
    finding = Finding(str(path))
    carried = save.read(path)
    made = _made(finding, carried, results)
    if made is None:
        return finding
    _compare(finding, carried, made, _places(path, results))
    if not finding.verdicts:
        kind = path.suffix[1:].lower()
        if not _same(kind, save.draw(made, carried)[kind], path.read_bytes(), finding):
            finding.add(FOREIGN, "edited: this is not what the data and the code of its metadata draw")
    _data_beside(finding, carried, path)
    return finding


def _made(finding: Finding, carried: save.Metadata | None, results: Path) -> save.LoadedFigure | None:
    """Load the figure that metadata name, from the tables at hand; None where they name none."""
    if carried is None:
        finding.add(FOREIGN, "it carries no metadata of tokenscale")
        return None
    if not _whole(carried):
        finding.add(FOREIGN, "its metadata are not those that tokenscale writes")
        return None
    with save.Tables(_tables(carried["experiment"], results)) as opened:
        return save.load_figure(carried["figure"], opened)


def _whole(carried: save.Metadata) -> bool:
    """Has it the keys and kinds of values that we write?"""
    queries, runs = carried.get("queries"), carried.get("runs")
    return (
        carried.keys() == save.KEYS
        and carried["figure"] in FIGURES
        and all(isinstance(carried[key], str) for key in ("experiment", "data", "code", "tables"))
        and isinstance(carried["libraries"], dict)
        and isinstance(runs, dict)
        and isinstance(queries, dict)
        and all(isinstance(query, dict) and query.keys() == {"sql", "rows"} for query in queries.values())
    )


def _tables(experiment: str, results: Path) -> Path:
    """The folder of an experiment's tables; its name comes from a file, and is looked up, never joined to a path."""
    folder = results / "tables"
    known = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if experiment not in known:
        raise UserError(
            f"there are no tables of experiment {experiment!r} to draw from.",
            folder=folder,
            found=", ".join(known) or "(none)",
            next="--results names the folder with the tables; snakemake tables makes them",
        )
    return folder / experiment


def _compare(finding: Finding, carried: save.Metadata, made: save.LoadedFigure, places: list[Path]) -> None:
    """Compare the metadata with what is at hand. `places` are folders in which a report may lie.

    If the tables have not changed, other rows come from other code. If the code has not changed either, the metadata
    state what never was.
    """
    now = made.metadata
    _compare_code(finding, carried, now, places)
    verdict = DATA if carried["tables"] != now["tables"] else CODE if finding.verdicts else FOREIGN
    if carried["queries"].keys() == now["queries"].keys():
        changed = [q for q in now["queries"] if carried["queries"][q]["rows"] != now["queries"][q]["rows"]]
        if changed:
            finding.add(verdict, f"rows of {queries(changed)} differ")
    if carried["data"] != now["data"]:
        finding.add(verdict, *_rows(carried["data"], made, places))
    if differing := _runs(carried["runs"], now["runs"]):
        finding.add(verdict, *differing)
    if verdict == DATA and DATA not in finding.verdicts:
        finding.notes.append("the experiment's tables have changed since, in nothing that this figure shows")


def _compare_code(finding: Finding, carried: save.Metadata, now: save.Metadata, places: list[Path]) -> None:
    sql = [q for q in sorted(now["queries"].keys() | carried["queries"].keys())
           if carried["queries"].get(q, {}).get("sql") != now["queries"].get(q, {}).get("sql")]  # fmt: skip
    if sql:
        finding.add(CODE, f"the definition of {queries(sql)} has changed")
    if carried["code"] != now["code"]:
        named = _changed_files(carried, places)
        finding.add(CODE, f"source files have changed: {few(named)}" if named else "source files have changed")
    libraries = [
        f"{name} {carried['libraries'].get(name, 'none')} then, {now['libraries'].get(name, 'none')} now"
        for name in sorted(now["libraries"].keys() | carried["libraries"].keys())
        if carried["libraries"].get(name) != now["libraries"].get(name)
    ]
    if libraries:
        finding.add(CODE, f"other packages: {few(libraries)}")


def _changed_files(carried: save.Metadata, places: list[Path]) -> list[str]:
    """Name the source files that differ from those of the metadata, where what they were can be found out."""
    figure = carried["figure"]
    for record in _records(places):
        then = record.get("experiments", {}).get(carried["experiment"], {}).get("figures", {}).get(figure, {})
        if carried["code"] == then.get("code"):
            now = save.files(*save.modules(figure))
            gone = [name for name in record["code"] if not (save.PACKAGE.parent / name).is_file()]
            return sorted([name for name in now if now[name] != record["code"].get(name)] + gone)
    for listing in sorted(Path("results/code").glob("*/sources.json")):
        if listing.with_name(f"{carried['code']}.json").is_file():
            return list_changes(listing, carried["code"])
    return []


def _places(path: Path, results: Path) -> list[Path]:
    """Folders in which the report may lie that a file is of: those above it, and that of the results at hand."""
    return [*path.resolve().parents[:3], results / "report"]


def _records(places: list[Path]) -> Iterator[dict[str, Any]]:
    """Records of a report's origin, those that can be read."""
    for record in (place / "provenance.json" for place in places):
        if record.is_file():
            try:
                value = read_json(record)
            except UserError:
                continue
            if isinstance(value, dict):
                yield value


def _rows(sha256: str, made: save.LoadedFigure, places: list[Path]) -> list[str]:
    """Which rows of the data differ, where the data of then are at hand."""
    name = f"{made.name}.csv"
    experiment = made.metadata["experiment"]
    for csv in (folder / name for place in places for folder in (place, place / "data" / experiment)):
        if csv.is_file() and sha256_file(csv) == sha256:
            before, after = csv.read_text("utf-8").splitlines(), made.csv.splitlines()
            gone = [line for line in before if line not in set(after)]
            new = [line for line in after if line not in set(before)]
            of = sorted({run for run in made.metadata["runs"] for line in gone + new if run in line})
            named = f", of {few(of)}" if of else ""
            return [f"{max(len(gone), len(new))} of {len(before) - 1} rows of its data differ{named}"]
    return ["its data differ"]


def _runs(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Runs that came, went, or have another record."""
    sentences = []
    for change, found in (
        ("runs that it was drawn from are not in the tables", sorted(then.keys() - now.keys())),
        ("runs have come since", sorted(now.keys() - then.keys())),
        ("runs have another record", sorted(run for run in then.keys() & now.keys() if then[run] != now[run])),
    ):
        if found:
            sentences.append(f"{change}: {few(found)}")
    return sentences


def _data_beside(finding: Finding, carried: save.Metadata, path: Path) -> None:
    """The CSV of the figure, beside it or in the folder of the report's data, is compared with the metadata, too."""
    name, experiment = f"{carried['figure']}.csv", carried["experiment"]
    folders = (folder / "data" / experiment for folder in path.resolve().parents[2:3])
    beside = [path.with_name(name), *(folder / name for folder in folders)]
    for csv in beside:
        if csv.is_file() and sha256_file(csv) != carried["data"]:
            finding.add(DATA, f"{csv} is not the data of this figure")


def _same(kind: str, drawn: bytes, found: bytes, finding: Finding) -> bool:
    """Equal bytes; of a PNG or PDF that another program has saved again, equal pixels or an equal page."""
    if drawn == found:
        return True
    equal = (kind == "png" and _pixels(drawn) == _pixels(found)) or (kind == "pdf" and _pages(drawn) == _pages(found))
    if equal:
        finding.notes.append("saved again by another program, which changed nothing that is seen")
    return equal


def _pixels(png: bytes) -> tuple[Any, bytes]:
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        return image.size, image.convert("RGBA").tobytes()


def _pages(document: bytes) -> list[str]:
    return [content(page) for page in PdfReader(io.BytesIO(document)).pages]


# --- the PDF of a report --------------------------------------------------------------------------------------------


def _document(path: Path, results: Path, ledger: Path) -> Finding:
    """Write the whole report again and name the pages that differ."""
    finding = Finding(str(path))
    carried = save.read(path)
    experiments = carried.get("order")
    if not isinstance(experiments, list) or not all(isinstance(name, str) for name in experiments):
        finding.add(FOREIGN, "its metadata are not those that tokenscale writes")
        return finding
    for name in experiments:
        _tables(name, results)
    with TemporaryDirectory() as folder:
        again, claims = Path(folder) / "report.pdf", None
        if carried.get("claims"):
            claims = build.judge(ledger, results / "tables", experiments, Path(folder))
        pdf.write(experiments, results / "tables", again, claims=claims)
        if again.read_bytes() == path.read_bytes():
            return finding
        _compare_report(finding, carried, pdf.of_report(experiments, results / "tables", claims))
        if claims is not None and carried["claims"] != sha256_file(claims):
            _compare_claims_of(finding, carried["claims"], path, claims)
        drawn = save.open_pdf(again)
    _compare_pages(finding, save.open_pdf(path), drawn)
    return finding


def _compare_pages(finding: Finding, found: PdfReader, drawn: PdfReader) -> None:
    """Name the pages that show something else than those drawn again."""
    if not finding.verdicts and [content(p) for p in found.pages] == [content(p) for p in drawn.pages]:
        finding.notes.append("saved again by another program, which changed nothing that is seen")
        return
    before, now = ([shown(p) for p in reader.pages] for reader in (found, drawn))
    titles: dict[int | None, list[str]] = {}
    for item in _entries(drawn.outline):
        titles.setdefault(drawn.get_destination_page_number(item), []).append(str(item.title))
    names = [
        f"{number + 1} ({'; '.join(titles[number])})" if number in titles else str(number + 1)
        for number, digest in enumerate(before)
        if digest not in now[number : number + 1]
    ]
    differs = f"pages that differ: {few(names)}" if names else "pages are missing" if len(before) < len(now) else ""
    if not finding.verdicts:
        finding.add(FOREIGN, f"edited: {differs or 'its fonts are not those of the report'}")
    elif differs:
        finding.differs.append(differs)


def _entries(outline: list[Any]) -> Iterator[Any]:
    """Yield all entries of an outline, those of chapters before those below them."""
    for item in outline:
        yield from _entries(item) if isinstance(item, list) else (item,)


def _compare_claims_of(finding: Finding, sha256: str, path: Path, now: Path) -> None:
    """Name the claims that a document shows otherwise, where the file it was made with is beside it or here."""
    beside = (folder / build.CLAIMS for folder in (path.parent, Path("results/report")))
    then = next((file for file in beside if file.is_file() and sha256_file(file) == sha256), None)
    if then is None:
        finding.add(DATA, "its claims are not those that are judged now; which, the claims.json of then would tell")
    else:
        compare_claims(finding, then, now)


def _compare_report(finding: Finding, carried: save.Metadata, now: save.Metadata) -> None:
    then = carried["report"] if isinstance(carried["report"], dict) else {}
    changed = [name for name, digest in now["report"].items() if then.get(name) != digest]
    if changed:
        finding.add(DATA, f"the tables of {few(changed)} have changed")
    if carried.get("code") != now["code"]:
        finding.add(CODE, "source files of the report have changed")
    if carried.get("libraries") != now["libraries"]:
        finding.add(CODE, "other packages than then")


# --- the folder of a report -----------------------------------------------------------------------------------------


def _folder(report: Path, results: Path, ledger: Path, signers: Path | None) -> list[Finding]:
    """The whole folder: its signature, its checksums, the records of its runs, and all files made again."""
    listed = bundle.read_sums(report)
    record = read_json(report / "provenance.json", "record of the report's origin", next="snakemake report")
    experiments = record.get("order") if isinstance(record, dict) else None
    if not isinstance(experiments, list) or not experiments:
        raise UserError(
            "the record of the report's origin names no experiments.",
            file=report / "provenance.json",
            next="build the report again",
        )
    for name in experiments:
        _tables(name, results)
    finding = Finding(str(report))
    _check_signature(finding, report, signers)
    edited = _edited(finding, report, listed)
    _compare_records(finding, record, report, results)
    details = []
    with TemporaryDirectory() as temporary:
        again = _again(experiments, results / "tables", Path(temporary), report, ledger)
        for name, sha256 in listed.items():
            if name in edited or not (again / name).is_file() or name in ("provenance.json", crate.NAME):
                continue
            if sha256_file(again / name) != sha256:
                details.append(name)
        _compare_origins(finding, record, read_json(again / "provenance.json"))
        if (again / build.CLAIMS).is_file():
            compare_claims(finding, report / build.CLAIMS, again / build.CLAIMS)
    if details and not finding.verdicts:
        finding.add(FOREIGN, f"not what the data and the code draw: {few(details)}")
    elif details:
        finding.notes.append(f"made again they differ: {few(details)}")
    figures = [n for n in [*edited, *details] if n.startswith("figures/") and (report / n).is_file()]
    return [finding, *(_figure(report / name, results) for name in figures)]


def _check_signature(finding: Finding, report: Path, signers: Path | None) -> None:
    """Check who signed the list of checksums: `ssh-keygen -Y sign -n tokenscale -f KEY SHA256SUMS`."""
    sums, signature = report / bundle.SUMS, report / f"{bundle.SUMS}.sig"
    if signers is None:
        if signature.is_file():
            finding.notes.append("signed; --signers FILE tells by whom, and whether it still fits")
        return
    for path in (signers, signature):
        if not path.is_file():
            finding.add(FOREIGN, f"not signed: there is no file {path}")
            return

    def ssh_keygen(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = ["ssh-keygen", "-Y", *map(str, arguments), "-s", str(signature), "-f", str(signers)]
        try:
            with open(sums, "rb") as signed:
                return subprocess.run(command, stdin=signed, capture_output=True, encoding="utf-8", errors="replace")
        except FileNotFoundError:
            raise UserError(
                "signatures need ssh-keygen.", file=signature, next="install OpenSSH 8.2 or newer"
            ) from None

    names = ssh_keygen("find-principals").stdout.splitlines()
    if not names:
        finding.add(FOREIGN, f"signed by nobody whom {signers} names")
    elif ssh_keygen("verify", "-n", NAMESPACE, "-I", names[0]).returncode:
        finding.add(FOREIGN, f"{sums.name} is not what {names[0]} signed")
    else:
        finding.notes.append(f"signed by {names[0]}")


def _compare_records(finding: Finding, record: dict[str, Any], report: Path, results: Path) -> None:
    """Name runs whose records are not those of the report: edited, spliced and sealed anew, or gone."""
    missing = [run for name in record["order"] for run in bundle.missing_runs(results / "tables" / name)]
    if missing:
        finding.notes.append(f"runs of the plan that are missing: {few(missing)}")
    if not (results / "runs").is_dir():
        return
    with report_malformed(report / "provenance.json", "record of the report's origin", "build the report again"):
        parts = [part["runs"] for part in record["experiments"].values()]
        seals = {check_file_name(run): facts.get("seal") for runs in parts for run, facts in runs.items()}
    found = {run: results / "runs" / run / "run.json" for run in seals}
    gone = sorted(run for run, path in found.items() if not path.is_file())
    broken = [run for run, path in found.items() if seals[run] and path.is_file() and read_sealed(path) is None]
    other = [
        run
        for run, path in found.items()
        if seals[run] and run not in [*gone, *broken] and read_json(path).get("seal") != seals[run]
    ]
    for change, names in (
        ("records of runs were edited", sorted(broken)),
        ("runs have another sealed record than the report's", sorted(other)),
        ("records of runs are gone", gone),
    ):
        if names:
            finding.add(DATA, f"{change}: {few(names)}")


def _edited(finding: Finding, folder: Path, listed: dict[str, str]) -> list[str]:
    """Files that are not as the list of checksums has them."""
    gone = [name for name in listed if not (folder / name).is_file()]
    changed = [name for name in listed if name not in gone and sha256_file(folder / name) != listed[name]]
    found = (path for part in bundle.FOLDERS for path in sorted((folder / part).rglob("*")) if path.is_file())
    extra = [name for name in (path.relative_to(folder).as_posix() for path in found) if name not in listed]
    data = [name for name in changed if name.startswith("data/")]
    for verdict, change, names in (
        (DATA, "changed since the report was built", data),
        (FOREIGN, "changed since the report was built", [name for name in changed if name not in data]),
        (FOREIGN, "missing", gone),
        (FOREIGN, "in no list of the report", extra),
    ):
        if names:
            finding.add(verdict, f"{change}: {few(names)}")
    return [*changed, *gone, *extra]


def _again(experiments: list[str], tables: Path, folder: Path, report: Path, ledger: Path) -> Path:
    """Build the report anew from tables and ledger, with the further files of `report`; return its folder."""
    output = folder / "report"
    build.write(
        experiments,
        tables,
        folder / "figures",
        output,
        ledger=ledger if (report / build.CLAIMS).is_file() else None,
        workflow=report / crate.MAIN,
        citation=report / "CITATION.cff",
    )
    return output


def _compare_origins(finding: Finding, then: dict[str, Any], now: dict[str, Any]) -> None:
    for name, part in now["experiments"].items():
        before = then.get("experiments", {}).get(name, {})
        if before.get("tables") != part["tables"]:
            seals = [{r: v.get("seal") for r, v in (o.get("runs") or {}).items()} for o in (before, part)]
            finding.add(DATA, f"the tables of {name} have changed", *_runs(*seals))
    code = then.get("code") or {}
    changed = sorted(f for f in code.keys() | now["code"].keys() if code.get(f) != now["code"].get(f))
    if changed:
        finding.add(CODE, f"source files have changed: {few(changed)}")
    packages = [p for p in save.LIBRARIES if (then.get("packages") or {}).get(p) != now["packages"].get(p)]
    if packages:
        finding.add(CODE, f"other packages: {few(packages)}")
    _note_environments(finding, then, now)


def _note_environments(finding: Finding, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Note packages that differ between this environment and those of the report and its runs, which is no fault."""
    with report_malformed(Path(finding.what) / "provenance.json", "record of the report's origin", "snakemake report"):
        here = find_versions() | now["packages"] | now["installed"]
        built = then.get("installed") or then.get("packages") or {}
        runs = {run: facts for part in then["experiments"].values() for run, facts in part["runs"].items()}
        trained: dict[str, None] = {}
        for facts in runs.values():
            own = {name: version for name, version in facts.get("packages", {}).items() if name != "tokenscale"}
            trained |= dict.fromkeys(name_differences(own, here))
        differ = {"the report was built": name_differences(built, here), "runs were trained": list(trained)}
    for what, packages in differ.items():
        if packages:
            finding.notes.append(f"{what} with other packages: {few(packages)}")


# --- claims -----------------------------------------------------------------------------------------------------------


def compare_claims(finding: Finding, then: Path, now: Path) -> None:
    """Name the claims of the file `then` that are others in `now`.

    Where data or code have changed, which `finding` says already, so have verdicts; else somebody has edited them.
    """
    try:
        rows = {row["id"]: row for row in read_claims(then)}
    except (UserError, KeyError, TypeError):
        finding.add(FOREIGN, f"{then.name} is not one that tokenscale writes")
        return
    found = {row["id"]: row for row in read_claims(now)}
    both = [name for name in found if name in rows]
    restated = [name for name in both if any(rows[name].get(key) != found[name][key] for key in STATED)]
    for change, names in (
        ("the ledger has no such claims", [name for name in rows if name not in found]),
        ("the ledger has further claims", [name for name in found if name not in rows]),
        ("the ledger states these claims otherwise", restated),
    ):
        if names:
            finding.add(CODE, f"{then.name}: {change}: {few(names)}")
    others = [name for name in both if name not in restated and rows[name] != found[name]]
    verdict = next((known for known in (DATA, CODE) if known in finding.verdicts), FOREIGN)
    sentences = [f"{then.name}: {name} {_difference(rows[name], found[name])}" for name in others[:SHOWN]]
    if len(others) > SHOWN:
        sentences.append(f"{then.name}: {len(others) - SHOWN} further claims are others")
    if sentences:
        finding.add(verdict, *sentences)


def _difference(then: dict[str, Any], now: dict[str, Any]) -> str:
    """The first thing that differs, the verdict before all else."""
    keys = ["verdict", *now, *then]
    key = next(key for key in keys if then.get(key) != now.get(key))
    return f"has {key} {then.get(key)!r}; judged again, {now.get(key)!r}"
