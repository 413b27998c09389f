"""The report as self-contained HTML: no script, no outside reference, equal bytes for equal tables.

One experiment is one page. Several have a page each, and `index.html` holds what is said of all: verdicts and claims.
"""

import csv
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from tokenscale import __version__
from tokenscale.analysis import queries, replication
from tokenscale.base.files import read_json, write_text
from tokenscale.report import answers, paired_comparisons, style, summary
from tokenscale.report import claims as judged
from tokenscale.report.figure import figure_class
from tokenscale.report.table import Table

QUERIES = tuple(queries.PARAMETERS)
#: files of this folder that the pages are made of
FILES = ("page.html.j2", "layout.html.j2", "macros.html.j2", "box.html.j2", "claims.html.j2", "experiment.html.j2",
         "end.html.j2", "page.css")  # fmt: skip
#: words that are shown as badges
WORDS = (
    *summary.VALIDITY,
    *("nonfinite", *paired_comparisons.VERDICT_WORDS),
    *answers.WORDS,
    *replication.VERDICTS,
    *judged.VERDICTS,
    *(judged.DIRECTION, judged.NOT_REPRODUCED, judged.UNDECIDED),
)
#: rows of a figure's data that the page shows; the CSV file beside the figure has all
SHOWN_ROWS = 60
ABOUT = "Every number on this page is computed from the logs of the runs and benchmarks of its experiments."
HOME = "index.html"
#: facts of an experiment, or of all of them
FACTS = ("text", "scale", "data_from")
#: answers that the first screen shows of an experiment beside others; its own page has all
ANSWERS = 3


def write(experiments: Sequence[str], tables: Path, figures: Path, output: Path, *, claims: Path | None = None) -> None:
    """Write the first page for the named experiments, in that order; `claims` is what the verb `claims` wrote.

    One experiment is shown in full; of several, their own pages (`write_experiment`) are linked.
    """
    parts = [summary.experiment(name, tables) for name in experiments]
    alone = len(parts) == 1
    for part in parts:
        part |= {"drawn": _drawn(part, figures)} if alone else {"href": f"{part['name']}.html"}
    claims_html = _claims(claims, parts)
    contents = [("claims", "#claims"), ("replication", "#replication")] if claims_html else []
    contents += [("originals", "#originals")] if not alone and summary.source_study_table(parts).rows else []
    contents += _sections(parts[0]["name"]) if alone else [(p["name"], p["href"]) for p in parts]
    contents += [("definitions", "#definitions"), ("methods", "#methods")]
    heading = (parts[0]["question"] or parts[0]["name"]) if alone else f"Report on {len(parts)} experiments"
    write_text(output, render(parts, heading, contents, claims=claims_html))


def write_experiment(name: str, tables: Path, figures: Path, output: Path) -> None:
    """Write the page of one of several experiments, beside the first page, which has the claims."""
    part = summary.experiment(name, tables)
    part["drawn"] = _drawn(part, figures)
    contents = [("all experiments", HOME), *_sections(name)]
    write_text(output, render([part], part["question"] or name, contents, home=HOME))


