"""A run that only reads: the batches of a training without its model, in a process of its own.

It logs like a training, so that its rates have repeats, random order, intervals and checks like
those of all runs. The batches are read once before anything is timed, which counts their tokens and
fills the page cache. A step lasts from the end of one batch to the end of the next.
"""

import gc
import os
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base import page_cache, processes
from tokenscale.base.errors import UserError
from tokenscale.base.files import get_boot_id
from tokenscale.data.batches.batch import Batch, Inputs
from tokenscale.data.batches.open import open_batches
from tokenscale.data.corpus.raw_text import read_corpus_manifest
from tokenscale.data.mixtures import list_sources, manifest_path
from tokenscale.runs.records import provenance
from tokenscale.runs.records.events import Writer
from tokenscale.settings.options import to_dict
from tokenscale.settings.run import RunSettings

#: batches that are copied from memory: more than a processor's caches hold
POOL_BYTES = 2 << 30

#: returns the next batch, whose arrays the second next may overwrite
Take = Callable[[], Batch]


def read(run: RunSettings, inputs: Inputs, directory: Path, attempt: int = 0) -> None:
    """Read the batches of a run and seal its record.

    What cannot be read here, such as files that stay in the page cache, is the reason of a failed
    run, which the report shows; other runs go on.
    """
    folder = directory / f"attempt={attempt:02d}"
    writer = Writer(folder / "rank=00000")
    began = writer.event("run_start", world_size=1, boot=get_boot_id())
    record = provenance.start_record(
        directory,
        record={
            **provenance.launched(folder),
            "run_id": run.identity,
            "run": to_dict(run),
            "attempt": attempt,
            "budget_steps": run.budget.steps,
            "started_unix_s": round(time.time(), 3),
            "hardware": {
                "device": "cpu",
                "device_kind": "cpu",
                "threads_per_rank": 1,
                "world_size": 1,
            },
        },
    )
    outcome: dict[str, Any] = {"status": "complete", "steps": run.budget.steps}
    try:
        with processes.pin_to_cores(_choose_cores(run)):
            steps = _measure(run, inputs, writer, began)
        for step in steps:
            writer.step(**step)
    except UserError as error:
        outcome = {"status": "failed", "steps": 0, "reason": error.what}
        print(error.render(), flush=True)
    writer.event("run_stop", status=outcome["status"], step=outcome["steps"])
    writer.close()
    outcome |= {
        "ended_unix_s": round(time.time(), 3),
        "begins_at": 0,
        "begins_at_useful_tokens": 0,
        "energy_j": None,
        "logs": provenance.log_hashes(directory),
    }
    provenance.seal_record(directory, record=record, outcome=outcome)


def _choose_cores(run: RunSettings) -> set[int]:
    """Return one core for a reader without worker processes, else all; none where they are not
    known.
    """
    cores = processes.available_cores()
    return cores if run.reader.workers is not None else set(sorted(cores)[:1])


def _measure(
    run: RunSettings, inputs: Inputs, writer: Writer, began: float
) -> list[dict[str, Any]]:
    """Return the steps of the timed pass. Raises UserError where it cannot be one, or reads other
    batches than the pass before it.
    """
    before, last = _read_once(run, inputs)
    if run.reader.cold:
        kept = page_cache.drop_page_cache(_list_files(run, inputs))
        if (reason := page_cache.explain_warm_cache(kept)) is not None:
            raise UserError(reason, run=run.identity, next="leave reader.cold out on this machine")
    gc.collect()
    gc.freeze()  # exclude existing objects from the collections before the timed pass
    opening = time.monotonic()
    take = _open(run, inputs)
    writer.span("open", opening, time.monotonic() - opening)
    writer.event_since("init_done", since=began)
    ends = [time.monotonic()]
    reading_s = []
    for _ in range(run.budget.steps):
        start = time.monotonic()
        batch = take()
        ends.append(time.monotonic())
        reading_s.append(ends[-1] - start)
    if not all(map(np.array_equal, (batch.tokens_bt, batch.labels_bt), last)):
        raise UserError(
            "the timed pass read other batches than the one before it.",
            run=run.identity,
            next="build the store again; if they still differ, report a bug",
        )
    peak = processes.count_peak_bytes()
    return [
        facts
        | {
            "step": step,
            "t_mono_s": ends[step + 1],
            "t_unix_s": writer.unix_s(ends[step + 1]),
            "step_s": ends[step + 1] - ends[step],
            "data_wait_s": reading_s[step],
            "memory_peak_bytes": peak,
        }
        for step, facts in enumerate(before)
    ]


