"""The writer and the reader of a format: finds the format's file, and imports no other."""

import importlib
from types import ModuleType

from tokenscale.settings.registry import FORMATS


def module_of(form: str) -> ModuleType:
    """The module whose `write` makes stores of this format."""
    return importlib.import_module(FORMATS[form].module)


def reader_of(form: str) -> type:
    """The class that reads its stores, from (folder or manifest's path, manifest that `open_store` checked)."""
    return getattr(module_of(form), FORMATS[form].reader)
