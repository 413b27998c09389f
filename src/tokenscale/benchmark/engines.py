"""Which engines tokenize in a benchmark: those that are here and exact."""

from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from tokenscale.base.errors import UserError
from tokenscale.data.tokenizers import gate
from tokenscale.data.tokenizers.load import load
from tokenscale.data.tokenizers.manifest import read_manifest
from tokenscale.settings.benchmark import Engine

NAMES = get_args(Engine)


def listed(asked: Iterable[str], tokenizer: Path, auto: str) -> tuple[list[str], dict[str, str]]:
    """(Those of the engines asked for that can be used, the others → why not): one that is not here, whose ids are not
    the reference's on the hostile texts, or that `auto` takes anyway."""
    found, left_out = [], {}
    for engine in asked:
        if (reason := _why_not(engine, tokenizer, auto)) is None:
            found.append(engine)
        else:
            left_out[engine] = reason
    return found, left_out


def _why_not(engine: str, folder: Path, auto: str) -> str | None:
    if read_manifest(folder)["kind"] == "numbers":
        return "numbers are read by no engine"
    if engine == auto:
        return "it is the engine that auto takes here"
    try:
        tokenizer = load(folder, engine)
    except UserError as error:
        return error.facts.get("reason") or error.what
    differs = tokenizer.difference(gate.fuzz())
    return None if differs is None else "its ids are not those of the reference"
