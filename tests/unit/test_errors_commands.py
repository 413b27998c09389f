"""Commands in messages run as printed, and every user's mistake is reported with its next step."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machines import program
from tokenscale.base.errors import USER_PATH, UserError, as_typed

BIN = Path(sys.executable).parent


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Working folder that has its environment in `.venv`; the user's shell finds none of it."""
    folder = tmp_path / "clone/.venv/bin"
    folder.mkdir(parents=True)
    for name in ("snakemake", "tokenscale", "python"):
        program(folder, name, "")
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv(USER_PATH, raising=False)
    monkeypatch.chdir(tmp_path / "clone")
    return tmp_path / "clone"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("snakemake -f a/manifest.json", ".venv/bin/snakemake -f a/manifest.json"),
        (
            "make it with `tokenscale corpus`, or add it",
            "make it with `.venv/bin/tokenscale corpus`, or add it",
        ),
        (
            "measure 8, or run weak scaling: snakemake weak",
            "measure 8, or run weak scaling: .venv/bin/snakemake weak",
        ),
        (
            "snakemake report, or tokenscale report",
            ".venv/bin/snakemake report, or .venv/bin/tokenscale report",
        ),
        ("first\nsnakemake -n", "first\n.venv/bin/snakemake -n"),
        ("python -m pip install torch", ".venv/bin/python -m pip install torch"),
        # no commands, or none of this environment
        ("run snakemake with this machine's profile", None),
        ("a series of runs of tokenscale with --series", None),
        ("--downloads FILE  (snakemake names it itself)", None),
        ("torchrun -m tokenscale train", None),
        ("results/snakemake report", None),
    ],
)
def test_commands_get_the_folder_of_the_environment(clone, text, expected):
    assert as_typed(text) == (expected or text)
    assert as_typed(as_typed(text)) == as_typed(text)


def test_a_folder_outside_the_working_folder_is_absolute_and_quoted(clone, monkeypatch):
    (clone.parent / "else where").mkdir()
    monkeypatch.chdir(clone.parent / "else where")
    assert as_typed("snakemake -n") == f"{clone}/.venv/bin/snakemake -n"
    clone.rename(clone.parent / "a clone")
    monkeypatch.setattr(sys, "executable", f"{clone.parent}/a clone/.venv/bin/python")
    assert as_typed("snakemake -n") == f"'{clone.parent}/a clone/.venv/bin/snakemake' -n"


def test_an_activated_environment_needs_no_folder(clone, monkeypatch):
    monkeypatch.setenv("PATH", f"{clone}/.venv/bin:/usr/bin")
    assert as_typed("snakemake -n") == "snakemake -n"
    # inside Snakemake, whose jobs have the environment in PATH
    monkeypatch.setenv(USER_PATH, "/usr/bin")
    assert as_typed("snakemake -n") == ".venv/bin/snakemake -n"


def test_only_the_printed_next_step_names_the_folder(clone):
    error = UserError("tokenscale is old.", found="snakemake 8", next="snakemake -n")
    lines = [
        "tokenscale: tokenscale is old.",
        "  found  snakemake 8",
        "  next   .venv/bin/snakemake -n",
    ]
    assert error.render().splitlines() == lines and str(error).endswith("  snakemake -n")


@pytest.mark.parametrize("command", ["", " plan", " train"])
def test_the_next_step_of_a_refusal_runs_where_nothing_is_activated(command, tmp_path):
    def shell(line: str) -> subprocess.CompletedProcess:
        environment = {"PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"]}
        return subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    refused = shell(f"{BIN}/tokenscale{command} --zzzzzzzz")
    assert refused.returncode == 2
    helped = shell(refused.stderr.split("next ", 1)[1].strip())
    assert helped.returncode == 0 and helped.stdout.startswith(f"usage: {BIN}/tokenscale{command} ")


ROOT = Path(__file__).parents[2]


def without_next_step(source: str) -> list[str]:
    """First arguments of calls of UserError that pass neither `next` nor facts gathered elsewhere
    (`**facts`).
    """
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    errors = (
        call
        for call in calls
        if {"UserError", "RecordingError"}
        & {
            getattr(call.func, "id", ""),
            getattr(call.func, "attr", ""),
        }
    )
    return [
        ast.unparse(call.args[0])
        for call in errors
        if not {"next", None} & {word.arg for word in call.keywords}
    ]


def test_every_user_error_has_a_next_step():
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests/benchmarks").glob("*.py")]
    missing = {
        str(path.relative_to(ROOT)): found
        for path in files
        if (found := without_next_step(path.read_text()))
    }
    assert missing == {}