def _picture(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The figure beside the answers of a page of one experiment: the first that was drawn and shows something. It is
    taken out of the experiment's list."""
    drawn = parts[0].get("drawn", []) if len(parts) == 1 else []
    found = next((f for f in drawn if f["svg"] and not f["folded"]), None)
    if found:
        drawn.remove(found)
    return found


def _drawn(part: dict[str, Any], figures: Path) -> list[dict[str, Any]]:
    return [figure(name, figures / part["name"], f"{part['name']}-{name}") for name in part["figures"]]


def _sections(name: str) -> list[tuple[str, str]]:
    parts = {"figures": "figures", "tables": "tables", "same data": "proof", "quality": "quality", "runs": "runs"}
    return [(name, f"#{name}"), *((text, f"#{name}-{part}") for text, part in parts.items())]


def _claims(path: Path | None, parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The judged claims: how many have which verdict, and those of each document; None where nobody judged.

    Claims lead to the figures of `parts` that show them.
    """
    if path is None:
        return None
    pages = {part["name"]: part.get("href") or f"#{part['name']}" for part in parts}
    drawn = {part["name"]: part["figures"] for part in parts}
    rows = [row | judged.describe_verdict(row) for row in judged.read_claims(path)]
    documents: dict[str, dict[str, Any]] = {}
    for row in rows:
        document = documents.setdefault(row["document"], {"title": row["document"], "where": row["where"]})
        document.setdefault("tested", []), document.setdefault("untested", [])
        row["href"] = pages.get(row["experiment"], "")
        if row["href"] and row["shown_in"] in drawn.get(row["experiment"], ()):
            row["href"] = f"{row['href'].partition('#')[0]}#{row['experiment']}-figure-{row['shown_in']}"
        document["tested" if row["experiment"] else "untested"].append(row)
    figures = judged.replication_tables(judged.read_replication(path))
    return {"counts": judged.count_verdicts(rows), "documents": list(documents.values()), "replication": figures}


def render(
    parts: list[dict[str, Any]],
    heading: str,
    contents: list[tuple[str, str]],
    *,
    claims: dict[str, Any] | None = None,
    home: str = "",
) -> str:
    """The page's text. Everything from the tables is escaped; only figures and the style sheet are markup."""
    environment = Environment(
        loader=FunctionLoader(_read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    shared, cautions = _shared(parts), summary.shared_cautions(parts)
    text = environment.get_template("page.html.j2").render(
        style=Markup(_read("page.css")),
        version=__version__,
        title=f"tokenscale report: {', '.join(p['name'] for p in parts) or heading}",
        heading=heading,
        about=ABOUT,
        picture=_picture(parts),
        contents=contents,
        home=home,
        words=WORDS,
        claims=claims,
        parts=[{"href": ""} | part | _box_fields(part, shared, cautions, alone=len(parts) == 1) for part in parts],
        shared_cautions=cautions,
        shared=shared,
        originals=summary.source_study_table(parts),
        total={word: sum(p["validity"][word] for p in parts) for word in summary.VALIDITY},
        runs=sum(p["runs"] for p in parts),
        digest=summary.tables_digest(parts),
        machines=list(dict.fromkeys(machine for p in parts for machine in p["machines"])),
        commits=[dict(c) for c in dict.fromkeys(tuple(c.items()) for p in parts for c in p["commits"])],
        versions=_versions(parts),
        definitions=[(name, queries.definition(name), _statement(name)) for name in QUERIES],
    )
    return text.lstrip("\n").rstrip("\n") + "\n"


def _shared(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Facts that most experiments share, which the page states once."""
    known = {key: Counter(part[key] for part in parts if part[key]) for key in FACTS}
    return {key: found.most_common(1)[0][0] for key, found in known.items() if found}


def _box_fields(part: dict[str, Any], shared: dict[str, Any], cautions: list[str], *, alone: bool) -> dict[str, Any]:
    """What the first screen shows of an experiment: all answers, or a few beside other experiments; facts in which it
    differs from most experiments; its cautions without those that all experiments share."""
    visible, hidden = paired_comparisons.select_answers(part["answers"], len(part["answers"]) if alone else ANSWERS)
    own = [key for key in FACTS if part[key] and part[key] != shared.get(key)]
    own_cautions = [text for text in summary.list_cautions(part) if text not in cautions]
    return {"visible": visible, "hidden": hidden, "own": own, "warnings": own_cautions}


def _statement(name: str) -> str:
    """A query without the definition at its head."""
    lines = queries.sql(name).splitlines()
    first = next(i for i, line in enumerate(lines) if not line.startswith("--"))
    return "\n".join(lines[first:])


def figure(name: str, folder: Path, prefix: str) -> dict[str, Any]:
    """Texts, inlined drawing and data of a figure; `svg` is None where its files have not been drawn."""
    path = folder / f"{name}.json"
    if not path.is_file():
        title = figure_class(name).title
        return {"name": name, "title": title, "finding": title, "folded": "", "svg": None}
    words = read_json(path, "figure's texts")
    drawing = style.inline((folder / f"{name}.svg").read_text(encoding="utf-8"), _identifier(prefix), words["alt"])
    with open(folder / f"{name}.csv", encoding="utf-8", newline="") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    numeric = [bool(rows) and all(_numeric(row[i]) for row in rows) for i in range(len(header))]
    columns = list(zip(header, numeric, strict=True))
    return {
        "name": name,
        **words,
        "table": Table(**words["table"]) if "table" in words else None,
        "svg": Markup(drawing),
        "data": Table(columns, [[_short(v) for v in row] for row in rows[:SHOWN_ROWS]]),
        "rows": len(rows),
        "left_out": max(0, len(rows) - SHOWN_ROWS),
    }


def _read(name: str) -> str:
    return resources.files("tokenscale.report").joinpath(name).read_text(encoding="utf-8")


def _identifier(text: str) -> str:
    return "".join(c if c.isalnum() or c == "-" else "-" for c in text)


def _versions(parts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    found: dict[str, dict[str, None]] = {}
    for package, versions in (pair for part in parts for pair in part["versions"]):
        found.setdefault(package, {}).update(dict.fromkeys(versions.split(", ")))
    return [(package, ", ".join(versions)) for package, versions in sorted(found.items())]


def _numeric(text: str) -> bool:
    try:
        float(text or "nan")
    except ValueError:
        return False
    return True


def _short(text: str) -> str:
    """Six significant digits of a fraction; everything else as it is."""
    return f"{float(text):.6g}" if _numeric(text) and "." in text else text
