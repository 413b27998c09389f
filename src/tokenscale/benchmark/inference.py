"""Benchmark of text generation with trained models, with and without a key-value cache.

Each run's weights are loaded once and continue the prompts. Then each round generates greedily for
every combination of batch size, prompt length and number of new tokens, with and without the cache,
in an order that changes between rounds. EOS does not end generation, so that equal cells generate
equally many tokens. An untimed pass with the cache gives the tokens that every round is compared
with. Seconds are recorded by ranges of positions; the analysis computes rates, medians and
speed-ups.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    canonical_json,
    read_json,
    sha256_file,
    sha256_text,
    write_sealed,
)
from tokenscale.benchmark.rounds import interleave
from tokenscale.data.stores.text import encode_prompts
from tokenscale.data.tokenizers.base import Tokenizer
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.runs.records import provenance
from tokenscale.runs.records.provenance import find_versions, read_git_state
from tokenscale.settings.benchmarks import InferenceBenchmarkSettings
from tokenscale.settings.closure import import_closure
from tokenscale.settings.options import from_json, to_dict
from tokenscale.train.checkpoint import RECORD
from tokenscale.train.checkpoint_models import CheckpointModel, continue_prompt, open_causal
from tokenscale.train.evaluation.generation import Sampling, generate_rows
from tokenscale.train.models.decoder import Decoder

VERSION = 1
#: positions per recorded time
STRETCH = 32
GREEDY = Sampling(temperature=0.0)
Cell = tuple[int, int, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--settings", default="{}", metavar="JSON", help="prompts, sampling, prompt_tokens, …"
    )
    parser.add_argument(
        "--run", nargs="+", required=True, type=Path, metavar="DIR", help="results/runs/RUN_ID, …"
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help="the JSON to write"
    )
    parser.add_argument(
        "--site",
        nargs="?",
        metavar="FILE",
        help="the machine's file; with srun there, run on a GPU",
    )


def run(arguments: argparse.Namespace) -> int | None:
    """Run the benchmark and print its table, or start it by srun and return its exit code."""
    if arguments.site:
        from tokenscale.runs.launch.start import run_on_site

        words = ["benchmark", "inference", "--settings", arguments.settings]
        words += ["--output", str(arguments.output), "--run", *map(str, arguments.run)]
        file = arguments.output.with_suffix(".arguments.json")
        exit_code = run_on_site(arguments.site, words, arguments_file=file)
        if exit_code is not None:
            return exit_code
    settings = from_json(InferenceBenchmarkSettings, text=arguments.settings)
    print(format_table(measure(settings, runs=arguments.run, output=arguments.output)))
    return None


@dataclass(frozen=True)
class Writer:
    """Model of a run with the run's id, its tokenizer, and ids from which prompts are built."""

    opened: CheckpointModel
    run_id: str
    engine: Tokenizer
    ids: list[int]

    @property
    def offers_cache(self) -> bool:
        """Whether the model has a key-value cache. The cache of `transformers` models is not
        used.
        """
        return isinstance(self.opened.model, Decoder)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the cache."""
        return self.opened.model.head.weight.dtype

    def prompts(self, cell: Cell) -> list[list[int]]:
        """Return the prompts of a cell, [batch][prompt length]. Each begins elsewhere in the
        text.
        """
        batch, length, _ = cell
        starts = [n * len(self.ids) // batch for n in range(batch)]
        return [
            [self.engine.bos_id, *(self.ids[(s + i) % len(self.ids)] for i in range(length - 1))]
            for s in starts
        ]

    def write(self, cell: Cell, cached: bool, on_token=None) -> list[list[int]]:
        """Generate and return the new tokens of each row, [batch][new tokens]."""
        return generate_rows(
            self.opened.model,
            prompts=self.prompts(cell),
            max_new_tokens=cell[2],
            positions=self.opened.positions,
            vocabulary_size=self.engine.vocabulary_size,
            stop_id=None,
            sampling=GREEDY,
            device=self.opened.device,
            cached=cached,
            on_token=on_token,
        )

    def cache_bytes(self, cell: Cell) -> int:
        """Return the bytes of the model's cache tensors, created on the meta device."""
        batch, prompt, new = cell
        cache = self.opened.model.new_cache(batch, length=prompt + new, device=torch.device("meta"))
        return 0 if cache is None else cache.keys.nbytes + cache.values.nbytes


