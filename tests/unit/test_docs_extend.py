"""docs/extend.md as it stands: its files and lines in a copy of the project, and what it says of them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workflow import forked

ROOT = Path(__file__).parents[2]
CHECKS = "tests/unit/test_training_extended.py"
BLOCK = re.compile(r"^```(\w+) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def extend(folder: Path, text: str) -> list[str]:
    """Write the files of a text's blocks, and apply its lines: ```LANGUAGE PATH. Returns the paths of the files."""
    written = []
    for language, name, content in BLOCK.findall(text):
        if language == "diff":
            assert f"+++ b/{name}\n" in content and len(re.findall(r"^\+(?!\+\+)", content, re.MULTILINE)) == 1, (
                "a registration is one line"
            )
            subprocess.run(["git", "apply", "-"], cwd=folder, input=content, text=True, check=True)
        else:
            path = folder / name
            assert not path.exists(), f"{name} is there already"
            path.write_text(content)
            written.append(name)
    return written


@pytest.fixture(scope="module")
def text():
    return (ROOT / "docs/extend.md").read_text()


@pytest.fixture(scope="module")
def copy(tmp_path_factory, text):
    """The project with all that the page adds."""
    folder = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "workflow", "config", "profiles", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    extend(folder, text)
    shutil.copy(ROOT / "tests/unit/extend/checks.py", folder / CHECKS)
    return folder


@pytest.fixture(scope="module")
def environment(copy):
    return os.environ | {"PYTHONPATH": str(copy / "src"), "HOME": str(copy.parent)}


def suites_pass(copy, environment, *arguments) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_what_every_newcomer_is_held_against_and_what_the_page_says_of_its_own(copy, environment):
    suites = ["tests/unit/test_formats.py", "tests/unit/test_batches.py", CHECKS]
    suites_pass(copy, environment, *suites, "-k", "raw or dpo or test_training_extended")


def test_the_experiment_would_run(copy, environment):
    """All six runs, with stores of both formats, figures and pages."""
    arguments = ["-n", "--quiet", "host", "--cores", "2", "preferences"]
    code, said = forked.snakemake(arguments, copy, environment)
    assert code == 0, said[-3000:]
    counts = dict(re.findall(r"^(\w+) +(\d+)$", said, re.MULTILINE))
    assert counts["train"] == "6" and counts["draw_figure"] == "3"
    assert "tokens docstrings / bpe-4096 / raw\n" in said
    assert re.search(r"raw-llama-tiny-each-w2-[0-9a-f]{10}", said)


def test_files_are_formatted_and_schemas_know_the_new_words(copy, environment, text):
    names = [name for _, name, _ in BLOCK.findall(text) if name.endswith(".py")]
    for command in (["ruff", "check"], ["ruff", "format", "--check"]):
        done = subprocess.run([sys.executable, "-m", *command, *set(names)], cwd=copy, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    command = [sys.executable, "-m", "tokenscale", "check", "--write"]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    schema = (copy / "workflow/schemas/experiment.schema.json").read_text()
    assert all(f'"{word}"' in schema for word in ("raw", "each", "dpo"))


def test_a_broken_file_fails(tmp_path, text):
    """Of the page's own test: a line that no longer fits, or a file that is taken, is told."""
    (tmp_path / "src/tokenscale/settings").mkdir(parents=True)
    for name in ("formats", "parallel", "training"):
        (tmp_path / "src/tokenscale" / name).mkdir()
    (tmp_path / "config/experiments").mkdir(parents=True)
    registry = (ROOT / "src/tokenscale/settings/registry.py").read_text()
    (tmp_path / "src/tokenscale/settings/registry.py").write_text(registry.replace('    "ddp": ', '    "other": '))
    with pytest.raises(subprocess.CalledProcessError):
        extend(tmp_path, text)
