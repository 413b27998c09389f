"""Two sets of runs: from folders and from logs in the formats of four trainers the numbers of the
report, and one message for what cannot be compared.
"""

import json
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests.logs import read_runs
from tokenscale.analysis.queries import query
from tokenscale.base.errors import UserError
from tokenscale.cli.main import main
from tokenscale.referee import statistics
from tokenscale.report import run_sets, save
from tokenscale.report.packed_logs import restore
from tokenscale.report.paired_comparisons import RATE, Judged, read_comparisons
from tokenscale.runs.records.external import ExternalRun

pytestmark = pytest.mark.slow(60)

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "evidence/frameworks-cpu-2-cores-2026-11-26/logs.json.xz"
#: trainer → a line of its log; numbers as it prints them, or in full
LINES = {
    "nanoGPT": "iter {step}: loss {loss:{d4}}, time {ms:{d2}}ms, mfu -100.00%",
    "litgpt": "Epoch 1 | iter {step} step {step} | loss train: {loss:{d4}}, val: n/a | iter time: "
    "{ms:{d2}} ms (step) remaining time: 0:00:01",
    "torchtitan": "[titan] - root - INFO - step: {step:2d}  loss: {loss:{d4}}  grad_norm:  1.0000  "
    "memory: 24.00GiB(55%)  tps: {rate:{d2}}  mfu: 3.2%",
    "llm.c": "step {step:4d}/30 | loss {loss:{d4}} (+nanz)| norm 1.0 (+nanz)| lr 0.00e+00 | "
    "{ms:{d2}} ms | {rate:{d2}} tok/s",
    "Megatron": " iteration {step:8d}/ 100 | elapsed time per iteration (ms): {ms:{d2}} | lm loss: "
    "{loss:{d4}} | loss scale: 1.0 |",
    "nanochat": "step {step:05d}/00030 (1.00%) | loss: {loss:{d4}} | lrm: 1.00 | dt: {ms:{d2}}ms | "
    "tok/sec: {rate:{d2}} | total time: 0.10m",
}
#: digits of losses and times: in full, and as the trainers print them
FULL = {"d4": ".12f", "d2": ".12f"}
PRINTED = {"d4": ".4f", "d2": ".2f"}
DECLARED = run_sets.DeclaredFacts(global_batch=8, sequence_length=128, devices=1)
BATCH = 8 * 128
FLAGS = ["--global-batch", "8", "--sequence-length", "128", "--devices", "1"]


def render(trainer: str, losses, seconds, digits=FULL, batch=BATCH) -> str:
    """The log of a trainer."""
    return "".join(
        LINES[trainer].format(step=k, loss=loss, ms=1000 * s, rate=batch / s, **digits) + "\n"
        for k, (loss, s) in enumerate(zip(losses, seconds, strict=True), 1)
    )


def write(
    folder: Path,
    name: str,
    trainer="nanoGPT",
    steps=12,
    loss=4.0,
    step_s=0.1,
    seed=0,
    of_batch=BATCH,
) -> str:
    """A log with 1 % of noise; its path."""
    random = np.random.default_rng([seed, *name.encode()])
    seconds = step_s * np.exp(0.01 * random.normal(size=steps))
    path = folder / name
    path.write_text(render(trainer, loss - 0.01 * np.arange(steps), seconds, batch=of_batch))
    return str(path)


def write_sets(folder: Path, count: int, ratio=1.0, **of_b) -> list[list[str]]:
    """Logs of A, and of B whose steps take `ratio` times as long."""
    return [
        [write(folder, f"a{k}.txt") for k in range(count)],
        [write(folder, f"b{k}.txt", **{"step_s": 0.1 * ratio, **of_b}) for k in range(count)],
    ]


def compare(paths, results: Path, quantities=("throughput",), declared=DECLARED) -> list[Judged]:
    sets = run_sets.name_sets(paths, names=("A", "B"))
    return run_sets.compare(run_sets.write_tables(sets, quantities, declared, results=results))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Folder of the published runs, and trainer → the report's comparison with ours."""
    folder = tmp_path_factory.mktemp("published")
    restore(EVIDENCE, folder)
    primary = json.loads((folder / "experiments/frameworks/runs.json").read_text())["primary"]
    with save.Tables(folder / "tables/frameworks") as tables:
        compared, _ = read_comparisons(tables.rows, primary)
    return folder, {c.pair.names[0]: c for c in compared[: len(primary)]}


