"""Lines that are read many at once are read as one by one: same rows, same broken lines."""

import json
import random

import pytest

from tests import logs as written_logs
from tests.harm import edited, harmed
from tests.logs import tabulate
from tokenscale.analysis import logs
from tokenscale.base.files import read_json, write_json
from tokenscale.runs.records.events import FIELDS, VERSION

pytestmark = pytest.mark.slow(31)

SAMPLE = {
    "INTEGER": [0, 1, -5, 2**31 - 1],
    "BIGINT": [0, 3, 2**52, -(2**63), 2**63 - 1],
    "DOUBLE": [0.0, 0.1, 1e-300, 1.7e9, -2.5, 3, 5e-324, 123456789.123456789],
    "VARCHAR": ["load", "", "a b", "run_start"],
    "BOOLEAN": [True, False],
}
#: what a line may be made into; most of them break it
HARM = [
    b"",
    b" ",
    b"{}",
    b"[1]",
    b"null",
    b'{"step":1}{"step":2}',
    b'{"step":1} {"step":2}',
    b'{"step":1,',
    b'"x":2}',
    b'{"step":[{}',
    b"{}]}",
    b'{"step":"1"}',
    b'{"step":1.0}',
    b'{"step":1.5}',
    b'{"step":1e2}',
    b'{"step":true}',
    b'{"step":1,"step":2}',
    b'{"step":9223372036854775808}',
    b'{"step":1,"step_s":1e999}',
    b'{"step":1,"step_s":NaN}',
    b'{"step":1,"loss_sum":-Infinity}',
    b'{"step":1,"rows":null}',
    b'{"step":null}',
    b'{"step":1,"x":[1,{"y":2}]}',
    b'{"step":1,"x":"caf\xc3\xa9"}',
    b'{"step":1,"x":"\xff"}',
    b'{"step":1,"x":"\\u0041"}',
    b"\0\0\0",
    b'{"step":01}',
    b'{"step":+1}',
    b'{"step":-0}',
    b'{"step":1,}',
    b"{'step':1}",
    b'{"step":1}//',
    b'{"step":1,"nonfinite":1}',
    b"\r",
    b'{"step":1}\r',
    b' {"step":1}',
    b'{"step":1} ',
    b'{"schema":%d,"step":1}' % (VERSION + 1),
    b'{"step":1,"step_s":"1"}',
    b'{"step":1,"step_s":1,"useful_tokens":3.0}',
    b'{"step" : 1 , "rows" : 2}',
    b'{"name":"x"}',
    b'{"event":"x"}',
    b'{"step":1,"schema":"1"}',
    b'{"step":1,"step_s":1.}',
    b'{"step":1,"step_s":.5}',
    b'{"step":1,"step_s":0x1}',
    b'{"step":1,"step_s":-}',
    b'{"step":1,"step_s":1e}',
    b'{"step":1,"step_s":tru}',
    b'{"step":1 2}',
    b'{"step":--1}',
    b'{"event":"\\ud800"}',
    b'{"step":1,"loss_sum":' + b"9" * 5000 + b"}",
    b'{"step":' + b"[" * 2000 + b"]" * 2000 + b"}",
    b"[" * 3000,
    b'{"step":1e400}',
    b"\xef\xbb\xbf{}",
    b"NaN",
    b'{"name":"\\ud800"}',
    b'{"event":"\\u00e9\\n"}',
    b'{"name":"\\"","step":1}',
    b'{"st\\u0065p":1}',
]


def line(kind: str, pick: random.Random) -> bytes:
    record = {
        name: pick.choice(SAMPLE[sql]) for name, sql in FIELDS[kind].items() if pick.random() < 0.7
    }
    record |= {
        "schema": pick.choice([1, VERSION]),
        logs.REQUIRED[kind]: 7 if kind == "steps" else "load",
    }
    return json.dumps(record, separators=pick.choice([(",", ":"), (", ", ": ")])).encode()


def both(path, kind, monkeypatch):
    """What is read at once, and what is read with nothing but the careful reader."""
    quick = logs.read_lines(path, kind)
    with monkeypatch.context() as patch:
        patch.setattr(logs, "_parse_clean_lines", lambda *_, **__: None)
        slow = logs.read_lines(path, kind)
    return quick, slow


@pytest.mark.parametrize("kind", list(FIELDS))
@pytest.mark.parametrize("block", [1, 200])
def test_whole_logs_and_broken_ones_are_read_as_line_by_line(tmp_path, monkeypatch, kind, block):
    monkeypatch.setattr(logs, "BLOCK_BYTES", block)
    pick = random.Random(block)
    path = tmp_path / f"{kind}.jsonl"
    for _ in range(15):
        lines = [line(kind, pick) for _ in range(pick.randrange(12))]
        for _ in range(pick.choice([0, 0, 1, 2])):
            lines.insert(pick.randrange(len(lines) + 1), pick.choice(HARM))
        end = pick.choice([b"\n", b"\n", b"", b'\n{"sch', b"\n\0\0"])
        path.write_bytes(b"\n".join(lines) + end)
        quick, slow = both(path, kind, monkeypatch)
        assert (
            quick.table.equals(slow.table)
            and quick.broken == slow.broken
            and quick.sha256 == slow.sha256
        )


def test_every_kind_of_harm_is_found_among_good_lines(tmp_path, monkeypatch):
    path = tmp_path / "steps.jsonl"
    good = b'{"schema":1,"step":7,"step_s":0.1}'
    for harm in HARM:
        for others in ([], [b""], [b'{"step":1}{"step":2}'], [b"{}"]):
            path.write_bytes(b"\n".join([good, harm, *others, good, b""]))
            quick, slow = both(path, "steps", monkeypatch)
            assert quick.table.equals(slow.table) and quick.broken == slow.broken, harm


def test_good_blocks_are_not_read_line_by_line(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "BLOCK_BYTES", 1000)
    careful = []
    original = logs._parse_line_by_line
    monkeypatch.setattr(
        logs,
        "_parse_line_by_line",
        lambda block, **named: careful.append(len(block)) or original(block, **named),
    )
    good = b'{"schema":1,"step":7,"step_s":0.1}\n' * 500
    path = tmp_path / "steps.jsonl"
    path.write_bytes(good + b"rubbish\n" + good + b'{"schema"')
    found = logs.read_lines(path, "steps")
    assert len(found.table) == 1000 and [b["line"] for b in found.broken] == [501, 1002]
    assert [b["benign"] for b in found.broken] == [False, True]
    assert sum(careful) < 3000


def test_damaged_folders_and_edited_records_are_rows_that_say_so(tmp_path):
    draw = random.Random(0)
    run = written_logs.settings(world_size=2)
    written_logs.write_run(tmp_path / "whole", run)
    table = written_logs.write_table(tmp_path / "runs.json", [run])
    for number in range(24):
        what = harmed(tmp_path / "whole", tmp_path / "runs", draw)
        if number % 2:
            what = edited(read_json(tmp_path / "whole" / run.identity / "run.json"), draw)
            write_json(tmp_path / "runs" / run.identity / "run.json", what)
        assert tabulate(table, tmp_path / "runs", tmp_path / "tables")["runs"] == 1, what
