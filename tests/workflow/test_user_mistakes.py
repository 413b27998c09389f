"""Mistakes of users and the message each gets: exit code 2, the file or the key, the next step, no
traceback.
"""

import argparse
import contextlib
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import tables
from tests.refusals import refused
from tests.workflow import forked
from tests.workflow.conftest import EXPERIMENTS, ROOT, RUNS, Project, make_project
from tokenscale.cli import main as cli
from tokenscale.report.save import KINDS

pytestmark = pytest.mark.slow(20)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Project:
    """A project with nothing built, for all mistakes: each writes files of its own only."""
    return make_project(tmp_path_factory.mktemp("mistakes"))


def said_by(command: str, project: Project, monkeypatch, capfd) -> tuple[int, str]:
    """(exit code, output) of a command line in the project: tokenscale's in this process,
    Snakemake's in a fork.
    """
    program, *arguments = shlex.split(command)
    if program == "make":
        makefile = ["--file", str(ROOT / "Makefile"), "READY=", f"VENV={sys.prefix}"]
        options = {
            "cwd": project.root,
            "env": project.environment,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        done = subprocess.run(["make", *makefile, *arguments], **options, stdout=subprocess.PIPE)
        return done.returncode, done.stdout
    if program == "snakemake":
        return forked.snakemake(
            [*arguments, "-n", "--quiet", "host"], project.root, project.environment
        )
    monkeypatch.chdir(project.root)
    capfd.readouterr()
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    output = capfd.readouterr()
    return code, output.out + output.err


#: what capitals in the table stand for
WORDS = {
    "MINE": "snakemake --configfile mine.yaml",
    "PLAN": "tokenscale plan --configfile mine.yaml",
    "PRETOKENIZE": "tokenscale pretokenize --store packed-split=validation --corpus c/manifest.json"
    " --tokenizer t/manifest.json --output s/manifest.json",
    "PAGE": "<!DOCTYPE html>\n<html><body>404: not found</body></html>\n",
    "OWN": "from tokenscale.settings.extensions import objective\n"
    "from tokenscale.train.models.objective import Objective\n\n\n"
    "@objective()\nclass Own(Objective):\n    pass\n",
    "TEXT": "Once upon a time there was a text.\n" * 50,
}
MISTAKES = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())


def arrange(root: Path, files: dict) -> None:
    """Write files of text or of values; those of an experiment change a valid one; `corpus` builds
    one of lines.
    """
    if "own/ways.yaml" in files:
        files = {"mine.yaml": {"experiments_folder": "own", "experiments": ["ways"]}} | files
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == "corpus":
            build_corpus(root, *content)
        elif content == "UTF-16":
            path.write_text(WORDS["TEXT"], encoding="utf-16")
        elif isinstance(content, str):
            path.write_text(WORDS.get(content, content))
        elif name == "own/ways.yaml":
            path.write_text(
                json.dumps(EXPERIMENTS["ways"] | content | {"runs": RUNS | content.get("runs", {})})
            )
        else:
            path.write_text(json.dumps(content))


def build_corpus(root: Path, line: str, times: int) -> None:
    """Build a corpus of a line of JSON so many times, and a tokenizer of numbers."""
    (root / "own.jsonl").write_text(f"{line}\n" * times)
    settings = {"name": "own", "source": {"kind": "files", "files": ["own.jsonl"]}}
    with contextlib.chdir(root):
        assert (
            cli.main(["corpus", "--settings", json.dumps(settings), "--output", "c/manifest.json"])
            == 0
        )
        kind = '{"name": "t", "kind": "numbers", "vocabulary_size": 20}'
        assert cli.main(["tokenizer", "--settings", kind, "--output", "t/manifest.json"]) == 0


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_gets_one_message(mistake, shared, monkeypatch, capfd):
    command, words, files = (*mistake, {})[:3]
    arrange(shared.root, files)
    code, output = said_by(WORDS.get(command, command), shared, monkeypatch, capfd)
    assert "Traceback" not in output and 'File "/' not in output, output
    assert code == 2, output
    messages = [line for line in output.splitlines() if line.startswith("tokenscale: ")]
    assert len(messages) == 1, output
    assert any(line.startswith("  next ") for line in output.splitlines()), output
    for word in words:
        assert word in output, output


