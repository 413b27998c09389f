"""Contract of an arm, as its process sees it: what to train on, and what to log. Imported by every
adapter.

An arm is another trainer. Its adapter runs `python adapter.py CONTRACT.json` in the arm's own
environment, which has numpy and safetensors, and torch where the trainer is written in it;
tokenscale itself is not importable there.

    contract = Contract()                                # sys.argv[1]
    tokens = contract.tokens[step, row]                  # int32 [T + 1]: inputs are [:-1], labels are [1:]
    contract.watch(model, optimizer)                     # before the first step: times, fed tokens, recording
    contract.loss(loss)                                  # each loss that .backward() is called on
    contract.close()                                     # after the last step

The loss of a step is the sum of its calls: the mean over all tokens of this rank's rows. Trainers
that are not written in torch call `contract.log_step` themselves.
"""

import hashlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

#: digests are added modulo this number, which JSON represents exactly
MODULUS = 1 << 52


def digest_rows(tokens_bt: np.ndarray) -> int:
    """Return the sum of a hash of each row, modulo 2**52. Independent of the order of rows."""
    rows = np.ascontiguousarray(tokens_bt, dtype=np.int64)
    hashes = (hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
    return sum(int.from_bytes(value, "little") for value in hashes) % MODULUS


class Contract:
    """Inputs and log of one rank of an arm.

    `steps` optimizer steps, each over `rows` sequences of this rank in micro-batches of at most
    `micro_batch`, of `sequence_length` tokens. `learning_rates` has the rate of each step;
    `optimizer` has beta1, beta2, epsilon, weight_decay and clip_norm (null: no clipping). `shape`
    is the model (`ModelSettings`), `precision` fp32 or bf16, `device` cpu or cuda. `folder` is a
    folder for the adapter's own files, `source` the arm's checkout or None.
    """

    def __init__(self, path: str | None = None):
        facts = json.loads(Path(path or sys.argv[1]).read_text(encoding="utf-8"))
        self.facts: dict[str, Any] = facts
        self.steps: int = facts["steps"]
        self.rows: int = facts["rows"]
        self.micro_batch: int = facts["micro_batch"]
        self.micro_steps = -(-self.rows // self.micro_batch)
        self.sequence_length: int = facts["sequence_length"]
        self.vocabulary_size: int = facts["vocabulary_size"]
        self.learning_rates: list[float] = facts["learning_rates"]
        self.schedule: dict[str, Any] = facts["schedule"]
        self.optimizer: dict[str, Any] = facts["optimizer"]
        self.shape: dict[str, Any] = facts["shape"]
        self.seed: int = facts["seed"]
        self.precision: str = facts["precision"]
        self.compile: bool = facts["compile"]
        self.device: str = facts["device"]
        self.rank: int = facts["rank"]
        self.world_size: int = facts["world_size"]
        self.source = Path(facts["source"]) if facts["source"] else None
        self.folder = Path(facts["folder"])
        #: Hugging Face folder of the initial weights: config.json and model.safetensors
        self.weights_folder = Path(facts["weights"])
        # int32 [steps, rows, T + 1]
        self.tokens: np.ndarray = np.load(facts["tokens"], mmap_mode="r")
        self._log = open(facts["log"], "w", encoding="utf-8")  # noqa: SIM115  # until the end
        self._step = 0
        self._losses: list[Any] = []
        self._inputs: list[Any] = []
        #: steps that are not read yet: (loss, the model's inputs, begin, end); begin and end as
        #: `_mark` has them
        self._pending: list[tuple[Any, list[Any], Any, Any]] = []
        self._last: Any = None
        self._paused = 0.0
        self._recorder: Any = None
        self._began = False

    def weights(self) -> dict[str, Any]:
        """Return the initial weights as torch tensors, by the names that `transformers` gives
        them.
        """
        from safetensors.torch import load_file

        return load_file(self.weights_folder / "model.safetensors")

    def require(self, wrong: dict[str, Any]) -> None:
        """Exit with one message if a value of `wrong` is true: settings that this trainer does not
        have, by name.
        """
        if found := [name for name, is_wrong in wrong.items() if is_wrong]:
            self.fail(f"this trainer does not support: {', '.join(found)}")

    def fail(self, reason: str) -> None:
        """Exit with a reason, which makes the run invalid and is shown in the report."""
        print(f"arm: {reason}", file=sys.stderr)
        sys.exit(3)

    # --- logging
    # -------------------------------------------------------------------------------------------------

    def watch(self, model: Any, optimizer: Any) -> None:
        """Log the steps of a torch model and optimizer through hooks. Call it before the first
        step.

        Hooks measure the time from the end of an update to the end of the next, on a GPU by events
        in its stream, and keep losses and the tokens that the model receives in training where they
        are. Every `log_every` steps, as this project's own trainer does, all of them are read, and
        tokens hashed, between two steps and in none's time. Where a parity recording is requested,
        the recorder is attached as well. Pass the model as it is before it is compiled or wrapped.
        """
        if folder := self.facts.get("recording"):
            from recorder import ParityRecorder

            self._recorder = ParityRecorder(folder, model, optimizer)
        import torch

        # torch.compile would trace the hook
        model.register_forward_pre_hook(torch.compiler.disable(self._take_inputs), with_kwargs=True)
        optimizer.register_step_post_hook(lambda *_: self._end_of_step())
        self._last = self._mark()

    def loss(self, value: object) -> None:
        """Add the loss of one backward pass: of a micro-batch, divided by their number."""
        if self._recorder is not None:
            self._recorder.loss(value)
        self._losses.append(value.detach() if hasattr(value, "detach") else value)

    def log_step(
        self,
        *,
        loss: float,
        tokens_bt: np.ndarray,
        step_s: float,
        ended_mono_s: float,
        **fields: Any,
    ) -> None:
        """Write the line of a step. Arms without torch call this in order, also after the training.

        `loss` is the mean in nats, `tokens_bt` [rows, T] are the model's input tokens. `fields` are
        data_wait_s, memory_peak_bytes and paused_s, the time since the previous step that belongs
        to no step.
        """
        self._write(loss, step_s, ended_mono_s, len(tokens_bt), digest_rows(tokens_bt), fields)

    def close(self, **facts: Any) -> None:
        """Complete the log. `facts` (text and numbers) go to the run's record, such as compiler and
        versions.
        """
        self._read()
        self._log.close()
        if self._recorder is not None:
            self._recorder.close()
        from importlib.metadata import distributions

        versions = {str(d.metadata["Name"]).lower(): d.version for d in distributions()}
        torch = sys.modules.get("torch")
        variables = self.facts["variables"]
        result = {
            "steps": self._step,
            "versions": versions,
            "facts": facts,
            # as the trainer left them: it may choose an allocator and threads of its own
            "environment": {name: os.environ[name] for name in variables if name in os.environ},
            "threads": torch.get_num_threads() if torch else None,
        }
        Path(self.facts["result"]).write_text(json.dumps(result), encoding="utf-8")

    # --- internals
    # -----------------------------------------------------------------------------------------------

    def _take_inputs(self, module: Any, args: Any, kwargs: Any) -> None:
        import torch

        if not torch.is_grad_enabled() or not module.training:
            return
        found = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if not found:
            return
        # building the model and the first validation are not part of the first step
        if not self._began:
            self._began = True
            self._last = self._mark()
        self._inputs.append(found[0].detach().clone())

    def _mark(self) -> Any:
        """Return the present moment: on a GPU an event in its stream, else seconds of the monotonic
        clock.
        """
        if self.device != "cuda":
            return time.monotonic()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _end_of_step(self) -> None:
        end = self._mark()
        self._pending.append(
            (sum(self._losses) if self._losses else float("nan"), self._inputs, self._last, end)
        )
        self._losses = []
        self._inputs = []
        self._last = end
        if len(self._pending) >= self.facts["log_every"] or not self._step:
            self._read()
            self._last = self._mark()

    def _read(self) -> None:
        """Write the pending steps. Waits for the device once; what it takes is `paused_s` of the
        next step.
        """
        if not self._pending:
            return
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
        losses, inputs, begins, ends = zip(*self._pending, strict=True)
        if self.device == "cuda":
            import torch

            ends[-1].synchronize()
            now = time.monotonic()
            seconds = [
                begin.elapsed_time(end) / 1e3 for begin, end in zip(begins, ends, strict=True)
            ]
            ends = tuple(now - end.elapsed_time(ends[-1]) / 1e3 for end in ends)
            peak = torch.cuda.max_memory_allocated()
        else:
            now = time.monotonic()
            seconds = [end - begin for begin, end in zip(begins, ends, strict=True)]
        values = [[*tokens, loss] for tokens, loss in zip(inputs, losses, strict=True)]
        for found, step_s, ended_mono_s in zip(_copy_to_host(values), seconds, ends, strict=True):
            *hosts, loss = found
            digest = sum(map(digest_rows, hosts)) % MODULUS
            fields = {"memory_peak_bytes": peak, "paused_s": self._paused}
            self._write(float(loss), step_s, ended_mono_s, sum(map(len, hosts)), digest, fields)
            self._paused = 0.0
        self._pending = []
        self._paused = time.monotonic() - now

    def _write(
        self,
        loss: float,
        step_s: float,
        ended_mono_s: float,
        rows: int,
        digest: int,
        fields: dict[str, Any],
    ) -> None:
        line = {
            "step": self._step,
            "loss": loss,
            "step_s": step_s,
            "ended_mono_s": ended_mono_s,
            "rows": rows,
        }
        self._log.write(json.dumps({**line, "digest": digest, **fields}) + "\n")
        self._log.flush()
        self._step += 1


def _copy_to_host(values: list[list[Any]]) -> list[list[Any]]:
    """Return lists of torch tensors as float64 arrays, by one copy for all of them; other values as
    they are.
    """
    tensors = [value for found in values for value in found if hasattr(value, "detach")]
    if not tensors:
        return values
    import torch

    device = tensors[-1].device
    flat = (
        torch.cat([tensor.reshape(-1).to(device, torch.float64) for tensor in tensors])
        .cpu()
        .numpy()
    )
    parts = iter(np.split(flat, np.cumsum([tensor.numel() for tensor in tensors])[:-1]))
    return [
        [next(parts).reshape(v.shape) if hasattr(v, "detach") else v for v in found]
        for found in values
    ]
