"""Commands where streams are closed, limits are low, folders are odd: right, or one message."""

import pytest

from tests.faults.surroundings import COMMANDS, SURROUNDINGS, try_all

#: of each kind of surrounding one, with the command that met it
FEW = {
    "figure": ["no streams", "notebook", "no hard links"],
    "plan": ["folder removed", "no files"],
}


def is_wrong(verdict: str) -> bool:
    return verdict.isupper() or verdict.startswith("CODE")


@pytest.mark.parametrize("command", FEW)
def test_a_command_ends_right_or_with_one_message(command, stages):
    found = list(try_all(stages.folder, FEW[command], [command]))
    assert not [row for row in found if is_wrong(row[2])], found
    assert ("as usual", command, "right") in [row[:3] for row in found]


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_in_every_surrounding(command, stages):
    found = list(try_all(stages.folder, [*SURROUNDINGS], [command]))
    assert not [row for row in found if is_wrong(row[2])], found
    assert ("as usual", command, "right") in [row[:3] for row in found]