def list_runs(folder: Path, of: Judged) -> list[list[str]]:
    """The runs of both sides of a comparison, by repeat."""
    return [
        [str(folder / "runs" / side[repeat][0]) for repeat in sorted(side)]
        for side in (of.pair.values, of.pair.bases)
    ]


def convert(run: str, trainer: str, digits, path: Path) -> str:
    """A run's steps as the log of a trainer."""
    text = (Path(run) / "attempt=00/rank=00000/steps.jsonl").read_text()
    steps = [json.loads(line) for line in text.splitlines()]
    losses = [step["loss_sum"] / step["useful_tokens"] for step in steps]
    path.write_text(render(trainer, losses, [step["step_s"] for step in steps], digits))
    return str(path)


@pytest.mark.parametrize("trainer", ["nanoGPT", "litgpt", "transformers"])
def test_folders_of_runs_give_the_numbers_of_the_report(trainer, published, tmp_path):
    folder, reported = published
    paths = [list(reversed(side)) for side in list_runs(folder, reported[trainer])]
    (found,) = compare(paths, tmp_path)
    assert found.result == reported[trainer].result  # pairs by the recorded repeat, not by place
    assert found.result.spread.n == 7


@pytest.mark.parametrize(("digits", "tolerance"), [(FULL, 1e-9), (PRINTED, 2e-4)])
@pytest.mark.parametrize("trainer", ["nanoGPT", "litgpt"])
def test_logs_of_other_trainers_give_the_numbers_of_the_report(
    trainer, digits, tolerance, published, tmp_path
):
    folder, reported = published
    paths = [
        [
            convert(run, name, digits=digits, path=tmp_path / f"{name}-{k}.txt")
            for k, run in enumerate(side)
        ]
        for name, side in zip(
            (trainer, "torchtitan"), list_runs(folder, reported[trainer]), strict=True
        )
    ]
    (found,) = compare(paths, tmp_path / "results")
    expected = reported[trainer].result
    for name in ("low", "median", "high"):
        value = getattr(expected.spread, name)
        assert getattr(found.result.spread, name) == pytest.approx(value, rel=tolerance)
    assert found.result.ratio == pytest.approx(expected.ratio, rel=tolerance)
    assert (found.result.p, found.result.spread.n) == (expected.p, 7)


@pytest.mark.parametrize("trainer", LINES)
def test_every_trainers_log_gives_its_tokens_and_losses(trainer, tmp_path):
    random = np.random.default_rng(3)
    seconds = 0.05 * np.exp(0.1 * random.normal(size=(4, 20)))
    losses = 5 + random.normal(size=(4, 20))
    paths = []
    for k in range(4):
        paths.append(str(tmp_path / f"{k}.txt"))
        Path(paths[-1]).write_text(render(trainer, losses[k], seconds[k]))
    sets = run_sets.name_sets([paths[:2], paths[2:]], names=("A", "B"))
    tables = run_sets.write_tables(sets, ("throughput", "loss"), DECLARED, results=tmp_path / "r")
    rates = query("throughput", tables).set_index("run_id")["useful_tokens_per_s"]
    found = query("training_loss", tables).set_index("run_id")["loss"]
    assert query("padding", tables).empty, "logs count no padding"
    for k, run in enumerate("0123"):
        assert rates[run] == pytest.approx(BATCH * 17 / seconds[k, 3:].sum())
        assert found[run] == pytest.approx(losses[k, -2:].mean())


