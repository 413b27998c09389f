"""A figure as files: SVG, PDF and PNG with equal bytes for equal tables, its data, its words and its metadata."""

import hashlib
import importlib.metadata
import io
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from html import unescape
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.analysis import tables
from tokenscale.analysis.queries import connect, query, sql
from tokenscale.base.errors import UserError
from tokenscale.base.files import atomic, canonical_json, pretty_json, sha256_file, sha256_text, write_json, write_text
from tokenscale.report import captions
from tokenscale.report.figure import Figure
from tokenscale.report.figures import figure_class
from tokenscale.report.style import settle, style
from tokenscale.settings.closure import PACKAGE, import_closure
from tokenscale.settings.registry import FIGURES

Metadata = dict[str, Any]

VERSION = 1
#: packages whose release may change a number or a drawing
LIBRARIES = ("duckdb", "fonttools", "matplotlib", "numpy", "pandas", "pillow")
#: keys of a figure's metadata; the first, with the version, marks a text as ours
KEYS = {"passport", "figure", "experiment", "data", "queries", "code", "libraries", "runs", "tables"}
#: name of the text in a PNG
PNG_KEY = "tokenscale"


def of_figure(
    name: str,
    folder: Path,
    digests: dict[str, str],
    data: str,
    *modules: str,
) -> Metadata:
    """Return the metadata of a figure of the experiment whose tables are in the folder.

    `digests` are those of the rows of its queries by name (`rows`), `data` is its CSV, `modules` are the roots of the
    code that draws it.
    """
    head = tables.read_experiment(folder)
    return {
        "passport": VERSION,
        "figure": name,
        "experiment": head.get("experiment") or folder.name,
        "data": sha256_text(data),
        "queries": {query: {"sql": sha256_text(sql(query)), "rows": digest} for query, digest in digests.items()},
        "code": code(*modules),
        "libraries": libraries(),
        "runs": runs(folder),
        "tables": digest(folder),
    }


def text(metadata: Metadata) -> str:
    """One line of ASCII: what every format can hold."""
    return json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(folder: Path) -> str:
    """Return one digest of all tables of an experiment, that of their manifest: equal digests, equal report.

    The caller has compared the tables with the manifest, as `connect` does.
    """
    return sha256_file(folder / tables.MANIFEST)


def rows(frame: pd.DataFrame) -> str:
    """Digest of the rows of a query, in their order: of the columns' names, and of pandas' hash of each row."""
    hashed = pd.util.hash_pandas_object(frame, index=False).to_numpy("<u8").tobytes()
    return hashlib.sha256(canonical_json(list(frame.columns)).encode() + hashed).hexdigest()[:16]


def runs(folder: Path) -> dict[str, str | None]:
    """Run id → the first 16 digits of its record's seal (None where it is not sealed), of all runs with a record."""
    tables.check(folder, "runs.parquet")
    found = pq.read_table(folder / "runs.parquet", columns=["run_id", "status", "seal"], use_threads=False).to_pylist()
    known = sorted((run["run_id"], run["seal"]) for run in found if run["status"] not in (None, "missing"))
    return {run_id: seal and seal[:16] for run_id, seal in known}


def code(*modules: str) -> str:
    """Digest of these modules' code; that of the file which `settings.closure.listing` keeps for a rule."""
    return sha256_text(pretty_json({"modules": modules, "files": files(*modules)}))


def files(*modules: str) -> dict[str, str]:
    """Source file → SHA-256, of all that these modules import or name."""
    found = (_source(Path.cwd() / path) for path in import_closure(*modules))
    return dict(sorted(found))


@cache
def _source(path: Path) -> tuple[str, str]:
    """(name, SHA-256) of a source file: every figure asks for those of nearly all."""
    path = path.resolve()
    return path.relative_to(PACKAGE.parent).as_posix(), sha256_file(path)


@cache
def libraries() -> dict[str, str]:
    """Package → version, of those that compute and draw."""
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


def read(path: Path) -> Metadata | None:
    """Return our metadata in an SVG, PNG or PDF file; None where there are none that can be read.

    Raises UserError for a file that is missing or of another kind.
    """
    if not path.is_file():
        raise UserError("there is no such file.", file=path, next="correct the path")
    kinds = {".svg": _of_svg, ".png": _of_png, ".pdf": _of_pdf}
    if path.suffix.lower() not in kinds:
        raise UserError(
            "this kind of file carries no metadata of tokenscale.",
            file=path,
            expected=", ".join(kinds),
            next="name a file of one of these kinds",
        )
    return kinds[path.suffix.lower()](path)


def parse(found: str | None) -> Metadata | None:
    """Return metadata from their text; None where they are not ours, or of another version."""
    try:
        value = json.loads(found or "")
    except ValueError:
        return None
    return value if isinstance(value, dict) and value.get("passport") == VERSION else None


def _of_svg(path: Path) -> Metadata | None:
    found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text("utf-8", "replace"), re.DOTALL)
    return parse(unescape(found[1])) if found else None


def _of_png(path: Path) -> Metadata | None:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path, formats=["PNG"]) as image:
            return parse(image.text.get(PNG_KEY))  # type: ignore[attr-defined]
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError):
        raise UserError(
            "the file is no readable PNG.", file=path, next="build the figure again, or name another file"
        ) from None


def _of_pdf(path: Path) -> Metadata | None:
    found = open_pdf(path).metadata
    return parse(str(found.subject)) if found and found.subject else None


