"""How fast a corpus becomes a token store, start of the process to the last byte, and with how much
memory.

Each side is a process of its own on the same cores, in interleaved rounds: ours, for each format; a
plain script with `transformers` over the same Parquet files. Engines are measured apart, on one
core, each over the text once (a tokenizer that has seen a text before is up to three times as fast,
which says nothing about a corpus).
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.base.files import write_json
from tokenscale.benchmark.rounds import format_columns, format_spread, group_by, interleave
from tokenscale.cli.main import Parser, exit_code
from tokenscale.data.corpus.build import build_from
from tokenscale.data.corpus.raw_text import read_corpus_manifest
from tokenscale.data.tokenizers.base import read_tokenizer_manifest as read_tokenizer
from tokenscale.runs.records import provenance
from tokenscale.runs.records.provenance import find_versions
from tokenscale.settings.data import CleaningSettings, CorpusSettings

SCRIPT = "plain script"
WORDS = 200_000


def measure(
    corpus: Path,
    tokenizer: Path,
    output: Path,
    *,
    stores: list[str],
    rounds: int,
    cores: int,
    memory: list[int],
) -> dict[str, Any]:
    """Time every side in each round; write the one JSON file; returns what was written.

    `stores` are names of stores, such as packed-sequence_length=2048; `cores` are given to each
    side alike; `memory` are megabytes of synthetic text whose peak memory is wanted. Files go to a
    folder beside `output`.
    """
    folder = output.with_suffix(".files")
    available = sorted(os.sched_getaffinity(0))
    if cores > len(available):
        raise UserError(
            "there are not so many cores.",
            flag="--cores",
            requested=cores,
            found=len(available),
            next="--cores 1",
        )
    held = set(available[:cores])
    fast = tokenizer / "tokenizer.json"
    split = read_corpus_manifest(corpus)["splits"]["train"]
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for number, side in interleave([*stores, *([SCRIPT] if fast.is_file() else [])], rounds):
        shutil.rmtree(folder / "store", ignore_errors=True)
        seconds, peak = _run(_command(side, corpus, tokenizer, folder), held)
        written = (
            [folder / "plain.parquet"]
            if side == SCRIPT
            else list((folder / "store" / side).iterdir())
        )
        stored = sum(path.stat().st_size for path in written)
        facts = {"seconds": seconds, "peak_bytes": peak, "stored_bytes": stored}
        records.append({"side": side, "round": number, **facts})
        print(
            f"round {number}: {side}: {seconds:.2f} s, {peak / 1e6:.0f} MB",
            file=sys.stderr,
            flush=True,
        )
    engines = _engines(corpus, tokenizer, {available[0]})
    peaks = _memory(memory, tokenizer, stores[0], folder)
    result = {
        "schema": 1,
        "benchmark": "pretokenize",
        "utf8_bytes": split["utf8_bytes"],
        "documents": split["rows"],
        "tokenizer": read_tokenizer(tokenizer)["name"],
        "cores": cores,
        "records": records,
        "engines": engines,
        "memory": peaks,
        "hardware": provenance.describe_machine(),
        "versions": find_versions(),
        "finished_unix_s": time.time(),
    }
    write_json(output, result)
    return result


def synthetic(directory: Path, megabytes: int, seed: int = 0) -> None:
    """A corpus of made-up words, their frequencies as in English (Zipf), in documents of log-normal
    length.
    """
    chance = np.random.default_rng(seed)
    lengths = np.clip(chance.poisson(7, WORDS), 1, 20)
    letters = chance.choice(list("etaoinshrdlucmfwypvbgkjqxz"), lengths.sum())
    words = np.array(
        ["".join(part) for part in np.split(letters, np.cumsum(lengths)[:-1])], dtype=object
    )
    shares = np.cumsum(1 / np.arange(1, WORDS + 1))
    shares /= shares[-1]

    def documents():
        rest = megabytes * 10**6
        number = 0
        while rest > 0:
            for size in np.clip(chance.lognormal(5.5, 1.0, 1000), 5, 5000).astype(int).tolist():
                text = " ".join(words[np.searchsorted(shares, chance.random(size))])
                yield text, f"synthetic::{number}"
                rest = rest - len(text)
                number = number + 1
                if rest <= 0:
                    return

    settings = CorpusSettings(
        name="synthetic", cleaning=CleaningSettings(deduplicate=False), validation_share=0.0
    )
    description = {"kind": "synthetic", "seed": seed, "megabytes": megabytes}
    build_from(documents(), settings, directory, description)


def table(result: dict[str, Any]) -> str:
    """For a terminal: medians with the range of the rounds, and each side against the plain
    script.
    """
    megabytes = result["utf8_bytes"] / 1e6
    head = (
        f"{megabytes:.1f} MB of text, {result['documents']:,} documents, {result['cores']} "
        "core(s), tokenizer "
        f"{result['tokenizer']}"
    )
    rows = [("side", "seconds (rounds)", "MB/s", "peak MB", "stored MB", "x script")]
    by_side = group_by(result["records"], "side")
    seconds = {
        side: np.array([record["seconds"] for record in records])
        for side, records in by_side.items()
    }
    for side, records in by_side.items():
        rate = megabytes / np.median(seconds[side])
        stored = records[0]["stored_bytes"] / 1e6
        peak = max(record["peak_bytes"] for record in records) / 1e6
        ratio = f"{np.median(seconds[SCRIPT] / seconds[side]):.1f}" if SCRIPT in seconds else ""
        rows.append(
            (
                side,
                format_spread(seconds[side]),
                f"{rate:.1f}",
                f"{peak:.0f}",
                f"{stored:.1f}",
                ratio,
            )
        )
    lines = [head, format_columns(rows)]
    if result["engines"]:
        lines += ["", "engines alone, one core, the text once:"]
        reference = result["engines"].get("tokenizers", {}).get("seconds_per_mb")
        for name, found in result["engines"].items():
            times = f"{reference / found['seconds_per_mb']:.1f} x tokenizers" if reference else ""
            share = f"{found['megabytes']:.0f} MB"
            lines.append(
                f"  {name:<20} {1 / found['seconds_per_mb']:>8.1f} MB/s   {times:>20}   ({share})"
            )
    for found in result["memory"]:
        lines.append(
            f"peak memory, {found['megabytes']:>5} MB of synthetic text: "
            f"{found['peak_bytes'] / 1e6:,.0f} MB"
        )
    return "\n".join(lines)


def _memory(
    megabytes: list[int], tokenizer: Path, store: str, folder: Path
) -> list[dict[str, Any]]:
    """Peak memory of a job on seeded synthetic text of several sizes."""
    found = []
    for size in megabytes:
        corpus = folder / f"synthetic-{size}"
        if not (corpus / "manifest.json").is_file():
            synthetic(corpus, size)
        shutil.rmtree(folder / "store", ignore_errors=True)
        seconds, peak = _run(_command(store, corpus, tokenizer, folder), None)
        found.append({"megabytes": size, "store": store, "seconds": seconds, "peak_bytes": peak})
        print(
            f"{size} MB of synthetic text: {seconds:.1f} s, peak {peak / 1e6:.0f} MB",
            file=sys.stderr,
            flush=True,
        )
    return found


def _command(side: str, corpus: Path, tokenizer: Path, folder: Path) -> list[str]:
    if side == SCRIPT:
        files = sorted(corpus.glob("train-*.parquet"))
        if len(files) > 1:
            raise UserError(
                "the plain script reads one file.",
                corpus=corpus,
                found=f"{len(files)} shards",
                next="name a corpus with one shard",
            )
        return [
            sys.executable,
            str(Path(__file__).with_name("plain_script.py")),
            *map(str, (files[0], tokenizer / "tokenizer.json", folder / "plain.parquet")),
        ]
    output = folder / "store" / side / "manifest.json"
    options = [
        "--corpus",
        corpus / "manifest.json",
        "--tokenizer",
        tokenizer / "manifest.json",
        "--output",
        output,
    ]
    return [sys.executable, "-m", "tokenscale", "pretokenize", "--store", side, *map(str, options)]


def _run(command: list[str], cores: set[int] | None) -> tuple[float, int]:
    """(seconds, peak resident bytes) of a process held to some cores. RuntimeError where it
    fails.
    """

    def hold() -> None:
        if cores is not None:
            os.sched_setaffinity(0, cores)

    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=hold
    )
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} … failed:\n{errors.decode()[-2000:]}")
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


_ENGINE = """
import json, sys, time
from pathlib import Path
from tokenscale.data.corpus.raw_text import RawText
from tokenscale.data.tokenizers.load import load_tokenizer
corpus, tokenizer, engine, most = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
made = load_tokenizer(tokenizer, engine)
text = RawText(corpus, verify=False)
columns, size = [], 0
for column in text.columns(1000):
    columns.append(column)
    size += column.nbytes
    if size > most * 1e6:
        break