@pytest.mark.parametrize(
    ("name", "unit", "counted", "devices"),
    [
        ("tps", "ms", BATCH, 4),  # declared for other logs: this one has its unit
        ("tokens/s", None, BATCH, 1),
        ("tokens/s", None, BATCH, 4),
        ("samples/s", None, 8, 4),
        ("tokens/s/gpu", None, BATCH, 1),
        ("tokens/s/gpu", None, BATCH, 4),
        ("wps", "tokens/s", BATCH, 4),
        ("wps", "samples/s/device", 8, 4),
    ],
)
def test_a_rate_gives_the_time_of_a_step_on_any_number_of_devices(
    name, unit, counted, devices, tmp_path
):
    is_of_a_device = name in ("tps", "tokens/s/gpu") or "device" in (unit or "")
    paths = []
    for k in range(4):
        seconds = 0.05 * np.exp(0.1 * np.random.default_rng(k).normal(size=12))
        rates = counted / seconds / (devices if is_of_a_device else 1)
        paths.append(str(tmp_path / f"{k}.txt"))
        lines = [f"step: {i} loss: {4 - i / 99} {name}: {r:.9f}" for i, r in enumerate(rates)]
        Path(paths[-1]).write_text("\n".join(lines))
    declared = run_sets.DeclaredFacts(8, 128, devices=devices, time_unit=unit)
    (found,) = compare([paths[:2], paths[2:]], tmp_path / "results", declared=declared)
    for repeat, (_, rate) in found.pair.values.items():
        seconds = 0.05 * np.exp(0.1 * np.random.default_rng(repeat).normal(size=12))
        assert rate == pytest.approx(BATCH * 9 / seconds[3:].sum(), rel=1e-6)
    tables = tmp_path / "results/tables/judge"
    cautions = read_runs(tables).to_pandas()["cautions"]
    assert cautions.str.contains("are taken as of").all() == (devices > 1)


def test_a_run_of_ours_on_two_ranks_is_compared_with_logs_of_two_devices(tmp_path):
    ours = []
    for repeat in range(2):
        folder = tmp_path / f"run-{repeat}"
        facts = {"approach": "loop", "steps": 12, "global_batch": 8, "sequence_length": 128}
        ranks = [ExternalRun(folder, **facts, rank=rank, world_size=2) for rank in (1, 0)]
        random = np.random.default_rng(repeat)
        counts = {"useful_tokens": 512, "total_tokens": 512, "rows": 4}
        with ranks[0], ranks[1]:
            for step, rank in product(range(12), ranks):
                loss = 2000 - step + random.normal()
                rank.step(loss_sum=loss, step_s=0.1 + 0.001 * random.random(), **counts)
        ours.append(str(folder))
    logs = write_sets(tmp_path, 2)[0]
    two = run_sets.DeclaredFacts(8, 128, devices=2)
    (found,) = compare([ours, logs], tmp_path / "results", declared=two)
    assert found.result.spread.n == 2
    with pytest.raises(UserError, match="world size"):
        compare([ours, logs], tmp_path / "other")


def test_a_rate_that_stands_beside_no_time_contradicts_no_batch(tmp_path):
    paths = []
    for k in range(4):
        paths.append(str(tmp_path / f"{k}.txt"))
        lines = [
            f"step {i} loss {4 + k - i / 10} " + ("dt: 50.0ms" if i % 2 else "tok/sec: 9.0")
            for i in range(12)
        ]
        Path(paths[-1]).write_text("\n".join(lines))
    (found,) = compare([paths[:2], paths[2:]], tmp_path / "results", ("loss",))
    assert found.result.spread.n == 2


def test_a_run_of_ours_is_compared_with_a_log(published, tmp_path):
    folder, reported = published
    ours, theirs = list_runs(folder, reported["nanoGPT"])
    logs = [
        convert(run, "llm.c", digits=FULL, path=tmp_path / f"c{k}.txt")
        for k, run in enumerate(theirs)
    ]
    (found,) = compare([ours, logs], tmp_path / "results")
    expected = reported["nanoGPT"].result.spread.median
    assert found.result.spread.median == pytest.approx(expected, rel=1e-9)


def test_three_runs_are_told_how_many_would_show_what(tmp_path, capsys):
    a, b = write_sets(tmp_path, 3)
    assert main(["judge", *a, "--over", *b, *FLAGS, "--quantity", "throughput"]) == 0
    shown = capsys.readouterr().out
    assert "too few runs" in shown and "3 pairs: no verdict possible; 6 would show" in shown
    assert "order of the runs and drift are not known" in shown
    assert "losses compare only where both are the same" in shown


@pytest.mark.parametrize("count", [5, 6])
def test_pairs_that_suffice_for_one_quantity_are_told_so(count, tmp_path, capsys):
    a, b = write_sets(tmp_path, count, ratio=1.05)
    assert main(["judge", *a, "--over", *b, *FLAGS]) == 0
    shown = capsys.readouterr().out
    for quantity in ("throughput", "loss"):
        assert (f"--quantity {quantity} takes 6" in shown) == (count == 6)


#: what a log states of its sizes → where: in each step's line, or in a line before them
STATED = {
    "Megatron": ("line", "global batch size: {batch:5d} | "),
    "torchtitan": (
        "before",
        "[titan] - root - INFO - Training starts at step 1, with local batch size 1, "
        "global batch size {batch}, gradient accumulation steps 1, sequence length {length}, "
        "total steps 30 (warmup 2)",
    ),
}


