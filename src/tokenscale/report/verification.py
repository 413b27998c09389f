"""Is a file of a report what its data and its code draw? Everything is drawn again, and what differs is named.

A file is `identical` where nothing that its passport names has changed and the same bytes are drawn again; `data
changed` or `code changed` where the tables or the source files at hand are others than the passport's; and `not ours`
where it has no passport of ours, or has one and shows something else.
"""

import io
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from pypdf import PdfReader

from tokenscale.errors import UserError
from tokenscale.files import read_json, sha256_file
from tokenscale.report import bundle, crate, page, passport, pdf, save, summary
from tokenscale.report.pdf_content import content
from tokenscale.report.views import VIEWS
from tokenscale.settings.closure import changes
from tokenscale.settings.registry import FIGURES

IDENTICAL, DATA, CODE, FOREIGN = "identical", "data changed", "code changed", "not ours"
#: files of a report's folder that are not made of its tables alone: of the ledger, and of another report
COPIED = ("claims.json", "claims.tex", page.CHANGES)
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


def verify(path: Path, results: Path) -> list[Finding]:
    """What is found of a figure, a PDF, or a report's folder (also by its `index.html` or `SHA256SUMS`).

    `results` holds the tables to draw from. Raises UserError where a file or the tables are missing.
    """
    if path.is_dir() or path.name in (bundle.SUMS, "index.html"):
        return _folder(path if path.is_dir() else path.parent, results)
    if path.suffix.lower() == ".pdf":
        return _pdf(path, results)
    return [_figure(path, results)]


# --- one figure ----------------------------------------------------------------------------------------------------


def _figure(path: Path, results: Path) -> Finding:
    """An SVG or PNG, or a figure's PDF."""
    finding = Finding(str(path))
    carried = passport.read(path)
    made = _made(finding, carried, results)
    if made is None:
        return finding
    _compare(finding, carried, made, _places(path, results))
    if not finding.verdicts:
        kind = path.suffix[1:].lower()
        if not _same(kind, save.draw(made, carried)[kind], path.read_bytes(), finding):
            finding.add(FOREIGN, "edited: this is not what the data and the code of its passport draw")
    _data_beside(finding, carried, path)
    return finding


def _made(finding: Finding, carried: passport.Passport | None, results: Path, *roots: str) -> save.Made | None:
    """The figure that a passport names, from the tables at hand; None where it names none."""
    if carried is None:
        finding.add(FOREIGN, "it carries no passport of tokenscale")
        return None
    if not _whole(carried):
        finding.add(FOREIGN, "its passport is not one that tokenscale writes")
        return None
    return save.make(carried["figure"], _tables(carried["experiment"], results), *roots)


