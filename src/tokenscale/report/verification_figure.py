"""One figure, or the page of one, against what its data and its code draw now."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from pypdf import PdfReader

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, sha256_file
from tokenscale.report import figure_metadata as passport
from tokenscale.report import pdf, save
from tokenscale.report.pdf_content import content
from tokenscale.report.verification_findings import CODE, DATA, FOREIGN, Finding, few, queries
from tokenscale.settings.closure import changes
from tokenscale.settings.registry import FIGURES


def figure(path: Path, results: Path) -> Finding:
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
    return save.make(carried["figure"], tables(carried["experiment"], results), *roots)


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


def tables(experiment: str, results: Path) -> Path:
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
            finding.add(verdict, f"rows of {queries(changed)} differ")
    if carried["data"] != now["data"]:
        finding.add(verdict, *_rows(carried["data"], made, places))
    if differing := runs(carried["runs"], now["runs"]):
        finding.add(verdict, *differing)
    if verdict == DATA and DATA not in finding.verdicts:
        finding.notes.append("the experiment's tables have changed since, in nothing that this figure shows")


def _compare_code(finding: Finding, carried: passport.Passport, now: passport.Passport, places: list[Path]) -> None:
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
            named = f", of {few(of)}" if of else ""
            return [f"{max(len(gone), len(new))} of {len(before) - 1} rows of its data differ{named}"]
    return ["its data differ"]


def runs(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
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


def page(path: Path, number: int, found: Any, results: Path, of: int) -> Finding:
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


def _pages(document: bytes) -> list[str]:
    return [content(page) for page in PdfReader(io.BytesIO(document)).pages]
