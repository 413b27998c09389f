"""Arms: other trainers, each in a folder `arms/NAME`, with an environment and a source of
its own.

`prepare` builds `results/arms/NAME/`: a virtual environment from a lock, and the trainer's
repository at a pinned commit, verified by the hash of its tree. The packages of an arm are never
imported by this project.
"""

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenscale.arms.prepared import ARMS, python_of, source_of
from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import (
    lock_folder,
    read_json,
    remove_tree,
    sha256_text,
    write_json,
    write_sealed,
)
from tokenscale.runs.records.redaction import redact
from tokenscale.settings.yaml_files import read_yaml

#: environment variable: a folder of git bundles NAME.bundle, read in place of the repositories
BUNDLES = "TOKENSCALE_ARM_BUNDLES"
#: names a release of torch, which locks leave out: its CPU and CUDA builds have other hashes
CONSTRAINTS = Path("locks/constraints.txt")
#: seconds that one command may take, such as a download of torch
LIMIT_S = 3600


@dataclass(frozen=True)
class Arm:
    """A trainer, as its `arm.yaml` describes it.

    `repository` has url, commit and tree; None for a trainer that is a package. `torch`: whether it
    needs torch. `programs` must be on the PATH.
    """

    name: str
    description: str
    repository: dict[str, str] | None
    torch: bool
    programs: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return ARMS / self.name


def list_arms() -> list[str]:
    return sorted(path.parent.name for path in ARMS.glob("*/arm.yaml"))


def load_arm(name: str) -> Arm:
    """Read an arm's `arm.yaml`. Raises UserError for an unknown arm and a malformed file."""
    path = ARMS / name / "arm.yaml"
    if not path.is_file():
        raise unknown(
            "arm",
            word=name,
            words=list_arms(),
            folder=ARMS,
        )
    facts: dict[str, Any] = {"repository": None, "torch": True, "programs": []} | read_yaml(path)
    wrong = sorted(facts.keys() - {"description", "repository", "torch", "programs"})
    repository = facts["repository"]
    if wrong or not isinstance(facts.get("description"), str):
        raise UserError(
            "the description of an arm is not valid.",
            file=path,
            found=", ".join(wrong) or "no description",
            expected="description, repository, torch, programs",
            next="correct the file (docs/other-trainers.md)",
        )
    if repository is not None and set(repository) != {"url", "commit", "tree"}:
        raise UserError(
            "repository needs url, commit and tree.",
            file=path,
            next="correct the file (docs/other-trainers.md)",
        )
    return Arm(
        name=name,
        description=facts["description"],
        repository=repository,
        torch=facts["torch"],
        programs=tuple(facts["programs"]),
    )


def list_files(name: str) -> list[str]:
    """Return the files of an arm, sorted: its environment is checked again when one changes."""
    return sorted(
        str(path)
        for path in (ARMS / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )


def prepare(name: str, record: Path, log: Callable[[str], object] = print) -> dict[str, Any]:
    """Build the environment and fetch the source of an arm beside `record`, which is written last.
    Return its content.

    What exists and is unchanged is kept. A failure is written into the record as `error`, so that
    only the runs of this arm become invalid. Raises UserError for an unknown arm.
    """
    arm = load_arm(name)
    folder = record.parent
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder, what=f"the environment of {name}", wait=True):
        record.unlink(missing_ok=True)
        began = time.monotonic()
        built = False
        found: dict[str, Any] = {
            "schema": 1,
            "arm": name,
            "error": None,
            "files": _hash_files(name),
        }
        try:
            if missing := [program for program in arm.programs if shutil.which(program) is None]:
                raise PreparationError(f"{', '.join(missing)} not found on the PATH")
            if arm.repository is not None:
                found["source"] = _fetch(arm, folder=source_of(record), log=log)
            found["lock"], built = _install(arm, record, log=log)
            listed = _run(
                [
                    python_of(record),
                    "-m",
                    "pip",
                    "list",
                    "--format",
                    "freeze",
                    "--disable-pip-version-check",
                ]
            )
            found["packages"] = dict(
                line.split("==", 1) for line in listed.splitlines() if "==" in line
            )
        except PreparationError as error:
            found["error"] = f"the environment of {name} could not be built: {error}"
        if built or not (folder / "build.json").is_file():
            size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
            # apart from the record, which is equal for equal environments
            write_json(
                folder / "build.json",
                value={"seconds": round(time.monotonic() - began, 1), "bytes": size},
            )
        write_sealed(record, record=found)
    return found


