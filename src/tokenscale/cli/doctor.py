"""What this machine can run, what it cannot, and why. Exit code 0 when the demo can run here, else 2."""

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
from tokenscale.cli import doctor_checks
from tokenscale.cli import doctor_probe as probe
from tokenscale.cli.doctor_checks import DoctorContext, Finding
from tokenscale.cli.packages import GROUPS, PACKAGES, describe_problems


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR", help="folder of the results")
    parser.add_argument("--network", action="store_true", help="also try to reach the hub of tokenizers and texts")
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Examine, print."""

    examination = examine(arguments.results, network=arguments.network)
    print(examination.to_json() if arguments.json else examination.render())
    return 0 if examination.demo.possible else 2


#: name → check, in the order of the output
CHECKS: dict[str, Callable[[DoctorContext], Finding]] = {
    "python": doctor_checks.python,
    **{f"{group} packages": partial(doctor_checks.packages, group) for group in GROUPS},
    "project": doctor_checks.folder,
    "configuration": doctor_checks.configuration,
    "tools": doctor_checks.tools,
    "cores": doctor_checks.cpu,
    "memory": doctor_checks.main_memory,
    "shared memory": doctor_checks.shared_memory,
    "gpu": doctor_checks.gpu,
    "bf16": doctor_checks.bf16,
    "gloo": doctor_checks.gloo,
    "nccl": doctor_checks.nccl,
    "results folder": doctor_checks.results_folder,
    "loopback": doctor_checks.loopback,
    "network": doctor_checks.hub,
    "slurm": doctor_checks.slurm,
    "environment": doctor_checks.environment,
}
#: no check waits longer: the slowest reads what the children say
LIMIT_S = probe.LIMIT_S + 10
#: the capability that decides the exit code
DEMO = "the demo (make run)"


@dataclass(frozen=True)
class Capability:
    """Something a user may want to run: whether this machine can, why (not), and what to do first."""

    what: str
    possible: bool
    reason: str
    next: str = ""


@dataclass(frozen=True)
class Examination:
    """All findings by name, and what follows from them."""

    findings: dict[str, Finding]
    capabilities: list[Capability]
    seconds: float

    @property
    def demo(self) -> Capability:
        """Whether `make run` can run here."""
        return next(a for a in self.capabilities if a.what == DEMO)

    def render(self, width: int = 120) -> str:
        """For people: a line a check, then a line an capability. ASCII, whatever the terminal's encoding."""
        lines = [
            f"tokenscale {__version__} on {platform.system()} {platform.machine()}, checked in {self.seconds:.1f} s"
        ]
        column = max(map(len, self.findings))
        for name, finding in self.findings.items():
            lines += _wrapped(f"{name:<{column}}  {finding.verdict:<4}  ", finding.fact, width)
            if finding.next:
                lines += _wrapped(f"{'':<{column}}  {'':<4}  next: ", finding.next, width)
        lines += ["", "What this machine can run"]
        column = max(len(a.what) for a in self.capabilities)
        for capability in self.capabilities:
            lines += _wrapped(
                f"  {capability.what:<{column}}  {'yes' if capability.possible else 'no':<3}  ",
                capability.reason,
                width,
            )
        if not self.demo.possible:
            lines += ["", f"make run cannot run here yet. First: {self.demo.next or 'mend what is named above'}"]
        return "\n".join(lines).encode("ascii", "backslashreplace").decode("ascii")

    def to_json(self) -> str:
        """The same for machines."""
        content = {
            "schema": 1,
            "version": __version__,
            "seconds": round(self.seconds, 3),
            "demo": self.demo.possible,
            "findings": [{"name": name, **asdict(finding)} for name, finding in self.findings.items()],
            "can_run": [asdict(capability) for capability in self.capabilities],
        }
        return json.dumps(content, indent=2, default=str)


def examine(results: Path, *, network: bool = False) -> Examination:
    """Run every check at once, each by itself."""
    start = time.monotonic()
    context = DoctorContext(results, network, _in_background(probe.try_imports), _in_background(probe.try_ranks))
    running = {name: _in_background(partial(check, context)) for name, check in CHECKS.items()}
    findings = {}
    for name, future in running.items():
        try:
            findings[name] = future.result(max(0.0, start + LIMIT_S - time.monotonic()))
        except NotInTime:
            findings[name] = Finding("no", f"did not answer within {LIMIT_S:g} s", "a disk or a service may hang")
        except BaseException as error:  # a check that breaks is a finding too
            findings[name] = Finding("no", f"the check itself failed: {type(error).__name__}: {error}", "report it")
    return Examination(findings, capabilities(findings), time.monotonic() - start)


