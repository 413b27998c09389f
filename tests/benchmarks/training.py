"""Benchmark of a training step against a plain loop over `transformers`, and against its Trainer.

Same model, weights and batches in one process, with interleaved arms in each round. Each arm uses
fused AdamW, clips to norm 1 and trains in fp32. The last position of each row is ignored in all
arms, since the peers shift labels themselves.
"""

import contextlib
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import write_json
from tokenscale.benchmark.rounds import format_columns, format_spread, group_by, interleave
from tokenscale.cli.main import Parser, exit_code
from tokenscale.data.batches.batch import Batch, Batches, Inputs
from tokenscale.data.stores.documents import IGNORED
from tokenscale.runs.records import provenance
from tokenscale.runs.records.provenance import find_versions
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import (
    BudgetSettings,
    OptimizerSettings,
    RunSettings,
    ScheduleSettings,
    ValidationSettings,
)
from tokenscale.train.loop import Training
from tokenscale.train.models.convert_hf import to_hf
from tokenscale.train.parallel.world import World

OURS = "tokenscale"
LOOP = "transformers, plain loop"
TRAINER = "transformers, Trainer"
#: target for bookkeeping per step, in microseconds: 0.1 % of a step of 100 ms
TARGET_US = 100.0
RATE = 1e-4


class Arm(Protocol):
    """A training loop under test."""

    def first_loss(self) -> float:
        """Return the loss in nats per label before any training."""
        ...

    def __call__(self, steps: int) -> list[float]:
        """Return the seconds of each of `steps` training steps."""
        ...


def measure(
    output: Path | None,
    *,
    models: tuple[str, ...] = ("llama-tiny", "llama-small", "gpt2-tiny"),
    sequence_length: int = 256,
    rows: int = 8,
    vocabulary_size: int = 4096,
    steps: int = 10,
    rounds: int = 5,
) -> dict[str, Any]:
    """Measure seconds of each step by model, arm and round, without the first step of a round
    (warm-up).

    Raises UserError if `transformers` is missing, and if the arms compute different losses. The
    Trainer needs `accelerate`; without it that arm is left out, as the result records.
    """
    for model in models:
        if model not in PRESETS:
            raise unknown("model preset", model, PRESETS, flag="--models")
    result: dict[str, Any] = {
        "settings": {
            "sequence_length": sequence_length,
            "rows": rows,
            "vocabulary_size": vocabulary_size,
            "steps": steps,
            "rounds": rounds,
            "threads": torch.get_num_threads(),
        },
        "hardware": provenance.describe_machine(),
        "versions": find_versions(),
        "left_out": [],
        "records": [],
    }
    for model in models:
        batches = _make_batches(rows, sequence_length, vocabulary_size, steps + 1)
        with tempfile.TemporaryDirectory() as folder:
            ours = _TokenscaleArm(model, vocabulary_size, sequence_length, batches, Path(folder))
            arms: dict[str, Arm] = {OURS: ours, LOOP: _PlainLoopArm(_convert_model(ours), batches)}
            try:
                arms[TRAINER] = _HuggingFaceArm(_convert_model(ours), batches, Path(folder))
            except ImportError as error:
                result["left_out"].append(f"{TRAINER}: {error}".splitlines()[0])
            losses = {name: arm.first_loss() for name, arm in arms.items()}
            if max(losses.values()) - min(losses.values()) > 1e-4 * min(losses.values()):
                raise UserError(
                    "the arms compute different losses, so their times cannot be compared.",
                    losses=losses,
                    next="report a bug, with the losses",
                )
            for number, name in interleave(list(arms), rounds):
                seconds = arms[name](steps)
                result["records"].append(
                    {"model": model, "arm": name, "round": number, "step_s": seconds}
                )
            result["records"][-1]["own_s"] = ours.own()
    if output is not None:
        write_json(output, result)
    return result