class PreparationError(Exception):
    """An environment or a source that could not be made."""


def _hash_files(name: str) -> dict[str, str]:
    return {path: sha256_text(Path(path).read_text(encoding="utf-8")) for path in list_files(name)}


def _run(command: list[Any], cwd: Path | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    options: dict[str, Any] = {
        "capture_output": True,
        "text": True,
        "errors": "replace",
        "timeout": LIMIT_S,
    }
    try:
        done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, **options)
    except OSError as error:
        raise PreparationError(f"{command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise PreparationError(
            f"{' '.join(map(str, command[:4]))} …: did not end within {LIMIT_S:g} s"
        ) from None
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise PreparationError(
            redact(f"{' '.join(map(str, command[:4]))} …: {' | '.join(lines[-3:])}")
        )
    return done.stdout


def _fetch(arm: Arm, folder: Path, log: Callable[[str], object]) -> dict[str, str]:
    repository = arm.repository
    bundles = os.environ.get(BUNDLES)
    assert repository is not None
    stamp = folder.parent / "source.json"
    if folder.is_dir() and stamp.is_file() and read_json(stamp) == repository:
        return repository
    remove_tree(folder)
    url = str((Path(bundles) / f"{arm.name}.bundle").resolve()) if bundles else repository["url"]
    log(f"{arm.name}: fetching {repository['url'] if not bundles else f'{arm.name}.bundle'}")
    _run(["git", "init", "--quiet", folder])
    wanted = "HEAD" if bundles else repository["commit"]
    _run(
        [
            "git",
            "fetch",
            "--quiet",
            "--depth=1",
            url,
            "refs/heads/*:refs/heads/*" if bundles else wanted,
        ],
        cwd=folder,
    )
    _run(["git", "checkout", "--quiet", "--detach", "FETCH_HEAD"], cwd=folder)
    tree = _run(["git", "rev-parse", "HEAD^{tree}"], cwd=folder).strip()
    if tree != repository["tree"]:
        shutil.rmtree(folder)
        raise PreparationError(
            f"the source has tree {tree}, expected {repository['tree']} (arm.yaml)"
        )
    write_json(stamp, value=repository)
    return repository


def _install(arm: Arm, record: Path, log: Callable[[str], object]) -> tuple[str | None, bool]:
    """Install the arm's packages, unless they are. Return (the lock's hash, whether anything was
    installed).

    The hash is None where this platform has no lock.
    """
    lock = (
        arm.folder
        / f"{sys.platform}-{platform.machine()}-python{sys.version_info[0]}.{sys.version_info[1]}.txt"
    )
    requirements = lock if lock.is_file() else arm.folder / "requirements.in"
    wanted = {
        "requirements": sha256_text(requirements.read_text(encoding="utf-8")),
        "torch": sha256_text(CONSTRAINTS.read_text(encoding="utf-8")) if arm.torch else None,
        "python": sys.version,
    }
    python = python_of(record)
    stamp = record.parent / "packages.json"
    missing = not (python.is_file() and stamp.is_file() and read_json(stamp) == wanted)
    if missing:
        stamp.unlink(missing_ok=True)
        log(f"{arm.name}: installing {requirements}")
        _run([sys.executable, "-m", "venv", "--clear", record.parent / "environment"])
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if arm.torch:
            _run([*pip, "--constraint", CONSTRAINTS, "torch"])
        locked = (
            ["--require-hashes", "--no-deps"]
            if requirements == lock
            else ["--constraint", CONSTRAINTS]
        )
        _run([*pip, *locked, "--requirement", requirements])
        write_json(stamp, value=wanted)
    return wanted["requirements"] if requirements == lock else None, missing
