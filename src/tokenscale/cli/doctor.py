"""Report what this machine can run, what it cannot, and why. Exit code 0 if the demo can run here, else 2."""

import argparse
import json
import platform
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tokenscale import __version__
from tokenscale.cli import doctor_checks, doctor_python
from tokenscale.cli.doctor_checks import Context, Finding
from tokenscale.cli.doctor_python import GROUPS, ONLY, describe_problems, list_packages, module_of


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
    examination = examine(arguments.results, least)
    print(examination.to_json() if arguments.json else examination.render())
    return 0 if examination.demo.possible else 2


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
#: the capability that decides the exit code
DEMO = "the demo (make run)"


@dataclass(frozen=True)
class Capability:
    """One thing that a user may want to run: whether this machine can run it, the reason, and the first step."""

    what: str
    possible: bool
    reason: str
    next: str = ""


@dataclass(frozen=True)
class Examination:
    """The findings of all checks by name, and the capabilities that follow from them, the demo first."""

    findings: dict[str, Finding]
    capabilities: list[Capability]
    seconds: float

    @property
    def demo(self) -> Capability:
        """Return the capability of running `make run`."""
        return self.capabilities[0]

    def render(self, width: int = 120) -> str:
        """Return the report as ASCII text: one line per check, then one per capability."""
        lines = [
            f"tokenscale {__version__} on {platform.system()} {platform.machine()}, checked in {self.seconds:.1f} s"
        ]
        column = max(map(len, self.findings))
        for name, finding in self.findings.items():
            lines += _wrap(f"{name:<{column}}  {finding.verdict:<4}  ", finding.fact, width)
            if finding.next:
                lines += _wrap(f"{'':<{column}}  {'':<4}  next: ", finding.next, width)
        lines += ["", "What this machine can run"]
        column = max(len(c.what) for c in self.capabilities)
        for c in self.capabilities:
            lines += _wrap(f"  {c.what:<{column}}  {'yes' if c.possible else 'no':<3}  ", c.reason, width)
        if not self.demo.possible:
            lines += ["", f"make run cannot run here yet. First: {self.demo.next or 'fix what is named above'}"]
        return "\n".join(lines).encode("ascii", "backslashreplace").decode("ascii")

    def to_json(self) -> str:
        """Return the report as JSON."""
        content = {
            "schema": 1,
            "version": __version__,
            "seconds": round(self.seconds, 3),
            "demo": self.demo.possible,
            "findings": [{"name": name, **asdict(finding)} for name, finding in self.findings.items()],
            "can_run": [asdict(capability) for capability in self.capabilities],
        }
        return json.dumps(content, indent=2, default=str)


def examine(results: Path, least_node_gb_s: float | None = None) -> Examination:
    """Run all checks one after another. GPUs' links are compared with `least_node_gb_s`."""
    start, findings = time.monotonic(), {}
    probed = doctor_python.probe([module_of(name) for name in list_packages()])
    context = Context(results, **probed, least_node_gb_s=least_node_gb_s)
    for name, check in CHECKS.items():
        try:
            findings[name] = check(context)
        except Exception as error:  # a check that fails is a finding, too
            fact = f"the check itself failed: {type(error).__name__}: {error}"
            findings[name] = Finding("no", fact, "report this as a bug")
    return Examination(findings, derive_capabilities(findings), time.monotonic() - start)


# -- conclusions


def derive_capabilities(findings: dict[str, Finding]) -> list[Capability]:
    """Derive the capabilities from the findings. A failed check excludes every capability that depends on it."""
    devices = len(findings["gpu"].values.get("devices", []))
    cores = findings["cores"].values.get("usable", 1)
    host, trainer, report = ([p for p in list_packages(g) if p not in ONLY] for g in ("host", "trainer", "report"))
    base = ["python", "memory", "results folder"]
    project = [*base, "project", "configuration"]
    on_cpu = f"1 to {cores} ranks, one a core" if cores > 1 else "1 rank, on one core"
    if devices:  # `device: auto` uses them
        on_cpu += "; only with `device: cpu`, otherwise the GPUs are used"
    slurm = [*host, "snakemake-executor-plugin-slurm"]
    copied = [*report, "numpy", "pyarrow"]
    tests = "except those of GPUs and SLURM"
    return [
        _assess_demo(findings, [*host, *trainer, *report], project, devices),
        _assess(findings, "training on the CPU (gloo)", on_cpu, trainer, [*base, "gloo"]),
        _assess_gpus(findings, trainer, [*base, "gpu"], devices),
        _assess(findings, "bf16", findings["bf16"].fact, trainer, ["bf16"]),
        _assess_slurm(findings, slurm, ["python", "project", "configuration", "slurm"]),
        _assess(findings, "the report from copied logs", "without torch, GPU or network", copied, [base[0], base[2]]),
        _assess_tests(findings, _assess(findings, "the tests (make test)", tests, list_packages(), [*project, "gloo"])),
    ]


