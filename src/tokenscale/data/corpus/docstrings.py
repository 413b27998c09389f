"""The embedded source: docstrings of the standard library and of installed packages, and Python's own help topics.

Real technical English that every machine with the environment has, under licences that allow it. Files are read with
`ast`, never imported. Paths are sorted, so equal packages give equal documents in an equal order.
"""

import ast
import importlib.metadata
import importlib.util
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.settings.data import SourceSettings

#: an upgrade of a package must not change a corpus unasked (see build.py)
KEEP_EARLIER = True

#: SPDX; what is not listed is asked of the package's metadata
LICENCES = {
    "stdlib": "PSF-2.0",
    "pydoc_data": "PSF-2.0",
    "numpy": "BSD-3-Clause",
    "pandas": "BSD-3-Clause",
    "matplotlib": "LicenseRef-Matplotlib (based on PSF-2.0)",
}

#: folders of the standard library that distributions add, leave out, or that are packages of their own
NOT_STDLIB = {
    "site-packages", "dist-packages", "idlelib", "turtledemo", "lib2to3", "ensurepip", "lib-dynload", "pydoc_data",
}  # fmt: skip
#: in every package: tests hardly have docstrings, and distributions differ in whether they ship them
NOT_TEXT = {"test", "tests", "idle_test", "__pycache__"}


def describe(source: SourceSettings, downloads: Path | None = None) -> dict[str, Any]:
    """What this source is, for the manifest: packages with versions and licences, and its declared date."""
    packages = [
        {"name": name, "version": _get_version(name), "licence": LICENCES.get(name) or _get_licence(name)}
        for name in source.packages
    ]
    return {"kind": "docstrings", "packages": packages}


def documents(source: SourceSettings, downloads: Path | None = None) -> Iterator[tuple[str, str]]:
    """(text, origin) of every docstring, package by package, file by file, from the top of a file down.

    The origin names the object below its package: `numpy/linalg/_linalg.py::norm`. Raises UserError for a package
    that is not installed.
    """
    number = 0
    for package in source.packages:
        for document in _read_topics() if package == "pydoc_data" else _read_package(package):
            if number == source.maximum_documents:
                return
            number += 1
            yield document


def _read_package(name: str) -> Iterator[tuple[str, str]]:
    root = _find_root(name)
    if root.is_file():
        files = {root.name: root}
    else:
        prefix = "" if name == "stdlib" else f"{name}/"
        files = {prefix + path.relative_to(root).as_posix(): path for path in _list_python_files(root, name)}
    for origin in sorted(files):
        tree = _parse(files[origin])
        if tree is not None:
            yield from _read_docstrings(tree, origin, "")


def _list_python_files(root: Path, package: str) -> Iterator[Path]:
    left_out = NOT_TEXT | NOT_STDLIB if package == "stdlib" else NOT_TEXT
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in left_out and not f.startswith("config-")]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _parse(path: Path) -> ast.Module | None:
    """The syntax tree, or None for a file that is not Python of this version (templates, for example)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like are the file's own business
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return None


def _read_docstrings(node: ast.AST, origin: str, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node, clean=True)
        if text:
            yield text, f"{origin}::{name}" if name else origin
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _read_docstrings(child, origin, f"{name}.{child.name}" if name else child.name)
        elif isinstance(child, (ast.If, ast.Try, ast.With)):
            yield from _read_docstrings(child, origin, name)
        elif isinstance(child, ast.Expr) and name == "" and isinstance(child.value, ast.Call):
            yield from _read_added_docstrings(child.value, origin)


def _read_added_docstrings(call: ast.Call, origin: str) -> Iterator[tuple[str, str]]:
    """Docstrings that NumPy gives its compiled objects: add_newdoc("numpy", "ndarray", ("all", \"\"\"…\"\"\"))."""
    if not (isinstance(call.func, ast.Name) and call.func.id == "add_newdoc"):
        return
    words = [
        n.value for a in call.args for n in ast.walk(a) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    if len(words) >= 3:
        *name, text = words[1:]
        yield cleandoc(text), f"{origin}::{'.'.join(name)}"


def _read_topics() -> Iterator[tuple[str, str]]:
    """Chapters of the language reference that `help()` shows, from the dict literal of pydoc_data.topics."""
    path = _find_root("pydoc_data") / "topics.py"
    tree = _parse(path)
    for node in tree.body if tree is not None else []:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "topics" for t in node.targets):
            for name, text in sorted(ast.literal_eval(node.value).items()):
                yield cleandoc(text), f"pydoc_data/topics.py::{name}"


def _find_root(name: str) -> Path:
    if name == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    if name == "pydoc_data":
        return Path(sysconfig.get_path("stdlib")) / "pydoc_data"
    try:
        spec = importlib.util.find_spec(name) if "." not in name else None
    except ValueError:
        spec = None
    if spec is None or spec.origin is None:
        raise UserError(
            f"the corpus source docstrings wants package {name!r}, which is not installed.",
            key="corpus.source.packages",
            next=f"install {name}, or take it off the list",
        )
    origin = Path(spec.origin)
    return origin.parent if spec.submodule_search_locations else origin


def _get_version(name: str) -> str:
    if name in ("stdlib", "pydoc_data"):
        return platform.python_version()
    _find_root(name)  # a missing package is a user's error with a next step
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _get_licence(name: str) -> str:
    try:
        metadata: Any = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
    return metadata.get("License-Expression") or metadata.get("License") or "unknown"