@pytest.mark.parametrize("files", ["gone.txt", ["gone/*.parquet"], "empty.txt"])
def test_a_source_without_files_is_a_line_of_the_plan(files, shared, monkeypatch, capfd):
    own = {"mine.yaml": {"corpus": "own", "corpora": {"own": {"source": {"files": files}}}}}
    arrange(shared.root, own | {"empty.txt": ""})
    code, text = said_by("tokenscale plan ways --configfile mine.yaml", shared, monkeypatch, capfd)
    assert code == 0 and "missing: corpus own: " in text and "corpora.own.source.files" in text


def test_an_experiment_that_does_not_fit_stops_no_other_target(fresh):
    """It is listed by its name, and refused where it is asked for."""
    for name, text in {
        "mute": "question: [",
        "other": "question: ?\nruns: {model: lama}\n",
    }.items():
        (fresh.root / f"config/experiments/{name}.yaml").write_text(text)
    done = fresh.snakemake("ways", "-n", "--quiet", "host")
    assert "experiments are left out" in done.stdout and "experiments  mute, other\n" in done.stdout
    for target, file in {"other": "other", "all_experiments": "mute"}.items():
        done = fresh.snakemake(target, "-n", check=False)
        assert done.returncode == 2 and f"config/experiments/{file}.yaml" in done.stdout


# --------------------------------------------------------------------------------------------------
# flags


def parsers() -> list[argparse.ArgumentParser]:
    """The parser of every command and sub-command."""
    found = []
    for verb in cli.COMMANDS:
        parser = cli.Parser(prog=verb)
        cli.load_command(verb).add_arguments(parser)
        inner = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        found += [kind for choices in inner for kind in choices.values()] or [parser]
    return found


@pytest.mark.parametrize("parser", parsers(), ids=lambda parser: parser.prog)
def test_an_unknown_flag_gets_the_nearest_spelling(parser, capsys):
    """Of every flag with a letter doubled; also before a required flag that is missing, which is
    the same one.
    """
    with contextlib.suppress(SystemExit):
        parser.parse_known_args([])  # which adds the options of a benchmark
    capsys.readouterr()
    flags = [
        a.option_strings[-1]
        for a in parser._actions
        if a.option_strings and a.help != argparse.SUPPRESS
    ]
    for flag in flags:
        wrong = f"--{flag[2]}{flag[2:]}"
        if wrong in parser._option_string_actions:
            continue
        with pytest.raises(SystemExit, match="^2$"):
            parser.parse_args([wrong, "1"])
        said = capsys.readouterr().err
        assert (
            said.startswith(f"tokenscale: unknown flag {wrong}.")
            and f"did you mean {flag}?" in said
        ), said


# --------------------------------------------------------------------------------------------------
# tables

DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "empty": lambda path: path.write_bytes(b""),
    "another table": lambda path: path.write_bytes(path.with_name("stores.parquet").read_bytes()),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "missing": lambda path: path.unlink(),
}


@pytest.fixture(scope="module")
def tables_folder(tmp_path_factory) -> Path:
    """An experiment's tables."""
    folder = tmp_path_factory.mktemp("tables") / "results/tables/demo"
    steps = tables.steps("a", 2000, loss_sum=lambda step, _: 60.0 + math.sin(step))
    return tables.write(
        folder,
        {"experiment": "demo", "scale": "demo"},
        runs=[tables.run("a", steps_asked=2000)],
        steps=steps,
    )


@pytest.mark.parametrize("table", ["runs", "steps"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_table_is_named_with_the_command_that_restores_it(
    table, damage, tables_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    folder = Path("results/tables/demo")
    shutil.copytree(tables_folder, folder)
    damage(folder / f"{table}.parquet")
    arguments = ["report", "figure", "loss_over_time", "--tables", folder, "--output", "o"]
    told = refused(capsys, arguments, untouched=tmp_path)
    assert f"{folder}/{table}.parquet" in told
    remove = f"rm -r {folder}/{table}.parquet && " if (folder / f"{table}.parquet").is_dir() else ""
    assert re.search(f"next +{remove}snakemake -f results/tables/demo/runs.parquet", told)


def test_a_figures_path_may_have_an_ending(tables_folder, tmp_path):
    for name in ("plain", "svg.svg", "table.csv"):
        arguments = [
            "report",
            "figure",
            "loss_over_time",
            "--tables",
            tables_folder,
            "--output",
            tmp_path / name,
        ]
        assert cli.main([str(argument) for argument in arguments]) == 0
    expected = {f"{name}.{kind}" for name in ("plain", "svg", "table") for kind in KINDS}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_status_outside_of_a_project_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments in ([], ["--failed"], ["--json"]):
        assert str(tmp_path) in refused(capsys, ["status", *arguments], untouched=tmp_path)
