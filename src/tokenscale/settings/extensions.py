"""Extensions: a user's own objectives, approaches, formats and figures in the folder `extensions/`.

A setting names one as `module:Name`. What it is and what settings must know about it are read from
its source, which nothing imports but the jobs that use it: planning and reports need neither torch
nor the module. In a run's settings its name is `module.Name.digest`; the digest is that of the
module, of the modules of the folder that it imports, and of all files of the folder that are no
modules. Other code is never loaded under this name.
"""

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.base.files import canonical_json, sha256_file, sha256_text
from tokenscale.settings.options import EXTENSION_NAME, option, settings_class
from tokenscale.settings.registry import (
    BATCHES,
    FORMATS,
    OBJECTIVES,
    Approach,
    Format,
    ObjectiveSpec,
)

T = TypeVar("T")

#: folder of the user's modules, in the project's root
FOLDER = Path("extensions")
#: package that its modules are imported from
PACKAGE = "extensions"
#: kind of an extension, which is also its decorator → what settings know about it
Kind = Literal["objective", "approach", "token_format", "figure"]
KINDS: dict[str, Mapping[str, Any]] = {
    "objective": ObjectiveSpec(whole_model=True)._asdict(),
    "approach": Approach()._asdict(),
    "token_format": {
        name: value
        for name, value in Format(reader="", writer="", options=())._asdict().items()
        if name in ("writer", "options", "streamed")
    },
    "figure": {},
}
#: how a user writes an extension
REFERENCE = re.compile(r"([A-Za-z]\w*):([A-Za-z]\w*)")
DIGITS = 10


def _declare(kind: Kind, facts: Mapping[str, object]) -> Callable[[T], T]:
    for name in facts.keys() - KINDS[kind].keys():
        raise TypeError(
            f"{kind}() has no argument {name}: {', '.join(KINDS[kind]) or 'it has none'}"
        )

    return lambda thing: thing


def objective(**facts: Any) -> Callable[[T], T]:
    """Declare a subclass of `train.models.objective.Objective`. `facts` are fields of
    `registry.ObjectiveSpec`, written as plain values. Its loss needs the whole model on each rank,
    unless `whole_model=False`.
    """
    return _declare("objective", facts)


def approach(**facts: Any) -> Callable[[T], T]:
    """Declare a function of (run, inputs) that opens `data.batches.batch.Batches`. `facts` are
    fields of `registry.Approach`; `format` may be an own format.
    """
    return _declare("approach", facts)


def token_format(**facts: Any) -> Callable[[T], T]:
    """Declare the reader of an own format. `facts` are fields of `registry.Format`, with `writer`
    the function as `module:name`.
    """
    return _declare("token_format", facts)


def figure(**facts: Any) -> Callable[[T], T]:
    """Declare a subclass of `report.figure.Figure`."""
    return _declare("figure", facts)


@settings_class
class ExtensionSettings:
    """Extension of a run: its name with the digest of its code, and what settings know about it.
    Whoever reads a run's settings thereby knows its objective, approach and format.
    """

    name: str = option(description="module.Name.digest")
    kind: Kind = option(description="what it is")
    facts: dict[str, Any] = option(dict, description="facts of its decorator")

    def __post_init__(self) -> None:
        """Enter the facts in the table of the kind. The name has a digest: it has one meaning."""
        if not EXTENSION_NAME.fullmatch(self.name) or self.facts.keys() - KINDS[self.kind].keys():
            raise ValueError("an extension as this project has written it")
        facts = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.facts.items()
        }
        known = {**KINDS[self.kind], **facts}
        if self.kind == "objective":
            OBJECTIVES[self.name] = ObjectiveSpec(**known)
        elif self.kind == "approach":
            BATCHES[self.name] = Approach(**known)
        elif self.kind == "token_format":
            known |= {"reader": module_of(self.name), "writer": module_of(known["writer"])}
            FORMATS[self.name] = Format(**known)
            if FORMATS[self.name].streamed:
                BATCHES[self.name] = BATCHES["token-list"]._replace(format=self.name)


class Source(NamedTuple):
    """Extension in the folder: its settings, with those that it names itself, and its files."""

    settings: tuple[ExtensionSettings, ...]
    #: file, relative to the folder → SHA-256
    files: dict[str, str]

    @property
    def name(self) -> str:
        return self.settings[-1].name


def is_reference(value: object) -> bool:
    """Whether a setting names an extension, as `module:Name`."""
    return isinstance(value, str) and REFERENCE.fullmatch(value) is not None


def show_extension(value: Any) -> Any:
    """Return a value of a setting as its user writes it: an extension without the digest, of which
    a table of runs has one.
    """
    if isinstance(value, str) and EXTENSION_NAME.fullmatch(value):
        return ":".join(value.split(".")[:2])
    return value


def module_of(name: str) -> str:
    """Return the module of an extension, by its name or as `module:Name`, for an import closure."""
    return f"{PACKAGE}.{re.split('[.:]', name)[0]}"