def _whole(carried: passport.Passport) -> bool:
    """Has it the keys and kinds of values that we write?"""
    queries, runs = carried.get("queries"), carried.get("runs")
    return (
        carried.keys() == passport.KEYS
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


def _compare(finding: Finding, carried: passport.Passport, made: save.Made, places: list[Path]) -> None:
    """What the passport says against what is at hand. `places` are folders in which a report may lie.

    Where the tables are those of then, other rows come of other code; and where that is the same, too, the passport
    says what never was.
    """
    now = made.passport
    _compare_code(finding, carried, now, places)
    verdict = DATA if carried["tables"] != now["tables"] else CODE if finding.verdicts else FOREIGN
    if carried["queries"].keys() == now["queries"].keys():
        changed = [q for q in now["queries"] if carried["queries"][q]["rows"] != now["queries"][q]["rows"]]
        if changed:
            finding.add(verdict, f"rows of {_queries(changed)} differ")
    if carried["data"] != now["data"]:
        finding.add(verdict, *_rows(carried["data"], made, places))
    runs = _runs(carried["runs"], now["runs"])
    if runs:
        finding.add(verdict, *runs)
    if verdict == DATA and DATA not in finding.verdicts:
        finding.notes.append("the experiment's tables have changed since, in nothing that this figure shows")


def _compare_code(finding: Finding, carried: passport.Passport, now: passport.Passport, places: list[Path]) -> None:
    sql = [q for q in sorted(now["queries"].keys() | carried["queries"].keys())
           if carried["queries"].get(q, {}).get("sql") != now["queries"].get(q, {}).get("sql")]  # fmt: skip
    if sql:
        finding.add(CODE, f"the definition of {_queries(sql)} has changed")
    if carried["code"] != now["code"]:
        named = _changed_files(carried, places)
        finding.add(CODE, f"source files have changed: {_listed(named)}" if named else "source files have changed")
    libraries = [
        f"{name} {carried['libraries'].get(name, 'none')} then, {now['libraries'].get(name, 'none')} now"
        for name in sorted(now["libraries"].keys() | carried["libraries"].keys())
        if carried["libraries"].get(name) != now["libraries"].get(name)
    ]
    if libraries:
        finding.add(CODE, f"other packages: {_listed(libraries)}")


def _changed_files(carried: passport.Passport, places: list[Path]) -> list[str]:
    """Source files that are others than those of the passport, where what they were can be found out."""
    figure = carried["figure"]
    for record in _records(places):
        then = record.get("experiments", {}).get(carried["experiment"], {}).get("figures", {}).get(figure, {})
        if carried["code"] in (then.get("code"), then.get("page")):
            roots = pdf.roots(figure) if carried["code"] == then.get("page") else save.modules(figure)
            now = passport.files(*roots)
            gone = [name for name in record["code"] if not (passport.PACKAGE.parent / name).is_file()]
            return sorted([name for name in now if now[name] != record["code"].get(name)] + gone)
    for listing in sorted(Path("results/code").glob("*/sources.json")):
        if listing.with_name(f"{carried['code']}.json").is_file():
            return changes(listing, carried["code"])
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


def _rows(sha256: str, made: save.Made, places: list[Path]) -> list[str]:
    """Which rows of the data differ, where the data of then are at hand."""
    name = f"{made.name}.csv"
    experiment = made.passport["experiment"]
    for csv in (folder / name for place in places for folder in (place, place / "data" / experiment)):
        if csv.is_file() and sha256_file(csv) == sha256:
            before, after = csv.read_text("utf-8").splitlines(), made.csv.splitlines()
            gone = [line for line in before if line not in set(after)]
            new = [line for line in after if line not in set(before)]
            of = sorted({run for run in made.passport["runs"] for line in gone + new if run in line})
            named = f", of {_listed(of)}" if of else ""
            return [f"{max(len(gone), len(new))} of {len(before) - 1} rows of its data differ{named}"]
    return ["its data differ"]


def _runs(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Runs that came, went, or have another record."""
    sentences = []
    for said, found in (
        ("runs that it was drawn from are not in the tables", sorted(then.keys() - now.keys())),
        ("runs have come since", sorted(now.keys() - then.keys())),
        ("runs have another record", sorted(run for run in then.keys() & now.keys() if then[run] != now[run])),
    ):
        if found:
            sentences.append(f"{said}: {_listed(found)}")
    return sentences


def _data_beside(finding: Finding, carried: passport.Passport, path: Path) -> None:
    """The CSV of the figure, beside it or in the folder of the report's data, is held against the passport, too."""
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


# --- pages of a PDF -----------------------------------------------------------------------------------------------


def _pdf(path: Path, results: Path) -> list[Finding]:
    """A figure's PDF, the whole report, or pages cut out of it."""
    carried = passport.read(path)
    if carried is not None and "figure" in carried:
        return [_figure(path, results)]
    pages = passport.open_pdf(path).pages
    if carried is not None and "report" in carried:
        return _report(path, carried, results)
    return [_page(path, number, found, results, len(pages)) for number, found in enumerate(pages, 1)]


def _page(path: Path, number: int, found: Any, results: Path, of: int) -> Finding:
    """One page against the same page drawn again."""
    finding = Finding(f"{path}, page {number}" if of > 1 else str(path))
    carried = passport.of_page(found)
    if carried is None:
        finding.add(FOREIGN, "the page carries no passport of tokenscale; in a report, pages of figures do")
        return finding
    roots = pdf.roots(carried["figure"]) if carried.get("figure") in FIGURES else ()
    made = _made(finding, carried, results, *roots)
    if made is None:
        return finding
    finding.notes.append(f"the page of figure {made.name} of {made.passport['experiment']}")
    _compare(finding, carried, made, _places(path, results))
    if not finding.verdicts:
        (drawn,) = _pages(pdf.figure_document(made, carried))
        if drawn != content(found):
            finding.add(FOREIGN, "edited: this is not what the data and the code of its passport draw")
    return finding


def _report(path: Path, carried: passport.Passport, results: Path) -> list[Finding]:
    """The whole report: built again, and where it differs, page by page."""
    finding = Finding(str(path))
    experiments = carried.get("order")
    if not isinstance(experiments, list) or not all(isinstance(name, str) for name in experiments):
        finding.add(FOREIGN, "its passport is not one that tokenscale writes")
        return [finding]
    for name in experiments:
        _tables(name, results)
    view, claims = carried.get("view"), _claims_of(carried, path)
    if view is not None and view not in VIEWS:
        finding.add(FOREIGN, "its passport is not one that tokenscale writes")
        return [finding]
    with TemporaryDirectory() as folder:
        again = Path(folder) / "report.pdf"
        pdf.write(experiments, results / "tables", again, claims=claims, view=view)
        if again.read_bytes() == path.read_bytes():
            return [finding]
        drawn = [content(p) for p in passport.open_pdf(again).pages]
    _compare_report(finding, carried, pdf.of_report(experiments, results / "tables", claims, view))
    pages = passport.open_pdf(path).pages
    found = [content(p) for p in pages]
    if not finding.verdicts and found == drawn:
        finding.notes.append("saved again by another program, which changed nothing that is seen")
        return [finding]
    others = [n for n, one in enumerate(found, 1) if n > len(drawn) or one != drawn[n - 1]]
    if not finding.verdicts:
        finding.add(FOREIGN, f"edited: page {_listed([str(n) for n in others])} is not what its data and code draw"
                    if others else "edited: pages are missing")  # fmt: skip
    of_figures = [n for n in others if passport.of_page(pages[n - 1])]
    return [finding, *(_page(path, n, pages[n - 1], results, len(pages)) for n in of_figures)]


def _claims_of(carried: passport.Passport, path: Path) -> Path | None:
    """The judged claims that a report was made with: beside it, or of the report here."""
    found = (folder / "claims.json" for folder in (path.parent, Path("results/report")))
    return next((file for file in found if file.is_file()), None) if carried.get("claims") else None


def _compare_report(finding: Finding, carried: passport.Passport, now: passport.Passport) -> None:
    then = carried["report"] if isinstance(carried["report"], dict) else {}
    changed = [name for name, digest in now["report"].items() if then.get(name) != digest]
    if changed:
        finding.add(DATA, f"the tables of {_listed(changed)} have changed")
    if carried.get("claims") != now["claims"]:
        finding.add(DATA, "the claims were judged anew" if now["claims"] else "claims.json is not beside it")
    if carried.get("code") != now["code"]:
        finding.add(CODE, "source files of the report have changed")
    if carried.get("libraries") != now["libraries"]:
        finding.add(CODE, "other packages than then")


def _pages(document: bytes) -> list[str]:
    return [content(page) for page in PdfReader(io.BytesIO(document)).pages]


# --- a folder -----------------------------------------------------------------------------------------------------


def _folder(folder: Path, results: Path) -> list[Finding]:
    """The whole folder: its checksums, and every file that can be made again, made again."""
    listed = bundle.read_sums(folder)
    record = read_json(folder / "provenance.json", "record of the report's origin", next="snakemake report")
    experiments = record.get("order") if isinstance(record, dict) else None
    if not isinstance(experiments, list) or not experiments:
        raise UserError("the record of the report's origin names no experiments.", file=folder / "provenance.json")
    for name in experiments:
        _tables(name, results)
    finding = Finding(str(folder))
    edited = _edited(finding, folder, listed)
    details = []
    with TemporaryDirectory() as temporary:
        again = _again(experiments, results / "tables", Path(temporary), folder, workflow=folder / crate.MAIN,
                       citation=folder / "CITATION.cff")  # fmt: skip
        for name, sha256 in listed.items():
            if name in edited or not (again / name).is_file() or name in ("provenance.json", crate.NAME):
                continue
            if sha256_file(again / name) != sha256:
                details.append(name)
        now = read_json(again / "provenance.json")
    _compare_origins(finding, record, now)
    if details and not finding.verdicts:
        finding.add(FOREIGN, f"not what the data and the code draw: {_listed(details)}")
    elif details:
        finding.notes.append(f"made again they differ: {_listed(details)}")
    figures = [n for n in [*edited, *details] if n.startswith("figures/") and (folder / n).is_file()]
    return [finding, *(found for name in figures for found in verify(folder / name, results))]


def _edited(finding: Finding, folder: Path, listed: dict[str, str]) -> list[str]:
    """Files that are not as the list of checksums has them."""
    gone = [name for name in listed if not (folder / name).is_file()]
    changed = [name for name in listed if name not in gone and sha256_file(folder / name) != listed[name]]
    found = (path for part in bundle.FOLDERS for path in sorted((folder / part).rglob("*")) if path.is_file())
    extra = [name for name in (path.relative_to(folder).as_posix() for path in found) if name not in listed]
    data = [name for name in changed if name.startswith("data/")]
    for verdict, said, names in (
        (DATA, "changed since the report was built", data),
        (FOREIGN, "changed since the report was built", [name for name in changed if name not in data]),
        (FOREIGN, "missing", gone),
        (FOREIGN, "in no list of the report", extra),
    ):
        if names:
            finding.add(verdict, f"{said}: {_listed(names)}")
    return [*changed, *gone, *extra]


def _again(experiments: list[str], tables: Path, folder: Path, report: Path, **files: Path) -> Path:
    """The report built anew from the tables, and from the files of `report` in `COPIED`; its folder."""
    pages = {
        (tables / name, figure): pdf.save_figure(figure, tables / name, folder / "figures" / name / figure)
        for name in experiments
        for figure in summary.experiment(name, tables)["figures"]
    }
    output = folder / "report"
    also = [file for file in (report / name for name in COPIED) if file.is_file()]
    output.mkdir(parents=True)
    also = [Path(shutil.copy(file, output)) for file in also]
    claims = next((file for file in also if file.suffix == ".json"), None)
    changes = (output / page.CHANGES).is_file()
    page.write(experiments, tables, folder / "figures", output / page.HOME, claims=claims, changes=changes)
    for name in experiments if len(experiments) > 1 else ():
        also.append(output / f"{name}.html")
        page.write_experiment(name, tables, folder / "figures", also[-1])
    with pdf.known(pages):
        pdf.write(experiments, tables, output / "report.pdf", claims=claims)
    bundle.write(experiments, tables, folder / "figures", output, also=tuple(also), **files)
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
        finding.add(CODE, f"source files have changed: {_listed(changed)}")
    packages = [p for p in passport.LIBRARIES if (then.get("packages") or {}).get(p) != now["packages"].get(p)]
    if packages:
        finding.add(CODE, f"other packages: {_listed(packages)}")


def _queries(names: list[str]) -> str:
    return f"{'query' if len(names) == 1 else 'queries'} {_listed(names)}"


def _listed(names: list[str]) -> str:
    """The first few of them."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
