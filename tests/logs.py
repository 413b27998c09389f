"""Synthetic logs of runs, written the way a training writes them; for tests of everything after a
training.
"""

import itertools
import json
import math
import zlib
from contextlib import closing
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np

from tokenscale.analysis.ingest import ingest, one_run
from tokenscale.analysis.queries import connect
from tokenscale.base.files import canonical_json, sha256_text, write_json
from tokenscale.costs import flops
from tokenscale.costs.memory import memory
from tokenscale.data.order.permutation import (
    MODULUS,
    get_samples,
    micro_steps,
    rank_slots,
    row_digests,
)
from tokenscale.referee.accounting import PHASES
from tokenscale.referee.expectations import describe_findings
from tokenscale.referee.validity import judge_run, judge_tables, read_evidence
from tokenscale.runs.records import provenance
from tokenscale.runs.records.events import Writer
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.options import to_dict
from tokenscale.settings.run import BudgetSettings, RunSettings


def tabulate(
    experiment: Path,
    runs: Path,
    output: Path,
    *benchmarks,
    stores=(),
    corpora=(),
    kept=None,
    **options,
) -> dict[str, int]:
    """Write the tables of an experiment's logs and judge them; return row counts."""
    named = {"stores": stores, "corpora": corpora, "kept": kept}
    counts = ingest(experiment, runs, output, *benchmarks, **named, **options)
    judge_tables(output, experiment, runs=runs, **named)
    return counts


def judge_one(entry: dict, experiment: str, runs: Path) -> tuple[dict, dict]:
    """Return the tables of one run, and its row of `runs` with what is said of it alone."""
    made = one_run(entry, experiment, runs).rows
    (row,) = made["runs"].to_pylist()
    found = judge_run(row, *read_evidence(row, made))
    return made, row | describe_findings(row["run_id"], [found])


def read_runs(folder: Path):
    """Return the rows of the table `runs` with those of `validity`, as a table of Arrow."""
    with closing(connect(folder)) as connection:
        return connection.sql("FROM runs ORDER BY run_id").to_arrow_table()


APPROACHES = ("padded", "padding-free", "pretokenized-padded", "token-list", "packed")
HARDWARE = {
    "device": "cpu",
    "device_kind": "cpu",
    "cpu": "A test CPU",
    "cores": 2,
    "threads_per_rank": 1,
}
#: approach → seconds a step, seconds of it waiting for data, useful share
SHAPES = {
    "padded": (0.30, 0.05, 0.4),
    "pretokenized-padded": (0.26, 0.01, 0.4),
    "padding-free": (0.29, 0.04, 0.98),
    "token-list": (0.27, 0.012, 0.98),
    "packed": (0.25, 0.002, 0.97),
}


def settings(approach="packed", world_size=1, repeat=0, steps=12, **fields) -> RunSettings:
    layout = LayoutSettings(data=world_size)
    budget = BudgetSettings(steps=steps)
    return RunSettings(approach=approach, layout=layout, repeat=repeat, budget=budget, **fields)


#: entries of a tokenizer that does not state them, and rows of every store
VOCABULARY = 4096
ROWS = 10_000


def digests(run: RunSettings, steps: range, reader: int) -> list[int]:
    """Order digests of a reader's rows, of one store for all approaches."""
    slots = np.array(rank_slots(run.global_batch, reader, run.layout.data_parallel_size))
    rows = get_samples(
        np.array(steps)[:, None] * run.global_batch + slots, ROWS, run.effective_seed
    )
    return row_digests(np.array(steps), slots, rows)


def learning_rate(run: RunSettings, step: int) -> float:
    schedule = run.schedule
    peak = run.optimizer.learning_rate
    floor = run.schedule.floor
    if step < (warmup := schedule.warmup_steps):
        return peak * (step + 1) / warmup
    start = max(warmup - 1, 0)
    done = min((step - start) / max(run.budget.steps - 1 - start, 1), 1.0)
    left = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[
        schedule.shape
    ]
    return peak if schedule.shape == "constant" else peak * (floor + (1 - floor) * left)


def with_shape(run: RunSettings) -> RunSettings:
    shape = run.model.with_vocabulary(run.tokenizer.vocabulary_size or VOCABULARY)
    return replace(run, model=shape.with_positions(run.sequence_length))


def peak_bytes(run: RunSettings, rank: int) -> int:
    try:
        of = memory(with_shape(run), rank, "cpu")
    except ValueError:  # more stages than layers, of a test of what is not predicted
        return 10**9
    return max(10**9, of.parameters + of.gradients + of.optimizer + 10**8)


