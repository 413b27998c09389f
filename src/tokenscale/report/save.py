"""A figure as files: SVG, PDF and PNG with equal bytes for equal tables, its data and its texts.
The PNG is a slide of 16:9: the finding, the drawing, the caption and the source.
"""

import io
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure as Drawing
from matplotlib.image import imread

from tokenscale.analysis.queries import connect, query
from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    atomic,
    read_record,
    report_malformed,
    sha256_file,
    sha256_text,
    write_sealed,
    write_text,
)
from tokenscale.base.manifests import read_listed
from tokenscale.report import captions
from tokenscale.report.figure import Figure, figure_class
from tokenscale.report.style import narrow, settle, style
from tokenscale.settings.registry import ALIASES

#: formats of the drawing, in the order in which they are drawn
DRAWN = ("svg", "pdf", "png")
KINDS = (*DRAWN, "csv", "parquet", "json")
#: what is left out: dates, and versions of the program that drew it
_UNTOLD = {
    "svg": ("Date", "Creator", "Format", "Type"),
    "pdf": ("CreationDate", "ModDate", "Creator", "Producer"),
    "png": ("Software",),
}
#: of a PNG; Pillow's name for packing by run lengths, which takes half the time and a quarter more
#: bytes
_PNG = {"facecolor": "white", "pil_kwargs": {"compress_type": 3}}
#: width and height of a slide in inches, with so many pixels an inch: 1,920 × 1,080
SLIDE = (9.6, 5.4)
SLIDE_DPI = 200
MARGIN = 0.35
#: inches between the drawing and a text
GAP = 0.1
#: texts of a slide: size in points, characters a line, inches a line
TITLE = (15, 78, 0.27)
CAPTION = (9, 128, 0.17)
SOURCE = (7.5, 160, 0.2)


@dataclass(frozen=True)
class LoadedFigure:
    """A figure with its rows, and what is plotted, also as CSV."""

    name: str
    figure: Figure
    data: pd.DataFrame
    csv: str


