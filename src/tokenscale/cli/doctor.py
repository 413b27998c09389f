"""Report what this machine has and lacks. Exit code 0 if `make run` can run here, else 2."""

import argparse
import json
import platform
import textwrap
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tokenscale import __version__
from tokenscale.cli import doctor_checks, doctor_python
from tokenscale.cli.doctor_checks import Context, Finding
from tokenscale.cli.doctor_python import GROUPS, list_packages, module_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    parser.add_argument(
        "--results", type=Path, default=Path("results"), metavar="DIR", help="folder of the results (default: results)"
    )
    parser.add_argument(
        "--machine", metavar="FILE", help="machine's file, such as profiles/alps/machine.toml: compare its link's speed"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run all checks and print the report."""
    least = None
    if arguments.machine:
        from tokenscale.settings.machine import load_machine

        least = load_machine(arguments.machine).least_node_gb_s
    findings = examine(arguments.results, least)
    possible = not find_first_lack(findings)
    if arguments.json:
        listed = [{"name": name, **asdict(finding)} for name, finding in findings.items()]
        content = {"schema": 1, "version": __version__, "demo": possible, "findings": listed}
        print(json.dumps(content, indent=2, default=str))
    else:
        print(render(findings))
    return 0 if possible else 2


#: name → check, in the order of the output
CHECKS: dict[str, Callable[[Context], Finding]] = {
    "python": doctor_python.check_python,
    **{f"{group} packages": partial(doctor_python.check_packages, group) for group in GROUPS},
    "project": doctor_checks.check_project_folder,
    "configuration": doctor_checks.check_configuration,
    "tools": doctor_checks.check_tools,
    "cores": doctor_checks.check_cores,
    "memory": doctor_checks.check_memory,
    "gpu": doctor_python.check_gpus,
    "bf16": doctor_python.check_bf16,
    "gloo": doctor_python.check_gloo,
    "nccl": doctor_python.check_nccl,
    "results folder": doctor_checks.check_results_folder,
    "slurm": doctor_checks.check_slurm,
}
#: checks that `make run` needs, which decide the exit code
DEMO = ("python", "host packages", "trainer packages", "report packages", "project", "configuration", "memory", "gloo",
        "results folder")  # fmt: skip


def examine(
    results: Path, least_node_gb_s: float | None = None, only: Container[str] | None = None
) -> dict[str, Finding]:
    """Return the findings of all checks, or of those in `only`, by name. A check that fails is a finding, too.

    GPUs' links are compared with `least_node_gb_s`.
    """
    findings = {}
    probed = doctor_python.probe([module_of(name) for name in list_packages()])
    context = Context(results, **probed, least_node_gb_s=least_node_gb_s)
    for name, check in CHECKS.items():
        try:
            if only is None or name in only:
                findings[name] = check(context)
        except Exception as error:
            fact = f"the check itself failed: {type(error).__name__}: {error}"
            findings[name] = Finding("no", fact, "report this as a bug")
    return findings


def find_first_lack(findings: Mapping[str, Finding]) -> str:
    """Return the first step of the first check that `make run` needs and that failed; empty if it can run."""
    lacks = (findings[name] for name in DEMO if findings[name].verdict == "no")
    return next((finding.next or finding.fact for finding in lacks), "")


def render(findings: Mapping[str, Finding], width: int = 120) -> str:
    """Return the report as ASCII text: one line per check, then whether `make run` can run."""
    lines = [f"tokenscale {__version__} on {platform.system()} {platform.machine()}"]
    column = max(map(len, findings))
    for name, finding in findings.items():
        lines += _wrap(f"{name:<{column}}  {finding.verdict:<4}  ", finding.fact, width)
        if finding.next:
            lines += _wrap(f"{'':<{column}}  {'':<4}  next: ", finding.next, width)
    first = find_first_lack(findings)
    chosen = "tokenscale ready says whether the chosen experiments can start"
    lines += ["", f"make run cannot run here yet. First: {first}" if first else f"make run can run here; {chosen}"]
    return "\n".join(lines).encode("ascii", "backslashreplace").decode("ascii")


def _wrap(start: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()) or "-",
        max(width, len(start) + 40),
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
