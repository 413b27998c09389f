"""Commands in the surroundings that machines of others have: closed streams, no network, no home,
limits of a login node, odd folders. Each ends right, or with one message and exit code 2.

    python -m tests.faults.surroundings [--lab LAB] [--commands plan,train] [--names "no home"]

`--lab`: folder of a workflow that was built (tests/faults/kills.py); else it is built first. Prints
a table: a row a surrounding, a column a command.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from tests.faults.kills import Lab
from tests.faults.sick_disk import compile_shim

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
#: command → its arguments; {out} is a folder of its own
COMMANDS = {
    "plan": "plan ways",
    "check": "check ways",
    "verify": "verify results",
    "advise": "advise {text} --tokenizer bpe",
    "ingest": "ingest --experiment results/experiments/ways/runs.json --runs results/runs"
    " --output {out}/tables",
    "figure": "report figure loss_over_time --tables results/tables/ways --output {out}/figure",
    "description": "report description --tables results/tables/ways --output {out}/description.json",
    "page": "report page --experiments ways --claims results/report/claims.json --output {out}/index.html",
    "train": "train --dataset {text} --tokenizer-name bpe --model llama-micro --device cpu"
    " --sequence-length 64 --global-batch 2 --micro-batch 1 --training-steps 2 --world-size 2"
    " --lr-warmup-steps 0 --validation.rows 0 --output-dir {out}/runs",
}
#: what a command makes, below {out}: file → whether its bytes are always the same
MADE = {
    "ingest": {"tables/steps.parquet": True},
    "figure": {"figure.svg": True, "figure.json": False},
    "description": {"description.json": True},
    "page": {"index.html": True},
    "train": {"runs/*/done.json": False},
}


@dataclass(frozen=True)
class Surrounding:
    """`shell` goes before the command in a shell, `variables` change the environment (None: not
    set), `prepare` changes the project's folder and returns where it then is.
    """

    shell: str = ""
    variables: dict[str, str | None] = field(default_factory=dict)
    prepare: Callable[[Path], Path] = lambda project: project
    needs: str = ""


def _results_behind_a_link(project: Path) -> Path:
    moved = project.with_name("moved")
    (project / "results").rename(moved)
    (project / "results").symlink_to(moved)
    return project


def _project_behind_a_link(project: Path) -> Path:
    link = project.with_name("link")
    link.symlink_to(project)
    return link


def _rename(name: bytes) -> Callable[[Path], Path]:
    def renamed(project: Path) -> Path:
        return project.rename(os.fsdecode(os.path.join(os.fsencode(project.parent), name)))

    return renamed


class Found(NamedTuple):
    """Exit code and output of a command, and digests of what it made (None: not made)."""

    code: int
    said: str
    made: dict[str, str | None]


LOCALES = ("LANG", "LC_ALL", "LC_CTYPE", "LANGUAGE")
SURROUNDINGS = {
    "as usual": Surrounding(),
    "no stderr": Surrounding(shell="exec 2>&-;"),
    "no stdin": Surrounding(shell="exec <&-;"),
    "no stdout": Surrounding(shell="exec >&-;"),
    "no streams": Surrounding(shell="exec <&- >&- 2>&-;"),
    "no loopback": Surrounding(shell="exec unshare --map-root-user --net", needs="unshare"),
    "unknown host": Surrounding(
        shell="exec unshare --map-root-user --uts sh -c 'hostname no-such-host; exec \"$@\"' sh",
        needs="unshare",
    ),
    "no home": Surrounding(variables={"HOME": None}),
    "missing home": Surrounding(variables={"HOME": "/nonexistent", "XDG_CACHE_HOME": "/proc"}),
    "no locale": Surrounding(variables=dict.fromkeys(LOCALES)),
    "locale C": Surrounding(variables={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}),
    "unknown locale": Surrounding(variables={"LC_ALL": "xx_YY.UTF-8"}),
    "ASCII terminal": Surrounding(variables={"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}),
    "notebook": Surrounding(
        variables={"MPLBACKEND": "module://matplotlib_inline.backend_inline", "COLUMNS": "1"}
    ),
    "no variables": Surrounding(
        variables=dict.fromkeys(["PATH", "HOME", "USER", "TERM", *LOCALES])
    ),
    "small files": Surrounding(shell="ulimit -f 64;"),
    "no files": Surrounding(shell="ulimit -f 0;"),
    "few open files": Surrounding(shell="ulimit -n 24;"),
    "hardly an open file": Surrounding(shell="ulimit -n 16;"),
    "little memory": Surrounding(shell="ulimit -v 3000000;"),
    "small stack": Surrounding(shell="ulimit -s 256;"),
    "few processes": Surrounding(shell="ulimit -u 20;"),
    "umask 777": Surrounding(shell="umask 777;"),
    "results behind a link": Surrounding(prepare=_results_behind_a_link),
    "project behind a link": Surrounding(prepare=_project_behind_a_link),
    "no hard links": Surrounding(variables={"SHIM": "{project} link 1 1 1000000"}, needs="cc"),
    "name not UTF-8": Surrounding(prepare=_rename(b"um-\xff")),
    "name with a line": Surrounding(prepare=_rename(b"a\nb 'c'")),
    "folder removed": Surrounding(
        shell='rmdir_here() { mkdir "$1" && cd "$1" && rmdir "$1"; }; rmdir_here {out}/gone;'
    ),
}


def list_missing(surrounding: Surrounding) -> str:
    """Return what this machine lacks for a surrounding; empty if nothing."""
    if surrounding.needs and shutil.which(surrounding.needs) is None:
        return f"no {surrounding.needs}"
    if surrounding.needs == "unshare":
        argv = ["unshare", "--map-root-user", "--net", "true"]
        if subprocess.run(argv, capture_output=True).returncode:
            return "no namespaces"
    return ""


def try_command(lab: Path, folder: Path, surrounding: Surrounding, command: str) -> Found:
    """Run a command in a copy of the built project; return exit code, output and what it made."""
    project = folder / "project"
    shutil.copytree(lab / "end/project", project, symlinks=True)
    out = folder / "out"
    out.mkdir()
    text = folder / "text.jsonl"
    text.write_text(
        "".join(f'{{"text": "{n} red stone river {"cloud " * (n % 30)}"}}\n' for n in range(99))
    )
    project = surrounding.prepare(project)
    paths = {"out": out, "text": text, "project": project}
    variables: dict[str, str | None] = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    variables["LD_PRELOAD"] = str(compile_shim(folder)) if surrounding.needs == "cc" else None
    variables |= {
        name: value and value.replace("{project}", str(folder))
        for name, value in surrounding.variables.items()
    }
    environment = os.environ | {name: value for name, value in variables.items() if value}
    for name in (name for name, value in variables.items() if value is None):
        environment.pop(name, None)
    words = [word.format(**paths) for word in COMMANDS[command].split()]
    shell = surrounding.shell.replace("{out}", str(out))
    line = f'{shell} {"" if shell.startswith("exec unshare") else "exec"} "$@"'
    done = subprocess.run(
        ["bash", "-c", line, "bash", sys.executable, "-m", "tokenscale", *words],
        cwd=project,
        env=environment,
        capture_output=True,
        timeout=LIMIT_S,
    )
    said = (done.stdout + done.stderr).decode(errors="replace")
    os.chmod(out, 0o700)
    found = {
        name: _digest(sorted(out.glob(name)), same) for name, same in MADE.get(command, {}).items()
    }
    return Found(done.returncode, said, found)


def _digest(paths: list[Path], same: bool) -> str | None:
    if not paths:
        return None
    paths[0].chmod(0o600)
    content = re.sub(rb"<metadata>.*?</metadata>", b"", paths[0].read_bytes(), flags=re.DOTALL)
    return sha256(content).hexdigest() if same else "made"


def judge(found: Found, usual: Found) -> str:
    """Return `right`, `refused`, or what is wrong."""
    # the launcher's line behind the message of a rank
    said = re.sub(
        r"^tokenscale: rank \d+ failed first \(exit code 2\).*", "", found.said, flags=re.MULTILINE
    )
    if "Traceback" in said or "frame #" in said:
        return "TRACE"
    if found.code == 0:
        whole = None not in found.made.values() and found.made == usual.made
        return "right" if whole else "OTHER"
    if found.code != 2:
        return f"CODE {found.code}"
    is_message = said.count("tokenscale: ") == 1 and "\n  next" in said
    return "refused" if is_message or not said.strip() else "UNCLEAR"


def try_all(
    lab: Path, names: list[str], commands: list[str]
) -> Iterator[tuple[str, str, str, str]]:
    """Yield (surrounding, command, verdict, output)."""
    for command in commands:
        with tempfile.TemporaryDirectory() as folder:
            usual = try_command(lab, Path(folder), SURROUNDINGS["as usual"], command)
        yield "as usual", command, judge(usual, usual), usual.said
        for name in names:
            surrounding = SURROUNDINGS[name]
            if name == "as usual":
                continue
            if missing := list_missing(surrounding):
                yield name, command, missing, ""
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = try_command(lab, Path(folder), surrounding, command)
                except subprocess.TimeoutExpired as error:
                    yield name, command, "HANGS", str(error.stderr)
                    continue
            yield name, command, judge(found, usual), found.said


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--lab", type=Path)
    parser.add_argument("--commands", type=lambda text: text.split(","), default=[*COMMANDS])
    parser.add_argument("--names", type=lambda text: text.split(","), default=[*SURROUNDINGS])
    asked = parser.parse_args()
    table: dict[str, dict[str, str]] = {name: {} for name in SURROUNDINGS}
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        lab = asked.lab or Path(folder, "lab")
        Lab(lab).made()
        for name, command, verdict, said in try_all(lab, asked.names, asked.commands):
            table[name][command] = verdict
            print(f"{name}, {command}: {verdict}", file=sys.stderr, flush=True)
            if verdict.isupper() or verdict.startswith("CODE"):
                wrong += 1
                print(said[-1500:], file=sys.stderr, flush=True)
    print(f"{'':<22}" + "".join(f"{command:>10}" for command in asked.commands))
    for name, row in table.items():
        if row:
            print(
                f"{name:<22}" + "".join(f"{row.get(command, ''):>10}" for command in asked.commands)
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
