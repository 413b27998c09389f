"""Planted one-line differences and harmless refactorings in the installed code of other trainers, for their certificates.

`python -m tests.arm_cases` runs all of them and prints the tables of `evidence/parity-arms-*/README.md`. It needs the
environments of three arms: `snakemake --cores 1 results/arms/{nanoGPT,litgpt,transformers}/environment.json`.
"""

# ruff: noqa: E501

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.arms.prepared import ARMS, python_of, source_of
from tokenscale.arms.train import read_steps, run_adapter, write_contract
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json
from tokenscale.data.batches.batch import Batch
from tokenscale.parity.certificate import EQUAL, ROUNDING, certify, compare
from tokenscale.parity.recorder import FLOOR_VARIABLE
from tokenscale.parity.recording import Recording, read_recording
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import BudgetSettings, OptimizerSettings, RunSettings, ScheduleSettings, ValidationSettings

ROWS, MICRO_BATCH, LENGTH, VOCABULARY, STEPS = 4, 2, 16, 96, 8
LLAMA = replace(PRESETS["llama-tiny"], layers=4, dimension=32, hidden=96)
GPT = replace(PRESETS["gpt2-tiny"], layers=4, dimension=32, hidden=128)
#: with the same warm-up nanoGPT, litgpt and the Trainer have other rates, so that their adapters refuse it
CONSTANT = ScheduleSettings(shape="constant", warmup_steps=0)
COSINE = ScheduleSettings(shape="cosine", warmup_steps=0)
#: the kernel `fused` is left to a refactoring, so that faults can be planted in the Python code of AdamW
OPTIMIZER = OptimizerSettings(learning_rate=3e-3, weight_decay=0.1, clip_norm=0.25, fused=False)
#: references: arm, model and schedule
SETTINGS = {
    "nanoGPT": ("nanoGPT", GPT, COSINE),
    "litgpt": ("litgpt", LLAMA, CONSTANT),
    "transformers, Llama": ("transformers", LLAMA, CONSTANT),
    "transformers, GPT-2": ("transformers", GPT, CONSTANT),
}
#: what an arm's process imports in place of an installed module; `loaded` shows that it did
SITECUSTOMIZE = """
import importlib.util
import pathlib
import sys


class Edited:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            pathlib.Path({loaded!r}).touch()
            return importlib.util.spec_from_file_location(name, {path!r})


sys.meta_path.insert(0, Edited)
"""


@dataclass(frozen=True)
class Case:
    """One change of a trainer. `expected` is a pattern of the cause's text; None for a refactoring.

    `file` is what is edited: the arm's `adapter.py`, a file of its repository (`model.py`), or an installed module
    (`litgpt.model`).
    """

    name: str
    setting: str
    file: str
    old: str
    new: str
    expected: str | None = None


ADAPTER = "adapter.py"
NANO, LIT, HF_LLAMA, HF_GPT = SETTINGS

