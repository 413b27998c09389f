"""Parity recordings of arms: a few steps with the recorder attached, and their certificates."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tokenscale.arms.prepared import read_record
from tokenscale.arms.train import LOG_LINES, run_adapter, write_contract
from tokenscale.base.files import write_json
from tokenscale.data.batches.batch import Inputs
from tokenscale.data.batches.open import open_batches
from tokenscale.parity.recorder import FLOOR_VARIABLE
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.run import RunSettings

#: optimizer steps of a recording
STEPS = 8
#: repetitions in which values are moved by rounding, from which the floor is measured
FLOORS = 2
#: seconds without a line of log or output after which a recording is given up
HANG_S = 1800
#: written last: `reason` says why there is no recording, or is null
OUTCOME = "outcome.json"


def record(
    run: RunSettings,
    store: Path,
    environment: Path | None,
    folder: Path,
    keep: tuple[int, ...] = (),
) -> str | None:
    """Record the first steps of a run below `folder`, and `FLOORS` repetitions. Return the reason
    of a failure.

    `environment` is the record of the arm's environment, None for this project's own trainer. One
    rank records, without torch.compile: the recorder reads whole parameters, and the modules as
    they are written. The recorded process, which may outlive this one, inherits the file
    descriptors `keep`: the lock of the folder.
    """
    run = replace(run, layout=LayoutSettings(), compile=False)
    folder.mkdir(parents=True, exist_ok=True)
    for path in [path for path in folder.iterdir() if path.name != ".lock"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    reason = read_record(environment)["error"] if environment is not None else None
    for floor in range(FLOORS + 1):
        reason = reason or _record_once(
            run,
            store,
            environment=environment,
            folder=folder,
            floor=floor,
            keep=keep,
        )
    write_json(folder / OUTCOME, value={"reason": reason})
    return reason


def _record_once(
    run: RunSettings,
    store: Path,
    environment: Path | None,
    folder: Path,
    floor: int,
    keep: tuple[int, ...],
) -> str | None:
    variables = {FLOOR_VARIABLE: str(floor)} if floor else {}
    work = folder / "arm"
    device = "cuda" if run.device == "auto" and torch.cuda.is_available() else "cpu"
    batches = open_batches(run, inputs=Inputs(store=store))
    steps = min(STEPS, run.budget.steps)
    options: dict[str, Any] = {"steps": steps, "device": device, "recording": folder}
    write_contract(
        run,
        batches,
        folder=work,
        record=environment,
        **options,
    )
    if environment is not None:
        reason = run_adapter(
            run.arm,
            record=environment,
            folder=work,
            variables=variables,
            hang_s=HANG_S,
            keep=keep,
        )
    else:
        command = [
            sys.executable,
            "-m",
            "tokenscale.arms.own",
            str((work / "contract.json").resolve()),
        ]
        options = {"capture_output": True, "text": True, "errors": "replace"}
        try:
            done = subprocess.run(
                command, env=os.environ | variables, timeout=HANG_S, pass_fds=keep, **options
            )
            lines = (done.stdout + done.stderr).strip().splitlines()[-LOG_LINES:]
            reason = f"recording failed: {' | '.join(lines)}" if done.returncode else None
        except subprocess.TimeoutExpired:
            reason = f"recording failed: it did not end within {HANG_S} s"
    written = (folder / f"floor-{floor}" if floor else folder) / "recording.json"
    if reason is None and not written.is_file():
        reason = "the arm wrote no recording"
    shutil.rmtree(work)
    return reason
