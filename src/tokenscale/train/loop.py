"""The training loop of one run on one rank."""

import math
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tokenscale.base.errors import UserError
from tokenscale.base.files import get_boot_id
from tokenscale.costs.flops import Convention, flops_per_token
from tokenscale.costs.schedule import epoch_ends, steps_of
from tokenscale.data.batches.batch import Batches, Inputs, Prefetcher
from tokenscale.data.batches.open import count_labelled_rows, open_batches
from tokenscale.runs.records import provenance
from tokenscale.runs.records.events import Status, Writer
from tokenscale.runs.records.provenance import Energy
from tokenscale.settings.data import LOSS_CAUTION
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import decode, to_dict
from tokenscale.settings.run import RunSettings, find_other_schedule
from tokenscale.train import profiling, record
from tokenscale.train.budget import Budget
from tokenscale.train.checkpoint import Checkpoint, State
from tokenscale.train.compilation import describe_compilation
from tokenscale.train.evaluation.held_out import HeldOut
from tokenscale.train.models.attention import choose_kernel
from tokenscale.train.models.build import resolve_shape
from tokenscale.train.parallel.world import World
from tokenscale.train.phase_timer import timer_of
from tokenscale.train.profiling import Garbage, Trace
from tokenscale.train.record import Progress, StepLog
from tokenscale.train.resume import Checkpoints, log_checkpoints
from tokenscale.train.trainer import Trainer
from tokenscale.train.watchdog import Interrupted, Signals, Watchdog


def train(
    run: RunSettings,
    inputs: Inputs,
    directory: Path,
    world: World,
    attempt: int = 0,
    signals: Signals | None = None,
    hang_s: float = 0,
) -> torch.nn.Module:
    """Train to the end of the budget, writing events below `directory/attempt=NN/rank=NNNNN/` and
    `directory/run.json`.

    Goes on from the run's newest resume state of the same code and data, or from the one that
    `resume_from` names. Returns the trained model, as its settings build it. A gradient that is not
    finite ends the run: the record is sealed with that outcome, and the batch is named. Raises
    Interrupted where a signal ended it (`watchdog.py`), with a resume state on disk and the record
    not sealed. `hang_s` seconds without a step end the process, thrice as many at the start
    (`watchdog.py`).
    """
    return Training(
        run=run,
        inputs=inputs,
        directory=directory,
        world=world,
        attempt=attempt,
        signals=signals,
        hang_s=hang_s,
    ).run()


