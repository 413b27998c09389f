"""`resume_from` in an experiment's file: the run of the same experiment to resume from. Host only (pydantic).

A file identifies that run by its levels and a step: the run's id is not known before the file is read.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json
from tokenscale.settings import yaml_files
from tokenscale.settings.continuation import find_difference, state_path
from tokenscale.settings.experiments import Experiment, cell_values, co_varied_keys, find_cell, flatten_cell
from tokenscale.settings.options import option, settings_class
from tokenscale.settings.run import RunSettings

KEY = "resume_from"


@settings_class
class ResumeFrom:
    """Run of the same experiment and repeat, and the step after which another run resumes from it."""

    run: dict[str, Any] = option(
        description="dotted key → level; enough levels to identify the cell. Other factors have the same level as in "
        "this run. A run that was itself resumed is selected only with `resume_from` among the levels"
    )
    step: int = option(description="optimizer step after which that run keeps a resume state", ge=0)


def resolve_settings(
    experiment: Experiment,
    cell: dict[str, Any],
    build: Callable[[dict[str, Any]], RunSettings],
    file: str,
    resumed_by: tuple[dict[str, Any], ...] = (),
) -> RunSettings:
    """Return the settings of a cell's run. `build` turns an experiment's values into settings.

    `resumed_by` are the cells that resume from this one. Raises UserError if the run to resume from is not in the
    experiment, keeps no state after that step, or has incompatible settings.
    """
    values, key = cell_values(experiment, cell), f"runs.{KEY}"
    if not isinstance(values.get(KEY), dict):
        return build(values)
    wanted: ResumeFrom = yaml_files.build(ResumeFrom, values[KEY], file=file, key=key)
    errors: list[UserError] = []
    with yaml_files.collect(errors):
        other = _find_cell(experiment, cell, wanted.run)
        if other in resumed_by:
            what, next = "runs resume from each other in a circle.", "let one of them start anew: resume_from: null"
            raise UserError(what, key=f"{key}.run", found=canonical_json(wanted.run), next=next)
    yaml_files.raise_errors(errors, file=file)
    theirs = resolve_settings(experiment, other, build, file, (*resumed_by, cell))
    mine = replace(build(values | {KEY: None}), resume_from=state_path(theirs.identity, wanted.step))
    yaml_files.raise_errors(_find_state_errors(theirs, mine, wanted.step), file=file)
    return mine


def _find_cell(experiment: Experiment, cell: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    given, ignored = flatten_cell(run), co_varied_keys(experiment, KEY)
    same = {
        key: level
        for key, level in cell.items()
        if key not in ignored and not any(name == key or name.startswith(f"{key}.") for name in given)
    }
    # `matches` expects mappings, not null, so `resume_from: null` is handled here
    levels = {key: level for key, level in run.items() if (key, level) != (KEY, None)}
    resumed = any(key.split(".")[0] == KEY for key in levels)

    def fits(other: dict[str, Any]) -> bool:
        from_scratch = cell_values(experiment, other).get(KEY) is None
        return other != cell and all(other[k] == v for k, v in same.items()) and (resumed or from_scratch)

    return find_cell(experiment, levels, f"runs.{KEY}.run", fits)


def list_kept_steps(run: RunSettings) -> list[int]:
    """Return the steps whose resume states remain after a run without interruption; empty if unknown."""
    policy, budget = run.checkpoints, run.budget
    if not policy.keep_resume_state or budget.kind != "steps" or policy.each_epoch:
        return []
    written = {0} if policy.at_start else set()
    written |= {*range(policy.every, budget.steps, policy.every)} if policy.every else set()
    return sorted(written | {budget.steps})[-policy.keep_last :]


def _find_state_errors(theirs: RunSettings, mine: RunSettings, step: int) -> Iterator[UserError]:
    steps, key = list_kept_steps(theirs), f"runs.{KEY}"
    if step not in steps:
        expected = ", ".join(map(str, steps))
        expected = expected or "a budget in steps, and checkpoints.keep_resume_state without each_epoch"
        what = "the run to resume from keeps no state after this step."
        next = "change runs.checkpoints: every, keep_last and keep_resume_state"
        yield UserError(what, key=f"{key}.step", run=theirs.identity, found=step, expected=expected, next=next)
    elif mine.budget.kind == "steps" and step >= mine.budget.steps:
        what, expected = "no steps are left after the resume state.", f"less than budget.steps = {mine.budget.steps}"
        next = "use an earlier state, or a larger budget"
        yield UserError(what, key=f"{key}.step", found=step, expected=expected, next=next)
    if (other := find_difference(theirs, mine)) is not None:
        setting, there, here = other
        what = "a run cannot resume from one with other settings."
        next = "choose a run that differs in layout, budget or evaluation only"
        yield UserError(what, key=f"{key}.run", setting=setting, found=there, expected=here, next=next)