# fmt: off
FAULTS = [
    # nanoGPT: model
    Case("LayerNorm epsilon 1e-6", NANO, "model.py", "self.bias, 1e-5)", "self.bias, 1e-6)", r"norm epsilon of transformer\.h\.0\.ln_1: 1e-05 in A, 1e-06 in B"),
    Case("tanh approximation of GELU", NANO, "model.py", "nn.GELU()", "nn.GELU(approximate='tanh')", r"activation of transformer\.h\.0\.mlp.*erf.*tanh"),
    Case("no causal mask", NANO, "model.py", "is_causal=True", "is_causal=False", r"mask of transformer\.h\.0\.attn.*causal in A, none in B"),
    Case("scores not scaled", NANO, "model.py", "is_causal=True", "is_causal=True, scale=1.0", r"scale of the scores of transformer\.h\.0\.attn"),
    Case("MLP branch halved", NANO, "model.py", "x + self.mlp(", "x + 0.5 * self.mlp(", r"weight of the output of \S+mlp\.c_proj in the sum"),
    Case("positions one late", NANO, "model.py", "pos = torch.arange(0, t, dtype=torch.long, device=device)", "pos = torch.arange(-1, t - 1, dtype=torch.long, device=device).clamp(min=0)", r"positions or ids"),
    Case("norm before attention left out", NANO, "model.py", "self.attn(self.ln_1(x))", "self.attn(x)", r"does not call the modules of transformer\.h\.0\.ln_1"),
    Case("head not tied", NANO, "model.py", "self.transformer.wte.weight = self.lm_head.weight", "pass", r"weight tying"),
    Case("logits halved", NANO, "model.py", "logits = self.lm_head(x)", "logits = self.lm_head(x) / 2", r"logits are changed.*0\.5"),
    Case("dropout 0.1", NANO, "train.py", "dropout = 0.0 #", "dropout = 0.1 #", r"dropout"),
    # nanoGPT: loss and batches
    Case("loss summed", NANO, "model.py", "ignore_index=-1)", "ignore_index=-1, reduction='sum')", r"reduction of the cross-entropy: mean in A, sum in B"),
    Case("labels not shifted", NANO, "train.py", "(data[i+1:i+1+block_size])", "(data[i:i+block_size])", r"label shift"),
    Case("accumulated gradient not divided", NANO, "train.py", "loss = loss / gradient_accumulation_steps", "loss = loss", r"scale of the gradient: B's is 2 of A's"),
    Case("micro-batch without a backward pass", NANO, "train.py", "scaler.scale(loss).backward()", "micro_step and scaler.scale(loss).backward()", r"dropped micro-batch"),
    # nanoGPT: optimizer
    Case("clipping off", NANO, ADAPTER, '"grad_clip": optimizer["clip_norm"] or 0.0', '"grad_clip": 0.0', r"gradient clipping.*off in B"),
    Case("decay on norms and biases", NANO, "model.py", "{'params': nodecay_params, 'weight_decay': 0.0}", "{'params': nodecay_params, 'weight_decay': weight_decay}", r"weight decay of (norms|biases) and (norms|biases): 0 in A, 0\.1 in B"),
    Case("Adam in place of AdamW", NANO, "model.py", "torch.optim.AdamW(optim_groups", "torch.optim.Adam(optim_groups", r"decoupled weight decay"),
    Case("optimizer epsilon 1e-6", NANO, "model.py", "betas=betas, **extra_args)", "betas=betas, eps=1e-6, **extra_args)", r"epsilon of the optimizer of all parameters: 1e-08 in A, 1e-06 in B"),
    Case("beta2 0.999", NANO, ADAPTER, 'betas = optimizer["beta1"], optimizer["beta2"]', 'betas = optimizer["beta1"], 0.999', r"betas of all parameters"),
    Case("warm-up of 3 steps", NANO, ADAPTER, '"warmup_iters": 0', '"warmup_iters": 3', r"learning rate of all parameters.*warm-up"),
    Case("learning rate one step late", NANO, "train.py", "get_lr(iter_num)", "get_lr(max(iter_num - 1, 0))", r"one step late"),
    Case("decay to zero", NANO, ADAPTER, 'peak * schedule["floor"]', '0.0', r"decay of the learning rate"),
]

