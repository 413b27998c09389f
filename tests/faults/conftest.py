"""The small workflow at each of its stages, built once for all that inject faults into it."""

import pytest

from tests.faults.kills import Lab
from tests.once import once


@pytest.fixture(scope="session")
def stages(tmp_path_factory) -> Lab:
    """Nobody may change it."""
    return Lab(once(tmp_path_factory, "stages", lambda folder: Lab(folder / "lab").made()) / "lab")
