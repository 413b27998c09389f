"""The flags of `train`: one for each setting of a run, in one spelling or several."""

import argparse
import sys
import typing
from pathlib import Path

import pytest

from tests.unit.study_train.conftest import asked
from tokenscale.cli.main import GROUPS, main
from tokenscale.settings import flags, source_studies
from tokenscale.settings.run import RunSettings


def sample(hint, default):
    """(text, value) of some other value than the default."""
    if typing.get_origin(hint) is typing.Literal:
        other = next((v for v in typing.get_args(hint) if v != default), default)  # there may be one value alone
        return other, other
    if hint is bool:
        return str(not default).lower(), not default
    if hint is int:
        return str((default or 1) + 1), (default or 1) + 1
    if hint is str:
        return "there", "there"
    return ("0.5", 0.5) if default != 0.5 else ("0.25", 0.25)


@pytest.mark.parametrize("flag", source_studies.RUN_FLAGS, ids=lambda flag: flag.key)
def test_each_setting_of_a_run_has_a_flag_that_sets_it(flag):
    hint = next((h for h in typing.get_args(flag.hint) if h in (float, int, str, bool)), flag.hint)
    text, value = sample(hint, flag.default)
    for name in flag.names:
        parser = argparse.ArgumentParser()
        flags.add_flags(parser, source_studies.RUN_FLAGS)
        stated = flags.parse_flags(parser.parse_args([name, text]), source_studies.RUN_FLAGS)
        assert stated == {flag.key: value}
        run = flags.replace_values(RunSettings(), stated)
        for part in flag.key.split("."):
            run = getattr(run, part)
        assert run == value


@pytest.mark.parametrize("text, value", [("none", None), ("null", None), ("2.5", 2.5)])
def test_a_flag_of_an_optional_setting_takes_none(text, value):
    assert asked("--optimizer.clip-norm", text).run.optimizer.clip_norm == value


@pytest.mark.parametrize("command", [name for group in GROUPS.values() for name in group])
def test_the_help_of_a_command_fits_a_terminal(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TOKENSCALE_USER_PATH", str(Path(sys.executable).parent))  # commands without their folder
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []
