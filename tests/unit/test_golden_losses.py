"""`tokenscale golden`: layouts of files, kinds of changes, speed, folders, declared changes and bad
input.
"""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.golden_times import simulate
from tokenscale.cli.main import main
from tokenscale_golden.history import derive_floors
from tokenscale_golden.platforms import Platform
from tokenscale_golden.reading import Curve, GoldenError, read
from tokenscale_golden.speed import compare_speed
from tokenscale_golden.verdict import judge

STEPS = 40
AT = np.arange(STEPS)


def curve(seed: int = 0) -> np.ndarray:
    """Return losses of steps: a falling trend, and batches that differ."""
    return 4 + 6 * np.exp(-AT / 15) + np.random.default_rng(seed).normal(0, 0.08, STEPS)


LOSSES = curve()
NORMS = 1 + LOSSES / 10


def lines(template: str, losses=LOSSES, start: int = 1) -> str:
    return (
        "\n".join(
            template.format(step=i, loss=v, norm=1 + v / 10) for i, v in enumerate(losses, start)
        )
        + "\n"
    )


def write(folder: Path, text: str | bytes, name: str = "new.txt") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def megatron(losses, **options) -> str:
    values = {str(i): float(v) for i, v in enumerate(losses, 1)}
    facts = {
        "start_step": 1,
        "end_step": len(losses),
        "step_interval": 1,
        "values": values,
    } | options
    times = {key: "nan" if key == "1" else 0.4 for key in values}
    return json.dumps(
        {"lm loss": facts, "iteration-time": {"values": times}, "num-zeros": {"values": values}}
    )