def format_table(result: dict[str, Any]) -> str:
    """Format the median step of each arm with its range, and the ratio to each peer by round."""
    rows = [("model", "arm", "step ms (rounds)", f"{OURS} / this arm")]
    notes = []
    for model, records in group_by(result["records"], "model").items():
        rounds = {
            arm: [statistics.median(r["step_s"]) for r in sorted(of_arm, key=lambda r: r["round"])]
            for arm, of_arm in group_by(records, "arm").items()
        }
        for arm in [OURS, *(name for name in rounds if name != OURS)]:
            ratios = [mine / theirs for mine, theirs in zip(rounds[OURS], rounds[arm], strict=True)]
            milliseconds = format_spread([1e3 * median for median in rounds[arm]], ".1f")
            rows.append(
                (model, arm, milliseconds, format_spread(ratios, ".3f") if arm != OURS else "")
            )
        own = [1e6 * seconds for record in records for seconds in record.get("own_s", ())]
        notes.append(
            f"{model}: bookkeeping a step {format_spread(own, '.0f')} us; target {TARGET_US:.0f} us"
        )
    return "\n".join(
        [format_columns(rows, 2), *notes, *(f"left out: {text}" for text in result["left_out"])]
    )


def _make_batches(rows: int, length: int, vocabulary_size: int, count: int) -> list[Batch]:
    random = np.random.default_rng(0)
    found = []
    for step in range(count):
        tokens = random.integers(0, vocabulary_size, (rows, length))
        labels = np.full_like(tokens, IGNORED)
        labels[:, :-1] = tokens[:, 1:]
        found.append(Batch.from_arrays(tokens, labels, step))
    return found


class _RepeatedBatches(Batches):
    """Given batches, repeated endlessly."""

    def __init__(self, batches: list[Batch], vocabulary_size: int):
        self.vocabulary_size = vocabulary_size
        self._batches = batches

    def rows_per_epoch(self) -> float:
        return float("inf")

    def next(self) -> Batch:
        self._step += 1
        return self._batches[(self._step - 1) % len(self._batches)]


class _TokenscaleArm:
    """Complete training loop of a run, including log, status, progress and garbage collection."""

    def __init__(
        self, model: str, vocabulary_size: int, length: int, batches: list[Batch], folder: Path
    ):
        run = RunSettings(
            model=PRESETS[model].with_vocabulary(vocabulary_size),
            sequence_length=length,
            global_batch=len(batches[0].tokens_bt),
            micro_batch=len(batches[0].tokens_bt),
            budget=BudgetSettings(steps=10**6),
            schedule=ScheduleSettings(shape="constant", warmup_steps=0),
            optimizer=OptimizerSettings(learning_rate=RATE, weight_decay=0.01),
            validation=ValidationSettings(rows=0),
            # no manual garbage collection, which would affect the other arms in this process
            garbage_every=0,
        )
        self._own: list[float] = []
        with contextlib.redirect_stdout(io.StringIO()):
            world = World(0, 1, 0, torch.device("cpu"))
            self.training = Training(
                run, Inputs(), folder, world, batches=_RepeatedBatches(batches, vocabulary_size)
            )
        self.training.progress.enabled = False
        self._path = self.training.writer.directory / "steps.jsonl"

    def first_loss(self) -> float:
        """See `Arm`."""
        batch = self.training.batches.next()
        self.training.batches.seek({"step": 0})
        with torch.no_grad():
            tokens = torch.from_numpy(batch.tokens_bt)
            labels = torch.from_numpy(batch.labels_bt)
            return (
                self.training.trainer.parallel.objective(tokens, labels) / batch.useful_tokens
            ).item()

    def __call__(self, steps: int) -> list[float]:
        self.training.clock.restart()
        before = self._lines()
        for _ in range(steps + 1):
            self.training.step()
        self.training.log.read()
        self.training.writer.flush()
        found = [
            json.loads(text)
            for text in self._path.read_text(encoding="utf-8").splitlines()[before + 1 :]
        ]
        self._own += [line["own_s"] for line in found]
        return [line["step_s"] for line in found]

    def _lines(self) -> int:
        self.training.writer.flush()
        return len(self._path.read_text(encoding="utf-8").splitlines())

    def own(self) -> list[float]:
        """Return the seconds of bookkeeping of each timed step."""
        return self._own