REFACTORINGS = [
    Case("GELU by its formula", NANO, "model.py", "x = self.gelu(x)", "x = 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))"),
    Case("LayerNorm by its formula", NANO, "model.py", "return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)", "return (input - input.mean(-1, keepdim=True)) * torch.rsqrt(input.var(-1, unbiased=False, keepdim=True) + 1e-5) * self.weight + self.bias"),
    Case("attention by matrix products", NANO, "model.py", "self.flash = hasattr(torch.nn.functional, 'scaled_dot_product_attention')", "self.flash = False"),
    Case("residual sum in another order", NANO, "model.py", "x = x + self.attn(self.ln_1(x))", "x = self.attn(self.ln_1(x)) + x"),
    Case("cross-entropy by log_softmax", NANO, "model.py", "F.cross_entropy(logits.view(-1, logits.size(-1)),", "F.nll_loss(F.log_softmax(logits.view(-1, logits.size(-1)), dim=-1),"),
    Case("head in two halves", NANO, "model.py", "logits = self.lm_head(x)", "logits = torch.cat([F.linear(x, half) for half in self.lm_head.weight.chunk(2)], dim=-1)"),
    Case("clipping by hand", NANO, "train.py", "torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)", "torch._foreach_mul_([p.grad for p in model.parameters()], min(1.0, grad_clip / (sum(p.grad.double().square().sum() for p in model.parameters()).sqrt().item() + 1e-6)))"),
    Case("fused AdamW", NANO, "model.py", "use_fused = fused_available and device_type == 'cuda'", "use_fused = fused_available"),
]
# fmt: on


class Sequences:
    """Batches of random tokens: the same sequences for every arm."""

    vocabulary_size = VOCABULARY

    def __init__(self):
        self.step = 0

    def next(self) -> Batch:
        """Return the batch of the next step."""
        rows = np.random.default_rng(self.step).integers(1, VOCABULARY, (ROWS, LENGTH + 1))
        self.step += 1
        return Batch.from_arrays(rows[:, :-1], rows[:, 1:], self.step)


def run_of(setting: str) -> RunSettings:
    """Return the run of a reference."""
    arm, model, schedule = SETTINGS[setting]
    return RunSettings(
        arm=arm,
        model=model,
        sequence_length=LENGTH,
        packing="concatenate",
        labels="stream",
        global_batch=ROWS,
        micro_batch=MICRO_BATCH,
        budget=BudgetSettings(steps=STEPS),
        schedule=schedule,
        optimizer=OPTIMIZER,
        validation=ValidationSettings(rows=0),
        device="cpu",
    )


def edit(path: Path, case: Case) -> str:
    """Return the text of a file with a case's edit, which must apply exactly once."""
    text = path.read_text(encoding="utf-8")
    count = text.count(case.old)
    assert count == 1, f"{case.setting}: {case.name}: {case.old!r} is {count} times in {path}, expected once"
    return text.replace(case.old, case.new)


def plant(case: Case, arm: str, record: Path, folder: Path) -> tuple[str, Path | None]:
    """Write an edited copy of one file for the process of `folder`. Return its adapter's folder, and its marker.

    The marker exists after the run if an installed module was imported from the copy; None for other files. Nothing
    is written outside `folder`.
    """
    if case.file == ADAPTER:
        copy = folder / "adapter"
        copy.mkdir()
        (copy / ADAPTER).write_text(edit(ARMS / arm / ADAPTER, case), encoding="utf-8")
        return str(copy.resolve()), None  # joined to the folder of arms, an absolute path stays as it is
    if case.file.endswith(".py"):
        source = folder / "source"
        shutil.copytree(source_of(record), source, ignore=shutil.ignore_patterns(".git", "data", "assets"))
        (source / case.file).write_text(edit(source_of(record) / case.file, case), encoding="utf-8")
        contract = folder / "contract.json"
        contract.write_text(json.dumps(read_json(contract) | {"source": str(source.resolve())}), encoding="utf-8")
        return arm, None
    (packages,) = python_of(record).parents[1].glob("lib/python3*/site-packages")
    original = packages.joinpath(*case.file.split(".")).with_suffix(".py")
    path, loaded = folder.resolve() / "edited.py", folder.resolve() / "loaded"
    path.write_text(edit(original, case), encoding="utf-8")
    text = SITECUSTOMIZE.format(module=case.file, path=str(path), loaded=str(loaded))
    (folder / "lib/sitecustomize.py").write_text(text, encoding="utf-8")
    return arm, loaded


