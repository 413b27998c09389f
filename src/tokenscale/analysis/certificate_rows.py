"""Rows of the table `certificates`: the verdicts of parity certificates between two trainers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenscale.base.files import read_json, report_malformed, sha256_file

Row = dict[str, Any]


def certificate_rows(paths: Sequence[Path]) -> list[Row]:
    """Return a row for each certificate; its path is `…/<run id>/over/<other run's id>.json`.

    Raises UserError for a file that is no certificate.
    """
    return sorted((_row(path) for path in paths), key=lambda row: (row["run_id"], row["over"]))


def _row(path: Path) -> Row:
    next = f"snakemake -f {path} --cores 2"
    found = read_json(path, "parity certificate", next=next)
    row = {"run_id": path.parent.parent.name, "over": path.stem, "certificate_sha256": sha256_file(path)}
    with report_malformed(path, "parity certificate", next=next):
        row |= {"verdict": found["verdict"]}
        if found["verdict"] == "none":
            return row | {"reason": found["reason"]}
        first, cause = found["first_difference"], found["cause"]
        losses = [step["loss"] for step in found["by_step"]]
        where = None
        if first is not None:
            step = "" if first["step"] is None else f"step {first['step']}: "
            where = f"{step}{first['stage']} of {first['name']}"
        return row | {
            "steps": found["steps"],
            "first_difference": where,
            "cause": cause and cause["text"],
            "loss_difference": max(loss["difference"] for loss in losses),
            "loss_floor": max(loss["floor"] for loss in losses),
        }
