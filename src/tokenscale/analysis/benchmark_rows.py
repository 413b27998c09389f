"""Rows of the tables that hold benchmarks: what `tokenscale benchmark` measured, no training."""

from pathlib import Path
from typing import Any

from tokenscale.analysis import inference_rows as inference
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json

Row = dict[str, Any]

TABLES = ("benchmarks", "storage_benchmarks", "inference_benchmarks", "generations")


def rows(paths: list[Path]) -> dict[str, list[Row]]:
    """Table → rows, of `results/benchmarks/{data,storage,inference}/<name>.json`, in order.
    Raises UserError for a file that is no such benchmark."""
    found: dict[str, list[Row]] = {name: [] for name in TABLES}
    for path in sorted(paths, key=lambda p: p.name):
        content = read_json(path, "benchmark file", next=f"snakemake {path}")
        try:
            if content.get("benchmark") == "storage":
                found["storage_benchmarks"] += _of_storage(path.stem, content)
            elif content.get("benchmark") == "inference":
                found["inference_benchmarks"] += inference.timed(path.stem, content)
                found["generations"] += inference.texts(path.stem, content)
            else:
                found["benchmarks"] += _of_data(path.stem, content)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                "this is no benchmark of data, storage or inference.", path=path, missing=error, next="write it anew"
            ) from None
    return found


def _of_data(name: str, content: Row) -> list[Row]:
    """The rows of one file; an arm that was left out has one with the reason, and without a round."""
    settings = content["settings"]
    common = {
        "benchmark": name,
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
    return found + [{**common, "arm": arm, "left_out": reason} for arm, reason in left_out]


def _of_storage(name: str, content: Row) -> list[Row]:
    """The rows of one file; an engine that was left out has one with the reason, and without a round."""
    common = {key: content[key] for key in ("tokenizer", "corpus", "documents", "text_bytes", "vocabulary_size")}
    common |= {"benchmark": name, "sequence_length": content["settings"]["sequence_length"], **_machine(content)}
    found = []
    for record in content["records"]:
        if record["sequential_s"] <= 0 or record["ids"] <= 0:
            raise KeyError("sequential_s and ids above 0")
        found.append({**common, **record, "left_out": record.get("not_cold")})
    found.sort(key=lambda r: (r["store"], r["round"]))
    left_out = sorted((content.get("left_out") or {}).items())
    return found + [{**common, "store": store, "format": "text", "left_out": reason} for store, reason in left_out]


def _machine(content: Row) -> Row:
    hardware = content.get("hardware") or {}
    return {"cpu": hardware.get("cpu"), "cores": hardware.get("cores")}