def measure(settings: InferenceBenchmarkSettings, runs: list[Path], output: Path) -> dict[str, Any]:
    """Run the benchmark on the final weights in these runs' folders and write its one JSON file;
    returns what it wrote.

    Raises UserError for missing weights, masked models, and prompts or texts that are longer than a
    row.
    """
    writers = [_open_writer(folder, settings) for folder in runs]
    device = writers[0].opened.device
    with _single_thread(device) as threads:
        answers = [answer for writer in writers for answer in _generate_texts(writer, settings)]
        records = list(_time_cells(writers, settings))
    code = map(Path, import_closure("tokenscale.cli.benchmark", __name__))
    described = provenance.describe_machine() | {"threads": threads}
    described["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    result = {
        "schema": VERSION,
        "benchmark": "inference",
        "settings": to_dict(settings),
        "models": [_describe_model(writer) for writer in writers],
        "left_out": {
            w.run_id: "the cache of transformers is not measured"
            for w in writers
            if not w.offers_cache
        },
        "code_sha256": sha256_text(canonical_json(sorted(map(sha256_file, code)))),
        "git": read_git_state()[0],
        "hardware": described,
        "versions": find_versions(),
        "finished_unix_s": time.time(),
        "generations": answers,
        "records": records,
    }
    write_sealed(output, record=result)
    return result


def _open_writer(folder: Path, settings: InferenceBenchmarkSettings) -> Writer:
    """Load a run's final weights and tokenizer. Raises UserError as `measure` does."""
    weights = folder / "checkpoints" / "final"
    again = f"snakemake -f {folder}/done.json   trains it again"
    if not (weights / RECORD).is_file():
        raise UserError("the run's weights are missing.", checkpoint=weights, next=again)
    record = read_json(weights / RECORD, what="checkpoint's record", next=again)
    opened = open_causal(weights, device=record["run"].get("device", "auto"))
    if settings.bf16:
        opened.model.to(torch.bfloat16)
    engine = load_tokenizer(opened.tokenizer)
    longest = max(prompt + new for _, prompt, new in settings.cells)
    if longest > opened.positions:
        what = "prompt and new tokens exceed the model's positions."
        next_step = "reduce prompt_tokens or new_tokens"
        expected = f"at most {opened.positions:,}"
        raise UserError(
            what,
            checkpoint=opened.name,
            found=f"{longest:,} tokens",
            expected=expected,
            next=next_step,
        )
    ids = np.concatenate(
        [*engine.encode_batch(list(settings.prompts)), np.array([engine.bos_id])]
    ).tolist()
    return Writer(
        opened=opened,
        run_id=folder.name,
        engine=engine,
        ids=ids,
    )


@contextmanager
def _single_thread(device: torch.device) -> Iterator[int]:
    """Use one thread on a CPU: decoding one token gives threads no work to share, and their waiting
    would be timed.
    """
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _generate_texts(
    writer: Writer, settings: InferenceBenchmarkSettings
) -> Iterator[dict[str, Any]]:
    """Yield a record per prompt and sampling setting, compared with generation without the
    cache.
    """
    prompts = encode_prompts(writer.engine, prompts=settings.prompts, name="the prompts")
    for way in settings.sampling:
        for number, (prompt, ids) in enumerate(zip(settings.prompts, prompts, strict=True)):
            sampling = Sampling(**asdict(way) | {"seed": way.seed + number})
            arguments = (
                prompt,
                ids.tolist(),
                writer.opened,
                writer.engine,
                settings.sample_tokens,
                sampling,
            )
            text, tokens = continue_prompt(*arguments)
            same = (
                continue_prompt(*arguments, cached=False)[1] == tokens
                if writer.offers_cache
                else None
            )
            yield {
                "of_run": writer.run_id,
                "number": number,
                "prompt": prompt,
                "prompt_tokens": len(ids),
                **asdict(sampling),
                "text": text,
                "tokens": len(tokens),
                "same_uncached": same,
            }


def _time_cells(
    writers: list[Writer], settings: InferenceBenchmarkSettings
) -> Iterator[dict[str, Any]]:
    """Yield a record per model, cell, cache setting and round."""
    writers = [writer for writer in writers if writer.offers_cache]
    measurements = list(itertools.product(writers, settings.cells, (True, False)))
    expected = {
        (w.run_id, cell): w.write(cell, cached=True) for w, cell, cached in measurements if cached
    }
    for number, (writer, cell, cached) in interleave(measurements, rounds=settings.rounds):
        yield {
            "round": number,
            **_time_cell(
                writer,
                cell,
                cached=cached,
                expected=expected[writer.run_id, cell],
            ),
        }


def _time_cell(
    writer: Writer, cell: Cell, cached: bool, expected: list[list[int]]
) -> dict[str, Any]:
    """Generate once and return the record, compared with the expected tokens."""
    device = writer.opened.device
    before = _allocated_bytes(device)
    times = [time.perf_counter()]
    found = writer.write(cell, cached, on_token=lambda _: times.append(time.perf_counter()))
    return {
        "of_run": writer.run_id,
        **dict(zip(("batch", "prompt_tokens", "new_tokens"), cell, strict=True)),
        "cached": cached,
        "parts": group_by_position(times, prompt=cell[1]),
        **compare_rows(found, expected, prompt=cell[1]),
        "cache_bytes": writer.cache_bytes(cell) if cached else 0,
        "peak_bytes": torch.cuda.max_memory_allocated(device) - before
        if device.type == "cuda"
        else None,
    }


