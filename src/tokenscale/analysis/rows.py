"""Rows of the tables that hold no training: benchmarks, generated texts, token stores and parity certificates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, report_malformed, sha256_file
from tokenscale.settings.data import HELD_OUT_IN_TRAINING

Row = dict[str, Any]

BENCHMARK_TABLES = ("benchmarks", "storage_benchmarks", "inference_benchmarks", "generations")
#: what a record states of all its stretches
_CELL = ("batch", "prompt_tokens", "new_tokens", "cached", "round", "rows_equal", "first_difference")
_BYTES = ("cache_bytes", "peak_bytes")
_MODEL = ("of_run", "model", "model_step", "dtype", "layers", "key_value_heads", "head_dimension", "number_bytes")
_SAMPLING = ("temperature", "top_k", "top_p", "seed")
_ANSWER = ("number", "prompt", "prompt_tokens", *_SAMPLING, "text", "tokens", "same_uncached")


def benchmark_rows(paths: list[Path]) -> dict[str, list[Row]]:
    """Table → rows, of `results/benchmarks/{data,storage,inference}/<name>.json`, in order.
    Raises UserError for a file that is no such benchmark."""
    found: dict[str, list[Row]] = {name: [] for name in BENCHMARK_TABLES}
    for path in sorted(paths, key=lambda p: p.name):
        content = read_json(path, "benchmark file", next=f"snakemake {path}")
        try:
            if content.get("benchmark") == "storage":
                found["storage_benchmarks"] += _of_storage(path.stem, content)
            elif content.get("benchmark") == "inference":
                found["inference_benchmarks"] += _of_inference(path.stem, content)
                found["generations"] += _generations(path.stem, content)
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


def _of_inference(name: str, content: Row) -> list[Row]:
    """A row a stretch of positions of each record; what was left out has one with the reason, and no round.

    Raises KeyError or TypeError for content that is none.
    """
    hardware = content.get("hardware") or {}
    common = {"benchmark": name, **{key: hardware.get(key) for key in ("device", "cpu", "cores", "threads")}}
    models = _models(content)
    rows = []
    for record in content["records"]:
        cell = {key: record[key] for key in (*_CELL, *_BYTES)}
        for part in record["parts"]:
            if part["seconds"] < 0 or part["tokens"] < 1:
                raise KeyError("seconds and tokens above 0")
            stretch = {key: part[key] for key in ("part", "position", "tokens", "seconds")}
            rows.append(common | models[record["of_run"]] | cell | stretch)
    order = ("of_run", "batch", "prompt_tokens", "new_tokens", "cached", "round", "position")
    rows.sort(key=lambda row: tuple(row[key] for key in order))
    left_out = sorted((content.get("left_out") or {}).items())
    return rows + [common | models[run_id] | {"left_out": reason} for run_id, reason in left_out]


def _generations(name: str, content: Row) -> list[Row]:
    """A row an answer, in the order of the models, prompts and ways to choose."""
    models = _models(content)
    rows = []
    for answer in content["generations"]:
        model = {key: models[answer["of_run"]][key] for key in ("of_run", "model", "model_step")}
        rows.append({"benchmark": name, **model, **{key: answer[key] for key in _ANSWER}})
    return rows


def _models(content: Row) -> dict[str, Row]:
    return {model["of_run"]: {key: model[key] for key in _MODEL} for model in content["models"]}


def store_rows(manifests: list[Path], corpora: Sequence[Path] = ()) -> list[Row]:
    """One row a store, by corpus, tokenizer and folder; `manifests` are
    `…/<corpus>/<tokenizer>/<store>/manifest.json`, each with its `build.json` beside it, where it has not been lost.

    `corpora` are manifests of corpora: a store whose own manifest names one of them by its hash gets the bytes of the
    text that it was made of, and how many held-out texts its training text also holds. Raises UserError for a file
    that is no manifest.
    """
    texts = dict(map(_corpus, corpora))
    found = [_store_row(path, texts) for path in manifests]
    return sorted(found, key=lambda row: (row["corpus"], row["tokenizer"], row["store"]))


def _corpus(path: Path) -> tuple[str, Row]:
    """(hash of a corpus' manifest, its facts: split → bytes of its text, and the columns of held-out texts)."""
    manifest = read_json(path, "corpus' manifest", next=f"snakemake {path} --cores 2")
    with report_malformed(path, "corpus' manifest", next=f"snakemake -f {path} --cores 2"):
        cleaning = manifest.get("cleaning", {})
        held_out = {
            "held_out_in_training": cleaning.get("documents", {}).get(HELD_OUT_IN_TRAINING, 0),
            "held_out_dropped": cleaning.get("deduplicate"),
        }
        bytes_ = {split: found["utf8_bytes"] for split, found in manifest["splits"].items()}
        return sha256_file(path), {"text_bytes": bytes_, "held_out": held_out}


def _store_row(path: Path, texts: dict[str, Row]) -> Row:
    manifest = read_json(path, "store's manifest", next=f"snakemake {path} --cores 2")
    try:
        text = texts.get(manifest.get("corpus_manifest_sha256"), {})
        padding = manifest["places"] - manifest["tokens_stored"]
        return {
            "corpus": path.parts[-4],
            "tokenizer": manifest["tokenizer"]["name"],
            "store": path.parent.name,
            "format": manifest["format"],
            "split": manifest["split"],
            "sequence_length": manifest["options"].get("sequence_length"),
            "eos": manifest["options"]["eos"],
            "documents": manifest["documents"],
            "documents_cut": manifest.get("documents_cut", 0),
            "useful_tokens": manifest["tokens_useful"],
            "total_tokens": manifest["tokens_total"],
            "padding_tokens": padding,
            "ids": manifest["tokens_stored"],
            "vocabulary_size": manifest["vocabulary_size"],
            "entropy_bits": manifest["bits_per_token"]["order_0_entropy"],
            "stored_bytes": sum(file["bytes"] for file in manifest["files"]),
            "text_bytes": text.get("text_bytes", {}).get(manifest["split"]),
            **text.get("held_out", {}),
            "manifest_sha256": sha256_file(path),
            "corpus_sha256": manifest.get("corpus_manifest_sha256"),
            **_build(path.with_name("build.json")),
        }
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(
            "this is no manifest of a token store that this version writes.",
            path=path,
            missing=error,
            next=f"snakemake -f {path} --cores 2",
        ) from None


def _build(path: Path) -> Row:
    """Return the engine and the seconds of the build; null if the record is lost.

    For a store in parts, the seconds are those of all jobs together."""
    if not path.is_file():
        return {}
    record = read_json(path, "record of the store's build")
    return {"engine": record.get("engine") or None, "seconds": record["duration_s"]}


def certificate_rows(paths: Sequence[Path]) -> list[Row]:
    """Return a row for each certificate; its path is `…/<run id>/over/<other run's id>.json`.

    Raises UserError for a file that is no certificate.
    """
    return sorted((_certificate_row(path) for path in paths), key=lambda row: (row["run_id"], row["over"]))


def _certificate_row(path: Path) -> Row:
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
