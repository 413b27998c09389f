"""The report as self-contained HTML: no script, no outside reference, equal bytes for equal tables.

One experiment is one page. Several have a page each, and `index.html` holds what is said of all:
verdicts and claims.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from tokenscale import __version__
from tokenscale.analysis import queries
from tokenscale.base.errors import UserError
from tokenscale.base.files import write_text
from tokenscale.referee import replication
from tokenscale.report import answers, paired_comparisons, style, summary
from tokenscale.report import claims as judged
from tokenscale.report.captions import as_sentence
from tokenscale.report.figure import figure_class
from tokenscale.report.save import read_figure
from tokenscale.report.table import Table

#: files of this folder that the pages are made of
FILES = (
    "page.html.j2",
    "macros.html.j2",
    "box.html.j2",
    "claims.html.j2",
    "experiment.html.j2",
    "end.html.j2",
    "page.css",
)
#: how a verdict of an answer was reached → its words
KINDS = {
    "exact": (answers.COUNTED, answers.PROVEN, answers.NOT_PROVEN),
    "tested on pairs of runs": tuple(
        word
        for word in paired_comparisons.VERDICT_WORDS
        if word not in paired_comparisons.UNDECIDED
    ),
    "described, not tested": (
        answers.MEASURED,
        answers.WITHIN,
        answers.BEYOND,
        answers.ONE_RUN,
        answers.OPEN,
    ),
    "no verdict": paired_comparisons.UNDECIDED,
}
#: words that are shown as badges
WORDS = (
    *summary.VALIDITY,
    *("nonfinite", *(word for words in KINDS.values() for word in words)),
    *replication.VERDICTS,
    *judged.VERDICTS,
    *(judged.DIRECTION, judged.NOT_REPRODUCED, judged.UNDECIDED),
)
HOME = "index.html"
#: sections of an experiment → their places
SECTIONS = {
    "figures": "figures",
    "tables": "tables",
    "same data": "same-data",
    "quality": "quality",
    "runs": "runs",
}
#: texts of a figure whose sentences may be those of others
TEXTS = ("caption", "method")
#: facts of an experiment, or of all of them
FACTS = ("text", "scale", "data_from")
#: answers that the first screen shows of an experiment beside others; its own page has all
ANSWERS = 3
#: figures of an experiment that are open, the one beside the answers included; the others are
#: folded
OPEN = 10
#: fields of an experiment whose figures are not drawn on this page
UNDRAWN: dict[str, Any] = {
    "href": "",
    "picture": None,
    "drawn": (),
    "more": (),
    "empty": (),
    "methods": (),
}


def write(
    parts: Sequence[dict[str, Any]],
    figures: Path,
    output: Path,
    *,
    claims: Path | None = None,
) -> None:
    """Write the first page of the described experiments: one in full, or links to the pages of
    several, in that order.

    `claims` is what the command `claims` wrote.
    """
    alone = len(parts) == 1
    parts = [
        part | (_build_figures(part, figures) if alone else {"href": f"{part['name']}.html"})
        for part in parts
    ]
    claims_html = _build_claims(claims, parts, output=output)
    contents = [(part["name"], part["href"]) for part in parts if not alone]
    contents += [
        (text, f"#{parts[0]['name']}-{place}") for text, place in SECTIONS.items() if alone
    ]
    contents += (
        [("source studies", "#originals")] if claims_html and claims_html["originals"] else []
    )
    contents += [("claims", "#claims")] if claims_html else []
    heading = (
        (parts[0]["question"] or parts[0]["name"])
        if alone
        else f"Report on {len(parts)} experiments"
    )
    write_text(
        output,
        text=render(
            parts,
            heading,
            contents=[*contents, ("methods", "#methods")],
            claims=claims_html,
        ),
    )


def write_experiment(part: dict[str, Any], figures: Path, output: Path) -> None:
    """Write the page of one of several experiments, beside the first page, which has the claims."""
    name = part["name"]
    contents = [
        ("all experiments", HOME),
        *((text, f"#{name}-{place}") for text, place in SECTIONS.items()),
    ]
    write_text(
        output,
        text=render(
            [part | _build_figures(part, figures)],
            heading=part["question"] or name,
            contents=contents,
            home=HOME,
        ),
    )


def _build_figures(part: dict[str, Any], figures: Path) -> dict[str, Any]:
    """Figures: the `picture` beside the answers, those that are open (`drawn`), `more`, and `empty`
    ones. `methods` are sentences that several figures and tables have. All lose these, and the
    experiment's caution.
    """
    every = [
        figure(name, folder=figures / part["name"], prefix=f"{part['name']}-{name}")
        for name in part["figures"]
    ]
    drawn = [f for f in every if not f["folded"]]
    empty = [f for f in every if f["folded"]]
    tables = {name: part[name] for name in summary.TABLES}
    caution = as_sentence(part["caution"]).strip()
    methods = [
        text
        for text in _list_repeated_sentences(every, drawn, tables=tables.values())
        if text != caution
    ]

    stated = (caution, *methods)
    for f in every:
        _shorten_figure(stated, f)
        if f"{f['folded']}." == caution:
            f["folded"] = "see the cautions"
    tables = {name: _shorten_caption(stated, table) for name, table in tables.items()}
    shown = {
        "picture": drawn[0] if drawn else None,
        "drawn": drawn[1:OPEN],
        "more": drawn[OPEN:],
        "empty": empty,
    }
    return tables | shown | {"methods": methods}


def _leave_out(stated: tuple[str, ...], text: str) -> str:
    """Return a text without the sentences that are stated elsewhere."""
    return " ".join(one for one in _split_sentences(text) if one not in stated)


def _shorten_figure(stated: tuple[str, ...], f: dict[str, Any]) -> None:
    f |= {key: _leave_out(stated, text=f[key]) for key in TEXTS if key in f}
    if f.get("table"):
        f["table"] = _shorten_caption(stated, table=f["table"])


def _shorten_caption(stated: tuple[str, ...], table: Table) -> Table:
    return replace(table, caption=_leave_out(stated, text=table.caption))


def _list_repeated_sentences(
    figures: list[dict[str, Any]], drawn: list[dict[str, Any]], tables: Iterable[Table]
) -> list[str]:
    """Return the sentences that more than one caption or method of figures and tables has."""
    told = [f["table"].caption for f in drawn if f["table"]]
    told += [table.caption for table in tables]
    told += [f[key] for f in figures for key in TEXTS if key in f]
    counts = Counter(text for whole in told for text in dict.fromkeys(_split_sentences(whole)))
    return [text for text, n in counts.items() if n > 1]


def _split_sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])(?<!al\.) (?=[A-Z0-9“])", text.strip()) if text.strip() else []


def _build_claims(
    path: Path | None, parts: list[dict[str, Any]], output: Path
) -> dict[str, Any] | None:
    """The tested claims of each document, with links to the figures of `parts` that show them, and
    how many have which verdict; None where nobody judged.
    """
    if path is None:
        return None
    named = {part["name"]: part for part in parts}
    documents = dict[str, dict[str, Any]]()
    rows = [row | judged.describe_verdict(row) for row in judged.read_claims(path)]
    tested = [row for row in rows if row["experiment"]]
    for row in tested:
        row["href"] = ""
        if part := named.get(row["experiment"]):
            place = f"-figure-{row['shown_in']}" if row["shown_in"] in part["figures"] else ""
            row["href"] = f"{part.get('href', '')}#{part['name']}{place}"
        document = documents.setdefault(
            row["document"], {"title": row["document"], "where": row["where"], "rows": []}
        )
        document["rows"].append(row)
    figures = [row for row in judged.read_replication(path) if row.table != "Claims"]
    of_studies = any(row["study"] for row in rows)
    return {
        "originals": summary.source_study_table(parts) if of_studies else None,
        "counts": judged.count_verdicts(tested),
        "documents": list(documents.values()),
        "untested": len(rows) - len(tested),
        "file": Path(os.path.relpath(path, output.parent)).as_posix(),
        "replication": judged.replication_tables(
            row for row in figures if row.verdict not in replication.WITHOUT_NUMBER
        ),
    }


def render(
    parts: Sequence[dict[str, Any]],
    heading: str,
    contents: Sequence[tuple[str, str]],
    **options: Any,
) -> str:
    """The page's text; `options` are `claims` and the first page (`home`). Everything from the
    tables is escaped; only figures and the style sheet are markup.
    """
    environment = Environment(
        loader=FunctionLoader(_read_asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shared = _find_shared_facts(parts)
    cautions = summary.shared_cautions(parts)
    parts = [
        UNDRAWN | part | _box_fields(part, shared, cautions=cautions, alone=len(parts) == 1)
        for part in parts
    ]
    text = environment.get_template("page.html.j2").render(
        style=Markup(_read_asset("page.css")),
        version=__version__,
        title=f"tokenscale report: {', '.join(p['name'] for p in parts) or heading}",
        heading=heading,
        contents=contents,
        words=WORDS,
        kinds=_group_by_kind(answer["verdict"] for part in parts for answer in part["visible"]),
        parts=parts,
        shared_cautions=cautions,
        shared=shared,
        total={word: sum(p["validity"][word] for p in parts) for word in summary.VALIDITY},
        runs=sum(p["runs"] for p in parts),
        digest=summary.tables_digest(parts),
        machines=list(dict.fromkeys(machine for p in parts for machine in p["machines"])),
        commits=_list_commits(parts),
        unknown=summary.describe_unknown(parts),
        versions=sorted({pair for part in parts for pair in part["versions"].items()}),
        definitions=tuple(queries.PARAMETERS),
        **{"claims": None, "home": ""} | options,
    )
    return text.lstrip("\n").rstrip("\n") + "\n"


def _find_shared_facts(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the facts that most experiments have, which are stated once."""
    known = {key: Counter(part[key] for part in parts if part[key]) for key in FACTS}
    return {key: found.most_common(1)[0][0] for key, found in known.items() if found}