def _assess(findings: dict[str, Finding], what: str, reason: str, packages: list[str], needed: list[str]) -> Capability:
    """Return a possible capability with that reason, or an impossible one if a package or a check is missing."""
    blockers = []  # name, reason
    for name in (f"{group} packages" for group in GROUPS if set(packages) & set(list_packages(group))):
        states = findings[name].values.get("packages")
        if states is None:
            blockers.append((name, findings[name].fact))
        elif wrong := describe_problems({m: state | {"only": ""} for m, state in states.items() if m in packages}):
            blockers.append((name, wrong))
    for name in needed:  # a missing package is reported by itself
        if findings[name].verdict == "no" and not findings[name].values.get("without"):
            blockers.append((name, f"{name}: {findings[name].fact}"))
    if not blockers:
        return Capability(what, True, reason)
    (first, why), *others = blockers
    why += f"; and {', '.join(name for name, _ in others)}" if others else ""
    return Capability(what, False, why, findings[first].next)


def _assess_demo(findings: dict[str, Finding], packages: list[str], needed: list[str], devices: int) -> Capability:
    ranks = findings["configuration"].values.get("ranks", 1)
    wanted = findings["configuration"].values.get("gpu_ranks", ranks)
    devices = devices if wanted else 0  # all its runs have `device: cpu`
    needed = [*needed, *["nccl" if devices else "gloo"] * (ranks > 1), *["gpu"] * (devices > 0)]
    where = f"on {devices} GPU{'s' * (devices > 1)}" if devices else "on the CPU"
    by = "" if findings["tools"].values.get("make") else "without make: snakemake --profile profiles/local; "
    capability = _assess(findings, DEMO, f"{by}{where}, up to {ranks} ranks", packages, needed)
    if capability.possible and 0 < devices < wanted:
        cure = "CUDA_VISIBLE_DEVICES= make run"
        why = f"it has runs of {wanted} ranks with one GPU each, but torch sees {devices}; use the CPU: {cure}"
        return Capability(DEMO, False, why, cure)
    return capability


def _assess_gpus(findings: dict[str, Finding], packages: list[str], needed: list[str], devices: int) -> Capability:
    what, nccl = "training on GPUs (NCCL)", findings["nccl"]
    if not devices:
        return Capability(what, False, findings["gpu"].fact, findings["gpu"].next)
    reason = f"1 to {devices} ranks" if devices > 1 else "1 rank"
    if devices > 1 and nccl.verdict == "no":
        reason = f"1 rank only: {nccl.fact}"
    return _assess(findings, what, reason, packages, needed)


def _assess_slurm(findings: dict[str, Finding], packages: list[str], needed: list[str]) -> Capability:
    what, project, here = "SLURM (--profile alps)", findings["project"], findings["slurm"]
    capability = _assess(findings, what, here.fact, packages, needed)
    if capability.possible and project.verdict == "note":
        return Capability(what, False, project.fact, project.next)
    if capability.possible and not here.values.get("account"):
        return Capability(what, False, "ALPS_ACCOUNT is not set", "export ALPS_ACCOUNT=<project>")
    return capability


def _assess_tests(findings: dict[str, Finding], capability: Capability) -> Capability:
    if capability.possible and not findings["tools"].values.get("git"):
        return Capability(capability.what, False, "git is not found", "install git")
    return capability


def _wrap(start: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()) or "-",
        max(width, len(start) + 40),
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
