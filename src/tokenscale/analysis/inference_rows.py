"""Rows of the tables `inference_benchmarks` and `generations`, from the file that `benchmark inference` wrote."""

from typing import Any

Row = dict[str, Any]

#: what a record states of all its stretches
_CELL = ("batch", "prompt_tokens", "new_tokens", "cached", "round", "rows_equal", "first_difference")
_BYTES = ("cache_bytes", "peak_bytes")
_MODEL = ("of_run", "model", "model_step", "dtype", "layers", "key_value_heads", "head_dimension", "number_bytes")
_SAMPLING = ("temperature", "top_k", "top_p", "seed")
_ANSWER = ("number", "prompt", "prompt_tokens", *_SAMPLING, "text", "tokens", "same_uncached")


def timed(name: str, content: Row) -> list[Row]:
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


def texts(name: str, content: Row) -> list[Row]:
    """A row an answer, in the order of the models, prompts and ways to choose."""
    models = _models(content)
    rows = []
    for answer in content["generations"]:
        model = {key: models[answer["of_run"]][key] for key in ("of_run", "model", "model_step")}
        rows.append({"benchmark": name, **model, **{key: answer[key] for key in _ANSWER}})
    return rows


def _models(content: Row) -> dict[str, Row]:
    return {model["of_run"]: {key: model[key] for key in _MODEL} for model in content["models"]}
