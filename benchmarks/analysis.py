"""From logs to numbers: ingest, the scaling query beside pandas on the same JSON, and the whole report.

Made-up logs of the shape that a training writes, eleven fields a line. Every arm is a process of its own, so that its
peak memory is its own (of the report: that of all its processes together); in each round every arm has its turn. The
answers of both sides are compared before a time counts.
"""

import json
import os
import re
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.base.files import write_json
from tokenscale.benchmark.rounds import format_columns, format_spread, group_by, interleave
from tokenscale.cli.main import Parser, exit_code
from tokenscale.runs.records import provenance
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.options import to_dict
from tokenscale.settings.run import BudgetSettings, RunSettings, ValidationSettings

APPROACHES = ("padded", "padding-free", "pretokenized-padded", "token-list", "packed")
#: a run on so many ranks has as many logs
WORLD_SIZES = (1, 4)
WARM_UP_STEPS = 3
#: arm → what it does
ARMS = {
    "ingest": "every log read, tables written",
    "scaling": "query on Parquet",
    "pandas scaling": "read_json and the same in pandas",
    "report": "figures, claims, page, PDF and folder from Parquet",
}
#: the experiment's tables and report, below the root
TABLES = Path("tables/wide")
REPORT = Path("report")
#: seconds between two looks at the memory of an arm's processes
LOOK_S = 0.05


