"""Provenance metadata in a figure's files: the data, queries, code and runs that it was drawn from.

Nothing of a time, a machine or a path is in it, so that equal tables and equal code give equal bytes; the commit
stands in `provenance.json` of the report's folder alone.
"""

import hashlib
import importlib.metadata
import io
import json
import logging
import re
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from tokenscale.analysis import tables
from tokenscale.analysis.queries import sql
from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json, pretty_json, sha256_file, sha256_text
from tokenscale.settings.closure import PACKAGE, import_closure

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