class Tables(AbstractContextManager):
    """Tables of an experiment, open for several figures. Each query runs once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._rows: dict[str, pd.DataFrame] = {}

    @cached_property
    def connection(self) -> duckdb.DuckDBPyConnection:
        """Connection to the tables, opened by the first query that is not cached. Opening takes as
        long as a small figure.
        """
        return connect(self.folder)

    def rows(self, name: str) -> pd.DataFrame:
        """Return the rows of a query, which callers must not change."""
        if name not in self._rows:
            self._rows[name] = query(name, self.connection)
        return self._rows[name]

    def __exit__(self, *_: object) -> None:
        if "connection" in vars(self):
            self.connection.close()


def load_figure(name: str, tables: Tables) -> LoadedFigure:
    """Load the rows of a figure, or of the one that shows the same as an alias, and prepare it."""
    kind = figure_class(name)
    name = ALIASES.get(name, name)
    figure = kind(*(tables.rows(query) for query in kind.queries))
    data = figure.data()
    return LoadedFigure(
        name=name,
        figure=figure,
        data=data,
        csv=csv(data),
    )


def draw(loaded: LoadedFigure, kinds: Sequence[str] = DRAWN) -> dict[str, bytes]:
    """Return the bytes of each format."""
    figure = loaded.figure.draw()
    drawn = {}
    settle(figure)
    with style():
        for kind in kinds:
            shown = make_slide(loaded, figure) if kind == "png" else figure
            options: dict[str, Any] = {"metadata": dict.fromkeys(_UNTOLD[kind])} | (
                _PNG if kind == "png" else {}
            )
            if kind == "svg":
                options["metadata"]["Description"] = loaded.name
            shown.savefig(buffer := io.BytesIO(), format=kind, **options)
            drawn[kind] = buffer.getvalue()
    return drawn


def make_slide(loaded: LoadedFigure, figure: Drawing) -> Drawing:
    """Return a drawing of 16:9 that has the figure between its finding, and its caption and
    source.
    """
    texts = describe(loaded)
    source = f"Source: tokenscale, {loaded.name}.csv, SHA-256 {sha256_text(loaded.csv)[:16]}"
    title = textwrap.wrap(texts["finding"], TITLE[1])
    caption = textwrap.wrap(texts["caption"], CAPTION[1])
    width, height = SLIDE
    title_inches = TITLE[2] * len(title)
    caption_inches = CAPTION[2] * len(caption)
    # of the drawing, from the slide's lower edge
    top = height - MARGIN - title_inches - GAP
    bottom = MARGIN + SOURCE[2] + caption_inches + GAP
    slide = Drawing(figsize=SLIDE, dpi=SLIDE_DPI)
    for lines, (size, _, step), first in (
        (title, TITLE, height - MARGIN),
        (caption, CAPTION, bottom - GAP),
        ([source], SOURCE, MARGIN),
    ):
        for number, line in enumerate(lines):
            at = (first - number * step) / height
            slide.text(MARGIN / width, at, line, size=size, va="top")
    # drawn with as many pixels as it has on the slide, so that nothing is scaled
    wide, tall = figure.get_size_inches()
    scale = min((width - 2 * MARGIN) / wide, (top - bottom) / tall)
    figure.savefig(buffer := io.BytesIO(), format="png", dpi=scale * SLIDE_DPI, facecolor="white")
    buffer.seek(0)
    pixels = imread(buffer)
    left = (width * SLIDE_DPI - pixels.shape[1]) / 2
    low = ((top + bottom) * SLIDE_DPI - pixels.shape[0]) / 2
    slide.figimage(pixels, int(left), int(low))
    return slide


def save(name: str, tables: Path, output: Path) -> list[Path]:
    """Write `<output>.{svg,pdf,png,csv,parquet,json}` from an experiment's tables; returns their
    paths.
    """
    with Tables(tables) as opened:
        return write(load_figure(name, tables=opened), output)


def write(loaded: LoadedFigure, output: Path) -> list[Path]:
    """Write the files of a loaded figure. Its JSON has the texts, and the drawing that the page
    shows on a phone.
    """
    paths = {kind: output.with_name(f"{output.name}.{kind}") for kind in KINDS}
    for kind, content in draw(loaded).items():
        with atomic(paths[kind]) as temporary:
            temporary.write_bytes(content)
    write_text(paths["csv"], text=loaded.csv)
    with atomic(paths["parquet"]) as temporary:
        temporary.write_bytes(parquet(loaded.data))
    with narrow():
        phone = draw(loaded, kinds=("svg",))["svg"].decode()
    files = {kind: sha256_file(path) for kind, path in paths.items() if kind != "json"}
    write_sealed(
        paths["json"],
        record={
            "schema": 2,
            "figure": loaded.name,
            "phone": phone,
            "files": files,
            **describe(loaded),
        },
    )
    return list(paths.values())


def read_figure(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Read the JSON of a figure and its other files: kind → content. Raises UserError if one is
    missing or changed.
    """
    next_step = f"snakemake -f {path.with_suffix('.svg')}"
    words = read_record(path, what="figure's record", next=next_step)
    contents = {}
    with report_malformed(path, what="figure's record", next=next_step):
        for kind in (kind for kind in KINDS if kind != "json"):
            name = f"{path.stem}.{kind}"
            try:
                contents[kind] = read_listed(path.parent, name, sha256=words["files"][kind])
            except ValueError as error:
                raise UserError(
                    "a figure's file is not the one that was drawn.",
                    file=path.parent / name,
                    found=error,
                    next=next_step,
                ) from None
    return words, contents


def describe(loaded: LoadedFigure) -> dict:
    """Return the texts of a figure, the names of its queries and, where the figure has one, its
    table.

    `caption` is short enough to be read with the figure, and `method` is the rest of it.
    """
    figure = loaded.figure
    caption, method = captions.split_caption(figure.caption())
    described = {"title": figure.title, "finding": figure.finding(), "folded": figure.folded()}
    described |= {"caption": caption, "method": method, "alt": figure.alt()}
    table = figure.table()
    return (
        described | ({"table": asdict(table)} if table else {}) | {"queries": list(figure.queries)}
    )


def csv(rows: pd.DataFrame) -> str:
    """Comma-separated values, ten significant digits, one way of ending lines."""
    return rows.to_csv(index=False, lineterminator="\n", float_format="%.10g")


def parquet(rows: pd.DataFrame) -> bytes:
    """The same rows with all digits and their types, as the bytes of a Parquet file."""
    table = pa.Table.from_pandas(rows, preserve_index=False).replace_schema_metadata(None)
    pq.write_table(table, buffer := io.BytesIO(), compression="zstd")
    return buffer.getvalue()
