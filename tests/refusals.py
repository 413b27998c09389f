"""How bad input must be refused: one message that says where and what next, exit code 2, nothing
changed on disk.
"""

from pathlib import Path

from tokenscale.cli import main as cli


def tree_of(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder but the file that locks it: content of files, None for folders."""
    found = [p for p in sorted(folder.rglob("*")) if p.name != ".lock"]
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in found}


def refused(capsys, arguments: list[object], untouched: Path | None = None) -> str:
    """What a command says as it refuses. It may raise nothing, and must leave the folder
    `untouched` as it was.
    """
    before = tree_of(untouched) if untouched else None
    capsys.readouterr()
    code = cli.main([str(argument) for argument in arguments])
    told = capsys.readouterr().err
    assert code == 2, told
    messages = [line for line in told.splitlines() if line.startswith("tokenscale: ")]
    assert len(messages) == 1 and "Traceback" not in told, told
    assert any(line.startswith("  next ") for line in told.splitlines()), told
    assert untouched is None or tree_of(untouched) == before
    return told