def measure(
    output: Path | None, logs: int = 200, steps: int = 10_000, rounds: int = 3, threads: int = 2
) -> dict[str, Any]:
    """Time all ARMS on so many logs of so many steps; returns the record, which `output` keeps as JSON.

    Raises UserError for numbers that leave nothing to measure, and where the answers of the two sides differ.
    """
    least = {"steps": (steps, WARM_UP_STEPS + 1), "rounds": (rounds, 1), "threads": (threads, 1)}
    for name, (given, fewest) in least.items():
        if given < fewest:
            raise UserError(
                f"{name}: fewer than {fewest} leave nothing to measure.", found=given, next=f"--{name} {fewest}"
            )
    a_repeat = len(APPROACHES) * sum(WORLD_SIZES)
    if logs < a_repeat or logs % a_repeat:
        raise UserError(
            "so many logs make no whole repeats.",
            found=logs,
            expected=f"a multiple of {a_repeat}",
            next=f"--logs {a_repeat}",
        )
    with tempfile.TemporaryDirectory(prefix="tokenscale-analysis-") as folder:
        root = Path(folder)
        size = make(root, logs // a_repeat, steps)
        records = []
        _arm(root, "ingest", threads)  # the tables that the other arms read
        for number, arm in interleave(list(ARMS), rounds):
            records.append({"arm": arm, "round": number, **_arm(root, arm, threads)})
            print(f"round {number + 1} of {rounds}: {arm}, {records[-1]['seconds']:.2f} s", file=sys.stderr)
        _compare(root)
        parquet = sum(path.stat().st_size for path in (root / TABLES).glob("*.parquet"))
        figures = len(list((root / REPORT / "figures").rglob("*.svg")))
    result = {
        "schema": 1,
        "logs": logs,
        "steps": steps,
        "bytes": size,
        "parquet_bytes": parquet,
        "figures": figures,
        "threads": threads,
        "hardware": provenance.describe_machine(),
        "versions": provenance.find_versions(("duckdb", "pandas", "pyarrow", "numpy")),
        "records": records,
    }
    if output is not None:
        write_json(output, result)
    return result


def make(root: Path, repeats: int, steps: int) -> int:
    """Runs of all approaches and world sizes with their logs below `root`; returns the bytes of the logs."""
    entries, size = [], 0
    for repeat in range(repeats):
        for approach in APPROACHES:
            for world in WORLD_SIZES:
                run = RunSettings(
                    approach=approach,
                    layout=LayoutSettings(data=world),
                    repeat=repeat,
                    budget=BudgetSettings(steps=steps),
                    validation=ValidationSettings(rows=0),
                )
                size += _write(root / "runs" / run.identity, run, steps, seed=len(entries))
                cell = {"approach": approach, "layout.data": world}
                place = {"repeat": repeat, "position": len(entries), "run": to_dict(run)}
                entries.append({"run_id": run.identity, "cell": cell, **place})
    head = {"experiment": "wide", "question": "How long does analysis take?", "scale": "demo", "factors": {}}
    write_json(root / "runs.json", {"schema": 1, **head, "repeats": repeats, "runs": entries})
    return size


def _write(folder: Path, run: RunSettings, steps: int, seed: int) -> int:
    """One run's logs and its sealed record."""
    pick = np.random.default_rng(seed)
    world, size = run.layout.world_size, 0
    loss = 2 + 8 * np.exp(-4 * np.arange(steps) / steps) + 0.05 * pick.standard_normal(steps)
    norm = 0.5 + pick.random(steps)
    rows = run.global_batch // world
    total = rows * run.sequence_length
    for rank in range(world):
        place = folder / "attempt=00" / f"rank={rank:05d}"
        place.mkdir(parents=True)
        took = 0.1 / world * (1 + 0.05 * pick.random(steps))
        ends = np.cumsum(took)
        useful = pick.integers(900 * rows, 1024 * rows, steps)
        columns = (1.7e9 + ends, ends, took, 0.002 * pick.random(steps), loss * useful, useful, norm)
        lines = (
            f'{{"schema":2,"step":{step},"t_unix_s":{unix},"t_mono_s":{mono},"step_s":{step_s},'
            f'"data_wait_s":{wait_s},"loss_sum":{loss_sum},"useful_tokens":{tokens},"total_tokens":{total},"rows":{rows},'
            f'"grad_norm":{grad_norm}}}\n'
            for step, (unix, mono, step_s, wait_s, loss_sum, tokens, grad_norm) in enumerate(
                zip(*(column.tolist() for column in columns), strict=True)
            )
        )
        size += (place / "steps.jsonl").write_text("".join(lines))
        times = [(0.0, {"event": "run_start", "world_size": world}), (0.0, {"event": "init_done"})]
        times.append((float(ends[-1]), {"event": "run_stop"}))
        events = ({"schema": 2, "t_unix_s": 1.7e9 + time_s, "t_mono_s": time_s, **event} for time_s, event in times)
        (place / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    record = {"schema": 1, "run_id": folder.name, "run": to_dict(run), "hardware": {"device_kind": "cpu", "cores": 64}}
    provenance.seal_record(folder, record, {"status": "complete", "steps": steps})
    return size


def _arm(root: Path, arm: str, threads: int) -> dict[str, Any]:
    """Run one arm; wall seconds (of an ingest and of the report the whole process, of a question from its call to its
    answer), processor seconds and peak bytes of its process and those that it starts."""
    tables = root / TABLES
    if arm == "ingest":
        command = ["-m", "tokenscale", "ingest", "--experiment", str(root / "runs.json"), "--runs", str(root / "runs")]
        command += ["--output", str(tables), "--threads", str(threads)]
    elif arm == "report":
        command = ["-m", "tokenscale", "report", "all", "--experiments", TABLES.name, "--tables", str(tables.parent)]
        command += ["--figures", str(root / "figures"), "--output", str(root / REPORT)]
    else:
        command = [__file__, "--answer", arm, str(root)]
    text, cost = _process([sys.executable, *command], arm)
    if arm in ("ingest", "report"):
        return cost
    answer = json.loads(text.splitlines()[-1])
    write_json(root / f"{arm}.json", answer["answer"])
    return cost | {"seconds": answer["seconds"]}


def _process(command: list[str], arm: str) -> tuple[str, dict[str, float]]:
    """(what it prints, what it costs) of a process and those that it starts, which are a group of their own."""
    reader, writer = os.pipe()
    began = time.perf_counter()
    child = os.posix_spawn(
        command[0],
        command,
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, writer, 1), (os.POSIX_SPAWN_CLOSE, reader)],
        setpgroup=0,
    )
    os.close(writer)
    ended, seen = threading.Event(), [0]
    watching = threading.Thread(target=_watch, args=(child, ended, seen))
    watching.start()
    with open(reader) as said:
        text = said.read()
    _, status, used = os.wait4(child, 0)
    seconds = time.perf_counter() - began
    ended.set()
    watching.join()
    if status:
        raise RuntimeError(f"{arm} ended with {os.waitstatus_to_exitcode(status)}")
    peak = max(seen[0], used.ru_maxrss * 1024)
    return text, {"seconds": seconds, "cpu_s": used.ru_utime + used.ru_stime, "peak_bytes": peak}


def _watch(group: int, ended: threading.Event, seen: list[int]) -> None:
    """Keep the most memory that a group of processes has held at once, while there are several."""
    while not ended.wait(LOOK_S):
        seen[0] = max(seen[0], held_bytes(group))


def held_bytes(group: int) -> int:
    """Resident memory of a group of processes, pages that they share counted once (Linux: proportional set size); 0
    where the system does not tell."""
    held = 0
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(place.name)) == group:
                told = re.search(r"^Pss:\s+(\d+) kB", (place / "smaps_rollup").read_text(), re.MULTILINE)
                held += 1024 * int(told[1]) if told else 0
        except OSError:  # it has ended
            continue
    return held