def _read_once(
    run: RunSettings, inputs: Inputs
) -> tuple[list[dict[str, Any]], tuple[np.ndarray, np.ndarray]]:
    """Return the facts of each batch, and the last one's tokens and labels."""
    take = _open_studies(run, inputs) if run.arm == "studies" else open_batches(run, inputs).next
    facts = []
    for _ in range(run.budget.steps):
        batch = take()
        facts.append(
            {
                "rows": len(batch.tokens_bt),
                "useful_tokens": batch.useful_tokens,
                "total_tokens": batch.total_tokens,
                # the studies' order is their own
                "order_digest": None if run.arm == "studies" else batch.order_digest,
            }
        )
    return facts, (np.asarray(batch.tokens_bt).copy(), np.asarray(batch.labels_bt).copy())


def _open(run: RunSettings, inputs: Inputs) -> Take:
    if run.arm == "studies":
        return _open_studies(run, inputs)
    if run.arm == "memcpy":
        return _open_copies(run, inputs)
    if run.reader.workers is not None:
        return _open_loader(run, inputs)
    return open_batches(run, inputs).next


def _open_studies(run: RunSettings, inputs: Inputs) -> Take:
    from tokenscale.arms.studies import open_reader

    return open_reader(run, inputs).next


def _open_loader(run: RunSettings, inputs: Inputs) -> Take:
    """Return a function that takes the next batch of a DataLoader, whose workers read ahead."""
    from torch.utils.data import DataLoader

    from tokenscale.data.batches.torch_data import BatchStream

    with warnings.catch_warnings():
        # more workers than cores are intended
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader = DataLoader(
            BatchStream(run, inputs=inputs, steps=run.budget.steps),
            batch_size=None,
            num_workers=run.reader.workers or 0,
            worker_init_fn=_limit_threads if run.reader.workers else None,
        )
        batches = iter(loader)

    def take() -> Batch:
        batch = next(batches)
        return Batch(
            batch["input_ids"].numpy(),
            batch["labels"].numpy(),
            batch["useful_tokens"],
            batch["total_tokens"],
            batch["order_digest"],
        )

    return take


def _limit_threads(worker: int) -> None:
    """Disable tokenizers' threads, which do not survive a fork and would block forever."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _open_copies(run: RunSettings, inputs: Inputs) -> Take:
    """Return a function that copies the next batch from memory to memory. Where they do not all
    fit, the last ones are copied again and again, and the last one last.
    """
    batches = open_batches(run, inputs)
    largest = 2 * 8 * run.global_batch * run.sequence_length  # two arrays of int64
    pool: deque[Batch] = deque(maxlen=max(1, POOL_BYTES // largest))
    pool.extend(batches.next().copy() for _ in range(run.budget.steps))
    # rows of buckets have several lengths
    into = {batch.tokens_bt.shape: batch.copy() for batch in pool}
    places = iter(range(-run.budget.steps, 0))

    def take() -> Batch:
        batch = pool[next(places) % len(pool)]
        target = into[batch.tokens_bt.shape]
        np.copyto(target.tokens_bt, batch.tokens_bt)
        np.copyto(target.labels_bt, batch.labels_bt)
        return target

    return take


def _list_files(run: RunSettings, inputs: Inputs) -> list[Path]:
    """Return the files that the run reads: of its store, and the text where it tokenizes.

    The tokenizer's file is left out: every reader reads it with the same code.
    """
    found = []
    for store in list_sources(run, inputs.store) if inputs.store is not None else ():
        folder = manifest_path(store).parent
        found += [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for corpus in list_sources(run, inputs.corpus) if inputs.corpus is not None else ():
        folder = manifest_path(corpus).parent
        files = read_corpus_manifest(folder)["splits"]["train"]["files"]
        found += [folder / file["name"] for file in files]
        found += sorted((folder / "records").glob("*"))
    return found
