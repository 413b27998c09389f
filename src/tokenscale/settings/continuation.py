"""Resuming one run from another run's state: path of the state, and settings that may differ."""

import re
from typing import Any

from tokenscale.settings.options import to_dict
from tokenscale.settings.run import RunSettings

#: settings that may differ; all others determine the data, the model or the computation of a step
MAY_DIFFER = {
    *("layout", "micro_batch", "device", "engine", "prefetch", "budget", "schedule", "validation"),
    *("checkpoints", "resume_from", "log_every", "garbage_every", "profile", "attention", "loss_chunk"),
    *("activation_checkpointing", "compile"),
}


def state_path(run_id: str, step: int) -> str:
    """Return the path of the resume state that a run writes after `step` steps."""
    return f"results/runs/{run_id}/checkpoints/step={step:08d}"


def parse_run_id(state: str) -> str | None:
    """Return the id of the run that writes a state; None for a state outside `results/runs`."""
    found = re.fullmatch(r"(?:\./)?results/runs/([^/]+)/checkpoints/step=\d+/?", state)
    return found[1] if found else None


def start_step(run: RunSettings) -> int:
    """Return the number of steps done before this run, from the name of the state it resumes from."""
    found = re.search(r"step=(\d+)/?$", run.resume_from or "")
    return int(found[1]) if found else 0


def find_difference(theirs: RunSettings, mine: RunSettings) -> tuple[str, Any, Any] | None:
    """Return (setting, value there, value here) of the first difference that prevents resuming `mine`, or None."""
    there, here = (to_dict(run, science_only=True) for run in (theirs, mine))
    for key in sorted((there.keys() | here.keys()) - MAY_DIFFER):
        if there.get(key) != here.get(key):
            return key, there.get(key, "the default"), here.get(key, "the default")
    return None