def read_extension(kinds: Sequence[str], reference: str, folder: Path = FOLDER) -> Source:
    """Read what the source of an extension declares. Imports nothing.

    Raises UserError for a missing module, one that is no Python, a name that it lacks, another
    kind, and facts that are no plain values.
    """
    module, _, name = reference.partition(":")
    if not is_reference(reference):
        word = re.sub(r"\W", "_", Path(module.removeprefix(f"{PACKAGE}.")).stem)
        raise UserError(
            f"{reference!r} names no extension.",
            expected=f"module:Name, for a name in {folder}/module.py",
            next=f"write {word}:{re.sub(chr(92) + 'W', '_', name) or 'Name'}",
        )
    path = folder / f"{module}.py"
    if not path.is_file():
        near = find_nearest(module, (file.stem for file in folder.glob("*.py")))
        following = f"did you mean {near}:{name}?" if near else f"write {path} (docs/extend.md)"
        raise UserError(
            f"the module of the extension {reference} is missing.", module=path, next=following
        )
    tree = _parse(path)
    declared = _list_declared(tree)
    if name not in declared:
        near = find_nearest(name, declared)
        listed = ", ".join(f"{module}:{other}" for other in declared) or "none"
        following = f"did you mean {module}:{near}?" if near else f"put @{kinds[0]}() above it"
        raise UserError(
            f"the module declares no extension {name}.",
            module=path,
            declared=listed,
            next=following,
        )
    kind, call = declared[name]
    if kind not in kinds:
        raise UserError(
            f"the extension {reference} is of another kind.",
            module=f"{path}, line {call.lineno}",
            found=f"@{kind}",
            expected=" or ".join(f"@{one}" for one in kinds),
            next=f"name one that is declared with @{kinds[0]}",
        )
    facts = _read_facts(path, kind, call)
    if kind == "token_format" and not is_reference(facts.get("writer")):
        raise UserError(
            f"the own format {reference} has no writer.",
            module=f"{path}, line {call.lineno}",
            found=facts.get("writer"),
            next=f'@token_format(writer="{module}:write", …) names the function',
        )
    inner: list[ExtensionSettings] = []
    if is_reference(facts.get("format")):
        inner = list(read_extension(("token_format",), facts["format"], folder).settings)
        facts["format"] = inner[-1].name
    named = [value for value in facts.values() if is_reference(value)]
    roots = [module, *(value.partition(":")[0] for value in named)]
    roots += [one.name.partition(".")[0] for one in inner]
    files = _hash_files(folder, roots)
    digest = sha256_text(canonical_json(files))[:DIGITS]
    made = ExtensionSettings(name=f"{module}.{name}.{digest}", kind=kind, facts=facts)
    return Source((*inner, made), files)


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise UserError(
            "the module of an extension is not Python.",
            module=f"{path}, line {error.lineno or 1}",
            reason=error.msg,
            next="correct this line",
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            "the module of an extension cannot be read.",
            module=path,
            reason=reason,
            next="use a readable file of text in UTF-8",
        ) from None


def _list_declared(tree: ast.Module) -> dict[str, tuple[Kind, ast.Call]]:
    """Return name → kind and decorator of the classes and functions of a module's top level."""
    found: dict[str, tuple[Kind, ast.Call]] = {}
    for node in tree.body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            continue
        for call in node.decorator_list:
            if not isinstance(call, ast.Call):
                continue
            word = ast.unparse(call.func).rpartition(".")[2]
            for kind in get_args(Kind):
                if word == kind:
                    found[node.name] = (kind, call)
    return found


def _read_facts(path: Path, kind: Kind, call: ast.Call) -> dict[str, Any]:
    """Return the keywords of a decorator that differ from their defaults."""
    facts: dict[str, Any] = {}
    where = f"{path}, line {call.lineno}"
    for word in call.keywords:
        name = word.arg or "**"
        if name not in KINDS[kind]:
            known = ", ".join(KINDS[kind]) or "none"
            raise UserError(
                f"@{kind} has no argument {name}.",
                module=where,
                allowed=known,
                next="remove it, or use one of the allowed arguments",
            )
        default = KINDS[kind][name]
        expected = str if default is None else type(default)
        try:
            value = ast.literal_eval(word.value)
        except ValueError:
            value = word
        value = float(value) if expected is float and isinstance(value, int) else value
        value = list(value) if expected is tuple and isinstance(value, (list, tuple)) else value
        fits = isinstance(value, list if expected is tuple else expected)
        if not fits and not (value is None and default is None):
            raise UserError(
                f"the argument {name} of @{kind} cannot be {ast.unparse(word.value)}.",
                module=where,
                expected=f"a plain value: {expected.__name__}",
                next="write the value out: settings read it without running the module",
            )
        if value != default:
            facts[name] = value
    return facts