def group_by_position(times: list[float], prompt: int) -> list[dict[str, Any]]:
    """Return seconds by ranges of positions: until the first new token, then `STRETCH` positions
    each.

    `times` are the time of the call and the time of each new token.

    >>> [(p["position"], p["tokens"], p["seconds"]) for p in group_by_position([0.0, 3.0, 4.0, 5.0, 7.0], prompt=30)]
    [(0, 30, 3.0), (31, 1, 1.0), (32, 2, 3.0)]
    """
    parts: list[dict[str, Any]] = [
        {"part": "prompt", "position": 0, "tokens": prompt, "seconds": times[1] - times[0]}
    ]
    for number, (earlier, later) in enumerate(zip(times[1:-1], times[2:], strict=True), 1):
        position = prompt + number
        if len(parts) == 1 or position % STRETCH == 0:
            parts.append({"part": "decode", "position": position, "tokens": 0, "seconds": 0.0})
        parts[-1]["tokens"] += 1
        parts[-1]["seconds"] += later - earlier
    return parts


def compare_rows(
    found: list[list[int]], expected: list[list[int]], prompt: int
) -> dict[str, int | None]:
    """Return the number of rows equal to the expected ones, and the position of the first different
    token.

    >>> compare_rows([[1, 2], [3, 4]], [[1, 2], [3, 5]], prompt=10)
    {'rows_equal': 1, 'first_difference': 11}
    """
    wrong = np.array(found) != np.array(expected)
    places = np.flatnonzero(wrong.any(axis=0))
    first = prompt + int(places[0]) if len(places) else None
    return {"rows_equal": int((~wrong.any(axis=1)).sum()), "first_difference": first}


def _allocated_bytes(device: torch.device) -> int:
    """Synchronise the device and return its allocated bytes; 0 on a CPU. Resets the peak."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _describe_model(writer: Writer) -> dict[str, Any]:
    """Return the record of a model: shape, type and checkpoint."""
    opened = writer.opened
    shape = writer.opened.model.settings
    weight: Tensor = opened.model.head.weight
    return {
        "of_run": writer.run_id,
        "model": opened.run.model.name,
        "model_step": opened.record["step"],
        "dtype": str(weight.dtype).removeprefix("torch."),
        **{name: getattr(shape, name) for name in ("layers", "key_value_heads", "head_dimension")},
        "number_bytes": weight.element_size(),
        "vocabulary_size": shape.vocabulary_size,
        "checkpoint_sha256": sha256_file(opened.folder / RECORD),
        "run_digest": opened.record.get("digest"),
    }


def format_table(result: dict[str, Any]) -> str:
    """Format a line per model and cell (medians over rounds, with and without the cache), then the
    generated texts.
    """
    names = {model["of_run"]: model["model"] for model in result["models"]}
    cells: dict[tuple, dict[bool, list[dict[str, Any]]]] = {}
    for record in result["records"]:
        key = (
            names[record["of_run"]],
            record["batch"],
            record["prompt_tokens"],
            record["new_tokens"],
        )
        cells.setdefault(key, {True: [], False: []})[record["cached"]].append(record)
    width = max(map(len, [*names.values(), "model"]))
    lines = [
        f"{'model':<{width}} {'batch':>5} {'prompt':>6} {'new':>5} {'first token ms':>14} "
        f"{'tokens/s':>9} "
        f"{'no cache':>9} {'x':>6} {'cache KiB':>9} {'texts':>9}"
    ]
    for (name, batch, prompt, new), by in sorted(cells.items()):
        with_cache, without = (
            np.median([_tokens_per_s(record) for record in by[cached]]) for cached in (True, False)
        )
        same = all(r["rows_equal"] == batch for records in by.values() for r in records)
        first_ms = 1e3 * np.median([r["parts"][0]["seconds"] for r in by[True]])
        speed_up = f"{with_cache / without:.1f}" if same else "–"
        lines.append(
            f"{name:<{width}} {batch:>5} {prompt:>6} {new:>5} {first_ms:>14.2f} "
            f"{with_cache:>9,.0f} {without:>9,.0f} "
            f"{speed_up:>6} {by[True][0]['cache_bytes'] / 1024:>9,.0f} "
            f"{'equal' if same else 'differ':>9}"
        )
    lines += [f"left out: {names[run_id]}: {why}" for run_id, why in result["left_out"].items()]
    for answer in result["generations"]:
        way = (
            f"temperature {answer['temperature']:g}, top_p {answer['top_p']:g}, seed "
            f"{answer['seed']}"
        )
        lines.append(
            f"{names[answer['of_run']]}, {way}: {answer['prompt']!r} -> {answer['text']!r}"
        )
    return "\n".join(lines)


def _tokens_per_s(record: dict[str, Any]) -> float:
    decoded = [part for part in record["parts"] if part["part"] == "decode"]
    return (
        record["batch"]
        * sum(part["tokens"] for part in decoded)
        / sum(part["seconds"] for part in decoded)
    )