def began_s(run: RunSettings) -> float:
    """Seconds from the first run's start to this one's: in the order of repeats, approaches and
    world sizes, and no two runs at one time.
    """
    slot = 100 * (zlib.crc32(run.identity.encode()) % 999)
    return (
        1e8 * run.repeat
        + 1e7 * APPROACHES.index(run.approach)
        + 1e5 * min(run.layout.world_size, 99)
        + slot
    )


def write_attempt(
    folder: Path,
    run: RunSettings,
    attempt=0,
    start=0,
    stop=None,
    stopped=True,
    t0=1.7e9,
    diverges=None,
    boot_s=None,
    boot="a boot of a test",
) -> None:
    """Event files of all ranks of one attempt: steps start … stop - 1; or up to the step that
    `diverges`, inclusive.

    `boot_s`: its start on the monotonic clock, which counts from `boot`.
    """
    boot_s = 100.0 + 1000 * attempt + began_s(run) if boot_s is None else boot_s
    began = t0 + 1000 * attempt + began_s(run)
    stop = run.budget.steps if stop is None else stop
    stop = stop if diverges is None else diverges + 1
    step_s, wait_s, useful_share = SHAPES[run.approach]
    step_s *= 1 + 0.01 * run.repeat
    readers = run.layout.data_parallel_size
    whole = int(run.global_batch * run.sequence_length * useful_share)
    limit = run.optimizer.clip_norm
    for rank in range(run.layout.world_size):
        writer = Writer(folder / f"attempt={attempt:02d}" / f"rank={rank:05d}")
        clock = boot_s + 0.001 * rank  # monotonic, seconds
        ahead = began - boot_s
        place = run.layout.coordinate(rank)
        slots = rank_slots(run.global_batch, place.data_rank, readers)
        counts = int(place.is_group_leader)
        rows = len(slots)
        useful = whole * slots.stop // run.global_batch - whole * slots.start // run.global_batch
        order = digests(run, range(start, stop), place.data_rank)
        peak = peak_bytes(run, rank)

        def event(name, at, writer=writer, ahead=ahead, **fields):
            writer._add("events", {"event": name, "t_unix_s": ahead + at, "t_mono_s": at, **fields})

        def validate(step, at, event=event, rank=rank):
            if rank == 0:
                loss = 2.0 + 6.0 * math.exp(-step / 8) + 0.01 * run.repeat
                event(
                    "validation",
                    at,
                    step=step,
                    loss_sum=5000 * loss,
                    useful_tokens=5000,
                    rows=16,
                    duration_s=0.2,
                )

        event(
            "run_start", clock, world_size=run.layout.world_size, **({"boot": boot} if boot else {})
        )
        clock += 0.5
        event("init_done", clock, duration_s=0.5)
        initialised = clock
        clock += 0.2
        if start == 0:
            validate(0, clock)
        for step in range(start, stop):
            loss = 2.0 + 6.0 * math.exp(-step / 8) + 0.03 * math.sin(7 * step + run.effective_seed)
            bad = step == diverges
            took = step_s * (1 if step else 5)
            clock += took
            writer.step(
                step=step,
                t_unix_s=ahead + clock,
                t_mono_s=clock,
                step_s=took,
                loss_sum=math.nan if bad else counts * loss * useful,
                useful_tokens=counts * useful,
                total_tokens=counts * rows * run.sequence_length,
                rows=counts * rows,
                micro_steps=micro_steps(run.global_batch, readers, run.micro_batch),
                data_wait_s=wait_s,
                forward_s=0.3 * step_s,
                backward_s=0.4 * step_s,
                optimizer_s=0.1 * step_s,
                learning_rate=learning_rate(run, step),
                grad_norm=1.5,
                grad_norm_clipped=1.5 / max((1.5 + 1e-6) / limit if limit else 1.0, 1.0),
                order_digest=counts * order[step - start],
                memory_peak_bytes=peak,
                nonfinite=bad,
            )
        clock += 0.2
        if diverges is not None:
            event("run_stop", clock, status="nonfinite", step=diverges, cpu_s=clock - initialised)
        elif stopped:
            validate(stop, clock)
            event("run_stop", clock, status="complete", step=stop, cpu_s=clock - initialised)
        writer.close()


