"""Report what this machine can run, what it cannot, and why. Exit code 0 if the demo can run here, else 2."""

import argparse
import json
import platform
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenscale import __version__
from tokenscale.cli import doctor_checks, doctor_probe
from tokenscale.cli.doctor_checks import DoctorContext, Finding
from tokenscale.cli.packages import GROUPS, PACKAGES, describe_problems


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    parser.add_argument(
        "--results", type=Path, default=Path("results"), metavar="DIR", help="folder of the results (default: results)"
    )
    parser.add_argument(
        "--machine", metavar="FILE", help="machine's file, such as profiles/alps/machine.toml: compare its link's speed"
    )
    parser.add_argument("--network", action="store_true", help="also try to reach the Hugging Face hub")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run all checks and print the report."""
    least = None
    if arguments.machine:
        from tokenscale.settings.machine import load_machine

        least = load_machine(arguments.machine).least_node_gb_s
    examination = examine(arguments.results, network=arguments.network, least_node_gb_s=least)
    print(examination.to_json() if arguments.json else examination.render())
    return 0 if examination.demo.possible else 2


#: name → check, in the order of the output
CHECKS: dict[str, Callable[[DoctorContext], Finding]] = {
    "python": doctor_checks.check_python,
    **{f"{group} packages": partial(doctor_checks.check_packages, group) for group in GROUPS},
    "project": doctor_checks.check_project_folder,
    "configuration": doctor_checks.check_configuration,
    "tools": doctor_checks.check_tools,
    "cores": doctor_checks.check_cores,
    "memory": doctor_checks.check_memory,
    "shared memory": doctor_checks.check_shared_memory,
    "gpu": doctor_checks.check_gpus,
    "bf16": doctor_checks.check_bf16,
    "gloo": doctor_checks.check_gloo,
    "nccl": doctor_checks.check_nccl,
    "results folder": doctor_checks.check_results_folder,
    "loopback": doctor_checks.check_loopback,
    "network": doctor_checks.check_hub,
    "slurm": doctor_checks.check_slurm,
    "environment": doctor_checks.check_environment,
}
#: time limit of each check: the slowest one reads the children's output
LIMIT_S = doctor_probe.LIMIT_S + 10
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
    """The findings of all checks by name, and the capabilities that follow from them."""

    findings: dict[str, Finding]
    capabilities: list[Capability]
    seconds: float

    @property
    def demo(self) -> Capability:
        """Return the capability of running `make run`."""
        return next(a for a in self.capabilities if a.what == DEMO)

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
        column = max(len(a.what) for a in self.capabilities)
        for capability in self.capabilities:
            lines += _wrap(
                f"  {capability.what:<{column}}  {'yes' if capability.possible else 'no':<3}  ",
                capability.reason,
                width,
            )
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


def examine(results: Path, *, network: bool = False, least_node_gb_s: float | None = None) -> Examination:
    """Run all checks in parallel, independent of each other. GPUs' links are compared with `least_node_gb_s`."""
    start = time.monotonic()
    context = DoctorContext(
        results,
        network,
        _start_in_background(doctor_probe.try_imports),
        _start_in_background(doctor_probe.try_ranks),
        least_node_gb_s,
    )
    running = {name: _start_in_background(partial(check, context)) for name, check in CHECKS.items()}
    findings = {}
    for name, future in running.items():
        try:
            findings[name] = future.result(max(0.0, start + LIMIT_S - time.monotonic()))
        except NotInTime:
            findings[name] = Finding("no", f"no result within {LIMIT_S:g} s", "a disk or a service may hang")
        except BaseException as error:  # a check that fails is a finding, too
            findings[name] = Finding(
                "no", f"the check itself failed: {type(error).__name__}: {error}", "report this as a bug"
            )
    return Examination(findings, derive_capabilities(findings), time.monotonic() - start)


def _start_in_background(work: Callable[[], Any]) -> Future:
    """Run a function in a daemon thread, so that a hanging disk cannot keep `doctor` from ending."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# -- conclusions


def derive_capabilities(findings: dict[str, Finding]) -> list[Capability]:
    """Derive the capabilities from the findings. A failed check excludes every capability that depends on it."""
    devices = len(findings["gpu"].values.get("devices", []))
    cores = findings["cores"].values.get("usable", 1)
    host, trainer, report, _ = ([p.distribution for p in PACKAGES if p.group == g and not p.only] for g in GROUPS)
    every = [p.distribution for p in PACKAGES]
    base = ["python", "memory", "results folder"]
    alone = [*base, "project", "configuration", "loopback"]
    on_cpu = f"1 to {cores} ranks, one a core" if cores > 1 else "1 rank, on one core"
    if devices:  # `device: auto` uses them
        on_cpu += "; only with `device: cpu`, otherwise the GPUs are used"
    return [
        _assess_demo(findings, [*host, *trainer, *report], alone, devices),
        _assess(findings, "training on the CPU (gloo)", on_cpu, trainer, [*base, "loopback", "gloo"]),
        _assess_gpus(findings, trainer, [*base, "gpu"], devices),
        _assess(findings, "bf16", findings["bf16"].fact, trainer, ["bf16"]),
        _assess_slurm(findings, [*host, "snakemake-executor-plugin-slurm"]),
        _assess(
            findings,
            "the report from copied logs",
            "without torch, GPU or network",
            [*report, "numpy", "pyarrow"],
            ["python", "results folder"],
        ),
        _assess_tests(findings, every, [*alone, "gloo"]),
    ]


def _assess(findings: dict[str, Finding], what: str, reason: str, packages: list[str], needed: list[str]) -> Capability:
    """Return a possible capability with that reason, or an impossible one if a package or a check is missing."""
    blockers = []  # name, reason
    for group in GROUPS:
        name, mine = f"{group} packages", [p.distribution for p in PACKAGES if p.group == group]
        mine = [distribution for distribution in mine if distribution in packages]
        states = findings[name].values.get("packages")
        if mine and states is None:
            blockers.append((name, findings[name].fact))
        elif wrong := describe_problems({m: states[m] | {"only": ""} for m in mine}):
            blockers.append((name, wrong))
    for name in needed:
        if findings[name].verdict == "no" and not findings[name].values.get(
            "without"
        ):  # the missing package is reported by itself
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
    if ranks > 1:
        needed = [*needed, "nccl" if devices else "gloo"]
    if devices:
        needed = [*needed, "gpu"]
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
    if devices > 1 and nccl.verdict == "no":
        return _assess(findings, what, f"1 rank only: {nccl.fact}", packages, needed)
    return _assess(findings, what, f"1 to {devices} ranks" if devices > 1 else "1 rank", packages, needed)


def _assess_slurm(findings: dict[str, Finding], packages: list[str]) -> Capability:
    what, here = "SLURM (--profile alps)", findings["slurm"]
    capability = _assess(findings, what, here.fact, packages, ["python", "project", "configuration", "slurm"])
    if capability.possible and findings["project"].verdict == "note":
        return Capability(what, False, findings["project"].fact, findings["project"].next)
    if capability.possible and not here.values.get("account"):
        return Capability(what, False, "ALPS_ACCOUNT is not set", "export ALPS_ACCOUNT=<project>")
    return capability


def _assess_tests(findings: dict[str, Finding], packages: list[str], needed: list[str]) -> Capability:
    capability = _assess(findings, "the tests (make test)", "except those of GPUs and SLURM", packages, needed)
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
