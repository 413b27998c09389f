"""Lines that are read as columns: what is taken is what JSON says, and everything else is left to another reader."""

import itertools
import json

import pytest

from tokenscale.analysis import alike, logs
from tokenscale.runs.records.events import Writer

STEPS = logs.SCHEMAS["steps"]
FIELDS = ["step", "step_s", "nonfinite"]


def block(*values, fields=FIELDS):
    """Lines of these fields; a value is the text that stands for it."""
    lines = ("{" + ",".join(f'"{f}":{v}' for f, v in zip(fields, row, strict=True)) + "}\n" for row in values)
    return "".join(lines).encode()


def columns(content, fields=FIELDS):
    found = alike.read(content, fields, STEPS)
    return found and [column.to_pylist() for column in found]


def test_values_are_cut_out_by_columns():
    assert columns(block((0, 0.5, "false"), (17, "-1.5e-07", "true"))) == [[0, 17], [0.5, -1.5e-07], [False, True]]


def as_json(text, kinds):
    """What Python's reader makes of a number of these kinds; None for what is none, and for one in white space."""
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except ValueError:
        return None
    return value if type(value) in kinds and text == text.strip() else None


@pytest.mark.parametrize("field, kinds", [("step", [int]), ("step_s", [int, float])])
def test_a_number_is_read_just_where_json_has_it(field, kinds):
    """Every text of up to three of these characters, and longer ones made of the parts of a number."""
    texts = {"".join(text) for size in (1, 2, 3) for text in itertools.product("012.-+eExn \n", repeat=size)}
    heads, tails = ["", "-", "+", "--"], ["", ".", ".5", "e", "e5", "E-05"]
    texts |= {"".join(text) for text in itertools.product(heads, ["0", "01", "10", "0x1", ".", "NaN"], tails)}
    for text in texts | {"true", "null", "Infinity", "1_0", "1.5.5", "1e5.5", "1,", '"1"', "１"}:
        found = columns(block((7,), (text,), (7,), fields=[field]), [field])
        assert (found and found[0][1]) == as_json(text, kinds), repr(text)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b'{"step":1}\n',
        block((1, 0.5, "false"))[:-1],
        block((1, 0.5, "false")) + b"\n",
        block((1, 0.5, "false")) + b'{"step":2',
        block((1, 0.5, "false")) + b"rubbish\n",
        block((1, 0.5, "false"), (2, 0.5, "null")),
        block((1, 0.5, "false"), (2, 0.5, "1")),
        block((1, 0.5, "false"), (2, 0.5, "TRUE")),
        block((1, 0.5, "false"), ("", 0.5, "false")),
        block((1, 0.5, "false"), (2**63, 0.5, "false")),
        block((1, 0.5, "false")) + block((2, 0.5, "false")).replace(b"step_s", b"own_ss"),
        block((1, 0.5, "false")) + block((2, 0.5, "false"), fields=["step_s", "step", "nonfinite"]),
        block((1, 0.5, "false"), (2, 0.5, "false")).replace(b"}\n{", b"}{"),
        block((1, 0.5, "false"), (2, 0.5, "false")).replace(b"}\n{", b"},{"),
        block((1, 0.5, "false"), (2, 0.5, "false")).replace(b"}\n", b"]\n"),
        block((1, 0.5, "false")).replace(b":1,", b": 1,"),
        b" " + block((1, 0.5, "false")),
    ],
)
def test_lines_that_are_not_just_so_are_left_to_another_reader(content):
    assert alike.read(content, FIELDS, STEPS) is None


def test_fields_that_are_text_or_unknown_are_left_to_another_reader():
    assert alike.read(b'{"event":"x"}\n', ["event"], logs.SCHEMAS["events"]) is None
    assert alike.read(b'{"colour":1}\n', ["colour"], STEPS) is None
    assert alike.read(b"{}\n", [], STEPS) is None


def test_what_a_training_writes_is_read_as_columns_and_as_any_json(tmp_path, monkeypatch):
    writer = Writer(tmp_path)
    for step in range(3000):
        numbers = {"step_s": 1 / (step + 1), "loss_sum": 1e-7 * step**3, "order_digest": 2**52 - step}
        writer.step(step=step, **numbers, rows=4, skipped=step % 7 == 0, nonfinite=False)
    writer.close()
    path = tmp_path / "steps.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(logs, "_parsed", lambda *_: pytest.fail("another reader was asked"))
        quick = logs.read(path, "steps")
    monkeypatch.setattr(alike, "read", lambda *_: None)
    assert quick.table.equals(logs.read(path, "steps").table) and len(quick.table) == 3000
