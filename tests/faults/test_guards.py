"""The guards that somebody takes out to see a test turn red (`mutations.py`)."""

import pytest

from tests.faults.mutations import GUARDS, ROOT


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_stands_once_in_its_file(name):
    guard = GUARDS[name]
    text = (ROOT / "src/tokenscale" / guard.file).read_text(encoding="utf-8")
    assert text.count(guard.guard) == 1
