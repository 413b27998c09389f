"""Two reports' folders: cells, claims, and what may explain the difference."""

import pandas as pd
import pytest

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, sha256_file, write_json
from tokenscale.cli.main import main
from tokenscale.report import bundle
from tokenscale.report.difference import difference, read
from tokenscale.report.table import Table

RATES = (100.0, 101.0, 102.0, 103.0, 104.0)


def folder(path, rates=RATES, cell="approach=packed", seal="a", claims=None, origin=None, **fields):
    """A report's folder with one cell; `origin` changes what its runs record."""
    run = {
        "seal": seal,
        "device": "cpu",
        "cpu": "A CPU",
        "commit": "c" * 40,
        "dirty": False,
        "code_digest": "d" * 64,
        "manifests": {"store": "e" * 64},
        "packages": {"torch": "2.9.0"},
        "corpus": "web",
        "tokenizer": "bpe",
        "held_out_tokens": 100,
        "science": "5" * 16,
        "cores": 2,
        "threads": 1,
        "load": 0.5,
    }
    run |= origin or {}
    rows = [
        dict.fromkeys((*bundle.IDENTITY, *bundle.NAMES))
        | {
            "run_id": f"run-{i}",
            "cell": cell,
            "series": "packed",
            "world_size": 1,
            "repeat": i,
            "external": False,
        }
        | {
            "validity": "valid",
            "seal": f"{seal}{i}",
            "useful_tokens_per_s": rate,
            "validation_loss": 3.0 + i,
        }
        | {name: value[i] for name, value in fields.items()}
        for i, rate in enumerate(rates)
    ]
    (path / "data" / "demo").mkdir(parents=True)
    pd.DataFrame(rows).to_parquet(path / "data" / "demo" / "cells.parquet")
    record = {
        "schema": 1,
        "git": {"commit": "b" * 40, "dirty": False},
        "packages": {"duckdb": "1.4.0"},
    }
    runs = {row["run_id"]: run for row in rows}
    write_json(path / "provenance.json", record | {"experiments": {"demo": {"runs": runs}}})
    if claims is not None:
        write_json(path / "claims.json", claims)
    return path


def compared(tmp_path, a=None, b=None):
    return difference(
        read(folder(tmp_path / "a", **(a or {}))),
        read(folder(tmp_path / "b", seal="b", **(b or {}))),
    )


def rows_of(table):
    return [dict(zip([name for name, _ in table.columns], row, strict=True)) for row in table.rows]


def verdicts(found):
    return [row["verdict"] for row in rows_of(found["Cells"])]


def test_cells_are_compared_by_medians_ratio_and_spread(tmp_path):
    found = compared(tmp_path, b={"rates": [2 * rate for rate in RATES]})
    rate, loss = rows_of(found["Cells"])
    assert (rate["measure"], rate["B / A"], rate["verdict"]) == (
        "useful_tokens_per_s",
        "2",
        "higher (better)",
    )
    assert (rate["spread"], loss["verdict"]) == ("1.923–2.08", "within the spread of the runs")
    one = read(tmp_path / "a")
    assert {*verdicts(difference(one, one))} == {"the same runs"}


@pytest.mark.parametrize(
    ("origin", "named"),
    [
        ({"corpus": "other"}, "corpus"),
        ({"tokenizer": "other"}, "tokenizer"),
        ({"held_out_tokens": 99}, "held-out tokens"),
        ({"manifests": {"store": "e" * 64, "validation_store": "1" * 64}}, "inputs"),
        ({"manifests": {"store": "0" * 64}}, "inputs"),
        ({"science": "1" * 16}, "settings"),
        ({"corpus": None, "science": None}, "corpus"),
    ],
)
def test_trainings_on_other_text_are_not_better_or_worse(tmp_path, origin, named):
    changed = {
        "rates": [2 * rate for rate in RATES],
        "validation_loss": [9.0, 10.0, 11.0, 12.0, 13.0],
    }
    found = compared(tmp_path, b=changed | {"origin": origin})
    assert all(
        named in word and "better" not in word and "worse" not in word for word in verdicts(found)
    )
    assert any(
        row["what differs"].startswith(named) for row in rows_of(found["What may explain it"])
    )
    for path in (tmp_path / "a", tmp_path / "b"):
        record = read_json(path / "provenance.json")
        write_json(path / "provenance.json", record | {"experiments": {}})
    assert all(
        "unrecorded corpus" in word
        for word in verdicts(difference(read(tmp_path / "a"), read(tmp_path / "b")))
    )


@pytest.mark.parametrize("changed", [False, True])
def test_fewer_repeats_are_no_other_settings(tmp_path, changed):
    a = folder(tmp_path / "a", rates=(*RATES, 105.0), validation_loss=[1.0] * 6)
    b = folder(tmp_path / "b", seal="b")
    for path in (a, b):
        record = read_json(path / "provenance.json")
        for run, facts in record["experiments"]["demo"]["runs"].items():
            facts["science"] = run if path == a or not changed else f"{run}-other"
        write_json(path / "provenance.json", record)
    found = difference(read(a), read(b))
    assert all(("settings" in word) == changed for word in verdicts(found))
    named = [
        row["what differs"] for row in rows_of(found.get("What may explain it", Table([], [])))
    ]
    assert ("settings" in named) == changed


