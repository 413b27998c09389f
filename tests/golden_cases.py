"""Loss curves of the planted differences and refactorings of `parity_cases`, judged by `tokenscale
golden`.

`python -m tests.golden_cases record CURVES SEED…` trains each case in fp32 and bf16 (3 CPU minutes
a seed); `python -m tests.golden_cases judge CURVES` prints the tables of
`evidence/golden-*/README.md` and writes `packages/golden/src/tokenscale_golden/rates.json`; `python -m
tests.golden_cases draw CURVES docs/golden.png` draws its picture.
"""

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tests.golden_times import simulate
from tests.parity_cases import FAULTS, HELD_OUT, LOOP, LOOP_OURS, REFACTORINGS, Case, L, build, edit
from tokenscale_golden import verdict as golden
from tokenscale_golden.reading import Curve

STEPS = 32
ROWS = 4
LENGTH = 16
VOCABULARY = 96
PRECISIONS = ("fp32", "bf16")


def batches(seed: int, other_from: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return tokens [B, T] and labels of each step, from `other_from` on of other data."""
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(
            1000 * seed + step + (500 if step >= other_from else 0)
        )
        drawn = (torch.rand(ROWS, LENGTH + 1, generator=generator) ** 2.5 * VOCABULARY).long()
        keep = torch.rand(ROWS, LENGTH + 1, generator=generator) < torch.rand(
            ROWS, 1, generator=generator
        )
        tokens = drawn.clone()
        for at in range(1, LENGTH + 1):
            tokens[:, at] = torch.where(
                keep[:, at], (3 * tokens[:, at - 1] + 7) % VOCABULARY, drawn[:, at]
            )
        labels = tokens[:, 1:].clone()
        labels[:, -2:] = -100
        found.append((tokens[:, :-1], labels))
    return found


class LossRecorder:
    """What a golden file holds: the loss and the gradient norm before clipping of each step."""

    def __init__(self, model, optimizer):
        self.losses = []
        self.norms = []
        self._loss = 0.0
        self._squares = {}
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.register_post_accumulate_grad_hook(self._square)
        optimizer.register_step_pre_hook(lambda *_, **__: self._close_step())

    def _square(self, parameter):
        self._squares[parameter] = float(parameter.grad.double().square().sum())

    def _close_step(self):
        self.losses.append(self._loss)
        self.norms.append(sum(self._squares.values()) ** 0.5)
        self._loss = 0.0
        self._squares = {}

    def loss(self, value):
        self._loss += float(value.detach())

    def close(self):
        pass


def train(
    name: str,
    case: Case,
    seed: int,
    precision: str,
    other_from: int = STEPS,
    weights: int | None = None,
):
    loop = {}
    curves = []
    torch.manual_seed(seed)
    exec(edit(LOOP_OURS if name.startswith("ours") else LOOP, case, L), loop)
    model = build(name, case, seed if weights is None else weights)
    model = torch.compile(model) if case.name == COMPILED else model
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        loop["train"](
            lambda *a: curves.append(LossRecorder(*a)) or curves[0],
            model,
            batches(seed, other_from),
        )
    return curves[0].losses, curves[0].norms


COMPILED = "compiled by Inductor"
UNCHANGED = Case("reference", "", L, "", "")
RATE = "PEAK, MICRO_BATCHES, CLIP = 3, 3e-3"
#: what the planted cases lack: name → case, first step of other data (from 0), seed of other
#: weights
OTHERS = {
    "other data from step 1": (UNCHANGED, 0, None),
    "other data from step 2": (UNCHANGED, 1, None),
    "other data from step 9": (UNCHANGED, 8, None),
    "other data from step 17": (UNCHANGED, 16, None),
    "other initial weights": (UNCHANGED, STEPS, 77),
    "other initial weights (2)": (UNCHANGED, STEPS, 78),
    "learning rate times 100": (Case("", "", L, RATE, RATE.replace("3e-3", "3e-1")), STEPS, None),
    "learning rate times 1.01": (
        Case("", "", L, RATE, RATE.replace("3e-3", "3.03e-3")),
        STEPS,
        None,
    ),
}


def record(path: Path, *seeds: str) -> None:
    """Train all cases and write their curves: [precision, seed, group, model, name, losses,
    gradient norms] a line.
    """
    torch.set_num_threads(1)
    models = sorted({case.model for case in FAULTS})
    with path.open("w") as file:
        for precision, seed in itertools.product(PRECISIONS, map(int, seeds)):
            todo = [("reference", model, UNCHANGED, STEPS, None) for model in models]
            for group, cases in (
                ("fault", FAULTS),
                ("held out", HELD_OUT),
                ("refactoring", REFACTORINGS),
            ):
                todo += [(group, case.model, case, STEPS, None) for case in cases]
            for name, (case, start, weights) in OTHERS.items():
                todo += [
                    ("other", model, replace(case, name=name), start, weights) for model in models
                ]
            if seed == 0:
                todo += [
                    ("refactoring", "ours-gpt", replace(UNCHANGED, name=COMPILED), STEPS, None)
                ]
            for group, model, case, start, weights in todo:
                curve = train(model, case, seed, precision, start, weights)
                row = [precision, seed, group, model, case.name, case.reference or model, *curve]
                print(json.dumps(row), file=file, flush=True)


#: rounding-only changes that measure the floor of each model; a case is not judged by itself
FLOORS = {
    "ours-gpt": (
        "GELU by its formula",
        "hidden units in another order",
        "renamed, fused and transposed (GPT-2)",
    ),
    "ours-llama": (
        "attention by matrix products",
        "RMSNorm by its formula",
        "our trainer's update",
    ),
    "gpt2": ("eager attention", "rows in another order", "renamed, fused and transposed (GPT-2)"),
    "llama": ("eager attention (Llama)", "other implementation of AdamW", "our trainer's update"),
}
#: changes of the model's code or of the loss's that leave the loss of step 1 as it was, and reach
#: it by the update
BY_UPDATE = {
    *(
        "weights untied",
        "no bias in a layer",
        "residual stream detached",
        "norm without its weight",
    ),
    *("embeddings not updated", "gradient of the last micro-batch only"),
}
LOSS = {case.name for case in FAULTS[24:34]} | {"loss over all positions"}


def kinds_of(group: str, case: Case) -> set[str]:
    if group == "refactoring":
        return {golden.IDENTICAL, golden.ROUNDING}
    if group == "other":
        name = case.name
        if name.startswith("learning rate"):
            return {golden.UPDATE, golden.DIVERGED} if "100" in name else {golden.UPDATE}
        return {golden.DATA if "data" in name else golden.WEIGHTS}
    if case.name in BY_UPDATE or (case.where == L and case.name not in LOSS):
        return {golden.UPDATE}
    also = {"square weight not transposed": {golden.WEIGHTS}, "micro-batch dropped": {golden.DATA}}
    return {golden.MODEL} | also.get(case.name, set())


def judge_all(path: Path) -> list[dict]:
    """Return the verdict of each recorded case, with floor runs and without."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    curves = {
        (p, s, group, name, model): Curve.of(*curve) for p, s, group, model, name, _, *curve in rows
    }
    cases = {case.name: case for case in FAULTS + HELD_OUT + REFACTORINGS}
    found = []
    for p, s, group, model, name, reference, *_ in rows:
        if group == "reference":
            continue
        case = replace(cases.get(name, UNCHANGED), name=name)
        runs = [
            curves[p, s, "refactoring", n, cases[n].model] for n in FLOORS[reference] if n != name
        ]
        fp32 = p == "fp32"
        for known, floors, told in (("floor", runs, fp32), ("none", [], False), ("fp32", [], True))[
            : 2 + fp32
        ]:
            old = curves[p, s, "reference", "reference", reference]
            new = curves[p, s, group, name, model]
            verdict = golden.judge(old, new, floors, told)
            right = kinds_of(group, case)
            # a real change that it shows
            right |= {golden.NORM} if group != "refactoring" else set()
            score = "cannot tell" if verdict.kind == golden.UNKNOWN else "wrong"
            if verdict.kind in right:
                score = "right"
            row = {
                "precision": p,
                "seed": s,
                "group": group,
                "model": model,
                "name": name,
                "known": known,
            }
            found.append(row | {"right": max(right), "score": score, "verdict": verdict})
    return found