def _convert_model(ours: _TokenscaleArm) -> torch.nn.Module:
    """Return the model of transformers with the same weights."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "this benchmark needs transformers.", reason=error, next="make setup"
        ) from None
    shape = ours.training.trainer.model.settings
    weights = {
        name: weight.detach().clone()
        for name, weight in ours.training.trainer.model.named_parameters()
    }
    config, weights = to_hf(shape, weights, ours.training.settings.sequence_length)
    config_class = transformers.CONFIG_MAPPING[config["model_type"]]
    model = transformers.AutoModelForCausalLM.from_config(
        config_class(**config), attn_implementation="sdpa"
    )
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if shape.tied_embeddings else set()
    if set(missing) - tied or unexpected:
        raise RuntimeError(f"weights do not fit: {missing}, {unexpected}")
    model.tie_weights()
    return model.train()


class _PlainLoopArm:
    """Hand-written training loop."""

    def __init__(self, model: torch.nn.Module, batches: list[Batch]):
        self._model = model
        self._batches = [torch.from_numpy(b.tokens_bt) for b in batches]
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )

    def first_loss(self) -> float:
        with torch.no_grad():
            return self._model(input_ids=self._batches[0], labels=self._batches[0]).loss.item()

    def __call__(self, steps: int) -> list[float]:
        times = [time.monotonic()]
        for tokens in self._batches[: steps + 1]:
            loss = self._model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            loss.item()  # as a loop that logs the loss does
            times.append(time.monotonic())
        return [b - a for a, b in zip(times[1:-1], times[2:], strict=True)]


class _HuggingFaceArm:
    """Hugging Face's Trainer without logging and saving. Raises ImportError without
    `accelerate`.
    """

    def __init__(self, model: torch.nn.Module, batches: list[Batch], folder: Path):
        import accelerate  # noqa: F401
        from transformers import TrainingArguments

        self._model = model
        self._rows = [
            {"input_ids": row, "labels": row}
            for b in batches
            for row in torch.from_numpy(b.tokens_bt)
        ]
        self._first = torch.from_numpy(batches[0].tokens_bt)
        self._arguments = lambda steps: TrainingArguments(
            output_dir=str(folder / "trainer"),
            max_steps=steps,
            per_device_train_batch_size=len(batches[0].tokens_bt),
            learning_rate=RATE,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.01,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            use_cpu=True,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )

    def first_loss(self) -> float:
        with torch.no_grad():
            return self._model(input_ids=self._first, labels=self._first).loss.item()

    def __call__(self, steps: int) -> list[float]:
        from transformers import Trainer, TrainerCallback

        class Clock(TrainerCallback):
            times: list[float] = []  # noqa: RUF012

            def on_step_end(self, *_: Any, **__: Any) -> None:
                self.times.append(time.monotonic())

        Clock.times = []
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = Trainer(
                model=self._model,
                args=self._arguments(steps + 1),
                train_dataset=self._rows,
                callbacks=[Clock()],
            )
            trainer.train()
        return [b - a for a, b in zip(Clock.times[:-1], Clock.times[1:], strict=True)]


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, and print the table. Return the exit code."""
    parser = Parser(prog="python tests/benchmarks/training.py", description=__doc__)
    parser.add_argument(
        "--models", nargs="+", default=["llama-tiny", "llama-small", "gpt2-tiny"], metavar="PRESET"
    )
    parser.add_argument(
        "--steps", type=int, default=10, metavar="N", help="timed steps in each round (default 10)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="every arm is timed once in each"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="the JSON to write")
    parsed = parser.parse_args(arguments)
    options = {"models": tuple(parsed.models), "steps": parsed.steps, "rounds": parsed.rounds}
    return exit_code(
        lambda: print(format_table(measure(parsed.output, **options))), f"{parser.prog} --help"
    )


if __name__ == "__main__":
    raise SystemExit(main())
