"""Users and folders of others: a user without an entry in passwd makes figures; who cannot write is
told once.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.kills import call
from tests.faults.test_disk import NAMESPACE, may_mount
from tests.workflow.conftest import Project, copy_of

NOBODY = 54321
#: reads what root reads, since Python may lie below /root, and writes what everybody may write
CAPABILITIES = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
USER = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *CAPABILITIES]
READONLY = ["sh", "-c", 'mount --bind -o ro . . && cd "$PWD" && exec "$@"', "sh"]


@pytest.fixture
def project(stages, tmp_path) -> Project:
    if os.geteuid() != 0 or subprocess.run([*USER, "true"], capture_output=True).returncode:
        pytest.skip("only root becomes another user")
    for folder in tmp_path.parents[:2]:
        folder.chmod(0o755)
    return copy_of(Project(stages.folder / "tables/project"), tmp_path)


def snakemake(project: Project, command: list[str], *words: str) -> tuple[int, str]:
    names = ("USER", "LOGNAME", "LNAME", "USERNAME")
    variables = {
        name: value for name, value in project.environment.items() if name not in names
    } | {"HOME": "/"}
    argv = [*command, sys.executable, "-m", "snakemake", *call(*words)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 900}
    done = subprocess.run(argv, cwd=project.root, env=variables, **options)
    return done.returncode, done.stdout


def give(folder: Path, user: int) -> None:
    for path in [folder, *folder.rglob("*")]:
        shutil.chown(path, user, user) if not path.is_symlink() else None


def test_a_user_without_a_name_and_a_home_makes_tables_and_figures(project):
    give(project.root, NOBODY)
    code, said = snakemake(project, USER, "figures")
    assert code == 0 and "Traceback" not in said, said + project.logs()
    assert [path.stat().st_uid for path in project.root.glob("results/figures/ways/*.svg")] == [
        NOBODY
    ]


@pytest.mark.parametrize(
    ("whose", "words"),
    [
        ("another user's", []),
        ("read-only", ["-n"]),
        pytest.param("another user's", ["-n"], marks=pytest.mark.long),
        pytest.param("read-only", [], marks=pytest.mark.long),
    ],
)
def test_who_cannot_write_is_told_once(project, whose, words):
    if whose == "read-only" and not may_mount():
        pytest.skip("this user may not mount")
    code, said = snakemake(
        project, USER if whose == "another user's" else [*NAMESPACE, *READONLY], *words
    )
    before, error, _ = said.partition("tokenscale: Snakemake cannot write in this folder.")
    assert code == 2 and error, said
    # Snakemake names the profile before it reads our Snakefile
    assert before.startswith("Using profiles ") and before.count("\n") == 1, said
    assert said.count("tokenscale: ") == 1 and "Traceback" not in said and "  next  " in said


@pytest.mark.parametrize("part", ["results/logs", "results", ".snakemake/metadata"])
def test_a_part_of_another_user_is_named(project, part):
    give(project.root, NOBODY)
    give(project.root / part, 0)
    code, said = snakemake(project, USER)
    assert code != 0 and "Traceback" not in said and part.partition("/")[2] in said, said
