"""`resume_from` of an experiment's file: which run of its table another one goes on from. Host only (pydantic).

A file names that run by its levels and the step after which it is left. Its id is known only once the file is read.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json
from tokenscale.settings import validate
from tokenscale.settings.continuation import apart, state
from tokenscale.settings.experiments import Experiment, cells, dotted, factor_of, matches, stated
from tokenscale.settings.options import STRICT, option
from tokenscale.settings.run import RunSettings

KEY = "resume_from"


@dataclass(frozen=True)
class ResumeFrom:
    """A run of the same experiment and repeat, and the step after which another one goes on from it."""

    __pydantic_config__ = STRICT

    run: dict[str, Any] = option(
        description="dotted key → level, as many as tell its cell from the others; factors that are not named have "
        "the same level there, and a run that was itself resumed is meant only where `resume_from` is named, too"
    )
    step: int = option(description="optimizer steps done by then, after which it keeps a state", ge=0, strict=True)


def settings_of(
    experiment: Experiment,
    cell: dict[str, Any],
    build: Callable[[dict[str, Any]], RunSettings],
    file: str,
    behind: tuple[dict[str, Any], ...] = (),
) -> RunSettings:
    """A cell's run; `build` makes settings of an experiment's words. `behind`: the cells that go on from this one.

    Raises UserError where the run to go on from is none of the experiment's, keeps no state after that step, or has
    settings with which its state is of no use here.
    """
    values = stated(experiment, cell)
    if not isinstance(values.get(KEY), dict):
        return build(values)
    wanted: ResumeFrom = validate.build(ResumeFrom, values[KEY], file=file, key=f"runs.{KEY}")
    other = _cell(experiment, cell, wanted, file)
    if other in behind:
        raise UserError(
            "runs go on from each other in a circle.",
            file=file,
            key=f"runs.{KEY}.run",
            found=canonical_json(wanted.run),
            next="one of them has to begin by itself: resume_from: null",
        )
    theirs = settings_of(experiment, other, build, file, (*behind, cell))
    mine = replace(build(values | {KEY: None}), resume_from=state(theirs.identity, wanted.step))
    _check(theirs, mine, wanted.step, file)
    return mine


def _cell(experiment: Experiment, cell: dict[str, Any], wanted: ResumeFrom, file: str) -> dict[str, Any]:
    """The cell that is to be gone on from."""
    named = dotted(wanted.run)
    apart = factor_of(experiment, KEY)
    same = {
        key: level
        for key, level in cell.items()
        if key not in apart and not any(name == key or name.startswith(f"{key}.") for name in named)
    }
    # a level of null is no mapping: it is spelled out here, and not by `matches`
    levels = {key: level for key, level in wanted.run.items() if (key, level) != (KEY, None)}
    resumed = any(key.split(".")[0] == KEY for key in levels)
    found = [
        other
        for other in cells(experiment)
        if other != cell
        and all(other[key] == level for key, level in same.items())
        and matches(other, levels)
        and (resumed or stated(experiment, other).get(KEY) is None)
    ]
    if len(found) != 1:
        raise UserError(
            f"the run to go on from is {'no run' if not found else 'several runs'} of the experiment.",
            file=file,
            key=f"runs.{KEY}.run",
            found=canonical_json(wanted.run),
            cells="\n".join(canonical_json(other) for other in found or cells(experiment)),
            next="name the levels of one cell",
        )
    return found[0]


def kept(run: RunSettings) -> list[int]:
    """Steps after which a run that was never interrupted keeps a state for others; none where that is not known."""
    policy, budget = run.checkpoints, run.budget
    if not policy.keep_resume_state or budget.kind != "steps" or policy.each_epoch:
        return []
    written = {0} if policy.at_start else set()
    written |= {*range(policy.every, budget.steps, policy.every)} if policy.every else set()
    return sorted(written | {budget.steps})[-policy.keep_last :]


def _check(theirs: RunSettings, mine: RunSettings, step: int, file: str) -> None:
    """That the state is there once their run has ended, and that mine can use it."""
    steps = kept(theirs)
    if step not in steps:
        raise UserError(
            "the run to go on from keeps no state after this step.",
            file=file,
            key=f"runs.{KEY}.step",
            run=theirs.identity,
            found=step,
            expected=", ".join(map(str, steps))
            or "a budget in steps, and checkpoints.keep_resume_state without each_epoch",
            next="see runs.checkpoints: every, keep_last and keep_resume_state",
        )
    if mine.budget.kind == "steps" and step >= mine.budget.steps:
        raise UserError(
            "nothing is left to do behind the state.",
            file=file,
            key=f"runs.{KEY}.step",
            found=step,
            expected=f"less than budget.steps = {mine.budget.steps}",
            next="take an earlier state, or a larger budget",
        )
    if (other := apart(theirs, mine)) is not None:
        setting, there, here = other
        raise UserError(
            "a run cannot go on from one of other settings: not the layout alone differs.",
            file=file,
            key=f"runs.{KEY}.run",
            setting=setting,
            found=there,
            expected=here,
            next="name a run that differs in its layout, budget or evaluation alone",
        )
