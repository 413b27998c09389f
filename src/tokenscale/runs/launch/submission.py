"""Checks before the first job is submitted: budget, unset variables, the profile, and packages of
the image.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenscale.base.errors import UserError, few
from tokenscale.base.wording import format_duration, format_number
from tokenscale.costs.prices import Total
from tokenscale.runs.launch.image import REQUIREMENTS

#: reference to an environment variable: `$ALPS_ACCOUNT`, `${ALPS_ACCOUNT}`
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
#: number of experiments shown in an error
MAX_EXPERIMENTS = 5


def unset_variable_error(resources: Iterable[Mapping[str, object]]) -> UserError | None:
    """Return the error for job resources with unset variables, which Snakemake leaves as they are;
    None without.
    """
    found = {
        (name, match[1])
        for of_job in resources
        for name, value in of_job.items()
        if isinstance(value, str) and (match := VARIABLE.match(value))
    }
    if not found:
        return None
    variables = sorted({variable for _, variable in found})
    values = {
        variable: "project" if variable.endswith("ACCOUNT") else "value" for variable in variables
    }
    what = f"environment variables that the profile uses have no value: {', '.join(variables)}."
    next_step = "\n".join(f"export {variable}=<{value}>" for variable, value in values.items())
    return UserError(
        what,
        used_by=", ".join(f"{name}: ${variable}" for name, variable in sorted(found)),
        next=next_step,
    )


def replaced_options_error(lost: Mapping[str, Iterable[str]]) -> UserError | None:
    """Return the error for entries of a profile that options replaced; None without. Jobs would
    lose their account.
    """
    if not lost:
        return None
    what = (
        f"{' and '.join(f'--{name}' for name in lost)} on the command line replaced settings of "
        "the profile."
    )
    found = "\n".join(f"{name}: {', '.join(keys)}" for name, keys in lost.items())
    reason = "Snakemake replaces the profile's whole mapping by the option"
    following = (
        "copy the profile's folder and change the value there: profiles/alps/README.md, A "
        "profile of your own"
    )
    return UserError(what, lost=found, reason=reason, next=following)


def missing_package_error(
    lacking: Mapping[str, list[str]], machine: str, container: str
) -> UserError | None:
    """Return the error for runs that import packages missing in the container; None without.

    `lacking` is package → ids of the runs that import it. `machine` and `container` are the files
    to change.
    """
    if not lacking:
        return None
    what = "runs import packages that the container lacks."
    runs = "\n".join(f"{package}: {few(run_ids)}" for package, run_ids in lacking.items())
    return UserError(
        what,
        file=machine,
        key="container_packages",
        runs=runs,
        next=install_hint(lacking, container),
    )


def install_hint(packages: Iterable[str], container: str) -> str:
    file = Path(container).with_name(REQUIREMENTS)
    again = "install again, and add the name to container_packages; or choose other runs"
    return f"add {', '.join(packages)} to {file}, {again}"


def format_costs(totals: Mapping[str, Total], node_hours: float) -> list[str]:
    """Return lines with the estimated cost of the runs to submit, by experiment, and the budget;
    empty if no runs.
    """
    if not totals:
        return []
    hours, bounded, unknown = _add(totals)
    width = max(map(len, totals))
    lines = [
        f"cost of {sum(of.runs for of in totals.values()):,} trainings, estimated: "
        f"{format_hours(totals)} node-hours, "
        f"{'within' if hours <= node_hours else 'over'} the budget of {node_hours:,g} "
        "(budget.node_hours)"
    ]
    for name, of in totals.items():
        share = f", {sum(of.bounded.values()):,} with an upper bound" if of.bounded else ""
        lines.append(f"  {name:<{width}}  {format_hours({name: of}):>10}  {of.runs:,} runs{share}")
    lines += [f"  ≤: {count:,} runs are priced by {why}" for why, count in bounded.items()]
    return lines + [
        f"  hours of {count:,} runs are not known: {why}" for why, count in unknown.items()
    ]


def budget_error(totals: Mapping[str, Total], node_hours: float) -> UserError | None:
    """Return the error for runs to submit (by experiment) that exceed the budget of node-hours;
    None if they do not.
    """
    needed, bounded, unknown = _add(totals)
    if needed <= node_hours:
        return None
    largest = sorted(totals.items(), key=lambda item: -item[1].node_hours)
    width = max(len(name) for name, _ in largest[:MAX_EXPERIMENTS])
    lines = [
        f"{name:<{width}}  {format_hours({name: of}):>10}" for name, of in largest[:MAX_EXPERIMENTS]
    ]
    if rest := dict(largest[MAX_EXPERIMENTS:]):
        lines.append(f"and {len(rest)} more experiments: {format_hours(rest)}")
    return UserError(
        "the runs need more node-hours than the budget allows.",
        needed=f"{format_hours(totals)} node-hours (estimated)"
        + (f", {bounded.total():,} runs with an upper bound" if bounded else "")
        + (f", and {unknown.total():,} runs of unknown hours" if unknown else ""),
        budget=f"{node_hours:,g}  (budget.node_hours)",
        largest="\n".join(lines),
        next=f"--config '{suggest_budget(needed)}', or the same key in config.yaml;\n"
        "or run fewer: `tokenscale plan` prints what each experiment takes"
        + (
            ";\nor `snakemake corpus tokens` first: token stores make bounds exact"
            if bounded
            else ""
        ),
    )


def cpu_error(flops: Sequence[float], rate: float, allowed_hours: float) -> UserError | None:
    """Return the error for runs (their FLOPs) that a CPU of this rate (FLOP/s) computes in more
    hours than allowed; None if it does not.
    """
    hours = sum(flops) / rate / 3600
    if hours <= allowed_hours:
        return None
    enough = math.ceil(2 * hours)  # the next call measures another rate
    return UserError(
        "the trainings are sized for GPUs, and this machine has none.",
        needed=f"at least {format_duration(3600 * hours)} on this CPU: {sum(flops) / 1e12:,.0f} "
        f"TFLOP in {len(flops):,} runs, of which matrix products reach {rate / 1e12:,.2f} a second",
        budget=f"{allowed_hours:,g} hours  (budget.cpu_hours)",
        next="start it on a machine with GPUs, or with --profile NAME on a cluster;\n"
        "`tokenscale plan` prints what each experiment takes;\n"
        f"on this CPU all the same: --config 'budget={{cpu_hours: {enough}}}'",
    )


def format_hours(totals: Mapping[str, Total]) -> str:
    """Format node-hours: `≤` marks a sum with upper bounds, `≥` one that lacks runs."""
    hours, bounded, unknown = _add(totals)
    if bounded and unknown:
        sign = "about "
    elif bounded:
        sign = "≤ "
    elif unknown:
        sign = "≥ "
    else:
        sign = ""
    return f"{sign}{format_number(hours)}"


def _add(totals: Mapping[str, Total]) -> tuple[float, Counter[str], Counter[str]]:
    """Return node-hours, and the numbers of runs with an upper bound and of unknown hours, each by
    reason.
    """
    bounded = Counter[str]()
    unknown = Counter[str]()
    for of in totals.values():
        bounded.update(of.bounded)
        unknown.update(of.unknown)
    return sum(of.node_hours for of in totals.values()), bounded, unknown


def suggest_budget(needed: float) -> str:
    """Return the value of `--config` that allows this number of node-hours.

    >>> suggest_budget(123.4)
    'budget={node_hours: 130}'
    """
    return f"budget={{node_hours: {-(-math.ceil(needed) // 10) * 10}}}"
