"""Memory of an experiment's runs in `plan`: predicted, and with `--measure` beside the bytes of one
step without devices.
"""

from collections.abc import Iterator
from dataclasses import replace

from tokenscale.base.errors import UserError
from tokenscale.base.wording import format_bytes, format_number
from tokenscale.cli.library_weights import count_library_weights
from tokenscale.costs.exchanges import exchanged_bytes, is_predicted, most_exchanged_bytes
from tokenscale.costs.flops import UncountedModelError
from tokenscale.costs.memory import fullest_rank, largest_memory, memory
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.registry import OBJECTIVES
from tokenscale.settings.run import OURS, RunSettings


def render_memory(runs: list[RunSettings], gpu_gib: float | None = None) -> Iterator[str]:
    """Yield one line for each model, micro-batch shape and precision; layouts with equal memory
    share a line.

    A line says where the memory exceeds `gpu_gib`, that of a GPU in GiB.
    """

    def order(run: RunSettings) -> tuple:  # small layouts before large ones of the same method
        layout = run.layout
        return (
            run.model.name,
            layout.world_size,
            layout.method,
            run.micro_batch,
            run.precision,
            _format_options(run),
        )

    found: dict[tuple[str, ...], dict[str, None]] = {}
    unknown: dict[str, None] = {}
    for run in sorted(runs, key=order):
        memory, reason = _predict_memory(run, gpu_gib)
        if memory is None:
            unknown[f"    {run.model.name}: {reason}"] = None
            continue
        shape = f"{run.micro_batch} x {run.sequence_length}"
        what = (run.model.name, shape, run.precision, _format_options(run), *memory)
        found.setdefault(what, {})[_format_layout(run.layout) + _format_sent(run)] = None
    kernels = "a CPU's" if all(run.device == "cpu" for run in runs) else "a GPU's"
    sent = (
        ", and bytes sent by a rank in a step"
        if any(run.layout.world_size > 1 for run in runs)
        else ""
    )
    yield f"  memory of the rank with the most, predicted for {kernels} kernels{sent}:"
    lines = [(model, ", ".join(layouts), *rest) for (model, *rest), layouts in found.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for *pieces, total, parts in lines:
        *wide, room, _ = widths
        columns = [text.ljust(width) for text, width in zip(pieces, wide, strict=True) if width]
        yield f"    {'  '.join(columns)}  {total.rjust(room)} = {parts}"
    yield from unknown


def _format_layout(layout: LayoutSettings) -> str:
    """Describe the degrees of a layout that are above 1."""
    names = {"shard": layout.sharding, "pipeline": layout.schedule}
    degrees = (
        (degree, getattr(layout, degree)) for degree in ("data", "shard", "tensor", "pipeline")
    )
    return (
        " ".join(f"{names.get(degree, degree)} {size}" for degree, size in degrees if size > 1)
        or "one rank"
    )


def _format_sent(run: RunSettings) -> str:
    """Describe the bytes that the rank that sends most sends in a step; empty where none or
    unknown.
    """
    vocabulary = run.model.vocabulary_size or run.tokenizer.vocabulary_size
    if vocabulary is None:
        return ""
    sent = most_exchanged_bytes(replace(run, model=run.model.with_vocabulary(vocabulary)))
    return f" ({format_bytes(sent)} sent)" if sent else ""


def _format_options(run: RunSettings) -> str:
    """Describe the other settings that a run's memory depends on."""
    again = run.activation_checkpointing
    named = {
        f"{again} checkpointing": again != "none",
        f"loss_chunk {run.loss_chunk}": run.loss_chunk,
        "gradients accumulated unsharded": run.layout.accumulation == "unsharded",
    }
    named |= {name: getattr(run, name) for name in ("document_mask", "compile", "float8")}
    return ", ".join(name for name, used in named.items() if used)


def _predict_memory(
    run: RunSettings, gpu_gib: float | None
) -> tuple[tuple[str, str] | None, str | None]:
    """Return ((sum, terms of the sum), None), or (None, why the memory is not known)."""
    vocabulary = run.model.vocabulary_size or run.tokenizer.vocabulary_size
    if vocabulary is None:
        return (
            None,
            (
                f"not known before the tokenizer {run.tokenizer.name} is built, which decides the "
                "vocabulary"
            ),
        )
    try:
        counted = count_library_weights(run, vocabulary_size=vocabulary)
        whole = replace(
            counted, model=counted.model.with_vocabulary(vocabulary), compile=False, float8=False
        )
        predicted = largest_memory(whole, device="cpu" if run.device == "cpu" else "cuda")
    except UncountedModelError:
        return (
            None,
            f"not known without the library transformers, which builds {run.model.transformers}",
        )
    unit, name = (1 << 30, "GiB") if predicted.total >= 1 << 30 else (1 << 20, "MiB")
    if run.compile or run.float8:
        eager = " as without " + ("compile" if run.compile else "float8")
    else:
        eager = ""
    parts = []
    for part, size in predicted.parts.items():
        text = f"{part}, not predicted" if size is None else f"{format_number(size / unit)} {part}"
        parts.append(text + eager * (size is not None and part == "activations"))
    if predicted.transient:
        parts.append(f"{format_number(predicted.transient / unit)} for a moment in a pass")
    remark = ""
    if gpu_gib is not None and run.device != "cpu" and predicted.total > gpu_gib * (1 << 30):
        remark = f": does not fit a GPU of {gpu_gib:g} GiB"
    return (f"{format_number(predicted.total / unit)} {name}", " + ".join(parts) + remark), None


def measure_memory(runs: list[RunSettings]) -> Iterator[str]:
    """Yield for each cell the bytes of its fullest rank, predicted and measured, as one step on
    torch's fake process group goes on (`train/fake_world.py`). Raises UserError before the first
    step where a cell cannot run without its device.
    """
    cells = {of_memory.to_json(): of_memory for of_memory in map(_of_memory, runs)}
    refused: dict[str, None] = {}
    for run in cells.values():
        if reason := _needs_device(run):
            refused[f"{run.model.name}, {_format_layout(run.layout)}: {reason}"] = None
    if refused:
        raise UserError(
            "plan --measure cannot run these cells without their device.",
            cells="\n".join(refused),
            next="name experiments without them, or leave --measure out",
        )
    from tokenscale.train.fake_world import measure_step, shorten  # torch, which takes seconds

    yield (
        "memory of the rank with the most, for a CPU's kernels without compile: predicted / measured "
        "by one step without devices"
    )
    for run in cells.values():
        vocabulary = run.model.vocabulary_size or run.tokenizer.vocabulary_size
        assert vocabulary is not None  # else it is refused
        whole = replace(run, model=run.model.with_vocabulary(vocabulary))
        rank = fullest_rank(whole)
        predicted = memory(whole, rank)
        measured = measure_step(whole, rank)
        sent = exchanged_bytes(shorten(whole), rank) if is_predicted(whole) else None
        between_steps = predicted.parameters + predicted.optimizer
        if run.layout.keeps_gradients:
            between_steps += predicted.gradients
        shape = f"{run.micro_batch} x {run.sequence_length}"
        what = [run.model.name, _format_layout(run.layout), shape, run.precision]
        yield f"  {'  '.join(filter(None, [*what, _format_options(run)]))}, rank {rank}"
        for name, expected, found in (
            ("between steps", between_steps, measured.between_steps),
            ("between micro-steps", predicted.standing, measured.between_micro_steps),
            ("peak", predicted.peak, measured.peak),
            ("sent", sent, measured.sent),
        ):
            if expected is not None and found is not None:
                yield f"    {name:<19}  {format_bytes(expected):>10} / {format_bytes(found):>10}"


def _of_memory(run: RunSettings) -> RunSettings:
    """Return the run with the settings alone that its memory depends on."""
    names = [
        *("model", "tokenizer", "sequence_length", "global_batch", "micro_batch", "layout"),
        *("precision", "float8", "objective", "document_mask", "attention", "loss_chunk", "arm"),
        *("activation_checkpointing", "optimizer"),
    ]
    return RunSettings(**{name: getattr(run, name) for name in names})


def _needs_device(run: RunSettings) -> str | None:
    """Return why a step of the run cannot be measured without its device, or None."""
    if run.arm != OURS:
        return f"arm {run.arm} is another trainer"
    if run.model.transformers is not None:
        return f"models of transformers ({run.model.transformers}) are not predicted"
    if OBJECTIVES[run.objective].whole_model:
        return f"objective {run.objective} needs the weights of the whole model"
    if run.float8:
        return "float8 needs a GPU"
    if run.attention not in ("auto", "sdpa"):
        return f"attention by {run.attention} needs a GPU"
    if (run.model.vocabulary_size or run.tokenizer.vocabulary_size) is None:
        return f"the vocabulary is not known before the tokenizer {run.tokenizer.name} is built"
    return None
