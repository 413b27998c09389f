"""Which Python a rule's `python` is."""

import os
import sys
from pathlib import Path


def use_this_python() -> None:
    """Put the folder of the running Python first in PATH, for this process and its children.

    A Snakemake that is called by its path then runs its jobs with its own Python, activated or not.
    """
    here = str(Path(sys.executable).parent)
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if folders[0] != here:
        os.environ["PATH"] = os.pathsep.join([here, *folders])
