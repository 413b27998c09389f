"""Words of a command and what it prints: files of arguments, paths as people write them, streams
that are not UTF-8.
"""

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenscale.base.errors import UserError
from tokenscale.base.files import expand_path, read_arguments, write_arguments
from tokenscale.cli import main as cli
from tokenscale.cli.main import Parser, main
from tokenscale.cli.train import command as train


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("text", ["12 µs × 3 → 日本語", "a file named \udcff"])
def test_what_a_terminal_cannot_show_is_replaced(monkeypatch, encoding, text):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(
            sys, name, io.TextIOWrapper(io.BytesIO(), encoding, line_buffering=True)
        )
    assert main(["plan", text]) == 2 and main([]) == 0
    shown = sys.stderr.buffer.getvalue().decode(encoding)
    assert (
        shown.startswith("tokenscale: unknown experiment ")
        and "file named" in shown
        or "12 " in shown
    )
    assert "data:" in sys.stdout.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize(
    "words", [[], ["--names", "a b", "", "@x", "–", "line\nline"], ["x" * 300_000] * 3]
)
def test_a_file_of_arguments_stands_for_its_words(tmp_path, words):
    word = write_arguments(tmp_path / "a.json", words)
    assert read_arguments(["first", word, "@last"]) == ["first", *words, "@last"]
    before = (tmp_path / "a.json").stat().st_mtime_ns
    assert (
        write_arguments(tmp_path / "a.json", words) == word
        and (tmp_path / "a.json").stat().st_mtime_ns == before
    )
    (tmp_path / "a.json").unlink()
    with pytest.raises(UserError, match="file of arguments is missing"):
        read_arguments([word])


def test_a_path_is_expanded_as_a_shell_does(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    monkeypatch.delenv("NOWHERE", raising=False)
    assert expand_path("~/a/*.parquet") == f"{tmp_path}/a/*.parquet"
    assert expand_path("$DATA/b") == expand_path("${DATA}/b") == f"{tmp_path}/data/b"
    for kept in (
        "a~b",
        "data/price_5$.txt",
        "s3://bucket/$DATA/~",
        "https://host/~user/$x",
        "~no-such-user/x",
    ):
        assert expand_path(kept) == kept
    monkeypatch.chdir(tmp_path)
    for literal in ("~", "$DATA", "$NOWHERE"):
        Path(literal).touch()
        assert expand_path(literal) == literal
    for unset in ("$NOWHERE/x", "a/${NOWHERE}/b"):
        with pytest.raises(UserError, match="NOWHERE"):
            expand_path(unset)


def test_paths_behind_flags_are_expanded_and_texts_are_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    parser = Parser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--prompt")
    parsed = parser.parse_args(["--output=~/x.json", "--prompt", "~/$HOME"])
    assert parsed == argparse.Namespace(output=tmp_path / "x.json", prompt="~/$HOME")
    (tmp_path / "c.yaml").write_text("scale: nowhere\n")
    assert (
        main(["check", "--configfile", "~/c.yaml"]) == 2
        and f"{tmp_path}/c.yaml" in capsys.readouterr().err
    )
    assert main(["generate", "--checkpoint", str(tmp_path), "--prompt", "no\udcff"]) == 2
    assert "PYTHONUTF8" in capsys.readouterr().err


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="has no file system that makes no folders"
)
@pytest.mark.parametrize("folder", ["/proc/x", "/proc/self/x"])
@pytest.mark.parametrize(
    "command",
    ["train --training-steps 1 --output-dir", "pretokenize --input-path README.md --output-dir"],
)
def test_a_folder_that_cannot_be_made_is_no_trace(command, folder, capsys):
    assert main([*command.split(), folder]) == 2
    assert folder in capsys.readouterr().err


def test_a_notebooks_back_end_does_not_reach_the_figures():
    """Matplotlib refuses the name, of a package that is not installed, while it is imported."""
    text = "import tokenscale.report.style"
    back_end = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    done = subprocess.run(
        [sys.executable, "-c", text], env=os.environ | back_end, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_works_with_closed_streams_as_daemons_start_it(closed, tmp_path):
    settings = '{"name": "numbers", "kind": "numbers", "vocabulary_size": 20}'
    command = f"{sys.executable} -m tokenscale tokenizer --settings '{settings}' --output out/manifest.json"
    done = subprocess.run(f"{command} {closed}", shell=True, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done
    assert json.loads((tmp_path / "out/manifest.json").read_text())["vocabulary_size"] == 20


@pytest.mark.parametrize(("only_prints", "code"), [(True, 0), (False, 1)])
def test_a_reader_that_leaves_ends_what_makes_something_with_a_word(only_prints, code):
    text = f"""
import sys
from tokenscale.cli.main import exit_code
def run():
    raise BrokenPipeError
sys.exit(exit_code(run, "help", only_prints={only_prints}))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == code
    assert ("before its work was done" in done.stderr) is not only_prints


@pytest.mark.parametrize("command", sorted(cli.PRINTING_UNLESS_ASKED))
@pytest.mark.parametrize(
    ("output", "code"), [([], 0), (["--output", "file"], 1), (["--output=file"], 1)]
)
def test_a_command_makes_something_where_an_output_is_named(command, output, code, monkeypatch):
    """A stand-in for the command, whose reader leaves at once."""

    class Command:
        add_arguments = staticmethod(lambda parser: parser.add_argument("--output"))

        @staticmethod
        def run(arguments):
            raise BrokenPipeError

    monkeypatch.setattr(cli, "load_command", lambda name: Command)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1, raising=False)
    assert main([command, *output]) == code


def test_a_run_that_is_not_complete_fails_its_command(tmp_path, capsys):
    for status, code in (("complete", 0), ("nonfinite", 1), ("failed", 1)):
        (tmp_path / "done.json").write_text(json.dumps({"status": status}))
        assert train.report_failure(tmp_path / "done.json") == code
        assert (f"not complete: {status}" in capsys.readouterr().err) is bool(code)
