"""What a job's code really is: the files that its verb imports, and the variants it uses. Standard library only.

A rule names these files as inputs, so that Snakemake compares their content: an edit reruns exactly the jobs whose
code it is. Registries name modules as strings, which no import statement follows; the job's own variants are added by
name. Left out: the command line, the errors' texts, and empty `__init__` files.
"""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
#: SQL that `analysis/queries.py` prepares for all queries
VIEWS = {"steps_global"}
EXCLUDED = {"tokenscale.cli", "tokenscale.errors", "tokenscale.settings.closure"}


def code_of(verb: str, *variants: str) -> list[str]:
    """Sorted paths of the source files of one job, relative to the working directory where they lie below it.

    `variants` are dotted names of modules that the verb loads through a registry.
    """
    return closure_of(f"tokenscale.verbs.{verb}", *variants)


def closure_of(*modules: str) -> list[str]:
    """Sorted paths of these modules and of everything of ours that they import, and of the SQL that they name.

    A module names its SQL in an assignment `QUERIES = ("name", …)`; the views that every query may use are added.
    """
    files: set[Path] = set()
    for module in modules:
        files |= _closure(module)
    names = {query for file in files for query in _queries(file)}
    if names:
        files |= {PACKAGE / "analysis" / "sql" / f"{query}.sql" for query in names | VIEWS}
    root = Path.cwd().resolve()
    return sorted(str(f.relative_to(root)) if f.is_relative_to(root) else str(f) for f in files)


@cache
def _closure(module: str) -> frozenset[Path]:
    seen: dict[str, Path] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen or name in EXCLUDED:
            continue
        path = _file(name)
        if path is None:
            raise ModuleNotFoundError(name)
        seen[name] = path
        todo += _imports(name, path)
    return frozenset(seen.values())


def _file(module: str) -> Path | None:
    """The file of a module of ours; None for packages (their `__init__` is empty) and for what does not exist."""
    parts = module.split(".")
    if parts[0] != "tokenscale" or len(parts) == 1:
        return None
    path = PACKAGE.joinpath(*parts[1:]).with_suffix(".py")
    return path if path.is_file() else None


@cache
def _queries(path: Path) -> tuple[str, ...]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.suffix == ".py" else []:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "QUERIES" for t in node.targets):
            return tuple(ast.literal_eval(node.value))
    return ()


def _imports(module: str, path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{module}: relative imports are not followed; write the full name")
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in found if name.split(".")[0] == "tokenscale" and _file(name) is not None]
