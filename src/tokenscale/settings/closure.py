"""Import closure of a job: the source files that its command imports, and its variants. Standard
library only.

The content of these files is an input of the rule: an edit reruns exactly the jobs that use the
file. Registries name modules as strings, which no import statement shows, so a job's variants are
added by name. The command-line parser, error texts and empty `__init__` files are left out.

A rule's input `code` is `write_listing(*modules)`: one small file with the hashes of the source
files. Listing the files themselves as inputs would be slower: Snakemake needs a millisecond per
input of a job, and a run has sixty.
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
from tokenscale.settings import extensions
from tokenscale.settings.registry import FORMATS, TOKENIZERS
from tokenscale.settings.run import OURS, READERS, RunSettings

PACKAGE = Path(__file__).resolve().parent.parent
#: SQL files that `analysis/queries.py` loads for every query
VIEWS = {"steps_global", "validation", "macros"}
ASSIGNMENTS = ("QUERIES", "FILES", "queries")
EXCLUDED = {
    "tokenscale.cli.main",  # options of interactive commands; rules pass values
    "tokenscale.base.errors",
    # another pattern for secrets must not train anything again
    "tokenscale.runs.records.redaction",
    "tokenscale.settings.closure",
    "tokenscale.settings.registry",
}
#: modules that only some jobs import, inside a function: not followed, but named where they are
#: used (`training_modules`)
ONLINE = "tokenscale.data.batches.online"
TOKENIZER_LOADER = "tokenscale.data.tokenizers.load"
TEXT_DOOR = "tokenscale.data.stores.text"
LIBRARY = "tokenscale.train.models.library"
TRAINER = "tokenscale.train.loop"
LINKS = "tokenscale.train.parallel.preflight"
ARM = "tokenscale.arms.train"
READER = "tokenscale.arms.reader"
#: the same of one importer alone: (importer, imported)
NOT_FOLLOWED = {
    ("tokenscale.train.evaluation.held_out", TOKENIZER_LOADER),
    ("tokenscale.train.evaluation.held_out", TEXT_DOOR),
    # files of users, which are no rule's
    ("tokenscale.cli.pretokenize", "tokenscale.cli.pretokenize_file"),
    # start this benchmark by srun, and are not measured
    ("tokenscale.benchmark.inference", "tokenscale.settings.machine"),
    ("tokenscale.benchmark.inference", "tokenscale.runs.launch.start"),
}
#: folder of the listings, each in a folder of its own
LISTINGS = Path("results/code")
#: number of earlier contents kept per listing
MAX_COPIES = 50
#: import statement; imported names run to the end of the line or are in parentheses
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\S+)[ \t]+)?import[ \t]+(\([^)]*\)|[^(\n]*)", re.MULTILINE
)
#: imports for type checkers alone, which no job executes
_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+.*\n|\n(?=[ \t]))+", re.MULTILINE)
ALL_QUERIES = "tuple(queries.PARAMETERS)"
_ASSIGNMENT = re.compile(
    rf"^(?: {{4}})?({'|'.join(ASSIGNMENTS)}) = (\([^)]*\)|{re.escape(ALL_QUERIES)})", re.MULTILINE
)


def training_modules(run: RunSettings) -> tuple[str, ...]:
    """Return the modules of a training: the rank command and the modules that it loads by name
    (`module[:name]`).
    """
    variants: list[str | None] = [
        "tokenscale.runs.launch.ranks",
        ONLINE if run.online else None,
        FORMATS[run.store.format].reader if run.store is not None else None,
    ]
    for extension in run.extensions:
        named = filter(extensions.is_reference, (extension.name, *extension.facts.values()))
        variants += [extensions.module_of(name) for name in (extension.name, *named)]
    if run.arm == OURS:
        variants += [TRAINER, LINKS]
    else:
        variants.append(READER if run.arm in READERS else ARM)
    if run.reads_text:
        variants += [TOKENIZER_LOADER, TEXT_DOOR, TOKENIZERS[run.tokenizer.kind].module]
    if run.model.transformers is not None:
        variants.append(LIBRARY)
    return ("tokenscale.cli.rank", *(module for module in variants if module is not None))


def training_code(run: RunSettings) -> list[str]:
    return import_closure(*training_modules(run))


#: optional package, imported inside functions → predicate of the runs that need it
ONLY_FOR = {
    "torchao": lambda run: run.float8,
    "transformers": lambda run: run.model.transformers is not None,
    "flash_attn": lambda run: run.attention == "flash",
    "recorder": lambda run: False,  # copied beside the contract that adapters import
    "awkward": lambda run: False,  # used by gigatoken only outside of ranks
    "huggingface_hub": lambda run: False,  # downloads happen in the tokenizer's rule
}


def training_imports(run: RunSettings) -> set[tuple[str, ...]]:
    """Return the import names of packages that ranks need (any one of a tuple), without those in a
    top-level `try`.
    """
    files = {
        path
        for module in training_modules(run)
        for path in _closure(module)
        if path.suffix == ".py"
    }
    top, inside = (set().union(*parts) for parts in zip(*map(_find_packages, files), strict=True))
    backends = {_package_of(engine) for kind in TOKENIZERS.values() for engine in kind.engines}
    needed = {name for name in inside - top - backends if ONLY_FOR.get(name, lambda run: True)(run)}
    found: set[tuple[str, ...]] = {(name,) for name in top | needed}
    if run.reads_text and (engines := TOKENIZERS[run.tokenizer.kind].engines):
        found.add(
            tuple(sorted(map(_package_of, engines if run.engine == "auto" else [run.engine])))
        )
    return found


def _package_of(engine: str) -> str:
    return engine.replace("-", "_")


def find_missing_packages(
    runs: Mapping[str, RunSettings], packages: Container[str]
) -> dict[str, list[str]]:
    """Return package (or alternatives) that runs import and `packages` lacks → ids of these
    runs.
    """
    found: dict[str, list[str]] = {}
    for run_id, run in runs.items():
        for names in sorted(training_imports(run)):
            if not any(name in packages for name in names):
                found.setdefault(" or ".join(names), []).append(run_id)
    return found


@cache
def _find_packages(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return third-party packages that a file imports: by statements of its top level, and inside
    functions.
    """
    top = set()
    inside = set()
    for block in re.split(
        r"^(?=\w|@)", _TYPES.sub("", path.read_text(encoding="utf-8")), flags=re.MULTILINE
    ):
        found = (
            re.findall(r"(?:^|,\s*)(\w+)", module or names)
            for module, names in _IMPORT.findall(block)
        )
        names = {name for names in found for name in names}
        if block.startswith(("import ", "from ")):
            top |= names
        elif block.startswith(("def ", "async def ", "class ")):
            inside |= names
    own = {"tokenscale", extensions.PACKAGE, *sys.stdlib_module_names}
    return frozenset(top - own), frozenset(inside - own)