def _compare(root: Path) -> None:
    """Raises UserError where the two sides answered differently."""
    ours, theirs = (json.loads((root / f"{arm}.json").read_text()) for arm in ("scaling", "pandas scaling"))
    same = ours.keys() == theirs.keys() and all(np.isclose(ours[k], theirs[k], rtol=1e-9).all() for k in ours)
    if not same:
        raise UserError(
            "the query and pandas answer differently; no time counts.",
            next="correct the query or the pandas version until their answers agree",
        )


def answer(arm: str, root: Path) -> dict[str, Any]:
    """Seconds and answer (run → efficiency), asked of the tables or of the logs."""
    if not arm.startswith("pandas "):
        from tokenscale.analysis.queries import query

        began = time.perf_counter()
        frame = query("scaling", root / TABLES)
        found = dict(zip(frame["run_id"], frame["efficiency"], strict=True))
        return {"answer": found, "seconds": time.perf_counter() - began}
    import pandas as pd

    began = time.perf_counter()
    entries = {entry["run_id"]: entry for entry in json.loads((root / "runs.json").read_text())["runs"]}
    frames = []
    for path in sorted(root.glob("runs/*/attempt=00/rank=*/steps.jsonl")):
        frames.append(pd.read_json(path, lines=True).assign(run_id=path.parts[-4]))
    ranks = pd.concat(frames, ignore_index=True).drop_duplicates(["run_id", "step", "t_mono_s"])
    steps = ranks.groupby(["run_id", "step"], as_index=False).agg(
        step_s=("step_s", "max"), useful_tokens=("useful_tokens", "sum")
    )
    return {"answer": _pandas_scaling(steps, entries), "seconds": time.perf_counter() - began}


def _pandas_scaling(steps: Any, entries: dict[str, Any]) -> dict[str, float]:
    timed = steps[steps["step"] >= WARM_UP_STEPS].groupby("run_id")[["useful_tokens", "step_s"]].sum()
    rate = timed["useful_tokens"] / timed["step_s"]
    place = {k: (e["cell"]["approach"], e["repeat"], e["cell"]["layout.data"]) for k, e in entries.items()}
    base = {place[k][:2]: rate[k] for k in place if place[k][2] == min(WORLD_SIZES)}
    return {k: rate[k] / (place[k][2] / min(WORLD_SIZES) * base[place[k][:2]]) for k in place}


def table(result: dict[str, Any]) -> str:
    """Medians with their range over rounds, and how many times faster than pandas."""
    by_arm = group_by(result["records"], "arm")
    seconds = {arm: [record["seconds"] for record in records] for arm, records in by_arm.items()}
    megabytes, lines = result["bytes"] / 1e6, result["logs"] * result["steps"]
    head = f"{result['logs']} logs of {result['steps']} steps: {lines} lines, {megabytes:.0f} MB of JSON"
    told = [f"{head} → {result['parquet_bytes'] / 1e6:.0f} MB of Parquet; {result['threads']} threads", ""]
    rows = [("arm", "what", "seconds (rounds)", "CPU s", "peak MB")]
    for arm, what in ARMS.items():
        cpu = statistics.median(record["cpu_s"] for record in by_arm[arm])
        peak = max(record["peak_bytes"] for record in by_arm[arm]) / 1e6
        rows.append((arm, what, format_spread(seconds[arm]), f"{cpu:.1f}", f"{peak:.0f}"))
    told += [format_columns(rows, 2), f"report: {result['figures']} figures", ""]
    ratios = [theirs / ours for theirs, ours in zip(seconds["pandas scaling"], seconds["scaling"], strict=True)]
    told.append(f"scaling: {format_spread(ratios, '.1f')} times faster than pandas from JSON, with equal answers")
    return "\n".join(told)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, and print the table. Return the exit code."""
    parser = Parser(prog="python benchmarks/analysis.py", description=__doc__)
    parser.add_argument("--logs", type=int, default=200, metavar="N", help="logs of one rank each (default 200)")
    parser.add_argument("--steps", type=int, default=10_000, metavar="N", help="lines of a log (default 10000)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="every arm is timed once in each round")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads for ingest (default 2)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the records as JSON")
    parser.add_argument(
        "--answer", nargs=2, metavar=("ARM", "FOLDER"), help="print one arm's answers (used internally)"
    )
    parsed = parser.parse_args(arguments)

    def run() -> None:
        if parsed.answer:
            print(json.dumps(answer(parsed.answer[0], Path(parsed.answer[1]))))
        else:
            print(table(measure(parsed.output, parsed.logs, parsed.steps, parsed.rounds, parsed.threads)))

    return exit_code(run, f"{parser.prog} --help")


if __name__ == "__main__":
    raise SystemExit(main())
