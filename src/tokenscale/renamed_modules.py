"""Answer imports of old module names with the new name; the table is renamed_modules.txt."""

import importlib.abc
import importlib.machinery
import types
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_suffix(".txt")
PREFIX = "tokenscale."


@cache
def renamed() -> dict[str, str]:
    """Return old module name → new module name, or the path of a script of the repository."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    pairs = (line.split() for line in lines if not line.startswith("#"))
    return {PREFIX + old: new if new.endswith(".py") else PREFIX + new for old, new in pairs}


def message(name: str) -> str | None:
    """Return the one line that names the new place of a module or package; None for a name that never existed."""
    if name in renamed():
        return f"tokenscale: the module {name} is now {renamed()[name]}."
    found = {new for old, new in renamed().items() if old.startswith(f"{name}.")}
    if not found:
        return None
    homes = sorted({new.rpartition(".")[0] if not new.endswith(".py") else "benchmarks" for new in found})
    return f"tokenscale: the package {name} was split; its modules are now in {', '.join(homes)}."


class OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder behind all others, so that it sees only names of modules that do not exist."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Raise ModuleNotFoundError for an old module; return an empty package for an old package.

        Python imports the package first. Only its submodule's name says what the user looked for.
        """
        if not name.startswith(PREFIX) or (text := message(name)) is None:
            return None
        if name in renamed():
            raise ModuleNotFoundError(text)  # with `name`, `from package import module` would swallow it
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Have Python create an ordinary module."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill an old package: any attribute of it answers with the new places."""
        package = module.__name__

        def answer(attribute: str) -> object:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            raise AttributeError(message(f"{package}.{attribute}") or message(package))

        vars(module)["__getattr__"] = answer