def import_closure(*modules: str | None) -> list[str]:
    """Return the sorted paths of modules, of all project modules that they import, and of the data
    files they list, relative to the working directory if they are below it.

    A module lists SQL queries in `QUERIES = ("name", …)` or `QUERIES = tuple(queries.PARAMETERS)`,
    a figure in its `queries` (views shared by all queries are added). `FILES = ("page.css", …)` are
    files of the module's folder.
    """
    root = Path.cwd().resolve()
    return [_display_path(file, root) for file in _list_files(tuple(filter(None, modules)))]


@cache
def _list_files(modules: tuple[str, ...]) -> list[Path]:
    """Return the sorted files of a closure, cached: thousands of runs share a few."""
    return sorted(frozenset().union(*map(_closure, modules)), key=str)


def _display_path(file: Path, root: Path) -> str:
    return str(file.relative_to(root) if file.is_relative_to(root) else file)


@cache
def _closure(module: str) -> frozenset[Path]:
    files: dict[str, frozenset[Path]] = {}
    todo = [module.partition(":")[0]]
    while todo:
        name = todo.pop()
        if name in files or name in EXCLUDED:
            continue
        path = _find_module_file(name)
        if path is None:
            raise ModuleNotFoundError(name)
        imports, data = _scan_source(path)
        files[name] = frozenset({path, *data})
        todo += (
            found
            for found in imports
            if found not in (ONLINE, LIBRARY, TRAINER, LINKS, ARM, READER)
            and (name, found) not in NOT_FOLLOWED
        )
    return frozenset().union(*files.values())


@cache
def _find_module_file(module: str) -> Path | None:
    parts = module.split(".")
    roots = {"tokenscale": PACKAGE, extensions.PACKAGE: extensions.FOLDER}
    if parts[0] not in roots or len(parts) == 1:
        return None
    path = roots[parts[0]].joinpath(*parts[1:]).with_suffix(".py")
    return path if path.is_file() else None


