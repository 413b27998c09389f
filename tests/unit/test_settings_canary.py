"""The canary of an experiment: further repeats of one cell, spread over the order."""

import pytest

from tests.unit.test_config import EXPERIMENT, project
from tokenscale.base.errors import UserError

CANARY = {"cell": {"approach": "packed", "layout.data": 1}, "every": 3}


def test_a_canary_stands_first_last_and_between(tmp_path):
    runs = project(tmp_path, {**EXPERIMENT, "canary": CANARY}).runs("e")
    places = [r.position for r in runs if r.repeat >= EXPERIMENT["repeats"]]
    assert [r.position for r in runs] == list(range(len(runs))) and len(runs) == 8 + 4
    assert places == [0, 4, 8, 11]
    assert {(r.cell["approach"], r.cell["layout.data"]) for r in runs if r.position in places} == {("packed", 1)}
    assert [r.repeat for r in runs if r.position in places] == [2, 3, 4, 5]


def test_a_canary_changes_no_other_run(tmp_path):
    plain = project(tmp_path / "a").runs("e")
    mixed = project(tmp_path / "b", {**EXPERIMENT, "canary": CANARY}).runs("e")
    assert [r.run_id for r in mixed if r.repeat < EXPERIMENT["repeats"]] == [r.run_id for r in plain]
    assert len({r.run_id for r in mixed}) == len(mixed)


@pytest.mark.parametrize(
    ("cell", "words"),
    [({"approach": "packed"}, "several cells"), ({"approach": "token-list"}, "no cell"), ({}, "several cells")],
)
def test_a_canary_is_one_cell(tmp_path, cell, words):
    with pytest.raises(UserError, match=words) as error:
        project(tmp_path, {**EXPERIMENT, "canary": {"cell": cell}}).runs("e")
    assert error.value.facts["key"] == "canary.cell" and error.value.facts["file"].endswith("e.yaml")