start = time.process_time()
for column in columns:
    made.encode(column)
print(json.dumps({"megabytes": size / 1e6, "seconds_per_mb": (time.process_time() - start) / size * 1e6}))
"""


def _engines(corpus: Path, tokenizer: Path, core: set[int]) -> dict[str, Any]:
    """CPU seconds a megabyte of each engine, in a fresh process; slow ones get a part of the
    text.
    """
    found = {}
    for engine, most in (("gigatoken", 1e9), ("tiktoken", 30), ("tokenizers", 10)):
        command = [sys.executable, "-c", _ENGINE, str(corpus), str(tokenizer), engine, str(most)]
        environment = os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, core),
        )
        if done.returncode == 0:
            found[engine] = json.loads(done.stdout)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, and print the table. Return the exit code."""
    parser = Parser(prog="python tests/benchmarks/pretokenize.py", description=__doc__)
    manifest = {"required": True, "type": Path, "metavar": "FILE"}
    parser.add_argument("--corpus", **manifest, help="results/corpus/NAME/manifest.json")
    parser.add_argument("--tokenizer", **manifest, help="results/tokenizers/NAME/manifest.json")
    parser.add_argument(
        "--stores", nargs="+", default=["packed-sequence_length=2048", "token-list"], metavar="NAME"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="every side is timed once in each round"
    )
    parser.add_argument(
        "--cores", type=int, default=1, metavar="N", help="cores that each side may use"
    )
    parser.add_argument(
        "--memory",
        nargs="*",
        type=int,
        default=[],
        metavar="MB",
        help="measure peak memory on synthetic text",
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help="write the records as JSON"
    )
    parsed = parser.parse_args(arguments)
    folders = parsed.corpus.parent, parsed.tokenizer.parent
    options = {name: getattr(parsed, name) for name in ("stores", "rounds", "cores", "memory")}
    return exit_code(
        lambda: print(table(measure(*folders, parsed.output, **options))), f"{parser.prog} --help"
    )


if __name__ == "__main__":
    raise SystemExit(main())