def _list_commits(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the different commits of all experiments."""
    every = (tuple(commit.items()) for part in parts for commit in part["commits"])
    return [dict(commit) for commit in dict.fromkeys(every)]


def _group_by_kind(verdicts: Iterable[str]) -> dict[str, list[str]]:
    """How verdicts were reached → those of `verdicts`, without what restricts them."""
    words = list(dict.fromkeys(verdict.split(", ")[0] for verdict in verdicts))
    return {
        kind: found
        for kind, of in KINDS.items()
        if (found := [word for word in words if word in of])
    }


def _box_fields(
    part: dict[str, Any], shared: dict[str, Any], cautions: list[str], *, alone: bool
) -> dict[str, Any]:
    """Return what the first screen shows of an experiment. `alone`: all answers, else a few. Beside
    them: facts in which it differs from most experiments, and cautions that not all experiments
    share.
    """
    visible, hidden = paired_comparisons.select_answers(
        part["answers"], most=len(part["answers"]) if alone else ANSWERS
    )
    own = [key for key in FACTS if part[key] and part[key] != shared.get(key)]
    own_cautions = [text for text in summary.list_cautions(part) if text not in cautions]
    return {"visible": visible, "hidden": hidden, "own": own, "warnings": own_cautions}


def figure(name: str, folder: Path, prefix: str) -> dict[str, Any]:
    """Texts, table and inlined drawings of a figure; `folded` says why there is nothing to show."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return {
            "name": name,
            "title": figure_class(name).title,
            "folded": "This figure has not been made",
        }
    words, contents = read_figure(path)
    prefix = "".join(c if c.isalnum() or c == "-" else "-" for c in prefix)
    drawing = contents["svg"].decode("utf-8")
    _, _, width, height = map(float, style.view_box(drawing).split())
    try:
        wide = style.inline(drawing, prefix, css_class="wide")
        phone = style.inline(words["phone"], prefix=f"{prefix}-phone", css_class="phone")
    except ValueError as error:
        raise UserError(
            "this drawing is none of this project's.",
            path=folder / f"{name}.svg",
            reason=error,
            next=f"snakemake -f {folder / name}.svg draws it again",
        ) from None
    table = Table(**words["table"]) if "table" in words else None
    return {
        "name": name,
        "tall": height / width,
        **words,
        "table": table,
        "svg": Markup(wide),
        "phone": Markup(phone),
    }


def _read_asset(name: str) -> str:
    return resources.files("tokenscale.report").joinpath(name).read_text(encoding="utf-8")
