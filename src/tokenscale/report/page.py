"""The report as one self-contained HTML file: no script, no outside reference, equal bytes for equal tables."""

import csv
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from tokenscale import __version__
from tokenscale.analysis import queries
from tokenscale.files import canonical_json, read_json, sha256_text, write_text
from tokenscale.report import registry, summary, svg
from tokenscale.report.table import Table

#: SQL whose definitions the page prints, beside what `summary` asks; files of this folder that it is made of
QUERIES = (
    "steps_global",
    "throughput",
    "computing",
    "epochs",
    "padding",
    "loss",
    "validation",
    "time_to_target",
    "time_to_training_loss",
    "stalls",
    "communication",
    "pretokenization",
    "break_even",
    "benchmark",
    "scaling",
    "scaling_weak",
    "parallelism",
    "pipeline",
    "memory",
    "order",
    "inventory",
)
FILES = ("page.html.j2", "page.css")
#: rows of a figure's data that the page shows; the CSV file beside the figure has all
SHOWN_ROWS = 60


def write(experiments: list[str], tables: Path, figures: Path, output: Path) -> None:
    """Write the page for the named experiments, in that order."""
    parts = [summary.experiment(name, tables) for name in experiments]
    for part in parts:
        part["drawn"] = [figure(name, figures / part["name"], f"{part['name']}-{name}") for name in part["figures"]]
    write_text(output, render(parts))


def render(parts: list[dict[str, Any]]) -> str:
    """The page's text. Everything from the tables is escaped; only figures and the style sheet are markup."""
    environment = Environment(
        loader=FunctionLoader(_read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    total = {word: sum(p["validity"][word] for p in parts) for word in summary.VALIDITY}
    text = environment.get_template("page.html.j2").render(
        style=Markup(_read("page.css")),
        version=__version__,
        parts=parts,
        total=total,
        runs=sum(p["runs"] for p in parts),
        digest=sha256_text(canonical_json([p["digest"] for p in parts])),
        machines=_distinct(p["machines"] for p in parts),
        commits=_distinct(p["commits"] for p in parts),
        versions=_versions(parts),
        definitions=[(name, queries.definition(name)) for name in QUERIES],
    )
    return text.rstrip("\n") + "\n"


def figure(name: str, folder: Path, prefix: str) -> dict[str, Any]:
    """Words, inlined drawing and data of a figure; `svg` is None where its files have not been made."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return {"name": name, "title": registry.module(name).TITLE, "svg": None}
    words = read_json(path, "figure's words")
    drawing = svg.inline((folder / f"{name}.svg").read_text(encoding="utf-8"), _identifier(prefix), words["alt"])
    with open(folder / f"{name}.csv", encoding="utf-8", newline="") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    numeric = [bool(rows) and all(_numeric(row[i]) for row in rows) for i in range(len(header))]
    columns = list(zip(header, numeric, strict=True))
    shown = Table(columns, [[_short(v) for v in row] for row in rows[:SHOWN_ROWS]])
    return {
        "name": name,
        **words,
        "table": Table(**words["table"]) if "table" in words else None,
        "svg": Markup(drawing),
        "data": shown,
        "rows": len(rows),
        "left_out": max(0, len(rows) - SHOWN_ROWS),
    }


def _read(name: str) -> str:
    return resources.files("tokenscale.report").joinpath(name).read_text(encoding="utf-8")


def _identifier(text: str) -> str:
    return "".join(c if c.isalnum() or c == "-" else "-" for c in text)


def _distinct(lists: Any) -> list:
    found = []
    for values in lists:
        found += [v for v in values if v not in found]
    return found


def _versions(parts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    found: dict[str, list[str]] = {}
    for part in parts:
        for package, version in part["versions"]:
            found.setdefault(package, [])
            found[package] += [v for v in version.split(", ") if v not in found[package]]
    return [(package, ", ".join(v)) for package, v in sorted(found.items())]


def _numeric(text: str) -> bool:
    try:
        float(text or "nan")
    except ValueError:
        return False
    return True


def _short(text: str) -> str:
    """Six significant digits of a fraction; everything else as it is."""
    return f"{float(text):.6g}" if _numeric(text) and "." in text else text