@dataclass
class References:
    """Recordings of the unchanged arms with two floors each, made once; `records` are those of the environments."""

    folder: Path
    records: dict[str, Path]
    _found: dict[str, Recording] = field(default_factory=dict)

    def get(self, setting: str) -> Recording:
        """Return the recording of a setting."""
        if setting not in self._found:
            folder = self.folder / re.sub(r"\W+", "-", setting)
            for floor in range(3):
                self.record(setting, folder, floor=floor)
            self._found[setting] = read_recording(folder)
        return self._found[setting]

    def record(self, setting: str, folder: Path, case: Case | None = None, floor: int = 0) -> None:
        """Run an arm, with the edit of a case, and record it in `folder`. Raises RuntimeError if it fails."""
        arm, work = SETTINGS[setting][0], self.folder / "work"
        record = self.records[arm]
        expected = write_contract(run_of(setting), Sequences(), work, record=record, recording=folder)
        adapter, loaded = plant(case, arm, record, work) if case else (arm, None)
        variables = {"OMP_NUM_THREADS": "1"} | ({FLOOR_VARIABLE: str(floor)} if floor else {})
        reason = run_adapter(adapter, record, work, variables=variables)
        if reason is None and (case is None or case.expected is None):
            _, reason = read_steps(work, expected)
        if reason is None and loaded and not loaded.exists():
            reason = f"{case.file} was not imported"
        if reason is not None:
            raise RuntimeError(f"{setting}: {case.name if case else 'reference'}: {reason}")

    def certificate_of(self, case: Case) -> dict[str, Any]:
        """Return the certificate of a case against its reference."""
        folder = self.folder / "case"
        reference = self.get(case.setting)
        shutil.rmtree(folder, ignore_errors=True)
        self.record(case.setting, folder, case)
        return certify(compare(reference, read_recording(folder)))


def judge(case: Case, certificate: dict[str, Any]) -> str:
    """Return `named`, `found`, `missed`, `equal…` or `false alarm`."""
    if certificate["verdict"] in (EQUAL, ROUNDING):
        return certificate["verdict"] if case.expected is None else "missed"
    if case.expected is None:
        return "false alarm"
    return "named" if certificate["cause"] and re.search(case.expected, certificate["cause"]["text"]) else "found"


def describe(certificate: dict[str, Any]) -> str:
    """Return the cause, or the largest ratio to the floor."""
    if certificate["cause"]:
        return certificate["cause"]["text"]
    worst = max((row["largest_ratio_to_floor"], stage) for stage, row in certificate["stages"].items())
    return f"at most {worst[0]:.2g} × floor ({worst[1]})"


def run(cases: list[Case], references: References) -> Iterator[tuple[Case, str, str]]:
    """Yield each case with its result and its cause."""
    for case in cases:
        try:
            certificate = references.certificate_of(case)
            yield case, judge(case, certificate), describe(certificate)
        except (RuntimeError, UserError) as error:
            yield case, "failed", " ".join(str(error).split())


def find_records() -> dict[str, Path]:
    """Return the records of the arms' environments in this checkout, whether they exist or not."""
    return {arm: Path("results/arms") / arm / "environment.json" for arm in ("nanoGPT", "litgpt", "transformers")}


def main() -> None:
    """Print the tables of all cases, or of those whose name or arm contains an argument."""
    records, only, began = find_records(), sys.argv[1:], time.monotonic()
    if missing := [str(path) for path in records.values() if not path.is_file()]:
        sys.exit(f"environments of arms are missing; next: snakemake --cores 1 {' '.join(missing)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        references = References(Path(folder), records)
        for title, cases in (("planted difference", FAULTS), ("refactoring", REFACTORINGS)):
            print(f"\n| {title} | arm | result | cause that the certificate names |\n|---|---|---|---|", flush=True)
            chosen = [case for case in cases if not only or any(w in (case.name, case.setting, title) for w in only)]
            for case, result, cause in run(chosen, references):
                print(f"| {case.name} | {case.setting} | {result} | {cause} |", flush=True)
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
