"""Of two runs of which one goes on from the other's state: what they share, and where that state lies."""

import re
from typing import Any

from tokenscale.settings.options import to_dict
from tokenscale.settings.run import RunSettings

#: settings in which the two may differ; all others decide the data, the model or what a step computes
MAY_DIFFER = {
    *("layout", "micro_batch", "device", "engine", "prefetch", "budget", "schedule", "validation"),
    *("checkpoints", "resume_from", "log_every", "garbage_every", "profile", "attention", "loss_chunk"),
    *("activation_checkpointing", "compile"),
}


def state(run_id: str, step: int) -> str:
    """The resume state that a run writes after so many steps.

    >>> state("packed-llama-tiny-single-w1-0123456789", 8)
    'results/runs/packed-llama-tiny-single-w1-0123456789/checkpoints/step=00000008'
    """
    return f"results/runs/{run_id}/checkpoints/step={step:08d}"


def writer_of(state: str) -> str | None:
    """The id of the run that writes a state; None for one that lies elsewhere."""
    found = re.fullmatch(r"(?:\./)?results/runs/([^/]+)/checkpoints/step=\d+/?", state)
    return found[1] if found else None


def begins_at(run: RunSettings) -> int:
    """Steps that another run did for this one: those in the name of the state that it goes on from.

    >>> begins_at(RunSettings(resume_from="elsewhere/step=00000008"))
    8
    """
    found = re.search(r"step=(\d+)/?$", run.resume_from or "")
    return int(found[1]) if found else 0


def apart(theirs: RunSettings, mine: RunSettings) -> tuple[str, Any, Any] | None:
    """(setting, its value there, its value here) of the first one for which no state of theirs serves mine."""
    there, here = (to_dict(run, science_only=True) for run in (theirs, mine))
    for key in sorted((there.keys() | here.keys()) - MAY_DIFFER):
        if there.get(key) != here.get(key):
            return key, there.get(key, "the default"), here.get(key, "the default")
    return None
