"""The small workflow where nothing can be written, and then where it can: `python -m` this module
with

    LAB FOLDER jobs    every job where the mount is read-only (readonly) and where nobody has the right to write
                       (denied), and then where it can write
    LAB FOLDER calls   a call of all that is not made with a share of the bytes that it needs, a call of the tables with
                       enough room, a call of all with a share of the files that it needs, and the
                       same call with enough

Runs in a mount namespace of its own, where `results/` (the project, for calls) is a tmpfs. Prints a
line of JSON a job or call, and at the end what then lies there, or what was lost.
"""

import ctypes
import itertools
import json
import os
import runpy
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import tests.preloaded  # noqa: F401  jobs are forks
from tests.faults.kills import STAGES, Lab, call, differences, lies_in
from tests.workflow import forked
from tests.workflow.conftest import Project

MEGABYTES = 64
ENOUGH = f"size={MEGABYTES}m,nr_inodes=100000"
FAULTS = ("readonly", "denied")


def without_rights() -> None:
    """Whoever is root obeys the rights of files from here on, as everybody does (capset(2), version
    3).
    """
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, data) == 0
    # effective, permitted, inheritable: not 1 DAC_OVERRIDE, 2 DAC_READ_SEARCH, 3 FOWNER
    for which in (0, 1, 2):
        data[which] &= ~0b1110
    assert libc.capset(header, data) == 0


def run(
    arguments: list[str],
    project: Path,
    *,
    like_others: bool = False,
    environment: dict[str, str] | None = None,
) -> tuple[int, str]:
    """(exit code, output) of a job in a fork of this process."""
    said = project.parent / "said.txt"
    if (process := os.fork()) == 0:
        file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(project)
        os.environ |= {"PYTHONPATH": str(project / "src"), **(environment or {})}
        sys.path.insert(0, str(project / "src"))
        if like_others:
            without_rights()
        sys.argv = ["tokenscale", *arguments]
        code = 0
        try:
            runpy.run_module("tokenscale", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), said.read_text(errors="replace")


def mount(results: Path, *options: str) -> None:
    subprocess.run(["mount", *options, "tmpfs", str(results)], check=True)


def rights(results: Path, folders: int, others: int) -> None:
    for path in [results, *results.rglob("*")]:
        path.chmod(folders if path.is_dir() else others)


def files(results: Path) -> dict[str, int]:
    return {
        str(p.relative_to(results)): p.stat().st_size for p in results.rglob("*") if p.is_file()
    }


def tried(arguments: list[str], fault: str, project: Path) -> dict:
    """What a job does under the fault: its exit code, its words, and what it changed."""
    results = project / "results"
    before = files(results)
    if fault == "readonly":
        mount(results, "-o", "remount,ro")
    if fault == "denied":
        rights(results, 0o555, 0o444)
    code, said = run(arguments, project, like_others=fault == "denied")
    if fault == "denied":
        rights(results, 0o755, 0o644)
    if fault == "readonly":
        mount(results, "-o", f"remount,rw,size={MEGABYTES}m")
    after = files(results)
    gone = before.keys() - after.keys()
    left = {name for name in after.keys() - before.keys() if after[name]}
    return {
        "job": arguments,
        "fault": fault,
        "code": code,
        "said": said,
        "gone": sorted(gone),
        "left": sorted(left),
    }


def room(project: Path) -> dict[str, int]:
    """What a tmpfs needs for a folder: bytes in whole pages, and inodes."""
    sizes = [path.lstat().st_size for path in project.rglob("*")]
    return {"bytes": sum(-(-size // 4096) * 4096 for size in sizes), "inodes": len(sizes) + 1}


def calls(lab: Path, folder: Path) -> None:
    root = folder / "project"
    stage = lab / "tokens/project"
    (folder / "home").mkdir()
    root.mkdir()
    mount(root, "-t", "tmpfs", "-o", ENOUGH)
    shutil.copytree(stage, root, symlinks=True, dirs_exist_ok=True)
    for fault, option, share in (("bytes", "size", 0.3), ("inodes", "nr_inodes", 0.5)):
        used = room(root)[fault]
        needed = room(lab / "end/project")[fault]
        limit = f"{option}={int(used + share * (needed - used))}"
        for options, targets in (
            (limit, ["all"]),
            (ENOUGH, ["tables" if fault == "bytes" else "all"]),
        ):
            mount(root, "-o", f"remount,{options}")
            code, said = forked.snakemake(call(*targets), root, Project(root).environment)
            print(json.dumps({"code": code, "said": said}), flush=True)
    print(json.dumps({"lost": differences(lies_in(root), Lab(lab))}))


def list_jobs(lab: Path, behind: str) -> Iterator[list[str]]:
    """Yield the arguments of the jobs before a stage, in their order; of trainings, the first."""
    noted = [path for path in (lab / "jobs" / behind).iterdir() if path.name.isdigit()]
    launched = False
    for job in sorted(noted, key=lambda path: path.stat().st_mtime):
        arguments = json.loads(job.read_text())
        if arguments[0] == "rank" or (arguments[0] == "launch" and launched):
            continue
        launched = launched or arguments[0] == "launch"
        yield arguments


def jobs(lab: Path, folder: Path) -> None:
    for start, behind in itertools.pairwise([*STAGES, "end"]):
        project = folder / start
        shutil.copytree(
            lab / start / "project",
            project,
            symlinks=True,
            ignore=shutil.ignore_patterns("results"),
        )
        (project / "results").mkdir()
        mount(project / "results", "-t", "tmpfs", "-o", f"size={MEGABYTES}m")
        if (lab / start / "project/results").exists():
            shutil.copytree(
                lab / start / "project/results",
                project / "results",
                symlinks=True,
                dirs_exist_ok=True,
            )
        # files of them, which Snakemake writes and which is not here
        arguments = "project/results/arguments"
        shutil.copytree(lab / behind / arguments, project / "results/arguments", dirs_exist_ok=True)
        for arguments in list_jobs(lab, behind):
            rows = [tried(arguments, fault, project) for fault in FAULTS]
            again, then = run(arguments, project)
            for row in rows:
                print(json.dumps({**row, "again": again, "then": then[-800:]}), flush=True)
    print(json.dumps({"lies": lies_in(project)}))


if __name__ == "__main__":
    {"jobs": jobs, "calls": calls}[sys.argv[3]](Path(sys.argv[1]), Path(sys.argv[2]))
