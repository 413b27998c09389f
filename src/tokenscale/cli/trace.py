"""Show which text was in a step of a run: files, rows, documents, tokens, and shares of the loss.

The batch is computed again from the run's settings and its inputs, and compared with the digest that the run logged.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.base.files import write_sealed
from tokenscale.settings.manifests import (
    corpus_manifest,
    list_manifests,
    mixture_manifest,
    tokenizer_manifest,
)
from tokenscale.settings.run import READERS, RunSettings

if TYPE_CHECKING:
    from tokenscale.analysis.steps import Steps
    from tokenscale.data.batches.batch import Inputs
    from tokenscale.data.batches.trace import StepTrace

#: steps before a step that its loss and its norm are compared with
BEFORE = 20
#: a spike lies so many times the spread above the median of the steps before it. The spread is
#: 1.4826 times the median distance from the median: the standard deviation of normal values. It is
#: at least this share of the median, below which no difference is worth a look
SPREADS = 6
LEAST_SPREAD = 0.005
#: spikes that are traced: the highest
MOST_SPIKES = 3
#: characters of a text in a line
SHOWN = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_DIRECTORY", help="results/runs/RUN_ID")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, metavar="N", help="the step")
    text = f"the {MOST_SPIKES} steps whose loss or gradient norm stands out most"
    which.add_argument("--loss-spike", action="store_true", help=text)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="also write the whole text (JSON)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the text of the steps. Return 1 if the batch is not the one that the run read."""
    from tokenscale.analysis.logs import merge, read_run
    from tokenscale.analysis.steps import Steps

    settings, recorded, digest = _read_record(arguments.run)
    if arguments.loss_spike and settings.arm in READERS:
        raise UserError(
            "a run that only reads has no loss.",
            folder=arguments.run,
            next="--step N shows the text of a step",
        )
    if settings.arm == "studies":
        raise UserError(
            "the studies' readers have rows and an order of their own, which no trace follows.",
            folder=arguments.run,
            next="trace a run of arm reader, which reads the same text",
        )
    log = read_run(arguments.run, arguments.run.name, digest=digest)
    steps = Steps(merge(log.steps, events=log.events))
    inputs = _find_inputs(settings, recorded, project=_find_project(arguments.run))
    if arguments.loss_spike:
        heights = measure_heights(steps)
        chosen = find_spikes(heights)
        if not chosen:
            print(_describe_calm(settings.identity, heights))
    else:
        chosen = {_check_step(arguments.step, steps, settings): ""}
    agree = True
    written = []
    for step, reason in chosen.items():
        entry, found = _trace(settings, inputs, steps, step)
        agree = agree and entry["digest_logged"] in (None, entry["digest"])
        written.append(entry | {"reason": reason})
        print("\n".join(_describe(settings, entry, found, reason)))
    if arguments.output is not None:
        write_sealed(arguments.output, record={"run": settings.identity, "steps": written})
    return 0 if agree else 1


def _read_record(folder: Path) -> tuple[RunSettings, dict[str, str], str | None]:
    """Return (settings, role → SHA-256 of the inputs, digest of the settings) by a run's record."""
    from tokenscale.analysis.run_record import read_run_record, read_settings

    found = read_run_record(folder / "run.json")
    if found.record is None:
        raise UserError(
            "this is no folder of a run.",
            folder=folder,
            found=found.trouble or "no run.json",
            next="tokenscale status  (lists the runs)",
        )
    settings = None
    if not found.record.get("external"):
        settings = read_settings(found.record.get("run"))
    if settings is None:
        raise UserError(
            "the order of this run's data is not known here.",
            folder=folder,
            expected="a run that this version of tokenscale made",
            next="trace a run of `train` or of an experiment",
        )
    inputs = found.record.get("inputs")
    return settings, inputs if isinstance(inputs, dict) else {}, found.record.get("digest")


def _find_project(folder: Path) -> Path:
    """Return the folder that `results` of a run lies in."""
    parents = folder.resolve().parents
    return next((parent.parent for parent in parents if parent.name == "results"), Path.cwd())


def _find_inputs(settings: RunSettings, recorded: dict[str, str], project: Path) -> "Inputs":
    """Return the inputs of a run. Raises UserError for one that is gone or was built again."""
    from tokenscale.base.files import sha256_file
    from tokenscale.data.batches.batch import Inputs

    names = {
        "corpus": (mixture_manifest if settings.mixture else corpus_manifest)(settings.corpus.name),
        "tokenizer": tokenizer_manifest(settings.tokenizer.name),
    }
    names |= {role: name for role, name in list_manifests(settings).items() if role == "store"}
    for role, name in names.items():
        path = project / name
        if not path.is_file():
            is_project = (project / "workflow/Snakefile").is_file()
            raise UserError(
                f"the {role} of the run is not at hand.",
                file=path,
                run=settings.identity,
                next=f"snakemake {name}" if is_project else "cd to the project that trained it",
            )
        if role in recorded and recorded[role] != sha256_file(path):
            raise UserError(
                f"the {role} at hand is not the one that the run read.",
                file=path,
                expected=f"sha256 {recorded[role]}",
                found=f"sha256 {sha256_file(path)}",
                next="restore it, or train the run again",
            )
    paths = {role: project / name for role, name in names.items()}
    return Inputs(
        corpus=paths["corpus"] if settings.mixture else paths["corpus"].parent,
        tokenizer=paths["tokenizer"].parent,
        store=paths.get("store"),
    )


