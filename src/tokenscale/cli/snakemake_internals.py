"""All private parts of Snakemake that the workflow's rules use.

Snakemake may change these parts in any release. A release without one of them is refused with a clear message.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any, NoReturn

from tokenscale.base.errors import UserError

#: the release that these parts were last tested with
TESTED = "9.27"


def get_internal(owner: Any, path: str) -> Any:
    """Return a private attribute by its dotted path. Raise UserError for a Snakemake without it."""
    for name in path.split("."):
        if not hasattr(owner, name):
            raise UserError(
                "this release of Snakemake does not fit the workflow.",
                found=f"snakemake {version('snakemake')}, without {path}",
                expected=f"a release like {TESTED}",
                next=f"pip install 'snakemake~={TESTED}.0'",
            )
        owner = getattr(owner, name)
    return owner


def exit_with(error: UserError) -> NoReturn:
    """Print the error and end the process with exit code 2.

    Snakemake prints the stack trace of any exception raised while it reads the rules, `SystemExit` included.
    """
    print(error.render(), file=sys.stderr, flush=True)
    os._exit(2)


def get_command_line() -> list[str]:
    """Return Snakemake's command line, the program first."""
    return sys.argv


def parse_targets(words: Iterable[str]) -> list[str]:
    """Return the targets among these words; only Snakemake's own parser distinguishes them from option values."""
    from snakemake.cli import get_argument_parser

    return get_argument_parser().parse_known_args(list(words))[0].targets


def is_planned(workflow: Any) -> bool:
    """Return whether this call of Snakemake planned jobs; calls such as --list-rules or --unlock do not."""
    return get_internal(workflow, "scheduler") is not None


def get_jobs_to_run(workflow: Any) -> list[Any]:
    """Return the jobs that this call runs or has run."""
    return list(get_internal(workflow, "dag.needrun_jobs")(exclude_finished=False))


def get_jobs_to_submit(workflow: Any) -> list[Any]:
    """Return the jobs that go to a cluster: all that run, except for local rules and targets."""
    local = get_internal(workflow, "_localrules")
    return [job for job in get_jobs_to_run(workflow) if job.rule.name not in local and not job.is_norun]


def submits_jobs(workflow: Any) -> bool:
    """Return whether this process submits jobs, instead of running them here or inside such a job."""
    return get_internal(workflow, "non_local_exec") and not get_internal(workflow, "remote_exec")


def get_given_resources(workflow: Any) -> dict[str, Any]:
    """Return the maps of resources and threads that the command line or a profile gives."""
    given = get_internal(workflow, "resource_settings")
    return {
        "default-resources": get_internal(given, "default_resources") or {},
        "set-resources": get_internal(given, "overwrite_resources"),
        "set-threads": get_internal(given, "overwrite_threads"),
    }


def find_rules(workflow: Any, target: str) -> Iterator[str]:
    """Yield the names of rules that make a target or have its name."""
    for rule in get_internal(workflow, "rules"):
        if rule.name == target or rule.is_producer(target):
            yield rule.name