def _in_background(work: Callable[[], Any]) -> Future:
    """Run in a thread that nobody waits for at exit: a hanging disk must not keep `doctor` from ending."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# -- conclusions


def capabilities(findings: dict[str, Finding]) -> list[Capability]:
    """What follows from the findings. A check that failed never makes a yes where its subject is needed."""
    devices = len(findings["gpu"].values.get("devices", []))
    cores = findings["cores"].values.get("usable", 1)
    host, trainer, report, _ = ([p.distribution for p in PACKAGES if p.group == g and not p.only] for g in GROUPS)
    every = [p.distribution for p in PACKAGES]
    base = ["python", "memory", "results folder"]
    alone = [*base, "project", "configuration", "loopback"]
    on_cpu = f"1 to {cores} ranks, one a core" if cores > 1 else "1 rank, on one core"
    if devices:  # `device: auto` takes them
        on_cpu += "; with `device: cpu`, or the GPUs are taken"
    return [
        _demo(findings, [*host, *trainer, *report], alone, devices),
        _capability(findings, "training on the CPU (gloo)", on_cpu, trainer, [*base, "loopback", "gloo"]),
        _on_gpus(findings, trainer, [*base, "gpu"], devices),
        _capability(findings, "bf16", findings["bf16"].fact, trainer, ["bf16"]),
        _slurm(findings, [*host, "snakemake-executor-plugin-slurm"]),
        _capability(
            findings,
            "the report from copied logs",
            "without torch, GPU or network",
            [*report, "numpy", "pyarrow"],
            ["python", "results folder"],
        ),
        _tests(findings, every, [*alone, "gloo"]),
    ]


def _capability(
    findings: dict[str, Finding], what: str, reason: str, packages: list[str], needed: list[str]
) -> Capability:
    """Possible with that reason, unless a package or a needed check stands in the way."""
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
        if findings[name].verdict == "no" and not findings[name].values.get("without"):  # what it lacks is told itself
            blockers.append((name, f"{name}: {findings[name].fact}"))
    if not blockers:
        return Capability(what, True, reason)
    (first, why), *others = blockers
    why += f"; and {', '.join(name for name, _ in others)}" if others else ""
    return Capability(what, False, why, findings[first].next)


def _demo(findings: dict[str, Finding], packages: list[str], needed: list[str], devices: int) -> Capability:
    ranks = findings["configuration"].values.get("ranks", 1)
    wanted = findings["configuration"].values.get("gpu_ranks", ranks)
    devices = devices if wanted else 0  # all its runs say `device: cpu`
    if ranks > 1:
        needed = [*needed, "nccl" if devices else "gloo"]
    if devices:
        needed = [*needed, "gpu"]
    where = f"on {devices} GPU{'s' * (devices > 1)}" if devices else "on the CPU"
    by = "" if findings["tools"].values.get("make") else "without make: snakemake --profile profiles/local; "
    capability = _capability(findings, DEMO, f"{by}{where}, up to {ranks} ranks", packages, needed)
    if capability.possible and 0 < devices < wanted:
        cure = "CUDA_VISIBLE_DEVICES= make run"
        why = f"it has runs of {wanted} ranks, one a GPU, and torch sees {devices}; on the CPU it can: {cure}"
        return Capability(DEMO, False, why, cure)
    return capability


def _on_gpus(findings: dict[str, Finding], packages: list[str], needed: list[str], devices: int) -> Capability:
    what, talk = "training on GPUs (NCCL)", findings["nccl"]
    if not devices:
        return Capability(what, False, findings["gpu"].fact, findings["gpu"].next)
    if devices > 1 and talk.verdict == "no":
        return _capability(findings, what, f"1 rank only: {talk.fact}", packages, needed)
    return _capability(findings, what, f"1 to {devices} ranks" if devices > 1 else "1 rank", packages, needed)


def _slurm(findings: dict[str, Finding], packages: list[str]) -> Capability:
    what, here = "SLURM (--profile alps)", findings["slurm"]
    capability = _capability(findings, what, here.fact, packages, ["python", "project", "configuration", "slurm"])
    if capability.possible and findings["project"].verdict == "note":
        return Capability(what, False, findings["project"].fact, findings["project"].next)
    if capability.possible and not here.values.get("account"):
        return Capability(what, False, "ALPS_ACCOUNT is not set", "export ALPS_ACCOUNT=<project>")
    return capability


def _tests(findings: dict[str, Finding], packages: list[str], needed: list[str]) -> Capability:
    capability = _capability(findings, "the tests (make test)", "those of GPUs and SLURM aside", packages, needed)
    if capability.possible and not findings["tools"].values.get("git"):
        return Capability(capability.what, False, "git is not found", "install git")
    return capability


def _wrapped(start: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()) or "-",
        max(width, len(start) + 40),
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