def state_sizes(path: str, trainer: str, **sizes) -> str:
    """The log with its sizes, as the trainer prints them."""
    where, text = STATED[trainer]
    lines = Path(path).read_text().splitlines()
    if where == "before":
        lines = [text.format(**sizes), *lines]
    else:
        lines = [line.replace("lm loss", f"{text.format(**sizes)}lm loss") for line in lines]
    Path(path).write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("trainer", STATED)
def test_sizes_that_a_log_states_need_no_flag_and_contradict_a_wrong_one(trainer, tmp_path):
    a, b = ([write(tmp_path, f"{name}{k}.txt", trainer) for k in range(2)] for name in ("a", "b"))
    of_length = trainer == "torchtitan"
    for path in (*a, *b):
        state_sizes(path, trainer, batch=8, length=128)
    declared = run_sets.DeclaredFacts(None, None if of_length else 128, devices=1)
    (found,) = compare([a, b], tmp_path / "1", declared=declared)
    assert found.result.spread.n == 2
    wrong = [run_sets.DeclaredFacts(16, 128, devices=1)]
    wrong += [run_sets.DeclaredFacts(8, 64, devices=1)] * of_length
    for declared in wrong:
        with pytest.raises(UserError, match="a log states another size than --"):
            compare([a, b], tmp_path / "2", declared=declared)
    other = state_sizes(write(tmp_path, "b1.txt", trainer), trainer, batch=4, length=128)
    with pytest.raises(UserError, match="a log states another size") as error:
        compare([a, [b[0], other]], tmp_path / "3", declared=DECLARED)
    assert error.value.facts["found"] == "4" and error.value.facts["path"] == other


def test_a_text_with_one_loss_is_no_log(tmp_path, capsys):
    a, b = write_sets(tmp_path, 2)
    (tmp_path / "README.md").write_text("# Mine\n\nThe loss 4.2 is that of the last step.\n")
    assert main(["judge", *a, "--over", b[0], str(tmp_path / "README.md"), *FLAGS]) == 2
    shown = capsys.readouterr().err
    assert "README.md" in shown and "one loss, 4.2" in shown


def test_a_file_that_is_no_log_is_named_before_the_count_of_runs(tmp_path, capsys):
    a, _ = write_sets(tmp_path, 2)
    (tmp_path / "empty.txt").write_text("")
    assert main(["judge", *a, "--over", str(tmp_path / "empty.txt"), *FLAGS]) == 2
    assert "empty.txt is empty" in capsys.readouterr().err


def test_the_fewest_pairs_show_the_stated_difference_in_four_of_five_cases():
    random = np.random.default_rng(0)
    pairs = statistics.fewest_pairs()
    effect = statistics.least_shown(random.normal(size=100_000), pairs)
    cases = effect + random.normal(size=(4000, pairs))
    shown = np.mean([statistics.sign_flip_p(case)[0] < statistics.LEVEL for case in cases])
    assert abs(shown - statistics.POWER) < 0.03


def test_a_slower_set_is_found_and_an_equal_one_is_not(tmp_path, capsys):
    a, b = write_sets(tmp_path, 7, ratio=1.05)
    (slower,) = compare([b, a], tmp_path / "one")
    assert slower.verdict == "slower" and 0.94 < slower.result.ratio < 0.965
    same = [write(tmp_path, f"c{k}.txt", "torchtitan", seed=1) for k in range(7)]
    (equal,) = compare([a, same], tmp_path / "two")
    assert equal.verdict in ("equivalent", "no difference shown")


def test_a_run_that_did_not_hold_its_speed_is_suspect(tmp_path):
    a, b = write_sets(tmp_path, 7)
    text = render("nanoGPT", np.full(30, 4.0), np.r_[np.full(15, 0.1), np.full(15, 0.2)])
    Path(a[0]).write_text(text)
    for path in (*a[1:], *b):
        write(tmp_path, Path(path).name, steps=30)
    (found,) = compare([a, b], tmp_path / "results")
    assert any(
        "suspect runs in 1 of 7 pairs: a0 (suspect: no steady state" in n for n in found.notes
    )


