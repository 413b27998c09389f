"""Rows of the table `benchmarks`: what `tokenscale benchmark` measured apart from trainings."""

from pathlib import Path
from typing import Any

from tokenscale.errors import UserError
from tokenscale.files import read_json

Row = dict[str, Any]


def rows(paths: list[Path]) -> dict[str, list[Row]]:
    """Table → rows, of `results/benchmarks/data/<name>.json`, by file, arm and round. Raises UserError for a file that
    is no such benchmark."""
    found: dict[str, list[Row]] = {"benchmarks": []}
    for path in sorted(paths, key=lambda p: p.name):
        found["benchmarks"] += _of_data(path)
    return found


def _of_data(path: Path) -> list[Row]:
    """The rows of one file; an arm that was left out has one with the reason, and without a round."""
    content = read_json(path, "benchmark file", next=f"snakemake {path}")
    try:
        settings = content["settings"]
        common = {
            "benchmark": path.stem,
            "sequence_length": settings.get("sequence_length"),
            "rows": settings.get("rows"),
            "tokenizer": content.get("tokenizer"),
            "corpus": content.get("corpus"),
            **_machine(content),
        }
        keys = ("arm", "round", "open_s", "seconds", "batches", "useful_tokens", "total_tokens")
        found = []
        for record in content["records"]:
            more = {"cache": record.get("cache", content.get("cache"))}
            more |= {key: record.get(key) for key in ("engine", "workers")}
            found.append({**common, **{key: record[key] for key in keys}, **more})
        found.sort(key=lambda r: (r["arm"], r["round"]))
        left_out = sorted((content.get("left_out") or {}).items())
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError("this is no data benchmark.", path=path, missing=error, next="write it anew") from None
    return found + [{**common, "arm": arm, "left_out": reason} for arm, reason in left_out]


def _machine(content: Row) -> Row:
    hardware = content.get("hardware") or {}
    return {"cpu": hardware.get("cpu"), "cores": hardware.get("cores")}
