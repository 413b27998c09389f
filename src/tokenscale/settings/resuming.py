"""`resume_from` in an experiment's file: the run of the same experiment to resume from. Host only (pydantic).

A file identifies that run by its levels and a step: the run's id is not known before the file is read.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json
from tokenscale.settings import yaml_files
from tokenscale.settings.continuation import find_difference, state_path
from tokenscale.settings.experiments import Experiment, cell_values, co_varied_keys, expand_cells, flatten_cell, matches
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
    values = cell_values(experiment, cell)
    if not isinstance(values.get(KEY), dict):
        return build(values)
    wanted: ResumeFrom = yaml_files.build(ResumeFrom, values[KEY], file=file, key=f"runs.{KEY}")
    other = _find_cell(experiment, cell, wanted, file)
    if other in resumed_by:
        raise UserError(
            "runs resume from each other in a circle.",
            file=file,
            key=f"runs.{KEY}.run",
            found=canonical_json(wanted.run),
            next="let one of them start from scratch: resume_from: null",
        )
    theirs = resolve_settings(experiment, other, build, file, (*resumed_by, cell))
    mine = replace(build(values | {KEY: None}), resume_from=state_path(theirs.identity, wanted.step))
    _check_state(theirs, mine, wanted.step, file)
    return mine


def _find_cell(experiment: Experiment, cell: dict[str, Any], wanted: ResumeFrom, file: str) -> dict[str, Any]:
    given = flatten_cell(wanted.run)
    ignored = co_varied_keys(experiment, KEY)
    same = {
        key: level
        for key, level in cell.items()
        if key not in ignored and not any(name == key or name.startswith(f"{key}.") for name in given)
    }
    # `matches` expects mappings, not null, so `resume_from: null` is handled here
    levels = {key: level for key, level in wanted.run.items() if (key, level) != (KEY, None)}
    resumed = any(key.split(".")[0] == KEY for key in levels)
    found = [
        other
        for other in expand_cells(experiment)
        if other != cell
        and all(other[key] == level for key, level in same.items())
        and matches(other, levels)
        and (resumed or cell_values(experiment, other).get(KEY) is None)
    ]
    if len(found) != 1:
        raise UserError(
            f"the run to resume from matches {'no run' if not found else 'several runs'} of the experiment.",
            file=file,
            key=f"runs.{KEY}.run",
            found=canonical_json(wanted.run),
            cells="\n".join(canonical_json(other) for other in found or expand_cells(experiment)),
            next="give the levels of exactly one cell",
        )
    return found[0]


def list_kept_steps(run: RunSettings) -> list[int]:
    """Return the steps whose resume states remain after a run without interruption; empty if unknown."""
    policy, budget = run.checkpoints, run.budget
    if not policy.keep_resume_state or budget.kind != "steps" or policy.each_epoch:
        return []
    written = {0} if policy.at_start else set()
    written |= {*range(policy.every, budget.steps, policy.every)} if policy.every else set()
    return sorted(written | {budget.steps})[-policy.keep_last :]


def _check_state(theirs: RunSettings, mine: RunSettings, step: int, file: str) -> None:
    steps = list_kept_steps(theirs)
    if step not in steps:
        raise UserError(
            "the run to resume from keeps no state after this step.",
            file=file,
            key=f"runs.{KEY}.step",
            run=theirs.identity,
            found=step,
            expected=", ".join(map(str, steps))
            or "a budget in steps, and checkpoints.keep_resume_state without each_epoch",
            next="change runs.checkpoints: every, keep_last and keep_resume_state",
        )
    if mine.budget.kind == "steps" and step >= mine.budget.steps:
        raise UserError(
            "no steps are left after the resume state.",
            file=file,
            key=f"runs.{KEY}.step",
            found=step,
            expected=f"less than budget.steps = {mine.budget.steps}",
            next="use an earlier state, or a larger budget",
        )
    if (other := find_difference(theirs, mine)) is not None:
        setting, there, here = other
        raise UserError(
            "a run cannot resume from one with other settings.",
            file=file,
            key=f"runs.{KEY}.run",
            setting=setting,
            found=there,
            expected=here,
            next="choose a run that differs in layout, budget or evaluation only",
        )
