"""The report as a PDF: a cover with the numbers of the verdict, then a page a figure with its caption."""

import textwrap
from pathlib import Path

from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

from tokenscale.analysis.queries import connect
from tokenscale.files import atomic
from tokenscale.report import registry, save, summary
from tokenscale.report.style import style

#: A4, inches
WIDTH, HEIGHT = 8.27, 11.69
_MARGIN = 0.7


def write(experiments: list[str], tables: Path, output: Path) -> None:
    """Draw all pages from the tables; equal tables give equal bytes."""
    with style(), atomic(output) as temporary:
        dates = {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None, "Title": "tokenscale report"}
        with PdfPages(temporary, metadata=dates) as pages:
            for name in experiments:
                part = summary.experiment(name, tables)
                pages.savefig(cover(part))
                with connect(tables / name) as connection:
                    for figure in part["figures"]:
                        module = registry.module(figure)
                        rows = save.frames(figure, connection)
                        pages.savefig(
                            page(module.draw(*rows), module.TITLE, module.caption(*rows), f"{name}: {figure}")
                        )


def cover(part: dict) -> Figure:
    """Question, counts, answers, machine, commit, digest."""
    made = Figure(figsize=(WIDTH, HEIGHT), layout="none")
    y = 1 - 1.1 / HEIGHT
    y = _lines(made, y, f"tokenscale: {part['name']}", size=11)
    y = _lines(made, y, part["question"], size=17, weight="bold", columns=58) - 0.02
    v = part["validity"]
    y = _lines(
        made, y, f"{part['runs']} runs: " + ", ".join(f"{n} {word}" for word, n in v.items()), size=12, weight="bold"
    )
    facts = [f"{a['text']} ({a['spread']}): {a['verdict']}." for a in part["answers"]]
    facts += [p["text"] for p in part["proof"]["parts"]]
    if part["scale"] == "demo":
        facts.append("Demo scale: conclusions not transferable.")
    facts += [
        part["note"],
        part["caution"] and f"{_sentence(part['caution'])} (world sizes above one).",
    ]
    facts.append(f"Text: {part['text']}." if part["text"] else "")
    facts.append(f"Data from {part['data_from']} (UTC)." if part["data_from"] else "")
    facts.append(f"Machine: {'; '.join(part['machines']) or 'not recorded'}.")
    commits = [f"{c['commit']} ({'with uncommitted changes' if c['dirty'] else 'clean'})" for c in part["commits"]]
    facts.append(f"Commit: {', '.join(commits) or 'not recorded'}.")
    facts.append(f"Made from tables with digest {part['digest'][:16]}.")
    for fact in filter(None, facts):
        y = _lines(made, y - 0.006, fact, size=10)
    return made


def _sentence(text: str) -> str:
    """With a capital first letter, and the others as they are."""
    return text[:1].upper() + text[1:]


def page(figure: Figure, title: str, caption: str, place: str) -> Figure:
    """The figure at its own size on a page, its title above and its caption below."""
    drawn = figure.get_figheight() * (WIDTH - 2 * _MARGIN) / figure.get_figwidth()
    bottom = 1 - (1.9 + drawn) / HEIGHT
    figure.set_size_inches(WIDTH, HEIGHT)
    figure.get_layout_engine().set(rect=(_MARGIN / WIDTH, bottom, 1 - 2 * _MARGIN / WIDTH, drawn / HEIGHT))
    for legend in figure.legends:  # from the corner of the figure to that of the drawing
        legend.set_loc("lower left")
        legend.set_bbox_to_anchor((_MARGIN / WIDTH, bottom + drawn / HEIGHT), transform=figure.transFigure)
    _lines(figure, 1 - 0.7 / HEIGHT, place, size=9)
    _lines(figure, 1 - 0.95 / HEIGHT, title, size=14, weight="bold", columns=70)
    _lines(figure, bottom - 0.2 / HEIGHT, caption, size=10)
    return figure


def _lines(figure: Figure, y: float, text: str, *, size: float, weight: str = "normal", columns: int = 92) -> float:
    """Write wrapped text below `y` and return where it ends; dollar signs are no formulas here."""
    lines = textwrap.wrap(text, columns) or [""]
    for line in lines:
        y -= 1.5 * size / 72 / HEIGHT
        figure.text(_MARGIN / WIDTH, y, line, fontsize=size, fontweight=weight, parse_math=False, in_layout=False)
    return y