def retime(folder: Path) -> None:
    """After edits of `step_s`: rewrite clocks and phases of a run as a training with these times
    has them.
    """
    for path in folder.glob("attempt=*/rank=*/steps.jsonl"):
        steps, events = (
            [json.loads(line) for line in file.read_text().splitlines()]
            for file in (path, path.with_name("events.jsonl"))
        )
        ahead = events[0]["t_unix_s"] - events[0]["t_mono_s"]
        clock = next(e["t_mono_s"] for e in events if e["event"] == "init_done") + 0.2
        for step in steps:
            clock += step["step_s"]
            step |= {"t_mono_s": clock, "t_unix_s": ahead + clock}
            phases = {name: step[name] for name in (*PHASES, "data_wait_s") if step.get(name)}
            if (total := sum(phases.values())) > step["step_s"]:
                step |= {
                    name: 0.99 * step["step_s"] / total * seconds
                    for name, seconds in phases.items()
                }
        for event in events:
            if event["event"] == "run_stop" or event.get("step"):
                event |= {"t_mono_s": clock + 0.2, "t_unix_s": ahead + clock + 0.2}
        for file, lines in ((path, steps), (path.with_name("events.jsonl"), events)):
            file.write_text(
                "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            )


def write_run(
    runs: Path, run: RunSettings, status="complete", hardware=HARDWARE, attempts=None, **fields
) -> Path:
    """A whole run with its sealed run.json."""
    folder = runs / run.identity
    for number, options in enumerate(attempts or [{}]):
        write_attempt(folder, run, number, **options)
    shape = with_shape(run).model
    if shape.transformers is not None:
        from tokenscale.train.models.library import count_weights

        shape = count_weights(shape.with_positions(run.sequence_length))
    length = run.sequence_length
    full = flops.Convention.FULL
    convention = {
        c.value: flops.flops_per_token(shape, length, c, run.objective) for c in flops.Convention
    }
    again = flops.hardware_flops_per_token(
        shape, length, full, run.activation_checkpointing, run.objective
    )
    record = {
        "schema": 1,
        "run_id": run.identity,
        "run": to_dict(run),
        "attempt": len(attempts or [{}]) - 1,
        "digest": "d" * 64,
        "budget_steps": run.budget.steps,
        "parameters": flops.parameters(shape),
        "micro_steps": micro_steps(
            run.global_batch, run.layout.data_parallel_size, run.micro_batch
        ),
        "flops_per_token": convention | {"hardware": again},
        "number_format": run.number_format,
        "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "tokenscale": "0.1.0"},
        "environment": {},
        "hardware": {"world_size": run.layout.world_size, **hardware},
        **fields,
    }
    diverges = (attempts or [{}])[-1].get("diverges")
    outcome = {"status": status, "steps": run.budget.steps}
    provenance.seal_record(
        folder, record, outcome if diverges is None else {"status": "nonfinite", "steps": diverges}
    )
    write_json(folder / "done.json", {"run_id": run.identity})
    return folder


def edit(folder: Path, change, kind="steps", rank="*", attempt="*") -> None:
    """Replace each line of a run's logs, a mapping, by what `change` makes of it; None leaves it
    out.
    """
    for path in sorted(folder.glob(f"attempt={attempt}/rank={rank}/{kind}.jsonl")):
        lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines if line is not None))


def add_event(folder: Path, event: str, rank=0, attempt=0, **fields) -> None:
    with (folder / f"attempt={attempt:02d}/rank={rank:05d}/events.jsonl").open("a") as file:
        file.write(json.dumps({"event": event, "schema": 2, "step": 0} | fields) + "\n")


def add_memory(folder: Path, sizes, rank=0, attempt=0) -> None:
    """Bytes of parameters, gradients, optimizer and activations, as an event."""
    kinds = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes")
    add_event(
        folder, "memory", rank, attempt, t_unix_s=1.7e9, **dict(zip(kinds, sizes, strict=True))
    )


def write_table(path: Path, runs: list[RunSettings], further=(), **fields) -> Path:
    """The run table of an experiment with the factors approach, data-parallel degree and the dotted
    keys `further`.
    """
    factors: dict = {"approach": list(dict.fromkeys(r.approach for r in runs))}
    factors["layout.data"] = sorted({r.layout.data for r in runs})
    entries = []
    for position, run in enumerate(runs):
        cell = {key: reduce(getattr, key.split("."), run) for key in (*factors, *further)}
        entry = {"run_id": run.identity, "cell": cell, "repeat": run.repeat, "position": position}
        entries.append(entry | {"run": to_dict(run)})
    head = {
        "schema": 1,
        "experiment": "demo",
        "question": "Which approach trains fastest?",
        "scale": "demo",
        "note": "Numbers of a test.",
        "factors": factors,
        "repeats": 1 + max((r.repeat for r in runs), default=0),
    }
    table = {**head, **fields, "runs": entries}
    write_json(path, table | {"seal": sha256_text(canonical_json(table))})
    return path