#: what the command is told
KNOWN = {
    "floor": "With two or three floor runs",
    "none": "Without floor runs",
    "fp32": "Without floor runs, by --fp32",
}


def print_tables(found: list[dict]) -> None:
    for known, title in KNOWN.items():
        mine = [row for row in found if row["known"] == known]
        print(f"\n## {title}\n")
        print(
            "| cases | precision | judged | right | cannot tell | wrong "
            "|\n|---|---|---|---|---|---|"
        )
        for group, precision in itertools.product(
            ("fault", "held out", "other", "refactoring"), PRECISIONS
        ):
            scores = [
                row["score"]
                for row in mine
                if (row["group"], row["precision"]) == (group, precision)
            ]
            if not scores:
                continue
            counts = [scores.count(score) for score in ("right", "cannot tell", "wrong")]
            print(
                f"| {group} | {precision} | {len(scores)} | " + " | ".join(map(str, counts)) + " |"
            )
        truths = sorted({row["right"] for row in mine if row["group"] != "refactoring"}) + [
            "refactoring"
        ]
        print(
            "\n| truth | "
            + " | ".join(golden.KINDS)
            + " |\n"
            + "|---" * (len(golden.KINDS) + 1)
            + "|"
        )
        for truth in truths:
            kinds = [
                r["verdict"].kind
                for r in mine
                if truth == (r["group"] if r["group"] == truth else r["right"])
            ]
            print(
                f"| {truth} | "
                + " | ".join(str(kinds.count(kind) or "") for kind in golden.KINDS)
                + " |"
            )
        wrong = {}
        for row in (row for row in mine if row["score"] == "wrong"):
            times = row["verdict"].reason.rpartition(" times the floor")[0].rpartition(" ")[2]
            key = row["group"], row["name"], row["model"], row["precision"], row["verdict"].kind
            wrong.setdefault(key, []).append(
                times if row["verdict"].kind == golden.ROUNDING and known == "floor" else "yes"
            )
        print(
            "\n| wrong | case | model | precision | answer | seeds: times the floor "
            "|\n|---|---|---|---|---|---|"
        )
        for key, times in wrong.items():
            print("| " + " | ".join([*key, ", ".join(times)]) + " |")