def test_cells_of_one_report_alone_are_listed(tmp_path):
    found = compared(tmp_path, b={"cell": "approach=padded"})
    rows = [(row["cell"], row["only in"]) for row in rows_of(found["In one report only"])]
    assert rows == [
        ("approach=packed", str(tmp_path / "a")),
        ("approach=padded", str(tmp_path / "b")),
    ]
    assert "Cells" not in found


HIGHER = [9.0, 10.0, 11.0, 12.0, 13.0]
SHARE = [0.0, 0.1, 0.1, 0.1, 0.1]


@pytest.mark.parametrize(
    ("a", "b", "measure", "found"),
    [
        ({}, {"validation_loss": HIGHER}, "validation_loss", {"verdict": "higher (worse)"}),
        (
            {"rates": RATES[:1]},
            {"rates": [500.0, 501.0, 502.0]},
            "useful_tokens_per_s",
            {"verdict": "too few runs"},
        ),
        (
            {"rates": RATES[:3]},
            {"rates": [500.0, 501.0, 502.0]},
            "useful_tokens_per_s",
            {"verdict": "too few runs"},
        ),
        # which begins with zero
        (
            {"data_stall_share": SHARE},
            {"data_stall_share": SHARE},
            "data_stall_share",
            {"verdict": "within the spread of the runs", "B / A": "–"},
        ),
        (
            {},
            {"validity": ["invalid", *["valid"] * 4]},
            "useful_tokens_per_s",
            {"runs, A and B": "5, 4"},
        ),
    ],
)
def test_a_verdict_takes_runs_that_count_and_enough_of_them(tmp_path, a, b, measure, found):
    (row,) = [
        row for row in rows_of(compared(tmp_path, a, b)["Cells"]) if row["measure"] == measure
    ]
    assert row | found == row


@pytest.mark.parametrize("wrap", [lambda claims: claims, lambda claims: {"claims": claims}])
def test_claims_whose_verdict_differs(tmp_path, wrap):
    same = {"id": "same", "verdict": "supported", "number": 1.0}
    before, after = (
        {"id": "gain", "verdict": v, "number": n}
        for v, n in (("supported", 1.5), ("contradicted", 0.5))
    )
    found = compared(tmp_path, {"claims": wrap([same, before])}, {"claims": wrap([same, after])})
    assert found["Claims whose verdict differs"].rows == [
        ["gain", "1.5", "supported", "0.5", "contradicted"]
    ]
    (tmp_path / "b/claims.json").unlink()
    assert not any(
        "Claims" in name for name in difference(read(tmp_path / "a"), read(tmp_path / "b"))
    )


def test_suspects_are_ranked_by_what_they_could_explain(tmp_path):
    other = {
        "cpu": "Another CPU",
        "packages": {"torch": "2.10.0"},
        "commit": "f" * 40,
        "cores": 64,
        "threads": 32,
    }
    other |= {"manifests": {"store": "0" * 64}, "load": 9.5}
    found = rows_of(compared(tmp_path, b={"origin": other})["What may explain it"])
    assert [row["what differs"] for row in found] == [
        "inputs: store",
        "CPU",
        "cores",
        "threads of a rank",
        "load average when runs began",
        "packages of the training: torch",
        "commit",
        "spread of the runs of a cell, up to",
    ]
    assert (found[1]["A"], found[1]["B"]) == ("A CPU", "Another CPU")
    assert (found[6]["A"], found[6]["B"]) == ("c" * 12, "f" * 12)
    equal = {"origin": {"load": 0.9}}
    left = difference(read(tmp_path / "a"), read(folder(tmp_path / "c", seal="c", **equal)))[
        "What may explain it"
    ]
    assert [row[1:4] for row in left.rows] == [
        ["spread of the runs of a cell, up to", "3.9 %", "3.9 %"]
    ]


@pytest.mark.parametrize("name", ["data/demo/cells.parquet", "claims.json", "provenance.json"])
def test_a_flipped_bit_in_a_report_that_is_compared_is_named(tmp_path, capsys, name):
    a = folder(tmp_path / "a", claims=[])
    b = folder(tmp_path / "b")
    files = [path for path in sorted(a.rglob("*")) if path.is_file()]
    (a / bundle.SUMS).write_text("".join(f"{sha256_file(p)}  {p.relative_to(a)}\n" for p in files))
    assert main(["diff", str(a), str(b), "--output", str(tmp_path / "diff.md")]) == 0
    assert (
        "## Cells\n" in (tmp_path / "diff.md").read_text()
        and "the same runs" in capsys.readouterr().out
    )
    data = bytearray((a / name).read_bytes())
    data[len(data) // 2] ^= 1
    (a / name).write_bytes(data)
    assert main(["diff", str(a), str(b)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tokenscale: a file of a report has changed") and str(a / name) in error
    (b / "data/demo/cells.parquet").write_text("junk")
    with pytest.raises(UserError, match="cannot be read"):
        read(b)
    assert (
        main(["diff", str(tmp_path), str(tmp_path)]) == 2
        and "no report's folder" in capsys.readouterr().err
    )
