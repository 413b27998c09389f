"""What all that inject faults share: texts and stores for trainings, and the small workflow at each
of its stages.
"""

import pytest

from tests.corpora import words_lab
from tests.faults.kills import Lab
from tests.once import once


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    return words_lab(tmp_path_factory.mktemp("lab"), 120)


@pytest.fixture(scope="session")
def stages(tmp_path_factory) -> Lab:
    """Nobody may change it."""
    return Lab(once(tmp_path_factory, "stages", lambda folder: Lab(folder / "lab").made()) / "lab")
