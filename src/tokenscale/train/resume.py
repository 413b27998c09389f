"""Which checkpoints a run writes, keeps, resumes from and deletes: `step=00000100` to resume,
`final` and `best`.
"""

import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tokenscale.base.errors import UserError
from tokenscale.base.files import remove_tree, sync_tree
from tokenscale.settings.options import decode
from tokenscale.settings.run import RunSettings, find_difference
from tokenscale.train.checkpoint import (
    PARTIAL,
    RECORD,
    Checkpoint,
    State,
    commit,
    partial_of,
    write_rank,
)
from tokenscale.train.parallel.world import World

#: name of a resume state in the event of its writing
_STATE = re.compile(r'"status":"(step=\d{8})"')
FOLDER = "checkpoints"
DAMAGED = ".damaged"


class Checkpoints:
    """One rank's view of a run's checkpoints. `digest` is the attempt's code digest: states of
    other code are not resumed.
    """

    def __init__(
        self,
        run: RunSettings,
        directory: Path,
        world: World,
        record: dict[str, Any],
        tokenizer: Path | None,
    ):
        self.settings = run.checkpoints
        self.folder = directory / FOLDER
        self._run = run
        self._world = world
        self._record = record
        self._tokenizer = tokenizer
        self._writing: threading.Thread | None = None
        self._failed: BaseException | None = None
        self.best: float | None = None  # validation loss, nats a useful token
        # (folder, bytes, seconds) of what has been written
        self.seconds: list[tuple[str, int, float]] = []

    def newest(self) -> Checkpoint | None:
        """Return the newest resume state of this run that this code and data can resume from; None:
        start anew. A collective.

        Rank 0 chooses. It puts a damaged one aside (`.damaged`), with a line that says so.
        """
        chosen = self._chosen() if self._world.rank == 0 else None
        step = -1 if chosen is None else int(chosen.folder.name[5:])
        (step,) = self._world.sum(step if self._world.rank == 0 else 0, integer=True)
        if step < 0:
            return None
        return chosen or Checkpoint(self.folder / f"step={step:08d}", verify=False)

    def _chosen(self) -> Checkpoint | None:
        newest = self._states()
        self._report_missing_state(newest[-1] if newest else None)
        for folder in reversed(newest):
            try:
                found = Checkpoint(folder)
            except UserError as error:
                aside = folder.with_name(folder.name + DAMAGED)
                print(f"{error.render()}\n  so      it is put aside as {aside.name}", flush=True)
                remove_tree(aside)
                folder.rename(aside)
                continue
            if found.record.get("digest") == self._record.get("digest"):
                return found
        return None

    def _report_missing_state(self, newest: Path | None) -> None:
        """Report that the logs name a newer resume state than exists: the folder was replaced, or
        files are lost.
        """
        written = ""
        for path in self.folder.parent.glob("attempt=*/rank=00000/events.jsonl"):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                if '"checkpoint"' in line and (found := _STATE.search(line)):
                    written = max(written, found[1])
        if written and (newest is None or newest.name < written):
            notice = UserError(
                "the newest resume state of this run is missing.",
                folder=self.folder,
                expected=f"{written}  (events.jsonl)",
                found=newest.name if newest else "none",
                so=f"the run goes on from {newest.name}"
                if newest
                else "the run starts from scratch",
                next=(
                    "if the folder was replaced, stop this run, put the states back, and start "
                    "it again"
                ),
            )
            print(notice.render(), flush=True)

    def named(self, where: str) -> Checkpoint:
        """Return the resume state that `resume_from` names. Raises UserError where it does not fit
        this run.
        """
        found = Checkpoint(where)
        if found.record["kind"] != "resume":
            what = "this checkpoint holds weights alone: nothing can be resumed from it."
            raise UserError(
                what, checkpoint=where, next="run the other one with checkpoints.keep_resume_state"
            )
        if (
            other := find_difference(
                decode(RunSettings, values=found.record["run"]), mine=self._run
            )
        ) is not None:
            setting, there, here = other
            what = "the checkpoint is of another run."
            next_step = "name a checkpoint of the same run, or start without one"
            raise UserError(
                what, checkpoint=where, setting=setting, found=there, expected=here, next=next_step
            )
        theirs = found.record.get("inputs") or {}
        mine = self._record.get("inputs") or {}
        # which inputs there are follows from settings that may differ; held-out rows are not
        # trained on
        differing = [
            role
            for role in theirs.keys() & mine.keys() - {"validation_store"}
            if theirs[role] != mine[role]
        ]
        if differing or found.record.get("code_sha256") != self._record.get("code_sha256"):
            what = "the checkpoint was made with other code or data."
            next_step = "train the other run again, which writes a new one"
            raise UserError(
                what, checkpoint=where, differs=", ".join(differing) or "code", next=next_step
            )
        return found

    def due(self, done: int, *, epoch_ended: bool, last: bool) -> bool:
        """Return whether a resume state is to be written after `done` steps."""
        if last:
            return self.settings.keep_resume_state
        if done == 0:
            return self.settings.at_start
        every = self.settings.every
        return bool(every and done % every == 0) or (self.settings.each_epoch and epoch_ended)

    def save(self, name: str, kind: str, state: State, facts: dict[str, Any]) -> None:
        """Write this rank's part of a checkpoint, in a thread where the settings say so. A
        collective.

        `kind` is `resume` or `model`. The checkpoint before is waited for: one is written at a
        time.
        """
        self.wait()
        began = time.monotonic()
        if self.settings.asynchronous:
            state = state.snapshot()
        folder = self.folder / name
        record = {**self._record, "kind": kind, "best_validation_loss": self.best, **facts}
        if self._world.rank == 0:
            remove_tree(partial_of(folder))  # of an attempt that was killed
        self._world.barrier()
        if not self.settings.asynchronous:
            self._write(folder, state, record, began)
            return
        self._writing = threading.Thread(
            target=self._guarded,
            args=(folder, state, record, began),
            name="tokenscale-checkpoint",
            daemon=True,
        )
        self._writing.start()

    def wait(self) -> None:
        """Wait until all writing is complete. Raises what the writing raised."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failed is not None:
            failed = self._failed
            self._failed = None
            raise failed

    def forget(self) -> None:
        """Rank 0: delete resume states, incomplete ones included, because the run has ended."""
        for folder in self.folder.glob("*"):
            state = folder.name.startswith("step=") and not self.settings.keep_resume_state
            if state or folder.name.endswith((PARTIAL, DAMAGED, ".old")):
                remove_tree(folder)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _guarded(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except BaseException as error:
            self._failed = error

    def _write(self, folder: Path, state: State, record: dict[str, Any], began: float) -> None:
        try:
            write_rank(folder, rank=self._world.rank, state=state)
            if self._world.rank != 0:
                return
            if self._tokenizer is not None:
                copy = partial_of(folder) / "tokenizer"
                shutil.copytree(self._tokenizer, copy)
                sync_tree(copy)
            commit(folder, world_size=self._world.size, record=record)
        except TimeoutError:
            raise
        except (OSError, SafetensorError) as error:
            raise UserError(
                "a checkpoint could not be written.",
                folder=folder,
                reason=error,
                next="make room, write fewer (checkpoints.every, checkpoints.keep_last), or look at "
                "the disk (dmesg)",
            ) from error
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        self.seconds.append((folder.name, size, time.monotonic() - began))
        for old in self._states()[: -self.settings.keep_last]:
            remove_tree(old)

    def _states(self) -> list[Path]:
        found = [
            f for f in self.folder.glob("step=*") if f.name[5:].isdigit() and (f / RECORD).is_file()
        ]
        return sorted(found, key=lambda f: int(f.name[5:]))


def log_checkpoints(log: Callable[..., object], checkpoints: Checkpoints) -> None:
    """Log the checkpoints that have been written since the last call."""
    while checkpoints.seconds:
        name, size, seconds = checkpoints.seconds.pop(0)
        log("checkpoint", status=name, bytes=size, duration_s=seconds)
