"""Figure → the class that draws it. Nothing is imported until a figure is needed."""

import importlib

from tokenscale.base.errors import unknown
from tokenscale.report.figure import Figure
from tokenscale.settings.registry import FIGURES


def figure_class(name: str) -> type[Figure]:
    """Return the class of a figure: its name in capitals (`loss_over_time` is `LossOverTime`) in its module.

    Raises UserError for a name that is none.
    """
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    return getattr(importlib.import_module(FIGURES[name]), "".join(word.capitalize() for word in name.split("_")))