def open_pdf(path: Path) -> Any:
    """A reader of the PDF's pages (`pypdf.PdfReader`). Raises UserError where it cannot be read."""
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # the error below says it
    try:
        reader = PdfReader(io.BytesIO(path.read_bytes()))
        len(reader.pages)
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            "the file is no readable PDF.", file=path, reason=error, next="build the figure again, or name another file"
        ) from None
    return reader


#: formats of the drawing, in the order in which they are drawn
DRAWN = ("svg", "pdf", "png")
KINDS = (*DRAWN, "csv", "parquet", "json")
#: no date, no version of the program that drew it
_METADATA = {
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
_METADATA_KEY = {"svg": "Description", "pdf": "Subject", "png": PNG_KEY}
#: Pillow's names for how a PNG is packed: run lengths, which take half the time and a quarter more bytes
_PACKED = {"compress_type": 3}


@dataclass(frozen=True)
class Rows:
    """What a query gives, and the digest that metadata name it by."""

    frame: pd.DataFrame
    digest: str


@dataclass(frozen=True)
class LoadedFigure:
    """A figure with its rows, what is plotted (also as CSV), and its provenance metadata."""

    name: str
    figure: Figure
    data: pd.DataFrame
    csv: str
    metadata: Metadata


def modules(name: str) -> tuple[str, str]:
    """Return the roots of the code that draws a figure."""
    return "tokenscale.report.save", FIGURES[name]


class Tables:
    """An experiment's tables, open for several figures: what a query gives is asked once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._rows: dict[str, Rows] = {}

    @cached_property
    def connection(self) -> duckdb.DuckDBPyConnection:
        """Made when something is asked that is not known: it takes as long as a small figure's drawing."""
        return connect(self.folder)

    def rows(self, name: str) -> pd.DataFrame:
        """The rows of a query; nobody writes to them."""
        return self.rows_of(name).frame

    def rows_of(self, name: str) -> Rows:
        """The same, with their digest."""
        if name not in self._rows:
            frame = query(name, self.connection)
            self._rows[name] = Rows(frame, rows(frame))
        return self._rows[name]

    def __enter__(self) -> "Tables":
        return self

    def __exit__(self, *_: object) -> None:
        if "connection" in vars(self):
            self.connection.close()


def load_figure(name: str, tables: Tables) -> LoadedFigure:
    """Load the rows of a figure and prepare it."""
    kind = figure_class(name)
    figure = kind(*(tables.rows(query) for query in kind.queries))
    data = figure.data()
    text = csv(data)
    digests = {query: tables.rows_of(query).digest for query in kind.queries}
    metadata = of_figure(name, tables.folder, digests, text, *modules(name))
    return LoadedFigure(name, figure, data, text, metadata)


def draw(loaded: LoadedFigure, metadata: Metadata | None = None, kinds: Sequence[str] = ()) -> dict[str, bytes]:
    """The bytes of each format (of all in `DRAWN`), with the figure's own metadata or the given ones."""
    figure = loaded.figure.draw()
    settle(figure)
    described = text(metadata or loaded.metadata)
    drawn = {}
    with style():
        for kind in kinds or DRAWN:
            options: dict[str, Any] = {"facecolor": "white", "pil_kwargs": _PACKED} if kind == "png" else {}
            fields = _METADATA[kind] | {_METADATA_KEY[kind]: described}
            with io.BytesIO() as buffer:
                figure.savefig(buffer, format=kind, metadata=fields, **options)
                drawn[kind] = buffer.getvalue()
    return drawn


def save(name: str, tables: Path, output: Path) -> list[Path]:
    """Write `<output>.{svg,pdf,png,csv,parquet,json}` from an experiment's tables; returns their paths."""
    with Tables(tables) as opened:
        return write(load_figure(name, opened), output)


def write(loaded: LoadedFigure, output: Path) -> list[Path]:
    """Write the files of a loaded figure."""
    paths = {kind: output.with_name(f"{output.name}.{kind}") for kind in KINDS}
    for kind, content in draw(loaded).items():
        with atomic(paths[kind]) as temporary:
            temporary.write_bytes(content)
    write_text(paths["csv"], loaded.csv)
    with atomic(paths["parquet"]) as temporary:
        temporary.write_bytes(parquet(loaded.data))
    write_json(paths["json"], {"schema": 1, "figure": loaded.name, **describe(loaded)})
    return list(paths.values())


def describe(loaded: LoadedFigure) -> dict:
    """Return the texts of a figure, the names of its queries and, where the figure has one, its table.

    `caption` is short enough to be read with the figure, and `method` is the rest of it.
    """
    figure = loaded.figure
    caption, method = captions.split_caption(figure.caption())
    described: dict[str, Any] = {"title": figure.title, "finding": figure.finding(), "folded": figure.folded()}
    described |= {"caption": caption, "method": method, "alt": figure.alt()}
    if (table := figure.table()) is not None:
        described["table"] = asdict(table)
    return described | {"queries": list(figure.queries)}


def csv(rows: pd.DataFrame) -> str:
    """Comma-separated values, ten significant digits, one way of ending lines."""
    return rows.to_csv(index=False, lineterminator="\n", float_format="%.10g")


def parquet(rows: pd.DataFrame) -> bytes:
    """The same rows with all digits and their types, as the bytes of a Parquet file."""
    with io.BytesIO() as buffer:
        table = pa.Table.from_pandas(rows, preserve_index=False).replace_schema_metadata(None)
        pq.write_table(table, buffer, compression="zstd")
        return buffer.getvalue()