def _hash_files(folder: Path, roots: Iterable[str]) -> dict[str, str]:
    """Return file → SHA-256 of modules, of the modules of the folder that they import, and of all
    files of the folder that are no modules.
    """
    files = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.suffix not in (".py", ".pyc") and path.is_file() and not _is_hidden(path, folder)
    }
    todo = list(roots)
    while todo:
        path = folder / f"{todo.pop()}.py"
        if path.name not in files and path.is_file():
            files[path.name] = path
            todo += _find_imports(_parse(path))
    return {name: sha256_file(path) for name, path in sorted(files.items())}


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)


def _find_imports(tree: ast.Module) -> list[str]:
    """Return the modules of the folder that a module imports, anywhere in it."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name.split(".")[1] for name in found if name.startswith(f"{PACKAGE}.")]


def verify_extensions(extensions: Iterable[ExtensionSettings]) -> dict[str, str]:
    """Return file → SHA-256 of the code that a run's settings name, relative to the folder. Raises
    UserError unless the folder has that code.
    """
    files: dict[str, str] = {}
    for extension in extensions:
        files |= _find_source(extension.name, kinds=(extension.kind,)).files
    return files


def _find_source(name: str, kinds: Sequence[str]) -> Source:
    """Return the source of an extension by its name with the digest."""
    module, attribute, digest = name.split(".")
    source = read_extension(kinds, f"{module}:{attribute}")
    if source.name != name:
        raise UserError(
            f"the extension {module}:{attribute} has changed since this was planned.",
            module=FOLDER / f"{module}.py",
            expected=digest,
            found=source.name.rpartition(".")[2],
            next="start Snakemake again: the changed code is another run",
        )
    return source


def require_format(name: str) -> None:
    """Enter an own format that the name of a store has. Raises UserError if it has changed."""
    if name not in FORMATS:
        _find_source(name, kinds=("token_format",))


def load_extension(name: str, kind: Kind, fact: str | None = None) -> Any:
    """Import an extension of a run by its name, or the function that a fact of it names.

    Raises UserError if the code is another one, raises, or does not have what is named.
    """
    source = _find_source(name, kinds=(kind,))
    module, attribute, _ = name.split(".")
    if fact is not None:
        module, _, attribute = source.settings[-1].facts[fact].partition(":")
    return _load(module, attribute, files=source.files)


def load_figure(reference: str) -> type:
    """Import the class of an own figure, as the folder has it."""
    source = read_extension(("figure",), reference)
    module, _, name = reference.partition(":")
    found = _load(module, name, files=source.files)
    assert isinstance(found, type)
    return found


def _load(module: str, name: str, files: Mapping[str, str]) -> Any:
    path = FOLDER / f"{module}.py"
    _Finder.allow(files)
    try:
        found = importlib.import_module(f"{PACKAGE}.{module}")
        return getattr(found, name)
    except UserError:
        raise
    except AttributeError as error:
        if error.name != name:
            raise _import_error(path, error) from error
        raise UserError(
            f"the module has no {name}.", module=path, next=f"define {name} in it"
        ) from None
    except Exception as error:
        raise _import_error(path, error) from error


def _import_error(path: Path, error: Exception) -> UserError:
    """Return the error for a module that raises while it is imported, with the line of it."""
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name == path.name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return UserError(
        "the module of an extension raises an error where it is imported.",
        module=f"{path}, line {line}" if line else path,
        reason=f"{type(error).__name__}: {error}",
        next=f"correct it: python -c 'import {PACKAGE}.{path.stem}' shows the whole error",
    )


class _Finder(MetaPathFinder):
    """Finds the package `extensions` and those of its modules whose code is known. Nothing else is
    imported from the folder, so that all that runs is in the digest.
    """

    files: dict[str, str] = {}

    @classmethod
    def allow(cls, files: Mapping[str, str]) -> None:
        """Add files with their hashes. Modules that were imported with other code are dropped."""
        first = not any(isinstance(finder, cls) for finder in sys.meta_path)
        if first:
            sys.meta_path.insert(0, cls())
        if first or any(cls.files.get(name, sha256) != sha256 for name, sha256 in files.items()):
            for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
                del sys.modules[name]
        cls.files |= files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = fullname.partition(".")
        if package != PACKAGE:
            return None
        if not module:
            return ModuleSpec(fullname, None, is_package=True)
        file = f"{module}.py"
        if file not in self.files:
            raise UserError(
                f"an extension imports {fullname}, which is not part of its code.",
                expected=f"{FOLDER / file}, imported by an import statement",
                next=f"write `from {PACKAGE} import …` with modules of the folder {FOLDER} alone",
            )
        return ModuleSpec(fullname, _Loader(FOLDER / file, self.files[file]))


class _Loader(ExecutionLoader):
    """Runs the source of a module if it has this hash."""

    def __init__(self, path: Path, sha256: str):
        self._path = path.resolve()
        self._sha256 = sha256

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_source(self, fullname: str) -> str:
        if sha256_file(self._path) != self._sha256:
            raise UserError(
                "the module of an extension has changed since this was planned.",
                module=self._path,
                next="start Snakemake again: the changed code is another run",
            )
        return self._path.read_text(encoding="utf-8")