def test_the_page_is_rebuilt_from_its_logs_and_nothing_of_this_machine_is_in_it(tmp_path, capsys):
    a, b = write_sets(tmp_path, 2)
    output = tmp_path / "out"
    assert main(["judge", *a, "--over", *b, *FLAGS, "--output", str(output)]) == 0
    assert capsys.readouterr().out.endswith("out/report/index.html\n")
    assert main(["verify", str(output / "report")]) == 0
    capsys.readouterr()
    assert main(["verify", str(output)]) == 0
    assert capsys.readouterr().out == (
        f"note   {output / 'report'}: tokens are not counted again: a report has no token stores\n"
        f"{output}: read runs 4, tables 1, report 1; no faults\n"
    )
    record = (output / "runs/a0/run.json").read_text()
    assert str(tmp_path) not in record and "hardware" not in json.loads(record)
    (output / "mine").write_text("x")
    assert main(["judge", *a, "--over", *b, *FLAGS, "--output", str(output)]) == 2
    assert (output / "mine").read_text() == "x"


def test_repeats_are_chosen_by_name(tmp_path):
    rows = [
        f"{run},{step},{5 - 0.1 * step + k},{100 + k + (7 + k) * step % 11 / 3}"
        for k, run in enumerate("vwxy")
        for step in range(10)
    ]
    file = tmp_path / "all.csv"
    file.write_text("run,step,loss,time_ms\n" + "\n".join(rows))
    paths = [[f"{file}::v", f"{file}::w"], [f"{file}::x", f"{file}::y"]]
    (found,) = compare(paths, tmp_path / "results")
    assert found.result.spread.n == 2 and found.result.ratio > 1.01


def test_runs_of_one_file_with_other_steps_are_refused(tmp_path, capsys):
    rows = [
        f"{run},{step},{5 - 0.01 * step + k},{100 + step % 7 + k}"
        for k, (run, stride) in enumerate([("v", 1), ("w", 1), ("x", 10), ("y", 10)])
        for step in range(0, 20 * stride, stride)
    ]
    file = tmp_path / "all.csv"
    file.write_text("run,step,loss,time_ms\n" + "\n".join(rows))
    v, w, x, y = (f"{file}::{run}" for run in "vwxy")
    assert main(["judge", v, w, "--over", x, y, *FLAGS]) == 2
    said = capsys.readouterr().err
    assert f"{v} has a line for every 1 steps" in said
    assert f"{y} has a line for every 10 steps" in said


def strip(folder: Path, path: str) -> str:
    """The log without its times."""
    Path(path).write_text("".join(f"{k} {5 - k / 10}\n" for k in range(1, 13)))
    return path


def count_up(path: str) -> str:
    """The log with times since its start."""
    Path(path).write_text(
        "".join(f"step {k} loss 4 time {9 * k + ord(path[-5])}ms\n" for k in range(12))
    )
    return path


#: case → (changes the two lists of paths, what the message names)
BAD = {
    "one run": (lambda f, a, b: (a[:1], b), "one run shows no spread"),
    "both sides": (lambda f, a, b: (a, [b[0], a[0]]), "a run is in both sets"),
    "other spelling": (lambda f, a, b: (a, [b[0], f"{f}/../{f.name}/a0.txt"]), "a run is in both"),
    "twice": (lambda f, a, b: ([a[0], a[0]], b), "a run is named twice"),
    "no such file": (lambda f, a, b: (a, [f"{f}/none.txt"]), "there is no such run or log"),
    "no such name": (lambda f, a, b: (a, [b[0], f"{b[1]}::x"]), "has one run, without a name"),
    "another batch": (
        lambda f, a, b: (a, [write(f, Path(p).name, "nanochat", of_batch=16 * 128) for p in b]),
        "2,048 tokens in a step",
    ),
    "no times": (lambda f, a, b: (a, [strip(f, p) for p in b]), "times of 0 of 9 steps"),
    "times since the start": (
        lambda f, a, b: (a, [count_up(p) for p in b]),
        "the times of a log grow with every step",
    ),
    "unequal steps": (
        lambda f, a, b: (a, [write(f, Path(p).name, steps=9) for p in b]),
        "positions trained on",
    ),
    "later steps": (
        lambda f, a, b: (a, [str(later(p)) for p in b]),
        "the logs are of unequal steps",
    ),
    "copies": (lambda f, a, b: (a, [str(copied(p)) for p in a]), "two logs are of one run"),
}