def _check_step(step: int, steps: "Steps", settings: RunSettings) -> int:
    numbers = steps.numbers.tolist()
    if step in numbers:
        return step
    expected = "no step is logged"
    if numbers:
        expected = f"a logged step, {numbers[0]} … {numbers[-1]}"
    raise UserError(
        f"the run has no step {step}.",
        run=settings.identity,
        expected=expected,
        next="name one of these",
    )


def measure_heights(steps: "Steps") -> dict[int, tuple[float, str]]:
    """Return step → (spreads by which its loss or its norm, whichever is more, lies above the steps
    before it; the same in words).
    """
    found: dict[int, tuple[float, str]] = {}
    series = {"loss": _losses(steps), "gradient norm": steps.largest("grad_norm")}
    for name, values in series.items():
        for place in range(BEFORE, len(values)):
            before = values[place - BEFORE : place]
            middle = float(np.median(before))
            distance = float(np.median(np.abs(before - middle)))
            spread = max(1.4826 * distance, LEAST_SPREAD * abs(middle))
            height = (values[place] - middle) / spread if spread > 0 else 0.0
            step = int(steps.numbers[place])
            if height > found.get(step, (-np.inf, ""))[0]:
                side = "above" if height >= 0 else "below"
                text = f"its {name} {values[place]:.4g} is {abs(height):.2g} spreads {side} {middle:.4g}"
                found[step] = (height, text)
    return found


def find_spikes(heights: dict[int, tuple[float, str]]) -> dict[int, str]:
    """Return step → why it stands out, of the steps that stand out most, in the order of the run."""
    found = [step for step, (height, _) in heights.items() if height > SPREADS]
    highest = sorted(found, key=lambda step: -heights[step][0])[:MOST_SPIKES]
    return {step: heights[step][1] for step in sorted(highest)}


def _describe_calm(run: str, heights: dict[int, tuple[float, str]]) -> str:
    """Return that no step stands out, and what was looked at."""
    if not heights:
        return f"a step is compared with the {BEFORE} before it, and {run} has no more"
    highest = max(heights, key=lambda step: heights[step][0])
    return (
        f"no step of {run} stands out in its loss or gradient norm\n"
        f"looked at {len(heights)} steps, {min(heights)} to {max(heights)}; most: step {highest}, "
        f"{heights[highest][1]} ({SPREADS} or more stand out)"
    )


def _losses(steps: "Steps") -> np.ndarray:
    """Return the loss of each step in nats per label; NaN without labels, and of what only
    reads.
    """
    if np.isnan(steps["loss_sum"]).all():
        return np.full(len(steps.numbers), np.nan)
    labels = steps.sums("useful_tokens")
    return np.divide(
        steps.sums("loss_sum"), labels, out=np.full(len(labels), np.nan), where=labels > 0
    )


def _trace(
    settings: RunSettings, inputs: "Inputs", steps: "Steps", step: int
) -> tuple[dict[str, Any], "StepTrace"]:
    from tokenscale.data.batches.trace import trace_step

    place = int(np.searchsorted(steps.numbers, step))
    found = trace_step(settings, inputs, step)
    logged = None if np.isnan(steps["order_digest"]).all() else int(steps.digests()[place])
    loss = float(_losses(steps)[place])
    entry = {
        "step": step,
        "loss": loss if np.isfinite(loss) else None,
        "labels": found.labels,
        "digest": found.digest,
        "digest_logged": logged,
        "pieces": [dataclasses.asdict(piece) for piece in found.pieces],
    }
    return entry, found


def _describe(
    settings: RunSettings, entry: dict[str, Any], found: "StepTrace", reason: str
) -> Iterator[str]:
    loss = "unknown" if entry["loss"] is None else f"{entry['loss']:.4f}"
    documents = len({(piece.corpus, piece.document) for piece in found.pieces})
    yield f"step {entry['step']} of {settings.identity}" + (f": {reason}" if reason else "")
    yield f"loss      {loss}, over {entry['labels']:,} labels in {documents:,} documents"
    if entry["digest_logged"] is None:
        yield "batch     not compared: the run logged no digest"
    elif entry["digest_logged"] == entry["digest"]:
        yield f"batch     is the one that the run read (digest {entry['digest']})"
    else:
        yield f"batch     IS NOT the one that the run read: digest {entry['digest']}, logged"
        yield f"          {entry['digest_logged']}. The settings, the code or the data changed since"
    yield f"{'share':>6} {'slot':>5} {'tokens':>21}  text"
    for piece in sorted(found.pieces, key=lambda piece: -piece.labels):
        share = piece.labels / max(1, entry["labels"])
        tokens = f"{piece.first:,}-{piece.first + piece.tokens - 1:,} of {piece.length:,}"
        shown = json.dumps(piece.text[:SHOWN], ensure_ascii=False)
        place = f"{piece.corpus}/{piece.origin.file}, row {piece.origin.row:,}"
        yield f"{share:6.1%} {piece.slot:5} {tokens:>21}  {shown}"
        yield f"{'':>34}  {place}, from {piece.origin.source}"
