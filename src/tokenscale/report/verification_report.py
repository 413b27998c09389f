"""A whole report, on paper or as a folder, against what tables and ledger at hand make of it."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, sha256_file
from tokenscale.report import bundle, crate, page, pdf, summary, verification_claims, verification_figure
from tokenscale.report import figure_metadata as passport
from tokenscale.report.pdf_content import content
from tokenscale.report.verification_findings import CODE, DATA, FOREIGN, Finding, few
from tokenscale.report.views import VIEWS


def document(path: Path, carried: passport.Passport, results: Path, ledger: Path) -> list[Finding]:
    """The whole report: built again, and where it differs, page by page."""
    finding = Finding(str(path))
    experiments = carried.get("order")
    if not isinstance(experiments, list) or not all(isinstance(name, str) for name in experiments):
        finding.add(FOREIGN, "its passport is not one that tokenscale writes")
        return [finding]
    for name in experiments:
        verification_figure.tables(name, results)
    view = carried.get("view")
    if view is not None and view not in VIEWS:
        finding.add(FOREIGN, "its passport is not one that tokenscale writes")
        return [finding]
    with TemporaryDirectory() as folder:
        again, claims = Path(folder) / "report.pdf", None
        if carried.get("claims"):
            claims = verification_claims.judge(ledger, results / "tables", experiments, Path(folder))
        pdf.write(experiments, results / "tables", again, claims=claims, view=view)
        if again.read_bytes() == path.read_bytes():
            return [finding]
        drawn = [content(p) for p in passport.open_pdf(again).pages]
        _compare_passports(finding, carried, pdf.of_report(experiments, results / "tables", claims, view))
        if claims is not None and carried["claims"] != sha256_file(claims):
            _compare_claims(finding, carried["claims"], path, claims)
    pages = passport.open_pdf(path).pages
    found = [content(p) for p in pages]
    if not finding.verdicts and found == drawn:
        finding.notes.append("saved again by another program, which changed nothing that is seen")
        return [finding]
    others = [n for n, one in enumerate(found, 1) if n > len(drawn) or one != drawn[n - 1]]
    if not finding.verdicts:
        finding.add(FOREIGN, f"edited: page {few([str(n) for n in others])} is not what its data and code draw"
                    if others else "edited: pages are missing")  # fmt: skip
    of_figures = [n for n in others if passport.of_page(pages[n - 1])]
    return [finding, *(verification_figure.page(path, n, pages[n - 1], results, len(pages)) for n in of_figures)]


def _compare_claims(finding: Finding, sha256: str, path: Path, now: Path) -> None:
    """Name the claims that a document shows otherwise, where the file it was made with is beside it or here."""
    beside = (folder / verification_claims.FILE for folder in (path.parent, Path("results/report")))
    then = next((file for file in beside if file.is_file() and sha256_file(file) == sha256), None)
    if then is None:
        finding.add(DATA, "its claims are not those that are judged now; which, the claims.json of then would tell")
    else:
        verification_claims.compare(finding, then, now)


def _compare_passports(finding: Finding, carried: passport.Passport, now: passport.Passport) -> None:
    then = carried["report"] if isinstance(carried["report"], dict) else {}
    changed = [name for name, digest in now["report"].items() if then.get(name) != digest]
    if changed:
        finding.add(DATA, f"the tables of {few(changed)} have changed")
    if carried.get("code") != now["code"]:
        finding.add(CODE, "source files of the report have changed")
    if carried.get("libraries") != now["libraries"]:
        finding.add(CODE, "other packages than then")


def folder(report: Path, results: Path, ledger: Path) -> list[Finding]:
    """The whole folder: its checksums, and every file that can be made again, made again."""
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
        verification_figure.tables(name, results)
    finding = Finding(str(report))
    edited = _edited(finding, report, listed)
    details = []
    with TemporaryDirectory() as temporary:
        again = _again(experiments, results / "tables", Path(temporary), report, ledger)
        for name, sha256 in listed.items():
            if name in edited or not (again / name).is_file() or name in ("provenance.json", crate.NAME):
                continue
            if sha256_file(again / name) != sha256:
                details.append(name)
        _compare_origins(finding, record, read_json(again / "provenance.json"))
        if (again / verification_claims.FILE).is_file():
            verification_claims.compare(finding, report / verification_claims.FILE, again / verification_claims.FILE)
    if details and not finding.verdicts:
        finding.add(FOREIGN, f"not what the data and the code draw: {few(details)}")
    elif details:
        finding.notes.append(f"made again they differ: {few(details)}")
    figures = [n for n in [*edited, *details] if n.startswith("figures/") and (report / n).is_file()]
    return [finding, *(verification_figure.figure(report / name, results) for name in figures)]


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
    """The report built anew from tables and ledger, with what the folder `report` holds beside; its folder."""
    pages = {
        (tables / name, figure): pdf.save_figure(figure, tables / name, folder / "figures" / name / figure)
        for name in experiments
        for figure in summary.experiment(name, tables)["figures"]
    }
    output = folder / "report"
    output.mkdir(parents=True)
    also, claims = [], None
    if (report / verification_claims.FILE).is_file():
        claims = verification_claims.judge(ledger, tables, experiments, output)
        also += [claims, claims.with_suffix(".tex")]
    if changes := (report / page.CHANGES).is_file():  # made of another report, too
        also.append(Path(shutil.copy(report / page.CHANGES, output)))
    page.write(experiments, tables, folder / "figures", output / page.HOME, claims=claims, changes=changes)
    for name in experiments if len(experiments) > 1 else ():
        also.append(output / f"{name}.html")
        page.write_experiment(name, tables, folder / "figures", also[-1])
    with pdf.known(pages):
        pdf.write(experiments, tables, output / "report.pdf", claims=claims)
        for view in VIEWS:
            if (report / f"{view}.html").is_file():
                file = output / f"{view}.html"
                page.write_view(view, experiments, tables, folder / "figures", file, claims=claims)
            if (report / f"{view}.pdf").is_file():
                pdf.write(experiments, tables, output / f"{view}.pdf", claims=claims, view=view)
    files = {"workflow": report / crate.MAIN, "citation": report / "CITATION.cff"}
    bundle.write(experiments, tables, folder / "figures", output, also=tuple(also), **files)
    return output


def _compare_origins(finding: Finding, then: dict[str, Any], now: dict[str, Any]) -> None:
    for name, part in now["experiments"].items():
        before = then.get("experiments", {}).get(name, {})
        if before.get("tables") != part["tables"]:
            seals = [{r: v.get("seal") for r, v in (o.get("runs") or {}).items()} for o in (before, part)]
            finding.add(DATA, f"the tables of {name} have changed", *verification_figure.runs(*seals))
    code = then.get("code") or {}
    changed = sorted(f for f in code.keys() | now["code"].keys() if code.get(f) != now["code"].get(f))
    if changed:
        finding.add(CODE, f"source files have changed: {few(changed)}")
    packages = [p for p in passport.LIBRARIES if (then.get("packages") or {}).get(p) != now["packages"].get(p)]
    if packages:
        finding.add(CODE, f"other packages: {few(packages)}")
