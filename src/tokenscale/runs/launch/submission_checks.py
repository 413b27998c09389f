"""Before the first job is submitted: the budget, accounts without a value, the profile, and the image's packages."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.costs.prices import Total

#: a resource that the environment should have filled in: `$ALPS_ACCOUNT`, `${ALPS_ACCOUNT}`
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
#: experiments that a refusal names
LARGEST = 5


def without_a_value(resources: Iterable[Mapping[str, object]]) -> UserError | None:
    """The error for resources of jobs whose value still begins with `$`; None where there are none.

    Snakemake leaves a variable that is not set as it is, and SLURM would be given its name for a value.
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
    subject = "a variable" if len(variables) == 1 else "variables"
    return UserError(
        f"{subject} of the profile {'has' if len(variables) == 1 else 'have'} no value: {', '.join(variables)}.",
        used_by=", ".join(f"{name}: ${variable}" for name, variable in sorted(found)),
        next="\n".join(f"export {variable}=<{_meaning(variable)}>" for variable in variables),
    )


def _meaning(variable: str) -> str:
    return "project" if variable.endswith("ACCOUNT") else "value"


def taken_away(lost: Mapping[str, Iterable[str]]) -> UserError | None:
    """The error for names in a profile's maps that options of the command line have replaced; None without any.

    Without it a job would go to the account that SLURM takes by itself, with the partition's own time limit.
    """
    if not lost:
        return None
    options = " and ".join(f"--{name}" for name in lost)
    return UserError(
        f"{options} on the command line took away what the profile says.",
        lost="\n".join(f"{name}: {', '.join(keys)}" for name, keys in lost.items()),
        reason="Snakemake puts such an option in the place of the profile's whole map",
        next="copy the profile's folder and change the value there: profiles/alps/README.md, A profile of your own",
    )


def not_in_the_image(lacking: Mapping[str, list[str]], machine: str, container: str) -> UserError | None:
    """The error for runs that import packages which the container's image lacks; None without any.

    `lacking`: package → ids of the runs that import it. `machine` and `container` are the files that say so.
    """
    if not lacking:
        return None
    return UserError(
        "runs import packages that the image of the container lacks.",
        file=machine,
        key="container_packages",
        runs="\n".join(f"{package}: {some(run_ids)}" for package, run_ids in lacking.items()),
        next=to_install(lacking, container),
    )


def to_install(packages: Iterable[str], container: str) -> str:
    """What to do about packages that an image lacks."""
    file = Path(container).with_name("Containerfile")
    return (
        f"install {', '.join(packages)} in the image ({file}), build it again, and add the name to container_packages; "
        "or choose other runs"
    )


def some(run_ids: list[str]) -> str:
    """The first ids of a list.

    >>> some(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    rest = f" and {len(run_ids) - 3:,} more" if len(run_ids) > 3 else ""
    return ", ".join(run_ids[:3]) + rest


def cost(totals: Mapping[str, Total], node_hours: float) -> list[str]:
    """Lines on what the runs that are to be submitted take, by experiment, beside the budget; none without runs."""
    if not totals:
        return []
    runs, kept = sum(of.runs for of in totals.values()), _needed(totals) <= node_hours
    width = max(map(len, totals))
    lines = [
        f"cost of {runs:,} trainings, estimated: {hours(totals)} node-hours, "
        f"{'within' if kept else 'over'} the budget of {node_hours:,g} (budget.node_hours)"
    ]
    for name, of in totals.items():
        share = f", {sum(of.bounded.values()):,} with an upper bound" if of.bounded else ""
        lines.append(f"  {name:<{width}}  {hours({name: of}):>10}  {of.runs:,} runs{share}")
    for why, count in _together(of.bounded for of in totals.values()).items():
        lines.append(f"  ≤: {count:,} runs are priced by {why}")
    for why, count in _together(of.unknown for of in totals.values()).items():
        lines.append(f"  hours of {count:,} runs are not known: {why}")
    return lines


def over_budget(totals: Mapping[str, Total], node_hours: float) -> UserError | None:
    """The error for runs that need more node-hours than the budget; None where they keep to it.

    `totals` are those of the runs that are to be submitted, by experiment; upper bounds count as they are.
    """
    needed = _needed(totals)
    if needed <= node_hours:
        return None
    largest = sorted(totals.items(), key=lambda item: -item[1].node_hours)
    width = max(len(name) for name, _ in largest[:LARGEST])
    lines = [f"{name:<{width}}  {hours({name: of}):>10}" for name, of in largest[:LARGEST]]
    if rest := dict(largest[LARGEST:]):
        lines.append(f"and {len(rest)} more experiments: {hours(rest)}")
    unknown, bounded = (
        _together(getattr(of, name) for of in totals.values()).total() for name in ("unknown", "bounded")
    )
    return UserError(
        "the runs need more node-hours than the budget allows.",
        needed=f"{hours(totals)} node-hours (estimated)"
        + (f", {bounded:,} runs with an upper bound" if bounded else "")
        + (f", and {unknown:,} runs of unknown hours" if unknown else ""),
        budget=f"{node_hours:,g}  (budget.node_hours)",
        largest="\n".join(lines),
        next=f"--config '{larger(needed)}', or the same key in config.yaml;\n"
        "or run fewer: `python -m tokenscale plan` prints what each experiment takes"
        + (";\nor `snakemake corpus tokens` first: token stores make bounds exact" if bounded else ""),
    )


def hours(totals: Mapping[str, Total]) -> str:
    """Node-hours of several experiments: `≤` before a sum that holds upper bounds, `≥` before one that lacks runs."""
    bounded, unknown = any(of.bounded for of in totals.values()), any(of.unknown for of in totals.values())
    sign = "about " if bounded and unknown else "≤ " * bounded + "≥ " * unknown
    return f"{sign}{_needed(totals):,.1f}"


def _needed(totals: Mapping[str, Total]) -> float:
    return sum(of.node_hours for of in totals.values())


def _together(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    return sum(map(Counter, counts), Counter())


def larger(needed: float) -> str:
    """What allows so many node-hours, behind `--config`.

    >>> larger(123.4)
    'budget={node_hours: 130}'
    """
    return f"budget={{node_hours: {-(-math.ceil(needed) // 10) * 10}}}"