@cache
def _scan_source(path: Path) -> tuple[tuple[str, ...], tuple[Path, ...]]:
    """Return (project modules that a file imports, data files of its literal assignments).

    Regular expressions are thirty times as fast as Python's parser; a test compares both on every
    file of the package. Import statements inside string literals count as well.
    """
    text = _TYPES.sub("", path.read_text(encoding="utf-8"))
    imports = []
    for module, imported in _IMPORT.findall(text):
        if module.startswith("."):
            raise ValueError(f"{path}: relative imports are not supported; use the full name")
        names = re.findall(r"(?<!\bas )\b(?!as\b)[\w.]+", re.sub(r"#.*", "", imported))
        imports += [module, *(f"{module}.{name}" for name in names)] if module else names
    sql = PACKAGE / "analysis" / "sql"
    data = []
    for name, value in _ASSIGNMENT.findall(text):
        if name == "FILES":
            data += [path.parent / item for item in ast.literal_eval(value)]
        else:
            queries = (
                [f.stem for f in sql.glob("*.sql")]
                if value == ALL_QUERIES
                else ast.literal_eval(value)
            )
            data += [sql / f"{query}.sql" for query in (*queries, *VIEWS)]
    return tuple(
        name for name in dict.fromkeys(imports) if _find_module_file(name) is not None
    ), tuple(data)


@cache  # thousands of jobs share a dozen listings
def write_listing(*given: str | None) -> str:
    """Update the file that lists `import_closure(*given)` with hashes, and return its path.

    Equal content is not written again, so touching a source file changes nothing. The path depends
    on the modules only, so that an edit that adds an import can be accepted for a rule
    (`--consider-ancient train=code`). Earlier contents are kept for `list_changes`. Raises
    UserError if the file cannot be written.
    """
    modules = tuple(filter(None, given))
    files = _list_files(modules)
    text = pretty_json({"modules": modules, "files": hash_closure(*modules)})
    name = f"{modules[0].rpartition('.')[2]}-{sha256_text(' '.join(modules))[:8]}"
    # One folder per listing: Snakemake reads a folder once and would miss files added for later
    # jobs.
    path = LISTINGS / name / "sources.json"
    before = _read_text(path)
    if before == text:
        return str(path)
    try:
        if before is not None:
            _keep_copy(path, text=before)
        write_text(path, text)
        if before is None:
            # As old as the newest file listed: without records Snakemake compares times, and a
            # listing that is written again must not make anything stale.
            newest = max(file.stat().st_mtime for file in files)
            os.utime(path, (newest, newest))
    except OSError as error:
        if _read_text(path) != text:  # unless another Snakemake process has written the same
            what = "the listing of a job's files cannot be written."
            next_step = "make the folder results/code writable"
            raise UserError(what, file=path, reason=error.strerror, next=next_step) from None
    return str(path)


def hash_closure(*modules: str) -> dict[str, str]:
    """Return source file → SHA-256, of all that these modules import or list."""
    return dict(map(_hash_source, _list_files(modules)))


@cache
def _hash_source(file: Path) -> tuple[str, str]:
    own = file.is_relative_to(extensions.FOLDER)
    name = file if own else file.relative_to(PACKAGE.parent)
    return name.as_posix(), sha256_file(file)


def _keep_copy(listing: Path, text: str) -> None:
    """Save a copy under its hash, which Snakemake's records contain as the input's checksum."""
    write_text(listing.with_name(f"{sha256_text(text)}.json"), text)
    earlier = sorted(listing.parent.glob(f"{'?' * 64}.json"), key=lambda path: path.stat().st_mtime)
    for path in earlier[:-MAX_COPIES]:
        path.unlink(missing_ok=True)


def _read_text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def list_changes(listing: Path, sha256: str) -> list[str]:
    """Return the source files added, removed or changed since the listing had this hash; [] if its
    copy is gone.
    """
    before = _read_text(listing.with_name(f"{sha256}.json"))
    now = _read_text(listing)
    if before is None or now is None:
        return []
    old = json.loads(before)["files"]
    new = json.loads(now)["files"]
    changed = [name for name in sorted(old | new) if old.get(name) != new.get(name)]
    return [_display_path(PACKAGE.parent / name, root=Path.cwd().resolve()) for name in changed]
