"""What a job's code really is: the files that its verb imports, and the variants it uses. Standard library only.

Their content is an input of the rule: an edit reruns exactly the jobs whose code it is. Registries name modules as
strings, which no import statement follows; the job's own variants are added by name. Left out: the command line, the
errors' texts, and empty `__init__` files.

A rule's input `code` is `listing(*modules)`, one small file with the hash of each of these source files. The files
themselves would say the same, but Snakemake needs a millisecond for every input of every job, and a run has sixty.
"""

import ast
import json
import os
import re
import sys
from collections.abc import Container, Mapping
from functools import cache
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.base.files import pretty_json, sha256_file, sha256_text, write_text
from tokenscale.settings.registry import BATCHES, FORMATS, LABELS, MODELS, OBJECTIVES, PARALLEL, TOKENIZERS
from tokenscale.settings.run import RunSettings

PACKAGE = Path(__file__).resolve().parent.parent
#: SQL files that `analysis/queries.py` loads for every query
VIEWS = {"steps_global", "validation", "macros"}
NAMED = ("QUERIES", "FILES")
EXCLUDED = {
    "tokenscale.cli.main",
    "tokenscale.cli.configuration",  # a person's options; rules pass what they mean
    "tokenscale.base.errors",
    "tokenscale.settings.closure",
    "tokenscale.settings.registry",
}
#: one folder for each listing
LISTINGS = Path("results/code")
#: earlier contents of a listing that are kept, the newest
KEPT = 50
#: an import at the beginning of a line, its names to the end of the line or in parentheses
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\S+)[ \t]+)?import[ \t]+(\([^)]*\)|[^(\n]*)", re.MULTILINE)
_NAMED = re.compile(rf"^({'|'.join(NAMED)}) = (\([^)]*\))", re.MULTILINE)


def code_of(verb: str, *variants: str) -> list[str]:
    """Sorted paths of the source files of one job, relative to the working directory where they lie below it.

    `variants` are dotted names of modules that the verb loads through a registry.
    """
    return closure_of(f"tokenscale.cli.{verb}", *variants)


def training_modules(run: RunSettings) -> tuple[str, ...]:
    """Roots of a training's code: the trainer, what sets up its processes, and the variants that this run uses."""
    return ("tokenscale.cli.rank", *(PARALLEL[method] for method in run.layout.methods), *_variants(run))


def training_code(run: RunSettings) -> list[str]:
    """Source files of a training."""
    return closure_of(*training_modules(run))


def layout_code(run: RunSettings) -> list[str]:
    """The part of `training_code` that is the layout's alone: a run of another layout does without it."""
    common = set(code_of("rank", *_variants(run)))
    return [file for file in training_code(run) if file not in common]


def _variants(run: RunSettings) -> list[str]:
    variants = ["tokenscale.runs.launch.ranks", BATCHES[run.approach].module]
    if run.store is not None:
        variants.append(FORMATS[run.store.format].module)
    if run.reads_text:
        variants.append(TOKENIZERS[run.tokenizer.kind].module)
    if (objective := OBJECTIVES[run.objective].module) is not None:
        variants.append(objective)
    if run.labels in LABELS:
        variants.append(LABELS[run.labels])
    if run.model.transformers is not None:
        variants.append(MODELS["transformers"])
    return variants


#: packages that make token ids: a run needs the one it names (`engine`), or any of them
ENGINES = {
    "gigatoken": "gigatoken",
    "tiktoken": "tiktoken",
    "tokenizers": "tokenizers",
    "mistral-common": "mistral_common",
}
#: packages that code imports inside of functions, for what few runs ask for → whether a run does
ONLY_FOR = {
    "torchao": lambda run: run.float8,
    "flash_attn": lambda run: run.attention == "flash",
    "awkward": lambda run: False,  # gigatoken's arrays, which a rank never makes
    "huggingface_hub": lambda run: False,  # the rule of the tokenizer downloads it
}


def training_imports(run: RunSettings) -> set[tuple[str, ...]]:
    """Packages that the ranks of a training import, by their import names; of several in one tuple, any will do.

    What a file imports at its top in a `try` has a substitute, and is left out.
    """
    top, inside = _packages_of(training_modules(run))
    needed = {name for name in inside if name not in ENGINES.values() and ONLY_FOR.get(name, lambda run: True)(run)}
    found = {(name,) for name in top | needed}
    engines = sorted(inside & set(ENGINES.values()))
    if engines and run.reads_text:
        found.add((ENGINES[run.engine],) if run.engine in ENGINES else tuple(engines))
    return found


def lacking(runs: Mapping[str, RunSettings], packages: Container[str]) -> dict[str, list[str]]:
    """Package (or several, one of which would do) that trainings import and an image lacks → ids of these runs."""
    found: dict[str, list[str]] = {}
    for run_id, run in runs.items():
        for names in sorted(training_imports(run)):
            if not any(name in packages for name in names):
                found.setdefault(" or ".join(names), []).append(run_id)
    return found


