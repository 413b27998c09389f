"""Old module names answer with one line that names the new place."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tokenscale import renamed_modules

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("old", sorted(renamed_modules.renamed()))
def test_an_old_module_names_its_new_place_which_exists(old):
    new = renamed_modules.renamed()[old]
    path = ROOT / new if new.endswith(".py") else ROOT / "src" / (new.replace(".", "/") + ".py")
    assert path.is_file(), new
    with pytest.raises(ModuleNotFoundError, match=f"{old} is now {new}"):
        importlib.import_module(old)


@pytest.mark.parametrize(
    "statement",
    [
        "import tokenscale.formats.padded",
        "from tokenscale.formats import padded",
        "from tokenscale.formats.padded import write",
        "import tokenscale.formats; tokenscale.formats.padded",
    ],
)
def test_every_way_to_import_names_the_new_place(statement):
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "tokenscale.formats.padded is now tokenscale.data.stores.padded" in done.stderr.splitlines()[-1]


def test_running_an_old_module_prints_one_line():
    command = [sys.executable, "-m", "tokenscale.settings.reading"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode and len(done.stderr.splitlines()) == 1
    assert "tokenscale.settings.reading is now tokenscale.settings." in done.stderr


def test_a_name_that_never_existed_stays_python_s_own_error():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'tokenscale\.nothing'$"):
        importlib.import_module("tokenscale.nothing")