def later(path: str) -> Path:
    text = Path(path).read_text().splitlines(keepends=True)
    Path(path).write_text("".join(text[4:]))
    return Path(path)


def copied(path: str) -> Path:
    new = Path(path).with_name(f"z{Path(path).name}")
    new.write_text(Path(path).read_text())
    return new


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_compared_gets_one_message(case, tmp_path, capsys):
    change, said = BAD[case]
    a, b = change(tmp_path, *write_sets(tmp_path, 2))
    output = tmp_path / "out"
    assert main(["judge", *a, "--over", *b, *FLAGS, "--output", str(output)]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.startswith("tokenscale: ") and not shown.out
    assert "  next" in shown.err and not output.exists()


def test_what_a_log_does_not_state_is_asked_for(tmp_path):
    a, b = write_sets(tmp_path, 2)
    with pytest.raises(UserError, match="how many tokens are in a step") as error:
        compare([a, b], tmp_path / "1", declared=run_sets.DeclaredFacts(8))
    assert error.value.facts["next"] == "add --sequence-length N --devices N"
    with pytest.raises(UserError, match="--devices is 0"):
        compare([a, b], tmp_path / "5", declared=run_sets.DeclaredFacts(8, 128, devices=0))
    for first, path in enumerate((*a, *b), 5):
        Path(path).write_text("".join(f"{k} {first - k / 10} 1.0 0.1\n" for k in range(12)))
    with pytest.raises(UserError, match="the unit of a step's time is not in the log"):
        compare([a, b], tmp_path / "2")
    for first, path in enumerate((*a, *b), 5):
        Path(path).write_text("".join(f"step {k} loss 4 wps {first - k / 10}\n" for k in range(12)))
    with pytest.raises(UserError, match="what a rate counts is not in the log"):
        compare([a, b], tmp_path / "4", declared=run_sets.DeclaredFacts(8, 128, 1, "ms"))
    for path in a:
        strip(tmp_path, path)
    (found,) = compare(
        [a, b], tmp_path / "3", ("loss",), run_sets.DeclaredFacts(8, 128, devices=1, time_unit="s")
    )
    assert found.pair.quantity != RATE and found.result.spread.n == 2


@pytest.mark.parametrize("names", [("x", "x"), ("a=b", "c"), ("", "c"), ("a b", "a-b")])
def test_names_that_do_not_tell_sets_apart_are_refused(names, tmp_path, capsys):
    """Files of one name in two folders are called by their set."""
    for name in "ab":
        (tmp_path / name).mkdir()
    a, b = ([write(tmp_path / name, f"{k}.txt", seed=ord(name)) for k in range(2)] for name in "ab")
    assert main(["judge", *a, "--over", *b, *FLAGS, "--names", *names]) == 2
    assert "name" in capsys.readouterr().err.splitlines()[0]


def test_a_damaged_record_is_not_read_as_a_log(published, tmp_path, capsys):
    folder, reported = published
    ours, theirs = list_runs(folder, reported["nanoGPT"])
    copied = [tmp_path / Path(run).name for run in ours[:2]]
    for source, target in zip(ours, copied, strict=False):
        shutil.copytree(source, target)
        (target / "run.json").write_text("{")
    paths = [*map(str, copied)]
    assert main(["judge", *paths, "--over", *theirs[:2], *FLAGS]) == 2
    assert "run.json is not readable JSON" in capsys.readouterr().err


def test_it_runs_without_torch_and_snakemake(tmp_path):
    a, b = write_sets(tmp_path, 2)
    code = (
        "import sys\nfor name in ('torch', 'snakemake', 'transformers'): sys.modules[name] = None\n"
        f"from tokenscale.cli.main import main\nsys.exit(main({['judge', *a, '--over', *b, *FLAGS]!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "too few runs" in done.stdout, done.stderr


@pytest.mark.parametrize("digits", ["", ".1", ".2"])
def test_times_of_few_digits_make_no_copies(digits, tmp_path):
    random = np.random.default_rng(5)
    paths = []
    for k in range(14):
        times = 100 * np.exp(0.005 * random.normal(size=10))
        paths.append(str(tmp_path / f"{k}.txt"))
        lines = [f"iter {i}: loss 4.{i}, time {t:{digits or '.0'}f}ms" for i, t in enumerate(times)]
        Path(paths[-1]).write_text("\n".join(lines))
    (found,) = compare([paths[:7], paths[7:]], tmp_path / "results")
    assert found.result.spread.n == 7