def ingested(
    folder: Path, runs=(), benchmarks=(), *, to="tables", stores=(), corpora=(), **table
) -> Path:
    """Tables of an experiment of these runs, of which those count whose logs are in `runs`."""
    path = write_table(folder / "runs.json", list(runs), **table)
    tabulate(
        path,
        folder / "runs",
        folder / to,
        list(benchmarks),
        stores=list(stores),
        corpora=list(corpora),
    )
    return folder / to


def made(folder: Path, runs, *, further=(), to="tables", **options) -> Path:
    """Logs of these runs, with options of `write_run` or functions of the run that give them, and
    their tables.
    """
    for run in runs:
        write_run(
            folder / "runs",
            run,
            **{name: of(run) if callable(of) else of for name, of in options.items()},
        )
    return ingested(folder, runs, to=to, further=further)


def write_stores(folder: Path, bytes_per_id: dict[str, int], ids=8192) -> list[Path]:
    """Manifests of stores of one text, as far as the table `stores` reads them: 9.5 bits an id, a
    vocabulary of 17.
    """
    for store, size in bytes_per_id.items():
        counts = dict.fromkeys(("places", "tokens_stored", "tokens_total"), ids)
        manifest = {
            "format": store,
            "options": {"eos": False},
            "split": "train",
            "tokenizer": {"name": "tekken"},
            "vocabulary_size": 131_072,
            "documents": 80,
            **counts,
            "tokens_useful": ids - 80,
            "bits_per_token": {"stored": 8 * size, "order_0_entropy": 9.5},
            "files": [{"name": "tokens.bin", "bytes": size * ids}],
        }
        write_json(folder / "docs/tekken" / store / "manifest.json", manifest)
    return [folder / "docs/tekken" / store / "manifest.json" for store in bytes_per_id]


def _write_bench(path: Path, **fields) -> Path:
    write_json(
        path, {"schema": 1, "hardware": {"cpu": "A test CPU", "cores": 2}, "versions": {}, **fields}
    )
    return path


def write_benchmark(path: Path, rounds=3) -> Path:
    times = {
        "padded": 0.5,
        "padding-free": 0.4,
        "pretokenized-padded": 0.02,
        "token-list": 0.03,
        "packed": 0.001,
    }
    counts = {"batches": 16, "useful_tokens": 60_000, "total_tokens": 131_072}
    records = [
        {"arm": arm, "round": r, "open_s": 0.01, "seconds": seconds * (1 + 0.02 * r)} | counts
        for r in range(rounds)
        for arm, seconds in {**times, "memcpy": 2e-4}.items()
    ]
    shape = {"sequence_length": 1024, "rows": 8, "batches": 16, "rounds": rounds}
    of = {"settings": shape, "tokenizer": "tekken", "corpus": "docstrings", "cache": "warm"}
    return _write_bench(path, **of, records=records)


def write_storage_benchmark(path: Path, rounds=2) -> Path:
    """A storage benchmark: three stores of a hundred documents, and two engines that tokenize them
    on the fly.
    """
    common = {"rows": 100, "ids": 10_000, "useful_tokens": 9_900}
    seconds = {"sequential_s": 0.1, "shuffled_s": 0.2, "cold_s": 0.3, "single_rows_s": 0.05}
    facts = {
        "padded": ("int64", "zstd-22", 1000, 25_000),
        "token-list": ("int32", "none", 1000, 40_000),
    }
    facts |= {"packed": ("uint32", None, None, 41_000)}
    records = []
    for r in range(rounds):
        for form, (dtype, codec, group, size) in facts.items():
            record = {
                "round": r,
                "store": f"{form}-{codec}",
                "format": form,
                "dtype": dtype,
                "codec": codec,
            }
            record |= {
                "level": None,
                "row_group_rows": group,
                "stored_bytes": size,
                "entropy_bits": 9.6,
            }
            record |= {"documents_cut": 0, "single_rows": 10, "not_cold": None, "write_s": 0.5 + r}
            records.append(common | record | seconds)
        for engine, fly in (("gigatoken", 0.25), ("tokenizers", 1.2)):
            record = {"round": r, "store": f"text, {engine}", "format": "text", "engine": engine}
            record |= {
                "auto": engine == "gigatoken",
                "sequential_s": (1 + r) * fly,
                "bulk_s": fly / 2,
            }
            records.append(common | record)
    head = {
        "benchmark": "storage",
        "settings": {"sequence_length": 1024, "rounds": rounds},
        "tokenizer": "tekken",
    }
    head |= {
        "corpus": "docstrings",
        "documents": 100,
        "text_bytes": 50_000,
        "vocabulary_size": 131_072,
    }
    return _write_bench(
        path, **head, left_out={"text, tiktoken": "it is not here"}, records=records
    )


