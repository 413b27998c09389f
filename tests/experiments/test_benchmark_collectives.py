import json
import statistics

import pytest

from tokenscale.base.errors import UserError
from tokenscale.benchmark import collectives
from tokenscale.cli.main import main
from tokenscale.costs.communication import fit_link

pytestmark = pytest.mark.experiment

SIZES = [4096, 32772, 262144]


@pytest.mark.distributed
def test_everything_has_its_turn_in_each_round_and_is_fitted_to_medians_with_bandwidths_of_nccl_tests(
    tmp_path,
):
    measured = collectives.measure(tmp_path / "out.json", sizes=SIZES, rounds=3, device="cpu")
    assert json.loads((tmp_path / "out.json").read_text()) == measured
    cells = [(name, size) for name in collectives.COLLECTIVES for size in (4096, 32768, 262144)]
    rounds = [
        [(r["collective"], r["bytes"]) for r in measured["records"] if r["round"] == n]
        for n in range(3)
    ]
    assert all(sorted(found) == sorted(cells) for found in rounds)
    assert len(set(map(tuple, rounds))) == 3
    assert all(r["seconds"] > 0 and r["calls"] >= collectives.FEWEST for r in measured["records"])
    assert (measured["backend"], measured["world_size"], measured["nodes"]) == ("gloo", 2, 1)
    assert (
        measured["latency"] == "ring"
        and measured["versions"]["torch"]
        and measured["hardware"]["cores"]
    )
    for name, found in measured["fits"].items():
        cells = {}
        for r in measured["records"]:
            cells.setdefault((r["collective"], r["bytes"]), []).append(r["seconds"])
        times = [statistics.median(cells[name, size]) for size in (4096, 32768, 262144)]
        link, residuals = fit_link(name, (4096, 32768, 262144), times, 2, "ring")
        assert (found["alpha_s"], found["beta_s_per_byte"]) == (link.alpha_s, link.beta_s_per_byte)
        assert [r["relative"] for r in found["residuals"]] == residuals
        assert len(found["alpha_s_of_rounds"]) == len(found["beta_s_per_byte_of_rounds"]) == 3
    lines = collectives.format_table(measured).splitlines()
    row = next(
        line.split() for line in lines if line.startswith("all_gather ") and " 262144 " in line
    )
    microseconds = float(row[2])
    algorithm = float(row[4])
    bus = float(row[5])
    assert algorithm == pytest.approx(262144 / microseconds / 1e3, rel=0.05, abs=1e-3)
    assert bus == pytest.approx(algorithm / 2, abs=1e-3)


def test_several_nodes_are_fitted_by_what_each_rank_sends_between_them():
    link = {"alpha_s": 1e-4, "beta_s_per_byte": 5e-11}
    sizes = [2**n for n in range(20, 27)]
    seconds = {size: 2 * link["alpha_s"] + link["beta_s_per_byte"] * size / 4 for size in sizes}
    records = [
        {"collective": "all_reduce", "bytes": s, "round": 0, "seconds": t}
        for s, t in seconds.items()
    ]
    result = {
        "nodes": 2,
        "ranks_per_node": 4,
        "world_size": 8,
        "latency": "tree",
        "records": records,
    }
    found = collectives._fit_link(result, "all_reduce")
    assert {key: found[key] for key in link} == pytest.approx(link)


def test_a_collective_named_twice_is_measured_once_and_a_rank_that_fails_is_told(monkeypatch):
    seen = []
    monkeypatch.setattr(
        collectives, "run_ranks", lambda argv, world_size: seen.append(json.loads(argv[3])) or 3
    )
    with pytest.raises(UserError, match="a rank of the sweep failed"):
        collectives.measure(sizes=SIZES, collectives=["all_gather", "all_reduce", "all_gather"])
    assert seen[0]["collectives"] == ["all_gather", "all_reduce"]


def test_a_sweep_that_says_nothing_is_refused(capsys):
    for arguments, said in (
        ("--world-size 1", "--world-size must be at least 2"),
        ("--rounds 0", "--rounds must be at least 1"),
        ("--sizes 4096", "at least two sizes"),
        ("--sizes 4 4096", "at least one number per rank"),
        ("--sizes 4096 4100", "others are rounded down to one"),
        ("--collectives all_reduse", "did you mean 'all_reduce'"),
    ):
        assert main(["benchmark", "collectives", *arguments.split()]) == 2
        assert said in capsys.readouterr().err