@cache
def _packages_of(modules: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """Packages of others that the closure of modules imports: at the top of files, and inside of functions."""
    files = [path for module in modules for path in _closure(module)]
    top, inside = (frozenset().union(*parts) for parts in zip(*map(_packages, files), strict=True))
    return top, inside - top


@cache
def _packages(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Packages of others that one file imports: at its top and outside of `try`, and inside of functions."""
    top: set[str] = set()
    inside: set[str] = set()

    def visit(node: ast.AST, found: set[str] | None) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom) and found is not None:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found |= {name.partition(".")[0] for name in names}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = inside
        elif isinstance(node, ast.Try | ast.If) and found is top:  # has a substitute, or is for type checkers
            found = None
        for child in ast.iter_child_nodes(node):
            visit(child, found)

    visit(ast.parse(path.read_text(encoding="utf-8")), top)
    ours = {"tokenscale", *sys.stdlib_module_names}
    return frozenset(top - ours), frozenset(inside - ours)


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
    return tuple(sorted(_shown(file, root) for file in files))


@cache
def _shown(file: Path, root: Path) -> str:
    return str(file.relative_to(root) if file.is_relative_to(root) else file)


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


@cache
def _file(module: str) -> Path | None:
    """The file of a module of ours; None for packages (their `__init__` is empty) and for what does not exist."""
    parts = module.split(".")
    if parts[0] != "tokenscale" or len(parts) == 1:
        return None
    path = PACKAGE.joinpath(*parts[1:]).with_suffix(".py")
    return path if path.is_file() else None


@cache
def _read(path: Path) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """(modules of ours that a file imports anywhere, what it names in literal assignments to NAMED).

    Read by pattern, which takes a thirtieth of the time that Python's parser takes; a test compares the two on every
    file of the package. An import that stands in a text counts, too.
    """
    text = path.read_text(encoding="utf-8")
    found = []
    for module, listed in _IMPORT.findall(text):
        if module.startswith("."):
            raise ValueError(f"{path}: relative imports are not followed; write the full name")
        names = re.findall(r"(?<!\bas )\b(?!as\b)[\w.]+", re.sub(r"#.*", "", listed))
        found += [module, *(f"{module}.{name}" for name in names)] if module else names
    named = {name: tuple(ast.literal_eval(value)) for name, value in _NAMED.findall(text)}
    return tuple(name for name in dict.fromkeys(found) if _file(name) is not None), named


def listing(*modules: str) -> str:
    """Path of the list of the files in `closure_of(*modules)` with their hashes, brought up to date if need be.

    Equal content is never written again, so that touching sources leaves it as it is. Its name holds for these modules
    whatever they import: an edit may be accepted for a rule (`--consider-ancient train=code`) that adds an import, too.
    Contents that it had before are kept beside it, for `changes`. Raises UserError where it must be written and cannot.
    """
    return _listing(modules, Path.cwd().resolve())


@cache  # thousands of jobs share a dozen listings
def _listing(modules: tuple[str, ...], root: Path) -> str:
    files = dict(_named_sha256(root / file) for file in _paths(modules, root))
    text = pretty_json({"modules": modules, "files": files})
    name = f"{modules[0].rpartition('.')[2]}-{sha256_text(' '.join(modules))[:8]}"
    # A folder each: Snakemake lists a folder once, and would not see what is written there for a later job.
    path = LISTINGS / name / "sources.json"
    before = _text(path)
    if before != text:
        try:
            if before is not None:
                _keep(path, before)
            write_text(path, text)
            if before is None:
                # As old as what it lists: where Snakemake has no records and goes by times, a list that was lost
                # and is written again makes nothing stale that its files would not.
                newest = max((root / file).stat().st_mtime for file in _paths(modules, root))
                os.utime(path, (newest, newest))
        except OSError as error:
            if _text(path) != text:  # not even by another Snakemake that found the same
                reason = error.strerror
                raise UserError(
                    "the list of a job's source files cannot be written.",
                    file=path,
                    reason=reason,
                    next="make the folder results/code writable",
                ) from None
    return str(path)


@cache
def _named_sha256(file: Path) -> tuple[str, str]:
    return file.relative_to(PACKAGE.parent).as_posix(), sha256_file(file)


def _keep(listing: Path, text: str) -> None:
    """A copy under the hash by which Snakemake's records name what a job ran with."""
    write_text(listing.with_name(f"{sha256_text(text)}.json"), text)
    earlier = sorted(listing.parent.glob(f"{'?' * 64}.json"), key=lambda path: path.stat().st_mtime)
    for path in earlier[:-KEPT]:
        path.unlink(missing_ok=True)


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def changes(listing: Path, sha256: str) -> list[str]:
    """Source files that came, went or changed since the listing had this hash; [] where its content of then is gone."""
    before, now = _text(listing.with_name(f"{sha256}.json")), _text(listing)
    if before is None or now is None:
        return []
    old, new = json.loads(before)["files"], json.loads(now)["files"]
    changed = [name for name in sorted(old | new) if old.get(name) != new.get(name)]
    return [_shown(PACKAGE.parent / name, Path.cwd().resolve()) for name in changed]