class Training:
    """A run in progress on one rank. `batches` replaces the batches of the run's data strategy."""

    def __init__(
        self,
        run: RunSettings,
        inputs: Inputs,
        directory: Path,
        world: World,
        attempt: int = 0,
        batches: Batches | None = None,
        signals: Signals | None = None,
        hang_s: float = 0,
    ):
        self.settings = run
        self.world = world
        self.directory = directory
        self.attempt = attempt
        self.signals = signals or Signals()
        folder = directory / f"attempt={attempt:02d}"
        self.launched = provenance.launched(folder)
        self.writer = Writer(folder / f"rank={world.rank:05d}")
        self.watch = Watchdog(self.writer.directory / "stacks.txt", limit_s=hang_s)
        started = self.writer.event("run_start", world_size=world.size, boot=get_boot_id())

        # build: data, model and optimizer, budget, held-out rows
        self.place = run.layout.coordinate(world.rank)
        inputs = replace(
            inputs, rank=self.place.data_rank, world_size=run.layout.data_parallel_size
        )
        self.batches = batches or _batches(run, inputs, device=world.device)
        shape = _shape(run, vocabulary_size=self.batches.vocabulary_size)
        self.checkpoints = self._checkpoints(shape, inputs)
        #: what another run did for this one: steps, their useful tokens, and what else their
        #: learning rates followed
        self.earlier: dict[str, Any] = {
            "begins_at": 0,
            "begins_at_useful_tokens": 0,
            "earlier_schedule": None,
        }
        state = self._find_resume_state()
        self.trainer = Trainer(
            run=run,
            shape=shape,
            world=world,
            kernel=_kernel(run, device=world.device),
            unset=state is not None,
        )
        self.rows_per_epoch = self.batches.rows_per_epoch()
        per_token = flops_per_token(
            shape,
            sequence_length=run.sequence_length,
            convention=Convention.FULL,
            objective=run.objective,
        )
        self.steps = steps_of(
            run.budget,
            rows_per_epoch=self.rows_per_epoch,
            global_batch=run.global_batch,
            flops_per_row=run.sequence_length * per_token,
        )
        leads = self.place.is_group_leader
        self.budget = Budget(
            settings=run.budget,
            steps=self.steps,
            world=world,
            warmup_steps=run.schedule.warmup_steps,
            counts=leads,
        )
        self.held_out = HeldOut(
            run=run,
            inputs=inputs,
            vocabulary_size=self.batches.vocabulary_size,
            trainer=self.trainer,
            writer=self.writer,
            beat=self.watch.beat,
        )

        # what is written and measured
        self.running = self._start_record(shape)
        self.clock = timer_of(world.device)
        self.log = StepLog(
            writer=self.writer,
            timer=self.clock,
            world=world,
            scaled=run.precision == "fp16",
            counts=leads,
        )
        self.trace = Trace(settings=run.profile, folder=self.writer.directory, device=world.device)
        self.energy = Energy(record.pci_bus_id(world.device))
        self.status = Status(directory / "status.json")
        self.progress = Progress(self.steps, enabled=world.rank == 0)
        self._describe(inputs, counts_rows=batches is None)
        self.done = 0  # steps behind us
        self._compiled: dict[str, int] = {}  # as logged last
        self._state_after: int | None = None  # the step of the newest state to go on from

        # resume
        if state is not None:
            self._resume(state)
        self.writer.event_since("init_done", since=started)
        self._cpu_s = time.process_time()  # of the set-up

    def _start_record(self, shape: ModelSettings) -> dict[str, Any]:
        """Write the running record and return it; only rank 0."""
        if self.world.rank != 0:
            return {}
        run = self.settings
        batches = self.batches
        facts = {"budget_steps": self.steps, **self.trainer.facts()}
        facts |= record.costs(run, shape) | {
            f"text_{share}": value for share, value in batches.lost.items()
        }
        if run.validation.rows:
            facts["validation_attention"] = run.validation_attention
        if cut := batches.count_cut():
            facts["text_cut"] = cut
        if earlier := self.earlier["earlier_schedule"]:
            facts["earlier_schedule"] = earlier
        # of all ranks, found at the end; null where nothing was to be compiled
        facts["compilation"] = None
        return record.start(
            run,
            self.directory,
            attempt=self.attempt,
            world=self.world,
            launched=self.launched,
            facts=facts,
        )

    def _describe(self, inputs: Inputs, *, counts_rows: bool) -> None:
        """Print what is trained, and what of its data needs caution."""
        run = self.settings
        world = self.world
        log = self.progress.log
        ranks = f"{world.size} rank(s) on {record.device_name(world.device)}"
        log(
            f"{run.identity}  {self.trainer.parameters:,} parameters  {ranks}, attention by "
            f"{self.trainer.kernel}"
        )
        if (lost := self.batches.lost.get("lost", 0)) > LOSS_CAUTION:
            log(f"  caution  the tokenizer loses {lost:.2%} of the bytes of this text")
        if world.rank != 0 or not counts_rows:
            return
        if (found := count_labelled_rows(run, inputs)) is not None:
            log(f"  labels   {found[0]} of the first {found[1]} rows keep a label")
        if (rows := self.batches.rows_per_epoch()) < run.global_batch:
            log(
                f"  caution  {float(rows):.0f} rows of data for batches of {run.global_batch}: each "
                "batch repeats them"
            )

    def run(self) -> torch.nn.Module:
        """Run the loop to its end and return the trained model."""
        try:
            with self.signals:
                return self._run()
        finally:
            self.watch.close()

    def _run(self) -> torch.nn.Module:
        run = self.settings
        joules = self.energy.joules()
        # killed between its last step and its seal
        ended = self.done > 0 and self.budget.ended(self.done)
        self.clock.elapsed()  # what came before the first step is no part of a budget in seconds
        with self.clock.pause():
            if self.done == 0:
                self._between(self._due(last=False))
            garbage = Garbage(run.garbage_every)
        try:
            while not (ended or self.budget.stop):
                ended = self.step()
                garbage.after(self.done)
                self.budget.check_labels(ended)
        finally:
            garbage.close()
        self.trace.close()
        if isinstance(self.batches, Prefetcher):
            self.batches.close()
        used = self.energy.joules_since(joules)
        if not ended:
            self._interrupt(used)
        self._end(used)
        return self.trainer.model

    def step(self) -> bool:
        """Run an optimizer step, and validation and checkpoints that are due. Return whether the
        run has ended.
        """
        run = self.settings
        step = self.done
        clock = self.clock
        self.watch.beat(is_start=not self.log.last)
        self.trace.before(step)
        # memory is measured in the first step of an attempt
        probe = (
            None
            if self.log.last
            else profiling.Probe(
                model=self.trainer.model,
                device=self.world.device,
                run=run,
                held_gradients=self.trainer.shards.held_gradients,
            )
        )

        # batch: this rank's rows, the useful tokens of all ranks, and the learning rate
        batch = clock.wait_for(self.batches.next)
        useful = self.budget.exchange(
            batch.useful_tokens, stop_requested=self.signals.stop_requested is not None
        )
        rate = self.budget.learning_rate(
            step, peak=run.optimizer.learning_rate, schedule=run.schedule
        )

        # forward and backward, clip, update
        self.trainer.seed(step)
        clock.hand_over()
        with probe.sending(self.trainer.parallel.module) if probe else nullcontext():
            stepped = self.trainer.step(batch, useful, rate, clock, probe)
        self.log.add(step, batch, rate, self.trainer.micro_steps, stepped)
        clock.end()

        # log: numbers stay on the device until they are read
        self.done = step + 1
        last = clock.wait_for(partial(self.budget.after, step, clock.elapsed()))
        self.trace.after(self.done)
        due = self._due(last)
        if last or due or probe or self.budget.stop or len(self.log) >= run.log_every:
            self._write_steps(probe)

        # what is due: validate, translate, save
        if due and self.log.stopped_at is None:
            with clock.pause():
                self._between(due)
        return last or self.log.stopped_at is not None

    def _due(self, last: bool) -> set[str]:
        """Return what is due after the steps that are done: validate, translate, save."""
        run = self.settings
        done = self.done
        epoch_ended = done > 0 and epoch_ends(
            done - 1, rows_per_epoch=self.rows_per_epoch, global_batch=run.global_batch
        )
        asked = {
            "validate": self.held_out.due(done, epoch_ended=epoch_ended, last=last),
            "translate": run.validation.bleu_each_epoch and epoch_ended and not last,
            "save": self.checkpoints.due(done, epoch_ended=epoch_ended, last=last),
        }
        return {name for name, is_due in asked.items() if is_due}

    def _log_compilation(self) -> None:
        compilation = self.trainer.parallel.compilation
        if compilation is None or (counts := compilation.counts()) == self._compiled:
            return
        self._compiled = counts
        self.writer.event("compilation", step=self.done, **counts)
        self.progress.log(describe_compilation(counts))

    def _write_steps(self, probe: profiling.Probe | None) -> None:
        """Write the steps that the log has collected, and the memory that was measured."""
        self.log.read()
        line = self.log.last
        mean = line["loss_sum"] / line["useful_tokens"] if line["useful_tokens"] else None
        speed = line["useful_tokens"] * self.settings.layout.data_parallel_size / line["step_s"]
        self.progress.step(self.done, mean, speed, self.budget.share(self.done))
        if self.world.rank == 0:
            self.status.update(step=self.done, steps=self.steps, loss=mean, state="running")
        if probe is not None:
            self.writer.event("memory", step=line["step"], **probe.bytes)
            self._log_compilation()

    def _between(self, due: set[str]) -> None:
        if "validate" in due:
            loss = self.held_out.validate(self.done)
            best = self.checkpoints.best
            if (
                self.settings.checkpoints.best
                and math.isfinite(loss)
                and (best is None or loss < best)
            ):
                self.checkpoints.best = loss
                self._save("best", kind="model")
        # before the resume state, behind which nothing of this step is done again
        if "translate" in due:
            self.held_out.translate(self.done)
        if "save" in due:
            self._save(f"step={self.done:08d}", kind="resume")
        log_checkpoints(self.writer.event, checkpoints=self.checkpoints)

    def _checkpoints(self, shape: ModelSettings, inputs: Inputs) -> Checkpoints:
        run = self.settings
        facts = {
            "run_id": run.identity,
            "run": to_dict(run),
            "model": to_dict(shape),
            "objective": run.objective,
            "sequence_length": run.sequence_length,
            "tokenizer": run.tokenizer.name,
            **{key: self.launched.get(key) for key in ("digest", "code_sha256", "inputs")},
        }
        return Checkpoints(
            run=run,
            directory=self.directory,
            world=self.world,
            record=facts,
            tokenizer=inputs.tokenizer,
        )

    def _save(self, name: str, kind: str) -> None:
        resume = kind == "resume"
        self.watch.beat()
        # steps that a checkpoint has are not to be lost with what comes after it
        self.writer.flush()
        state = State(self.trainer.pieces(resume=resume))
        if resume:
            self._state_after = self.done
        facts = {
            "step": self.done,
            **self.earlier,
            "budget": self.budget.state(),
            "loss_scale": self.trainer.loss_scale.state(),
        }
        self.checkpoints.save(name, kind, state, facts)

    def _find_resume_state(self) -> Checkpoint | None:
        """Return the resume state that this run goes on from, if there is one. A collective."""
        found = self.checkpoints.newest()
        if found is not None:
            self.earlier = {name: found.record.get(name) for name in self.earlier}
        elif self.settings.resume_from is not None:
            found = self.checkpoints.named(self.settings.resume_from)
            step = found.record["step"]
            tokens = round(found.record["budget"]["useful_tokens"])
            theirs = find_other_schedule(
                decode(RunSettings, values=found.record["run"]), mine=self.settings, steps=step
            )
            theirs = (found.record.get("earlier_schedule") or {}) | theirs
            self.earlier = {
                "begins_at": step,
                "begins_at_useful_tokens": tokens,
                "earlier_schedule": theirs or None,
            }
        return found

    def _resume(self, found: Checkpoint) -> None:
        self.trainer.load(found)
        self.trainer.loss_scale.load(found.record["loss_scale"])
        self.batches.seek({"step": found.record["step"]})
        self.budget.load(found.record["budget"])
        # another run's best weights are not here
        if found.folder.parent == self.checkpoints.folder:
            self.checkpoints.best = found.record["best_validation_loss"]
        self.done = found.record["step"]
        if self.earlier["begins_at"] == self.done and self.budget.ended(self.done):
            what = "the checkpoint is at the end of this run's budget, or behind it."
            next_step = "raise the budget, or take an earlier state"
            raise UserError(
                what, checkpoint=found.folder, found=f"after step {self.done}", next=next_step
            )
        self.writer.event("resume", step=self.done, status=found.folder.name)
        self.progress.log(f"goes on after step {self.done}, from {found.folder}")
        if earlier := self.earlier["earlier_schedule"]:
            self.progress.log(
                f"  caution  steps before {self.earlier['begins_at']} had the learning rates of "
                "other settings "
                f"({', '.join(f'{name} {value}' for name, value in earlier.items())}): "
                "this is not the run that one with these settings would have been from its start"
            )

    def _interrupt(self, joules: float | None) -> None:
        """Write a resume state and logs; leave the record unsealed. Raises Interrupted once all
        ranks have written.
        """
        if self._state_after != self.done:
            self._save(f"step={self.done:08d}", kind="resume")
        self._close("interrupted", step=self.done, joules=joules)
        if self.world.rank == 0:
            self.status.update(force=True, step=self.done, steps=self.steps, state="interrupted")
            stop_requested = self.signals.stop_requested or "a signal to another rank"
            self.progress.log(
                f"interrupted by {stop_requested} after step {self.done}; the next attempt goes "
                "on from there"
            )
        self.world.barrier()
        raise Interrupted(self.done)

    def _close(self, status: str, step: int, joules: float | None) -> None:
        """Complete the files of all ranks."""
        self.checkpoints.wait()
        log_checkpoints(self.writer.event, checkpoints=self.checkpoints)
        self.writer.event(
            "run_stop",
            status=status,
            step=step,
            energy_j=joules,
            cpu_s=time.process_time() - self._cpu_s,
        )
        self.writer.close()
        self.world.barrier()

    def _end(self, joules: float | None) -> None:
        """Write weights, logs and the sealed record, then delete what is no longer needed."""
        stopped = self.log.stopped_at
        done, state = (self.done, "complete") if stopped is None else (stopped["step"], "nonfinite")
        if stopped is None and self.settings.checkpoints.final:
            self._save("final", kind="model")
        self._log_compilation()
        if self._compiled:
            totals = self.world.sum(*self._compiled.values(), integer=True)
            self.running["compilation"] = dict(zip(self._compiled, totals, strict=True))
        if stopped is None and self.held_out.pairs:
            self.held_out.translate(done)
        self._close(state, step=done, joules=joules)
        energy = self.world.sum(joules or 0.0)[0] if joules is not None else None
        if self.world.rank == 0:
            outcome = {"status": state, "steps": done, "ended_unix_s": round(time.time(), 3)}
            outcome |= {
                name: self.earlier[name] for name in ("begins_at", "begins_at_useful_tokens")
            }
            # null: no counter on this kind of device
            outcome |= {"energy_j": self.energy.unknown if energy is None else energy}
            if stopped is not None:
                outcome["stopped_at"] = stopped
            if changed := record.changed_code(self.running):
                outcome["code_changed"] = changed
                self.progress.log(
                    f"source files were edited while this run trained: {', '.join(changed)}\n"
                    f"  so      it may have trained with either content; run.json says so\n"
                    f"  next    rm -r {self.directory}, and train it again"
                )
            provenance.seal_record(
                self.directory,
                record=self.running,
                outcome=outcome | {"logs": provenance.log_hashes(self.directory)},
            )
            if stopped is None:
                self.checkpoints.forget()
            self.status.update(force=True, step=done, steps=self.steps, state=state)
            self.progress.log(f"{state}: {self.directory}/run.json")
            if stopped is not None:
                self.progress.log(
                    f"  the gradient is not finite at step {done} (order digest "
                    f"{stopped['order_digest_of_rank_0']} on rank 0)\n"
                    "  next  lower optimizer.learning_rate, lengthen schedule.warmup_steps, or "
                    "use precision fp32"
                )
        self.world.barrier()


def _batches(run: RunSettings, inputs: Inputs, device: torch.device) -> Batches:
    batches = open_batches(run, inputs)
    prefetch = device.type != "cpu" if run.prefetch is None else run.prefetch
    return Prefetcher(batches) if prefetch else batches


def _kernel(run: RunSettings, device: torch.device) -> str:
    dtype = torch.float32 if run.precision == "fp32" else torch.bfloat16
    dropout = run.model.dropout
    return choose_kernel(
        run.attention, device=device, bounds=run.document_mask, dtype=dtype, dropout=dropout
    )


def _shape(run: RunSettings, vocabulary_size: int) -> ModelSettings:
    entries = run.model.vocabulary_size
    if entries is not None and entries < vocabulary_size:
        raise UserError(
            "the tokenizer has more entries than the model's embedding.",
            run=f"{run.identity} has model.vocabulary_size {entries}",
            tokenizer=f"{run.tokenizer.name} has {vocabulary_size}",
            next="leave model.vocabulary_size out: it is then the tokenizer's",
        )
    return resolve_shape(run, vocabulary_size)
