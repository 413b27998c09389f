"""The verb `convert`."""

import json

from tests.unit.convert.conftest import ours
from tokenscale.cli.main import main


def test_the_command_line(lab, tmp_path, capsys):
    assert main(["convert", str(ours(lab)), str(tmp_path / "m"), "--to", "megatron"]) == 0
    assert main(["convert", str(tmp_path / "m"), str(tmp_path / "s.parquet"), "--to", "token-list", "--eos"]) == 0
    assert "EOS 1 behind" in capsys.readouterr().out
    assert json.loads((tmp_path / "s.build.json").read_text())["command"].startswith("tokenscale ")
    assert main(["convert", str(tmp_path / "m"), str(tmp_path / "t"), "--to", "packed", "--bos-id", "x"]) == 2
    assert "--bos-id cannot be 'x'" in capsys.readouterr().err