TITAN = (
    "[rank0]:\x1b[32m[titan] 2025-03-04 15:03:43 - root - INFO - \x1b[31mstep: {step:2d}  "
    "\x1b[32mloss: {loss:.5f}  "
    "\x1b[38mgrad_norm:  {norm:.4f}  \x1b[33mmemory: 24.00GiB(55%)  tps: 12,500  mfu: 3.2%\x1b[0m"
)
MEGATRON = (
    " [2025-01-01 10:00:00] iteration {step:8d}/  100 | consumed samples: 8 | elapsed time per "
    "iteration (ms): 400.1 | "
    "learning rate: 1.5E-04 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {norm:.4f} | "
    "skipped iterations: 0 |"
)
NANO = (
    "iter {step}: loss {loss:.5f}, time 123.45ms, mfu 3.4%\nstep {step}: train loss 9.0, val "
    "loss 9.9"
)
LLMC = (
    "step {step:4d}/100 | loss {loss:.6f} (+nanz)| norm {norm:.4f} (+nanz)| lr 0.00e+00 | 345.01 "
    "ms | 152345 tok/s"
)
WANDB = '"Step","a - train/loss","a - train/loss__MIN","a - val/loss"\n' + lines(
    '"{step}","{loss}","0","1"'
)
ROWS = [{"step": i, "loss": float(v), "grad_norm": 1 + v / 10} for i, v in enumerate(LOSSES, 1)]
LAYOUTS = {
    "step loss": lines("{step} {loss:.5f}"),
    "step loss norm": lines("{step}\t{loss:.5f}\t{norm:.4f}"),
    "step loss norm time, comments": "# golden\n" + lines("{step} {loss:.5f} {norm:.4f} 0.41"),
    "header": "step loss\n" + lines("{step} {loss:.5f}"),
    "decimal commas": lines("{step} {loss:.5f}").replace(".", ","),
    "Megatron's JSON": megatron(LOSSES),
    "Megatron's older JSON": megatron(LOSSES, values=[*map(float, LOSSES)]),
    "Megatron's older JSON, no start": megatron(
        LOSSES, values=[*map(float, LOSSES)], start_step=None, step_interval="x"
    ),
    "JSON, lists": json.dumps({"loss": [*LOSSES], "grad_norm": [*NORMS]}),
    "JSON, trainer state": json.dumps({"log_history": [*ROWS, {"step": STEPS, "eval_loss": 3.0}]}),
    "JSON lines, cut": "\n".join(map(json.dumps, ROWS)) + '\n{"step": 41, "lo',
    "JSON, one row a line, one line": json.dumps(ROWS),
    "CSV": "step,loss,val_loss,grad_norm\n" + lines("{step},{loss:.5f},9.9,{norm:.4f}"),
    "CSV, cut": "step,loss,grad_norm\n" + lines("{step},{loss:.5f},{norm:.4f}") + "41,4.0",
    "CSV, decimal commas": "step;loss\n" + lines("{step};{loss:.5f}").replace(".", ","),
    "W&B's CSV": WANDB,
    "output of torchtitan": lines(TITAN),
    "output of Megatron": lines(MEGATRON),
    "output of nanoGPT": lines(NANO),
    "output of llm.c": lines(LLMC),
    "output without steps": "\n".join(
        str({"loss": round(float(v), 5), "learning_rate": 5e-5}) for v in LOSSES
    ),
    "UTF-16": lines("{step} {loss:.5f}").encode("utf-16"),
    "Windows": ("\ufeff" + lines("{step} {loss:.5f}").replace("\n", "\r\n")).encode(),
    "from step 0": lines("{step} {loss:.5f}", start=0),
    "numbers, cut": lines("{step} {loss:.5f} {norm:.4f}") + "41",
    "CSV behind a comment": "# golden\nstep,loss\n" + lines("{step},{loss:.5f}"),
    "TensorBoard's CSV": "Wall time,Step,Value\n" + lines("1.7e9,{step},{loss:.5f}"),
    "JSON, loss by step": json.dumps({str(i): loss for i, loss in enumerate(LOSSES, 1)}),
    "JSON, metrics by step": json.dumps({str(row["step"]): row for row in ROWS}),
    "fairseq": lines("epoch 001: loss={loss:.5f}, ppl=100, gnorm={norm:.4f}, num_updates={step}"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_same_losses(layout, tmp_path):
    found = read(write(tmp_path, LAYOUTS[layout]))
    assert found.loss == pytest.approx(LOSSES, abs=6e-6) and len(found.steps) == STEPS
    if found.norm is not None:
        assert found.norm == pytest.approx(NORMS, abs=6e-5)
    assert judge(Curve.of(LOSSES), found).kind == "identical"


def test_times_are_seconds_of_steps(tmp_path):
    assert read(write(tmp_path, LAYOUTS["Megatron's JSON"])).time[1:] == pytest.approx(0.4)
    assert np.isfinite(read(write(tmp_path, lines(NANO))).time).all()
    faster = read(write(tmp_path, lines(TITAN.replace("12,500", "25,000")))).time
    # from tokens per second
    assert read(write(tmp_path, lines(TITAN))).time == pytest.approx(2 * faster)


@pytest.mark.parametrize(
    ("line", "time", "unit"),
    [
        ("iter {step}: loss 4.1, time 123.45ms, mfu 3.4%", 123.45, "ms"),
        (
            "Epoch 1 | iter {step} | loss train: 4.1 | iter time: 120.5 ms (step) left: 0:01",
            120.5,
            "ms",
        ),
        (
            "step {step:05d}/9 | loss: 4.1 | dt: 12.5ms | tok/sec: 424,242 | total time: 1m",
            12.5,
            "ms",
        ),
        (
            "[rank 0] Step: {step} | Loss: 4.1 | Tokens/s: 12.5K | Tokens/s/GPU: 1.5K",
            1 / 12500,
            "tokens/s",
        ),
        (
            "step {step}/9 | loss 4.1 (+nanz)| norm 1 | 345.01 ms | 30 % bf16 MFU | 152345 tok/s",
            345.01,
            "ms",
        ),
        ("step {step} loss 4.1 step_time 0.5s", 0.5, "s"),
        ("step {step} loss 4.1 samples/s 4.0", 0.25, "samples/s"),
        ("step: {step}  loss: 4.1  memory: 24.00GiB(55%)  tps: 8.0", 0.125, "tokens/s/device"),
        ("step {step} loss 4.1 tokens/sec/gpu 8.0", 0.125, "tokens/s/device"),
        ("step {step} loss 4.1 wps 8.0", 0.125, "rate/s"),
        ("step {step} loss 4.1 dt 0.5", 0.5, ""),
    ],
)
def test_the_unit_of_a_time_is_the_one_that_the_log_states(line, time, unit, tmp_path):
    found = read(write(tmp_path, lines(line)))
    assert found.time == pytest.approx(time) and found.time_unit == unit
    assert found.loss == pytest.approx(4.1) and len(found.steps) == STEPS


def test_tensorboard_events_are_read(tmp_path, monkeypatch):
    summary = pytest.importorskip("torch.utils.tensorboard")
    with summary.SummaryWriter(tmp_path / "run") as writer:
        for step, loss in enumerate(LOSSES, 1):
            writer.add_scalar("train/loss", loss, step)
            writer.add_scalar("val/loss", 9.9, step)
    assert judge(Curve.of(LOSSES.astype("float32")), read(tmp_path / "run")).kind == "identical"
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(GoldenError, match="pip install tensorboard"):
        read(tmp_path / "run")


def test_blanks_of_a_log_change_nothing_but_take_no_time(tmp_path):
    """With each blank tried as the end of a name, a line of 900 takes half a minute."""
    plain = [f"step {s} loss {float(LOSSES[s])!r} note" for s in range(STEPS)]
    wide = [line.replace(" ", " " * 9) + " " * 900 for line in plain]
    found = [
        read(write(tmp_path, "\n".join(lines), f"{name}.log"))
        for name, lines in {"plain": plain, "wide": wide}.items()
    ]
    assert found[0].loss.tolist() == found[1].loss.tolist() == list(LOSSES)


def test_logs_of_a_run_are_summed_over_ranks_and_attempts(tmp_path):
    for attempt, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        steps = range(30) if attempt == 0 else range(20, STEPS)
        rows = [
            {"step": s, "loss_sum": LOSSES[s] * 10 * (1 + rank), "useful_tokens": 10 * (1 + rank)}
            for s in steps
        ]
        text = "\n".join(
            json.dumps(row | {"own_s": 0.1, "forward_s": 0.2, "step_s": 0.4}) for row in rows
        )
        write(tmp_path, text, f"run/attempt=0{attempt}/rank=0000{rank}/steps.jsonl")
    assert (
        read(tmp_path / "run").loss == pytest.approx(LOSSES)
        and (read(tmp_path / "run").time == 0.4).all()
    )
    with (tmp_path / "run/attempt=01/rank=00001/steps.jsonl").open("a") as file:
        # as a loss that is not finite is logged
        file.write('\n{"step": 40, "loss_sum": null, "useful_tokens": 20}')
    verdict = judge(Curve.of([*LOSSES, 4.0]), read(tmp_path / "run"))
    assert verdict.kind == "diverged or not finite" and verdict.step == 41


@pytest.mark.parametrize("lost", ["null", "NaN", '"nan"', "-Infinity"])
def test_a_loss_that_is_not_finite_is_not_passed_over(lost, tmp_path):
    losses = [*map(str, LOSSES[:20]), lost, *map(str, LOSSES[21:])]
    rows = [f'{{"step": {i}, "loss": {loss}}}' for i, loss in enumerate(losses, 1)]
    # of another metric of a step that has a loss
    rows.insert(5, '{"step": 5, "loss": null, "val_loss": 9.0}')
    for text in ("\n".join(rows), f'{{"lm loss": {{"values": [{",".join(losses)}]}}}}'):
        verdict = judge(Curve.of(LOSSES), read(write(tmp_path, text)))
        assert verdict.kind == "diverged or not finite" and verdict.step == 21


def test_steps_of_a_resumed_run_replace_the_earlier_ones(tmp_path):
    text = lines("step {step} loss {loss:.5f}", LOSSES[:30] + 1) + lines(
        "step {step} loss {loss:.5f}", LOSSES[9:], 10
    )
    found = read(write(tmp_path, text))
    assert found.loss[9:] == pytest.approx(LOSSES[9:], abs=6e-6) and found.notes
    assert found.loss[:9] == pytest.approx(LOSSES[:9] + 1, abs=6e-6)


def test_runs_and_columns_are_chosen_by_name(tmp_path):
    rows = [f"{run},{i},{v + k}" for k, run in enumerate("xy") for i, v in enumerate(LOSSES)]
    path = write(tmp_path, "run,step,loss\n" + "\n".join(rows), "runs.csv")
    assert read(f"{path}::y").loss == pytest.approx(LOSSES + 1)
    path = write(tmp_path, "step,loss_a,loss_b\n" + lines("{step},{loss},{norm}"), "columns.csv")
    assert read(f"{path}::loss_b").loss == pytest.approx(NORMS)
    for chosen in ("", "::z"):
        with pytest.raises(GoldenError, match="loss_a.*loss_b"):
            read(f"{path}{chosen}")


REFUSED = {
    "empty": ("", "empty"),
    "blank": (" \n\n", "empty"),
    "binary": (bytes(range(256)), "binary"),
    "prose": ("Once upon a time\n", "Once upon a time"),
    "one column": ("4.2\n4.1\n", "4.2"),
    "CSV without losses": ("step,accuracy\n1,0.5\n", "step,accuracy"),
    "validation losses only": ("step,val_loss\n1,0.5\n", "val_loss"),
    "decimal commas between commas": ("step,loss\n1,4,25\n", "1,4,25"),
    "a JSON number": ("12", "12"),
    "JSON without losses": ('{"accuracy": {"1": 0.5}}', "accuracy"),
    "steps that are no numbers": ('{"loss": {"first": 0.5}}', "first"),
    "columns swapped": (lines("{loss:.5f} {step}"), "columns swapped"),
    "words behind numbers": (
        lines("{step} {loss}") + "Training ended after all steps\n",
        "Training ended",
    ),
    "words before numbers": ("A line\n" + lines("{step} {loss}"), "A line"),
    "JSON that nests deeper": ('{"a": {"b": {"loss": 4.0}}}', "'a'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_shown_in_one_message(name, tmp_path, capsys):
    content, shown = REFUSED[name]
    good = write(tmp_path, LAYOUTS["step loss"], "old.txt")
    for old, new in ((good, write(tmp_path, content)), (write(tmp_path, content), good)):
        assert main(["golden", str(old), str(new)]) == 2
        out, err = capsys.readouterr()
        assert not out and shown in err and "new.txt" in err and "Traceback" not in err


def test_other_bad_input_ends_with_exit_code_2(tmp_path, capsys):
    good = write(tmp_path, LAYOUTS["step loss"], "old/a.txt")
    for arguments in (
        [good, tmp_path / "missing"],
        [good, good.parent],
        [good.parent, good.parent, "--floor", good],
        [good, good, "--expect", "magic"],
        [good.parent, write(tmp_path, "", "other/b.txt").parent],
        [f"{good}::run", good],
    ):
        assert main(["golden", *map(str, arguments)]) == 2
        err = capsys.readouterr().err
        assert err.startswith("tokenscale: ") and "\n  next  " in err


def rounded(size: float | np.ndarray, seed: int = 5) -> np.ndarray:
    return LOSSES * (1 + size * 1.05**AT * np.random.default_rng(seed).normal(size=STEPS))


def from_step(step: int, other: np.ndarray) -> np.ndarray:
    return np.where(step - 1 > AT, LOSSES, other)


BF16 = [rounded(1e-4, seed) for seed in (1, 2, 3)]
SLOWER = LOSSES * (1 + 0.0005 * AT)
KINDS = {
    "the same": (LOSSES, [], "identical"),
    "rounding of fp32": (rounded(5e-8), [], "rounding"),
    "rounding of bf16": (rounded(1e-4), BF16, "rounding"),
    "rounding of bf16, no floor": (rounded(1e-4), [], "cannot tell"),
    "a small change within bf16's rounding, no floor": (LOSSES * (1 + 2e-4), [], "cannot tell"),
    "a floor that measures nothing": (rounded(1e-4), [LOSSES, LOSSES], "cannot tell"),
    "a floor of other data is left out": (
        LOSSES + 0.1,
        [*BF16, curve(7)],
        "other loss, mask or model",
    ),
    "a floor that diverged is left out": (rounded(1e-4), [*BF16, LOSSES + AT], "rounding"),
    "beyond the floor by little": (rounded(4e-4), BF16, "cannot tell"),
    "within the floor, with one sign": (LOSSES * (1 + 1e-4), BF16, "cannot tell"),
    "other weights": (LOSSES * (1 + 4e-3 * np.cos(AT * 0.9)), [], "other initial weights"),
    "other data from step 12": (from_step(12, curve(7)), [], "other data"),
    "other data from step 2": (from_step(2, curve(7)), BF16, "other data"),
    "other data from step 1": (curve(7), [], "other data"),
    "other data that are harder": (from_step(20, curve(7) + 0.5), [], "other data"),
    "label smoothing": (LOSSES + 0.3, [], "other loss, mask or model"),
    "loss times two": (2 * LOSSES, BF16, "other loss, mask or model"),
    "a small loss on top": (LOSSES + 0.05, BF16, "other loss, mask or model"),
    "other learning rate": (SLOWER, BF16, "other update"),
    "other learning rate, no floor": (LOSSES * (1 + 0.002 * AT), [], "other update"),
    "decay from step 20 on": (LOSSES * (1 + 0.002 * np.maximum(0, AT - 19)), [], "other update"),
    "rounding that grows above the noise": (rounded(1e-5 * 1.3**AT), [], "cannot tell"),
    "NaN at step 5": (
        from_step(5, np.where(AT == 4, np.nan, LOSSES)),
        [],
        "diverged or not finite",
    ),
    "infinity at the end": (
        np.where(AT == STEPS - 1, np.inf, LOSSES),
        BF16,
        "diverged or not finite",
    ),
    "NaN behind another update": (np.where(AT > 30, np.nan, SLOWER), [], "diverged or not finite"),
    "rising": (from_step(10, LOSSES + AT), [], "diverged or not finite"),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name):
    new, floors, kind = KINDS[name]
    floors = [Curve.of(floor) for floor in floors]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdict = judge(Curve.of(LOSSES), Curve.of(new), floors)
    assert verdict.kind == kind, verdict
    differ = np.flatnonzero(new != LOSSES)
    assert kind == "identical" or verdict.step in (
        differ[0] + 1,
        *np.flatnonzero(~np.isfinite(new))[:1] + 1,
    )
    assert judge(Curve.of(new), Curve.of(new), floors).kind == "identical"


@pytest.mark.parametrize(
    "size, told",
    [(1e-5, "other loss, mask or model"), (1e-4, "other loss, mask or model"), (1e-7, "rounding")],
)
def test_floor_runs_of_fp32_s_rounding_decide_nothing_in_bf16(size, told):
    floors = [Curve.of(rounded(1e-7, seed)) for seed in (4, 5)]
    new = Curve.of(rounded(size, 6))
    unknown = "rounding" if size < 1e-6 else "cannot tell"
    assert judge(Curve.of(LOSSES), new, floors).kind == judge(Curve.of(LOSSES), new).kind == unknown
    for runs in (floors, []):
        assert judge(Curve.of(LOSSES), new, runs, fp32=True).kind == told, runs


def test_gradient_norms_that_move_alone_are_a_kind_of_their_own():
    old = Curve.of(LOSSES, NORMS)
    assert judge(old, Curve.of(LOSSES, 1.02 * NORMS)).kind == "gradient norm only"
    assert judge(old, Curve.of(LOSSES, NORMS * (1 + 1e-5))).kind == "identical"
    # where losses are as near as fp32 rounds them
    for size, kind in ((1e-7, "rounding"), (1e-4, "cannot tell")):
        assert judge(old, Curve.of(rounded(5e-8), NORMS * (1 + size))).kind == kind
    floors = [Curve.of(loss, NORMS * loss / LOSSES) for loss in BF16]
    assert judge(old, Curve.of(rounded(1e-4), 1.02 * NORMS), floors).kind == "gradient norm only"
    assert (
        judge(old, Curve.of(rounded(1e-4), NORMS * rounded(1e-4) / LOSSES), floors).kind
        == "rounding"
    )
    moved = judge(old, Curve.of(SLOWER, 0.9 * NORMS), floors)
    assert moved.kind == "other update" and "gradient norm" in moved.reason


@pytest.mark.parametrize("digits", [2, 3, 4])
def test_few_printed_digits_hide_what_they_cannot_show(digits, tmp_path):
    printed = read(write(tmp_path, lines(f"{{step}} {{loss:.{digits}f}}")))
    assert judge(Curve.of(LOSSES), printed).kind == "identical"  # as far as the digits show
    moved = read(
        write(tmp_path, lines(f"{{step}} {{loss:.{digits}f}}", LOSSES + 10.0**-digits), "moved.txt")
    )
    assert judge(printed, moved).kind == "cannot tell"
    assert judge(printed, read(write(tmp_path, lines("{step} {loss}", 1.2 * LOSSES)))).kind not in (
        "identical",
        "rounding",
    )


def test_few_steps_of_a_difference_are_no_verdict():
    for count in (1, 2):
        floors = [Curve.of(run[:count]) for run in BF16]
        assert (
            judge(Curve.of(LOSSES[:count]), Curve.of(rounded(1e-4)[:count]), floors).kind
            == "cannot tell"
        )
    assert judge(Curve.of(LOSSES[:3]), Curve.of(LOSSES[:3] + [0, 0, 0.1])).kind == "cannot tell"
    assert judge(Curve.of(LOSSES[:1]), Curve.of(LOSSES[:1] + 1)).kind == "other loss, mask or model"


def test_common_steps_are_compared(tmp_path):
    far = read(write(tmp_path, lines("{step} {loss}", start=900), "far.txt"))
    assert judge(Curve.of(LOSSES), far).kind == "cannot tell"
    every = read(write(tmp_path, lines("{step} {loss:.5f}")))
    fifth = read(
        write(tmp_path, "\n".join(lines("{step} {loss:.5f}").splitlines()[4::5]), "fifth.txt")
    )
    verdict = judge(every, fifth)
    assert verdict.kind == "identical" and "8 steps in common" in verdict.notes[0]
    assert "shifted" in judge(every, read(write(tmp_path, LAYOUTS["from step 0"]))).notes[0]
    zero = [replace(Curve.of(run), steps=AT) for run in (rounded(4e-4), *BF16)]
    # a floor is shifted, too
    assert judge(Curve.of(LOSSES), zero[0], zero[1:]).kind == "cannot tell"
    lost = np.where(AT == 3, np.nan, LOSSES)
    assert judge(Curve.of(lost), Curve.of(lost)).kind == "identical"
    assert judge(Curve.of(lost), Curve.of(from_step(12, curve(7)) + 0 * lost)).kind == "other data"
    assert judge(Curve.of(0 * lost + np.nan), Curve.of(np.nan * lost)).kind == "cannot tell"
    later = judge(fifth, read(write(tmp_path, lines("{step} {loss:.5f}", LOSSES + 0.5))))
    assert later.kind == "cannot tell"  # step 1 is not known: a model or an update


@pytest.mark.parametrize("steps", [20, 40, 100])
def test_speed_that_moved_is_told_from_drift_noise_and_outliers(steps):
    generator = np.random.default_rng(steps)
    still = [
        compare_speed(simulate(generator, steps), simulate(generator, steps)) for _ in range(500)
    ]
    assert np.mean([speed.moved for speed in still]) <= 0.05
    for change in (0.05, -0.05):
        moved = [
            compare_speed(simulate(generator, steps), simulate(generator, steps, change))
            for _ in range(150)
        ]
        assert np.mean([speed.moved and speed.change * change > 0 for speed in moved]) >= 0.9


def test_speed_is_a_kind_where_losses_are_equal(tmp_path):
    generator = np.random.default_rng(0)
    old, slow, other = (Curve.of(losses) for losses in (LOSSES, LOSSES, 2 * LOSSES))
    old.time, slow.time, other.time = (
        simulate(generator, STEPS, change) for change in (0, 0.2, 0.2)
    )
    assert judge(old, slow).kind == "speed only" and judge(old, other).speed.moved
    assert judge(old, other).kind == "other loss, mask or model"
    slow.time = old.time * np.linspace(1, 1.1, STEPS)
    drifting = judge(old, slow)
    assert drifting.kind == "identical" and drifting.speed.drifts[1] > 0.05


@pytest.fixture
def folders(tmp_path):
    for name, losses in {
        "same": LOSSES,
        "data": from_step(12, curve(7)),
        "sub/lr": LOSSES * (1 + 0.002 * AT),
    }.items():
        write(tmp_path, lines("{step} {loss:.5f}"), f"old/{name}.txt")
        write(tmp_path, lines("{step} {loss:.5f}", losses), f"new/{name}.txt")
    return [str(tmp_path / name) for name in ("old", "new")]


def test_a_folder_is_one_table_worst_first_and_declared_changes_pass(folders, capsys):
    assert main(["golden", *folders]) == 1
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["data.txt", "sub/lr.txt", "same.txt"]
    assert {row.count("|") for row in rows} == {rows[0].count("|")}
    assert main(["golden", *folders, "--expect", "other data"]) == 1
    assert (
        main(
            ["golden", *folders, "--expect", "other data from step 12", "--expect", "other update"]
        )
        == 0
    )
    assert main(["golden", folders[0], folders[0]]) == 0
    assert main(["golden", f"{folders[0]}/data.txt", f"{folders[1]}/data.txt", "--markdown"]) == 1
    rows = capsys.readouterr().out.splitlines()[-3:]  # of one curve, too
    assert "other data from step 12" in rows[2] and rows[1].startswith("|---|")


def test_files_without_a_partner_or_losses_do_not_pass_in_silence(folders, capsys):
    os.remove(f"{folders[1]}/data.txt")
    Path(folders[1], "same.txt").write_text("| not | losses |\n")
    for folder in folders:  # has none in both
        Path(folder, "settings.yaml").write_text("steps: 40\n")
    assert main(["golden", *folders, "--expect", "other update"]) == 1
    out = capsys.readouterr().out
    assert out.count("cannot tell") == 2 and "settings" not in out


def test_the_floor_of_a_folder_is_found_by_name(tmp_path):
    names = ["old", "new", "one", "two", "three"]
    for folder, losses in zip(names, (LOSSES, rounded(1e-4), *BF16), strict=True):
        write(tmp_path, lines("{step} {loss}", losses), f"{folder}/a.txt")
    floor = ["--floor", f"{tmp_path}/one", f"{tmp_path}/two", f"{tmp_path}/three"]
    assert main(["golden", f"{tmp_path}/old", f"{tmp_path}/new"]) == 1
    assert main(["golden", f"{tmp_path}/old", f"{tmp_path}/new", *floor]) == 0


def test_the_command_starts_without_torch(tmp_path):
    old = str(write(tmp_path, LAYOUTS["step loss"], "old.txt"))
    code = (
        f"import sys; from tokenscale.cli.main import main; main(['golden', {old!r}, {old!r}]); "
        "print(*sys.modules)"
    )
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "pandas", "pydantic", "tensorboard", "tokenscale.settings"} & {*modules}


def drifted(losses, seed, size=4e-4):
    """Return losses whose differences begin at 1e-5 of the loss and grow to `size`, as those of
    rounding do."""
    grown = np.geomspace(1e-5, size, STEPS)
    return losses * (1 + grown * np.random.default_rng(seed).uniform(-1, 1, STEPS))


def learned(losses, size):
    """Return losses of another model, which lie on one side."""
    return losses * (1 - size * (1 + AT) / STEPS)


def commit(folder: Path, losses) -> None:
    write(folder, lines("{step} {loss:.9f}", losses), "losses.txt")
    for command in (
        "init -q",
        "add .",
        "-c user.name=a -c user.email=a@b commit -q --allow-empty -m losses",
    ):
        subprocess.run(["git", *command.split()], cwd=folder, check=True)


def test_earlier_versions_in_git_show_what_rounding_is(tmp_path, capsys):
    """A real change lies between them, which is none of it."""
    real = learned(LOSSES, 0.02)
    for losses in (LOSSES, drifted(LOSSES, 1), real, drifted(real, 2), drifted(real, 3)):
        commit(tmp_path, losses)
    old = tmp_path / "losses.txt"
    new = write(tmp_path, lines("{step} {loss:.9f}", drifted(read(old).loss, 4, size=2e-4)))
    assert main(["golden", str(old), str(new)]) == 1
    assert capsys.readouterr().out.startswith("cannot tell")
    assert main(["golden", str(old), str(new), "--history"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("rounding") and "earlier versions: 3 changes" in told
    assert "sure" not in told
    write(tmp_path, lines("{step} {loss:.9f}", learned(read(old).loss, 9e-4)))
    assert main(["golden", str(old), str(new), "--history"]) == 1
    assert "times the floor at most, beyond it" in capsys.readouterr().out


@pytest.mark.parametrize(
    "versions",
    [
        [LOSSES],
        [LOSSES, drifted(LOSSES, 1)],
        [LOSSES, drifted(LOSSES, 1), learned(LOSSES, 1e-3)],
        [LOSSES, learned(LOSSES, 0.01), learned(LOSSES, 0.03)],
        [LOSSES, LOSSES, LOSSES],
    ],
)
def test_one_small_change_or_large_ones_are_no_floor(versions):
    assert derive_floors(Curve.of(LOSSES), [Curve.of(losses) for losses in versions]) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_second_platform_moves_alike_by_a_real_change_and_otherwise_by_rounding(seed):
    old = Curve.of(LOSSES)
    beside = drifted(LOSSES, 100 + seed)

    def judged(new, other) -> str:
        second = Platform(Curve.of(beside), Curve.of(other))
        return judge(old, Curve.of(new), second=second).kind

    real = learned(LOSSES, 2e-3)
    assert judged(real, learned(beside, 2e-3)) == "other loss, mask or model"
    moved = drifted(LOSSES, 200 + seed)
    assert judged(moved, drifted(beside, 300 + seed)) in ("rounding", "cannot tell")
    assert judged(moved, beside) == "cannot tell"
    assert judged(learned(LOSSES, 5e-4), learned(beside, 5e-4)) == "cannot tell"


def test_history_needs_a_tracked_file_and_git(tmp_path, capsys, monkeypatch):
    old = write(tmp_path, lines("{step} {loss:.9f}"), "losses.txt")
    told = ["golden", str(old), str(old), "--history"]
    assert main(told) == 2 and "git does not know" in capsys.readouterr().err
    commit(tmp_path, LOSSES)
    other = write(tmp_path, lines("{step} {loss:.9f}"), "untracked.txt")
    assert main(["golden", str(other), str(old), "--history"]) == 2
    assert "tracked file" in capsys.readouterr().err
    commit(tmp_path / "binary", LOSSES)
    broken = write(tmp_path / "binary", b"\xff\x00", "broken.txt")
    commit(tmp_path / "binary", LOSSES)
    write(tmp_path / "binary", lines("{step} {loss:.9f}"), "broken.txt")
    assert main(["golden", str(broken), str(old), "--history"]) == 2
    assert "no version of" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(told) == 2 and "needs git" in capsys.readouterr().err


def test_folders_are_compared_with_their_history_and_a_second_platform(tmp_path, capsys):
    folders = [tmp_path / name for name in ("old", "new", "second-old", "second-new")]
    real = learned(LOSSES, 2e-3)
    beside = drifted(LOSSES, 5)
    for folder, losses in zip(folders, (LOSSES, real, beside, learned(beside, 2e-3)), strict=True):
        write(folder, lines("{step} {loss:.9f}", losses), "a.txt")
    old, new, *second = map(str, folders)
    assert main(["golden", old, new, "--second", *second, "--markdown"]) == 1
    assert "| a.txt | other loss, mask or model |" in capsys.readouterr().out