#: one example of each kind: precision, group, case, model
EXAMPLES = {
    golden.IDENTICAL: ("bf16", "refactoring", "fused AdamW", "llama"),
    golden.ROUNDING: ("bf16", "refactoring", "linear layers by matrix products", "ours-gpt"),
    golden.MODEL: ("bf16", "fault", "label smoothing", "ours-gpt"),
    golden.UPDATE: ("bf16", "fault", "warm-up longer", "gpt2"),
    golden.DATA: ("bf16", "other", "other data from step 9", "llama"),
    golden.WEIGHTS: ("bf16", "other", "other initial weights", "gpt2"),
    golden.DIVERGED: ("bf16", "other", "learning rate times 100", "llama"),
    golden.NORM: ("fp32", "fault", "exact GELU in place of tanh", "ours-gpt"),
    golden.UNKNOWN: ("bf16", "fault", "decay on norms and biases", "gpt2"),
}


def draw(curves_path: Path, target: Path) -> None:
    """Draw one example of each kind: relative differences by step, and the floor."""
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in curves_path.read_text().splitlines()]
    curves = {
        (p, group, name, m): (ref, Curve.of(*curve))
        for p, s, group, m, name, ref, *curve in rows
        if not s
    }
    cases = {case.name: case for case in REFACTORINGS}
    figure, axes = plt.subplots(5, 2, figsize=(7, 11), sharex=True, layout="constrained")
    for axis, (kind, key) in zip(axes.flat, EXAMPLES.items(), strict=False):
        reference, new = curves[key]
        old = curves[key[0], "reference", "reference", reference][1]
        floors = [curves[key[0], "refactoring", n, cases[n].model][1] for n in FLOORS[reference]]
        verdict = golden.judge(old, new, floors, key[0] == "fp32")
        assert verdict.kind == kind, (kind, verdict)
        norm = kind == golden.NORM
        x, y, *runs = ((curve.norm if norm else curve.loss) for curve in (old, new, *floors))
        repeats = [(old, run) for run in (x, *runs)]
        if floor := golden._measure_floor(old.steps, repeats, unit=0 * x, low=0 * x):
            axis.fill_between(
                old.steps, 1e-9, floor.size / x, color="0.85", label="within the floor"
            )
        axis.plot(
            old.steps,
            np.maximum(abs(y - x) / x, 1e-9),
            ".-",
            color="C0",
            markersize=4,
            linewidth=0.8,
        )
        axis.set(yscale="log", ylim=(1e-9, 3), title=f"{verdict.title}\n({key[2]})")
        axis.set_ylabel("gradient norm" if norm else "loss")
    generator = np.random.default_rng(0)
    axis = axes.flat[-1]
    for label, change in (("OLD", 0.0), ("NEW", 0.05)):
        axis.plot(
            old.steps,
            1000 * simulate(generator, STEPS, change),
            ".-",
            markersize=4,
            linewidth=0.8,
            label=label,
        )
    axis.set(title=f"{golden.SPEED}\n(simulated, 5 % slower)", ylabel="ms a step", ylim=(380, 480))
    axis.legend(fontsize=7)
    axes[0, 0].legend(fontsize=7, loc="upper left")
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("relative difference", fontsize=9)
    for axis in axes.flat:
        axis.title.set_fontsize(8)
        axis.tick_params(labelsize=7)
    figure.savefig(target, dpi=90)


def print_layouts() -> None:
    """Print the verdicts between the golden losses of all layouts of
    `tests/golden/layouts.json`.
    """
    values = json.loads((Path(__file__).parent / "golden/layouts.json").read_text())["values"]
    pairs = [*itertools.combinations(values.values(), 2)]
    kinds = [golden.judge(Curve.of(old), Curve.of(new)).kind for old, new in pairs]
    print(
        f"\n{len(values)} layouts, {len(pairs)} pairs:",
        {kind: kinds.count(kind) for kind in sorted({*kinds})},
    )


def write_rates(found: list[dict], source: str) -> None:
    """Write how often each answer was right: what the command prints as `sure`."""
    rates = {"source": source, **{known: {} for known in KNOWN}}
    for kind, known in itertools.product(golden.KINDS, KNOWN):
        scores = [
            row["score"] for row in found if row["known"] == known and row["verdict"].kind == kind
        ]
        if scores and kind not in (golden.UNKNOWN, golden.IDENTICAL):
            rates[known][kind] = [scores.count("right"), len(scores)]
    (Path(golden.__file__).parent / "rates.json").write_text(json.dumps(rates, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "record":
        record(Path(sys.argv[2]), *sys.argv[3:])
    elif sys.argv[1] == "draw":
        draw(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        judged = judge_all(Path(sys.argv[2]))
        print_tables(judged)
        print_layouts()
        write_rates(judged, "evidence/golden-2026-11-26")
