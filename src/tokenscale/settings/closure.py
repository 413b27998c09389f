"""What a job's code really is: the files that its verb imports, and the variants it uses. Standard library only.

A rule names these files as inputs, so that Snakemake compares their content: an edit reruns exactly the jobs whose
code it is. Registries name modules as strings, which no import statement follows; the job's own variants are added by
name. Left out: the command line, the errors' texts, and empty `__init__` files.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tokenscale.settings.registry import BATCHES, LABELS, MODELS, OBJECTIVES, PARALLEL, TOKENIZERS
from tokenscale.settings.run import RunSettings

PACKAGE = Path(__file__).resolve().parent.parent
#: SQL that `analysis/queries.py` prepares for all queries
VIEWS = {"steps_global"}
NAMED = ("QUERIES", "FILES")
EXCLUDED = {
    "tokenscale.cli",
    "tokenscale.errors",
    "tokenscale.settings.closure",
    "tokenscale.settings.registry",
}


def code_of(verb: str, *variants: str) -> list[str]:
    """Sorted paths of the source files of one job, relative to the working directory where they lie below it.

    `variants` are dotted names of modules that the verb loads through a registry.
    """
    return closure_of(f"tokenscale.verbs.{verb}", *variants)


def training_code(run: RunSettings) -> list[str]:
    """Source files of a training: the trainer, what sets up its processes, and the variants that this run uses."""
    return code_of("rank", *(PARALLEL[method] for method in run.layout.methods), *_variants(run))


def layout_code(run: RunSettings) -> list[str]:
    """The part of `training_code` that is the layout's alone: a run of another layout does without it."""
    common = set(code_of("rank", *_variants(run)))
    return [file for file in training_code(run) if file not in common]


def _variants(run: RunSettings) -> list[str]:
    variants = ["tokenscale.launch.ranks", BATCHES[run.approach]]
    if run.store is None:
        variants.append(TOKENIZERS[run.tokenizer.kind])
    if run.objective in OBJECTIVES:
        variants.append(OBJECTIVES[run.objective])
    if run.labels in LABELS:
        variants.append(LABELS[run.labels])
    if run.model.transformers is not None:
        variants.append(MODELS["transformers"])
    return variants


def closure_of(*modules: str) -> list[str]:
    """Sorted paths of these modules, of everything of ours that they import, and of the files that they name.

    A module names its SQL in an assignment `QUERIES = ("name", …)` (the views that every query may use are added), and
    files of its own folder in `FILES = ("page.css", …)`.
    """
    return list(_paths(modules, Path.cwd().resolve()))


@cache
def _paths(modules: tuple[str, ...], root: Path) -> tuple[str, ...]:
    """`closure_of`, found once for all jobs that share their code: of thousands of runs, only approaches differ."""
    files: set[Path] = set()
    for module in modules:
        files |= _closure(module)
    queries = {query for file in files for query in _read(file)[1].get("QUERIES", ())}
    named = {file.parent / name for file in files for name in _read(file)[1].get("FILES", ())}
    if queries:
        named |= {PACKAGE / "analysis" / "sql" / f"{query}.sql" for query in queries | VIEWS}
    files |= named
    return tuple(sorted(str(f.relative_to(root)) if f.is_relative_to(root) else str(f) for f in files))


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
        todo += _read(path)[0]
    return frozenset(seen.values())


def _file(module: str) -> Path | None:
    """The file of a module of ours; None for packages (their `__init__` is empty) and for what does not exist."""
    parts = module.split(".")
    if parts[0] != "tokenscale" or len(parts) == 1:
        return None
    path = PACKAGE.joinpath(*parts[1:]).with_suffix(".py")
    return path if path.is_file() else None


@cache
def _read(path: Path) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """(modules of ours that a file imports anywhere, what it names in literal assignments to NAMED)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path}: relative imports are not followed; write the full name")
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    named = {
        node.targets[0].id: tuple(ast.literal_eval(node.value))
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in NAMED
    }
    return tuple(name for name in dict.fromkeys(found) if _file(name) is not None), named


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Every statement, at any depth. An import is one; expressions, most of a tree, are passed over."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.stmt):
            yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, [])
            todo += inner if isinstance(inner, list) else []  # the body of a lambda is an expression
