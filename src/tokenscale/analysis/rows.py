"""Rows of the tables that hold no training: benchmarks, generated texts, token stores and parity
certificates.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    canonical_json,
    read_json,
    read_record,
    report_malformed,
    sha256_file,
)
from tokenscale.costs.card import count_dropped
from tokenscale.settings.data import HELD_OUT_IN_TRAINING

Row = dict[str, Any]

#: columns of the quantiles in the manifest of a store of lengths
QUANTILES = ("median_tokens", "tokens_95", "largest_tokens")
BENCHMARK_TABLES = ("benchmarks", "storage_benchmarks", "inference_benchmarks", "generations")
#: what a record states of all its stretches, a model of itself, and an answer of itself
_CELL = [
    "batch",
    "prompt_tokens",
    "new_tokens",
    "cached",
    "round",
    "rows_equal",
    "first_difference",
    "cache_bytes",
    "peak_bytes",
]
_MODEL = (
    "of_run",
    "model",
    "model_step",
    "dtype",
    "layers",
    "key_value_heads",
    "head_dimension",
    "number_bytes",
)
_ANSWER = [
    "number",
    "prompt",
    "prompt_tokens",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "text",
    "tokens",
    "same_uncached",
]
#: column of `stores` → field of a store's manifest
_STORE = {
    "useful_tokens": "tokens_useful",
    "total_tokens": "tokens_total",
    "ids": "tokens_stored",
    **{name: name for name in ("format", "split", "documents", "vocabulary_size")},
}


def _pick_fields(content: Row, names: Iterable[str]) -> Row:
    return {name: content[name] for name in names}


def benchmark_rows(paths: list[Path]) -> dict[str, list[Row]]:
    """Table → rows, of `results/benchmarks/{data,storage,inference}/<name>.json`, in order.
    Raises UserError for a file that is no such benchmark."""
    found: dict[str, list[Row]] = {name: [] for name in BENCHMARK_TABLES}
    for path in sorted(paths, key=lambda p: p.name):
        content = read_record(
            path,
            what="benchmark file",
            next=f"snakemake -f {path}",
            unsealed=True,
        )
        try:
            kind = content.get("benchmark", "")
            hardware = content.get("hardware") or {}
            of_kind = {"storage": _list_storage_rows, "inference": _list_inference_rows}
            table = f"{kind}_benchmarks" if kind in of_kind else "benchmarks"
            read = of_kind.get(kind, _list_data_rows)
            common: Row = {"benchmark": path.stem}
            common |= {key: hardware.get(key) for key in ("device", "cpu", "cores", "threads")}
            found[table] += read(common, content, sorted((content.get("left_out") or {}).items()))
            if kind == "inference":
                found["generations"] += _list_generations(path.stem, content)
        except (KeyError, TypeError, AttributeError) as error:
            what = "this is no benchmark of data, storage or inference."
            raise UserError(what, path=path, missing=error, next="write it anew") from None
    return found


# what was left out, and why: a row with the reason, and without a round
Reasons = list[tuple[str, str]]


def _list_data_rows(common: Row, content: Row, left_out: Reasons) -> list[Row]:
    settings = content["settings"]
    common |= {key: settings.get(key) for key in ("sequence_length", "rows")}
    common |= {key: content.get(key) for key in ("tokenizer", "corpus")}
    keys = ("arm", "round", "open_s", "seconds", "batches", "useful_tokens", "total_tokens")
    cache = content.get("cache")
    more = [
        {"cache": cache, "engine": None, "workers": None} | record for record in content["records"]
    ]
    found = [
        common | _pick_fields(record, names=(*keys, "cache", "engine", "workers"))
        for record in more
    ]
    found.sort(key=lambda r: (r["arm"], r["round"]))
    return found + [common | {"arm": arm, "left_out": reason} for arm, reason in left_out]


def _list_storage_rows(common: Row, content: Row, left_out: Reasons) -> list[Row]:
    common |= _pick_fields(
        content, names=("tokenizer", "corpus", "documents", "text_bytes", "vocabulary_size")
    )
    common |= {"sequence_length": content["settings"]["sequence_length"]}
    found = []
    for record in content["records"]:
        if record["sequential_s"] <= 0 or record["ids"] <= 0:
            raise KeyError("sequential_s and ids above 0")
        found.append({**common, **record, "left_out": record.get("not_cold")})
    found.sort(key=lambda r: (r["store"], r["round"]))
    return found + [
        common | {"store": store, "format": "text", "left_out": reason}
        for store, reason in left_out
    ]


def _list_inference_rows(common: Row, content: Row, left_out: Reasons) -> list[Row]:
    models = _index_models(content)
    rows = []
    for record in content["records"]:
        cell = common | models[record["of_run"]] | _pick_fields(record, names=_CELL)
        for part in record["parts"]:
            if part["seconds"] < 0 or part["tokens"] < 1:
                raise KeyError("seconds and tokens above 0")
            rows.append(cell | _pick_fields(part, names=("part", "position", "tokens", "seconds")))
    order = ("of_run", "batch", "prompt_tokens", "new_tokens", "cached", "round", "position")
    rows.sort(key=lambda row: tuple(row[key] for key in order))
    return rows + [common | models[run_id] | {"left_out": reason} for run_id, reason in left_out]


def _list_generations(name: str, content: Row) -> list[Row]:
    models = _index_models(content)
    return [
        {
            "benchmark": name,
            **_pick_fields(models[answer["of_run"]], names=_MODEL[:3]),
            **_pick_fields(answer, names=_ANSWER),
        }
        for answer in content["generations"]
    ]


def _index_models(content: Row) -> dict[str, Row]:
    return {model["of_run"]: _pick_fields(model, names=_MODEL) for model in content["models"]}


def store_rows(manifests: list[Path], corpora: Sequence[Path] = ()) -> list[Row]:
    """One row a store, by corpus, tokenizer and folder; `manifests` are
    `…/<corpus>/<tokenizer>/<store>/manifest.json`, each with its `build.json` beside it, where it
    has not been lost.

    `corpora` are manifests of corpora: a store whose own manifest names one of them by its hash
    gets the bytes of the text that it was made of, and how many held-out texts its training text
    also holds. Raises UserError for a file that is no manifest.
    """
    texts = dict(map(_read_corpus_facts, corpora))
    found = [_read_store_row(path, texts) for path in manifests]
    return sorted(found, key=lambda row: (row["corpus"], row["tokenizer"], row["store"]))


def _read_corpus_facts(path: Path) -> tuple[str, Row]:
    manifest = read_json(path, what="corpus' manifest", next=f"snakemake {path}")
    with report_malformed(path, what="corpus' manifest", next=f"snakemake -f {path}"):
        cleaning = manifest.get("cleaning", {})
        shared = cleaning.get("documents", {}).get(HELD_OUT_IN_TRAINING, 0)
        dropped = canonical_json(count_dropped(manifest))
        held_out = {
            "held_out_in_training": shared,
            "dropped": dropped,
            "held_out_dropped": cleaning.get("deduplicate"),
        }
        bytes_ = {split: found["utf8_bytes"] for split, found in manifest["splits"].items()}
        return sha256_file(path), {"text_bytes": bytes_, "held_out": held_out}


def _read_store_row(path: Path, texts: dict[str, Row]) -> Row:
    manifest = read_record(
        path,
        what="store's manifest",
        next=f"snakemake -f {path}",
        unsealed=True,
        key="self_sha256",
    )
    try:
        text = texts.get(manifest.get("corpus_manifest_sha256", ""), {})
        return {
            "corpus": path.parts[-4],
            "tokenizer": manifest["tokenizer"]["name"],
            "store": path.parent.name,
            **{column: manifest[name] for column, name in _STORE.items()},
            "sequence_length": manifest["options"].get("sequence_length"),
            "eos": manifest["options"]["eos"],
            "documents_cut": manifest.get("documents_cut", 0),
            "document_tokens": manifest.get("tokens_in_documents"),
            "cut_tokens": manifest.get("tokens_cut"),
            "padding_tokens": manifest["places"] - manifest["tokens_stored"],
            "entropy_bits": manifest["bits_per_token"]["order_0_entropy"],
            "stored_bytes": sum(file["bytes"] for file in manifest["files"]),
            "text_bytes": text.get("text_bytes", {}).get(manifest["split"]),
            **text.get("held_out", {}),
            **dict(zip(QUANTILES, manifest.get("quantiles", ()), strict=False)),
            "manifest_sha256": sha256_file(path),
            "corpus_sha256": manifest.get("corpus_manifest_sha256"),
            **_read_build_facts(path.with_name("build.json")),
        }
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        what = "this is no manifest of a token store that this version writes."
        raise UserError(what, path=path, missing=error, next=f"snakemake -f {path}") from None


def _read_build_facts(path: Path) -> Row:
    """Engine and seconds of the build, of all jobs of a store in parts together; nothing if the
    record is lost.
    """
    if not path.is_file():
        return {}
    next_step = f"snakemake -f {path.with_name('manifest.json')}"
    record = read_record(
        path,
        what="record of the store's build",
        next=next_step,
        unsealed=True,
    )
    return {"engine": record.get("engine") or None, "seconds": record["duration_s"]}


def certificate_rows(paths: Sequence[Path]) -> list[Row]:
    """Return a row for each certificate; its path is `…/<run id>/over/<other run's id>.json`.

    Raises UserError for a file that is no certificate.
    """
    return sorted(
        (_certificate_row(path) for path in paths), key=lambda row: (row["run_id"], row["over"])
    )


def _certificate_row(path: Path) -> Row:
    next_step = f"snakemake -f {path}"
    found = read_record(
        path,
        what="parity certificate",
        next=next_step,
        unsealed=True,
    )
    row = {
        "run_id": path.parent.parent.name,
        "over": path.stem,
        "certificate_sha256": sha256_file(path),
    }
    with report_malformed(path, what="parity certificate", next=next_step):
        row |= {"verdict": found["verdict"]}
        if found["verdict"] == "none":
            return row | {"reason": found["reason"]}
        first = found["first_difference"]
        cause = found["cause"]
        losses = [step["loss"] for step in found["by_step"]]
        step = f"step {first['step']}: " if first and first["step"] is not None else ""
        return row | {
            "steps": found["steps"],
            "first_difference": first and f"{step}{first['stage']} of {first['name']}",
            "cause": cause and cause["text"],
            "loss_difference": max(loss["difference"] for loss in losses),
            "loss_floor": max(loss["floor"] for loss in losses),
        }
