"""Source `docstrings`: docstrings of the standard library and installed packages, and Python's help
topics.

Real technical English under permissive licences, available wherever the environment is installed.
Files are parsed with `ast`, never imported. Paths are sorted, so equal packages give equal
documents in equal order.
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
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.facts import unknown_fact
from tokenscale.settings.data import SourceSettings

#: SPDX identifiers; other licences are read from the package metadata
LICENCES = {
    "stdlib": "PSF-2.0",
    "pydoc_data": "PSF-2.0",
    "numpy": "BSD-3-Clause",
    "pandas": "BSD-3-Clause",
    "matplotlib": "LicenseRef-Matplotlib (based on PSF-2.0)",
}

#: folders of the standard library that vary between distributions or are separate packages
NOT_STDLIB = {
    "site-packages",
    "dist-packages",
    "idlelib",
    "turtledemo",
    "lib2to3",
    "ensurepip",
    "lib-dynload",
    "pydoc_data",
}
#: folders skipped in every package: tests have few docstrings, and not every distribution ships
#: them
NOT_TEXT = {"test", "tests", "idle_test", "__pycache__"}
#: what the reader changes in a text or leaves out
CHANGES = "files that this Python cannot parse are left out; common indentation is removed"


def describe(source: SourceSettings, downloads: Path | None = None) -> dict[str, Any]:
    return {"kind": "docstrings", "packages": [_describe_package(name) for name in source.packages]}


def documents(source: SourceSettings, downloads: Path | None = None) -> Iterator[tuple[str, str]]:
    """Return (text, origin) by package, file and source order; the origin is
    `numpy/linalg/_linalg.py::norm`. Raises UserError for a package that is not installed.
    """
    packages = (
        _read_topics() if name == "pydoc_data" else _read_package(name) for name in source.packages
    )
    return islice(chain.from_iterable(packages), source.maximum_documents)


def _read_package(name: str) -> Iterator[tuple[str, str]]:
    root = _find_root(name)
    files = {root.name: root} if root.is_file() else {}
    prefix, excluded = ("", NOT_TEXT | NOT_STDLIB) if name == "stdlib" else (f"{name}/", NOT_TEXT)
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in excluded and not f.startswith("config-")]
        paths = [Path(folder, file) for file in names if file.endswith(".py")]
        files |= {prefix + path.relative_to(root).as_posix(): path for path in paths}
    for origin, path in sorted(files.items()):
        if (tree := _parse(path)) is not None:
            yield from _read_docstrings(tree, origin, name="")


def _parse(path: Path) -> ast.Module | None:
    """Return the syntax tree, or None for a file that this Python cannot parse (a template, for
    example).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like in third-party files
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
            yield from _read_docstrings(
                child, origin, name=f"{name}.{child.name}" if name else child.name
            )
        elif isinstance(child, (ast.If, ast.Try, ast.With)):
            yield from _read_docstrings(child, origin, name=name)
        elif isinstance(child, ast.Expr) and name == "" and isinstance(child.value, ast.Call):
            yield from _read_added_docstrings(child.value, origin)


def _read_added_docstrings(call: ast.Call, origin: str) -> Iterator[tuple[str, str]]:
    """Yield docstrings that NumPy adds to compiled objects: add_newdoc("numpy", "ndarray", ("all",
    \"\"\"…\"\"\")).
    """
    if not (isinstance(call.func, ast.Name) and call.func.id == "add_newdoc"):
        return
    constants = (
        node.value
        for part in call.args
        for node in ast.walk(part)
        if isinstance(node, ast.Constant)
    )
    strings = [value for value in constants if isinstance(value, str)]
    if len(strings) >= 3:
        *name, text = strings[1:]
        yield cleandoc(text), f"{origin}::{'.'.join(name)}"


def _read_topics() -> Iterator[tuple[str, str]]:
    """Yield the chapters of the language reference shown by `help()`, from the dict literal in
    pydoc_data.topics.
    """
    path = _find_root("pydoc_data") / "topics.py"
    tree = _parse(path)
    for node in tree.body if tree is not None else []:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "topics" for t in node.targets
        ):
            for name, text in sorted(ast.literal_eval(node.value).items()):
                yield cleandoc(text), f"pydoc_data/topics.py::{name}"


def _find_root(name: str) -> Path:
    if name in ("stdlib", "pydoc_data"):
        return Path(sysconfig.get_path("stdlib"), "" if name == "stdlib" else name)
    try:
        spec = importlib.util.find_spec(name) if "." not in name else None
    except ValueError:
        spec = None
    if spec is None or spec.origin is None:
        what = f"the package {name!r} is not installed."
        next_step = f"install {name}, or take it off the list"
        raise UserError(what, key="corpus.source.packages", next=next_step)
    origin = Path(spec.origin)
    return origin.parent if spec.submodule_search_locations else origin


def _describe_package(name: str) -> dict[str, str]:
    if name in ("stdlib", "pydoc_data"):
        return {"name": name, "version": platform.python_version(), "licence": LICENCES[name]}
    _find_root(name)  # raises UserError for a missing package
    try:
        metadata: Any = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        metadata = {}
    licence = (
        LICENCES.get(name)
        or metadata.get("License-Expression")
        or metadata.get("License")
        or unknown_fact("the package states none")
    )
    version = metadata.get("Version") or unknown_fact("the package states none")
    return {"name": name, "version": version, "licence": licence}