def write_inference_benchmark(
    path: Path, rounds=2, differs=False, prompts=("Once <script>alert(1)</script>",)
) -> Path:
    """An inference benchmark of one model: a prompt of 8 and answers of 4 and 12 tokens, two at
    once.
    """
    records = []
    for r, new, cached in itertools.product(range(rounds), (4, 12), (True, False)):
        each_s = (0.01 if cached else 0.1) * (1 + 0.1 * r)
        parts = [{"part": "prompt", "position": 0, "tokens": 8, "seconds": 0.5}]
        parts += [{"part": "decode", "position": 9, "tokens": 3, "seconds": 3 * each_s}]
        if new > 4:
            parts += [{"part": "decode", "position": 12, "tokens": 8, "seconds": 16 * each_s}]
        wrong = differs and new == 12 and not cached
        record = {
            "of_run": "packed-tiny",
            "round": r,
            "batch": 2,
            "prompt_tokens": 8,
            "new_tokens": new,
        }
        record |= {
            "cached": cached,
            "parts": parts,
            "rows_equal": 1 if wrong else 2,
            "peak_bytes": None,
        }
        record |= {
            "first_difference": 15 if wrong else None,
            "cache_bytes": 2048 * (8 + new) * cached,
        }
        records.append(record)
    model = {
        "of_run": "packed-tiny",
        "model": "llama-tiny",
        "model_step": 7,
        "dtype": "float32",
        "number_bytes": 4,
    }
    shape = {"layers": 2, "key_value_heads": 4, "head_dimension": 16}
    models = [
        of | shape for of in (model, model | {"of_run": "packed-other", "model": "qwen-tiny"})
    ]
    answer = {
        "of_run": "packed-tiny",
        "prompt_tokens": 5,
        "text": "a\nb & c",
        "tokens": 4,
        "same_uncached": True,
    }
    answer |= {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "seed": 3}
    answers = [{"number": n, "prompt": prompt, **answer} for n, prompt in enumerate(prompts)]
    head = {
        "benchmark": "inference",
        "settings": {},
        "models": models,
        "left_out": {"packed-other": "no cache"},
    }
    head |= {"hardware": {"cpu": "A test CPU", "cores": 2, "device": "cpu", "threads": 1}}
    return _write_bench(path, **head, generations=answers, records=records)


def write_demo(
    folder: Path, world_sizes=(1, 2), repeats=3, approaches=APPROACHES, **fields
) -> Path:
    """`<folder>/{runs,runs.json,bench.json}`: an experiment whose runs are all there."""
    runs = [
        settings(a, w, r, steps=12) for r in range(repeats) for a in approaches for w in world_sizes
    ]
    for run in runs:
        write_run(folder / "runs", run)
    write_benchmark(folder / "bench.json")
    return write_table(folder / "runs.json", runs, **fields)


def demo(folder: Path, to="tables", **options) -> Path:
    tabulate(write_demo(folder, **options), folder / "runs", folder / to, [folder / "bench.json"])
    return folder / to


def unsealed(path: Path) -> dict:
    table = json.loads(path.read_text())
    table.pop("seal", None)
    return table


def read_steps(run: Path) -> dict[int, dict]:
    """Step → its fields: sums over the ranks of the latest attempt that has it, norm and rate of
    the first.
    """
    found: dict[int, dict] = {}
    for path in sorted(run.glob("attempt=*/rank=*/steps.jsonl")):
        attempt = path.parts[-3]
        for text in path.read_text().splitlines(keepends=True):
            if not text.endswith("\n"):  # the last line of a rank that was killed
                continue
            line = json.loads(text)
            step = found.get(line["step"])
            if step is None or step["attempt"] != attempt:
                found[line["step"]] = line | {"attempt": attempt}
                continue
            for name in ("loss_sum", "useful_tokens", "rows"):
                step[name] += line[name]
            step["order_digest"] = (step["order_digest"] + line["order_digest"]) % MODULUS
    return dict(sorted(found.items()))


def series(run: Path) -> dict[int, tuple]:
    """Step → (loss of all ranks, gradient norm, rate, order digest): what no kill and no resumption
    may change.
    """
    names = ("loss_sum", "grad_norm", "learning_rate", "order_digest")
    return {step: tuple(line[name] for name in names) for step, line in read_steps(run).items()}
