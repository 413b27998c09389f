"""A run's record, `run.json`, and the settings in it, as far as they can be read."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from tokenscale.base.errors import UserError
from tokenscale.base.facts import clear_unknown, list_unknown
from tokenscale.base.files import read_file, read_json
from tokenscale.runs.records import provenance
from tokenscale.settings.options import decode
from tokenscale.settings.run import RunSettings

Row = dict[str, Any]


#: what code raises that works with the values of a record of another program
MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, UserError)


class RunRecord(NamedTuple):
    """`run.json`, or None; whether its seal is valid; what is wrong with it, in words; and (name, why)
    of the facts that could not be had, which `record` has as None.
    """

    record: Row | None
    sealed: bool = False
    trouble: str | None = None
    unknown: tuple[tuple[str, str], ...] = ()


def read_run_record(path: Path) -> RunRecord:
    """Read a run's record. One that is missing has no trouble."""
    if not path.is_file():
        return RunRecord(None)
    try:
        record = read_json(path, what="run record")
        if not isinstance(record, dict):
            return RunRecord(None, trouble="run.json is no object")
        return RunRecord(
            record=clear_unknown(record),
            sealed=provenance.read_sealed(path) is not None,
            unknown=tuple(list_unknown(record)),
        )
    except UserError as error:
        if error.what == "the run record cannot be read.":  # by the system, not by its content
            return RunRecord(None, trouble=f"run.json cannot be read: {error.facts['reason']}")
        return RunRecord(None, trouble="run.json is not readable JSON")
    except ValueError:
        return RunRecord(None, trouble="run.json is not readable JSON")


def hash_record(path: Path) -> str | None:
    """Return the SHA-256 of a record's bytes; None for one that cannot be read."""
    try:
        return hashlib.sha256(read_file(path)).hexdigest()
    except OSError:
        return None


def describe_trouble(error: Exception) -> str:
    """Return what is wrong with a record that this version cannot work with."""
    reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return f"run.json does not hold what this version writes ({reason})"


def read_settings(values: Row | None) -> RunSettings | None:
    """A run's settings; None where they cannot be read."""
    try:
        return None if values is None else decode(RunSettings, values)
    except (UserError, TypeError, AttributeError, ValueError):
        return None
