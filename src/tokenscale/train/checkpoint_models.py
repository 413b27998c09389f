"""Models from checkpoints, ready for evaluation and generation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    check_file_name,
    open_file,
    read_json,
    report_malformed,
)
from tokenscale.data.tokenizers.base import Tokenizer, read_tokenizer_manifest
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import decode
from tokenscale.settings.registry import OBJECTIVES
from tokenscale.settings.run import RunSettings
from tokenscale.train.checkpoint import NEXT, RECORD, check_finite, read_model
from tokenscale.train.evaluation.generation import Sampling, generate
from tokenscale.train.models.attention import choose_kernel
from tokenscale.train.models.build import build
from tokenscale.train.models.convert_hf import from_hf
from tokenscale.train.models.objective import LanguageModel

#: the configuration of a model of `transformers`
CONFIG = "config.json"
METADATA = ".metadata"  # of torch.distributed.checkpoint
#: positions of a row where such a model allows more
PUBLISHED_POSITIONS = 2048
#: number formats that such a model may have
FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: sixteen bits of a run's precision
HALF = {"bf16": torch.bfloat16, "bf16-true": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class CheckpointModel:
    """A model without dropout on its device, the run that made it, and the folder of its
    tokenizer.
    """

    folder: Path
    model: LanguageModel
    run: RunSettings
    record: dict[str, Any]
    tokenizer: Path
    device: torch.device
    positions: int  # as many as a row may have

    @property
    def takes_bounds(self) -> bool:
        """Whether its attention can stay inside documents."""
        return self.model.settings.transformers is None

    @property
    def name(self) -> str:
        """Return the model's name for terminal output."""
        if self.record["step"] is None:
            return f"{self.folder}: {self.record['run_id']} of transformers"
        return f"{self.folder}: {self.record['run_id']}, after {self.record['step']:,} steps"


def open_checkpoint(
    folder: Path,
    *,
    tokenizer: Path | None = None,
    device: str = "auto",
    sequence_length: int = 0,
    document_mask: bool = True,
) -> CheckpointModel:
    """Read a checkpoint of any layout, or a folder of `transformers` (`read_published`). Rows may
    be as long as those it was trained on, or of `sequence_length` where that is more; weights keep
    their number format. `document_mask`: rows hold several documents, and attention stays inside
    each, where the model can.

    Raises UserError for what is no checkpoint, for a sequence that is longer than a table of
    positions, and where neither the checkpoint nor `tokenizer` has a tokenizer.
    """
    if is_published(folder):
        shape, weights, record, run = read_published(folder)
    else:
        shape, weights = read_model(folder)
        record = read_json(folder / RECORD, what="checkpoint's record")
        run = decode(RunSettings, values=record["run"])
    # whatever its loss was, what it left answers as any causal model
    if OBJECTIVES[run.objective].causal:
        run = replace(run, objective="causal")
    held = folder / "tokenizer"
    if tokenizer is None and not held.is_dir():
        next_step = (
            "name the folder of the one that the model was trained with: --tokenizer "
            "results/tokenizers/NAME"
        )
        raise UserError("the checkpoint holds no tokenizer.", checkpoint=folder, next=next_step)
    entries = read_tokenizer_manifest(tokenizer or held)["vocabulary_size"]
    if shape.vocabulary_size is not None and entries > shape.vocabulary_size:
        raise UserError(
            "the tokenizer has more entries than the model's embedding.",
            tokenizer=f"{tokenizer or held} has {entries:,}",
            model=f"{folder} has {shape.vocabulary_size:,}",
            next=(
                "name the tokenizer that the model was trained with: --tokenizer "
                "results/tokenizers/NAME"
            ),
        )
    where = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else "cpu")
    kernel = choose_kernel(
        "auto",
        device=where,
        bounds=document_mask and not shape.transformers,
        dtype=HALF.get(run.precision, torch.float32),
        dropout=0.0,
    )
    positions = max(run.sequence_length, sequence_length)
    model = build(
        shape,
        sequence_length=positions,
        objective=run.objective,
        kernel="sdpa" if shape.transformers else kernel,
    )
    check_weights(folder, model, weights=weights)
    for name, weight in model.named_parameters():
        weight.data = weights[name]
    return CheckpointModel(
        folder=folder,
        model=model.to(where).eval(),
        run=run,
        record=record,
        tokenizer=tokenizer or held,
        device=where,
        positions=positions,
    )


def is_published(folder: Path) -> bool:
    """Return whether the folder has a model of `transformers`, or of DCP, and no checkpoint of
    ours.
    """
    return (
        any((folder / name).is_file() for name in (CONFIG, METADATA))
        and not (folder / RECORD).exists()
    )


def read_published(
    folder: Path,
) -> tuple[ModelSettings, dict[str, Tensor], dict[str, Any], RunSettings]:
    """Return (shape, parameters by name, record, run) of a folder that `save_pretrained` or a hub
    wrote, or `torch.distributed.checkpoint` beside such a config.json.

    bf16 weights stay in bf16, others are read as fp32. Rows have the model's positions, at most
    `PUBLISHED_POSITIONS`. Raises UserError for model types, settings and weights that the decoder
    does not have.
    """
    hint = "save the model again with save_pretrained"
    if (folder / METADATA).is_file():
        hint = (
            "copy the model's config.json of transformers beside .metadata, which does not state "
            "the shape"
        )
    config = read_json(folder / CONFIG, what="model's configuration", next=hint)
    weights = _read_files(folder, hint)
    with report_malformed(folder / CONFIG, what="model's configuration", next=hint):
        try:
            if "tok_embeddings.weight" in weights:
                from tokenscale.train.models.dcp import from_titan

                weights = from_titan(config, weights)
            shape, weights = from_hf(config, weights)
        except RuntimeError as error:  # of a tensor that cannot be split or turned
            raise ValueError(f"the weights are not of this shape: {error}") from None
        positions = (
            config.get("max_position_embeddings")
            or config.get("n_positions")
            or PUBLISHED_POSITIONS
        )
        half = all(weight.dtype == torch.bfloat16 for weight in weights.values())
        run = RunSettings(
            sequence_length=min(int(positions), PUBLISHED_POSITIONS),
            precision="bf16-true" if half else "fp32",
        )
    for name, weight in weights.items():
        if weight.dtype not in FORMATS:
            what = f"weights in {str(weight.dtype).removeprefix('torch.')} are not read."
            raise UserError(what, checkpoint=folder, tensor=name, next=hint)
    check_finite(folder, weights)
    if not half:
        weights = {name: weight.float() for name, weight in weights.items()}
    return shape, weights, {"run_id": shape.name, "step": None}, run


def _read_files(folder: Path, hint: str) -> dict[str, Tensor]:
    """Return the tensors of model.safetensors, or of the files that its index names, or of DCP.

    Files may be links: those of a Hugging Face cache are.
    """
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if not (folder / names[0]).is_file():
        if (folder / METADATA).is_file():
            from tokenscale.train.models.dcp import read_dcp

            return read_dcp(folder)
        if index.is_file():
            with report_malformed(index, what="index of the weights", next=hint):
                files = read_json(index, what="index of the weights")["weight_map"].values()
                names = sorted({check_file_name(name) for name in files})
    weights: dict[str, Tensor] = {}
    for name in names:
        try:
            # opened here: the library would wait for a pipe, and could find another file
            with open(open_file(folder / name), "rb") as file:
                found = load_file(f"/dev/fd/{file.fileno()}")
        except (SafetensorError, OSError) as error:
            raise UserError(
                "the model's weights cannot be read.", file=folder / name, reason=error, next=hint
            ) from None
        for key in weights.keys() & found.keys():
            if not torch.equal(weights[key], found[key]):
                raise UserError(
                    "two files hold a tensor.", file=folder / name, tensor=key, next=hint
                )
        weights |= found
    return weights


def check_weights(folder: Path, model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Raise UserError unless the weights of a checkpoint are those of the model that its record
    describes.
    """
    expected = {name: list(weight.shape) for name, weight in model.named_parameters()}
    found = {name: list(weight.shape) for name, weight in weights.items()}
    for name in [*expected, *found]:
        if expected.get(name) != found.get(name):
            raise UserError(
                (
                    "the weights of the checkpoint are not those of the model that its record "
                    "describes."
                ),
                checkpoint=folder,
                tensor=name,
                expected=f"shape {expected[name]}" if name in expected else "no such tensor",
                found=f"shape {found[name]}" if name in found else "no such tensor",
                next=NEXT,
            )


#: replacement character for invalid UTF-8: at the end of a text, an incomplete character
BROKEN = "\ufffd"


def open_causal(
    checkpoint: Path, *, tokenizer: Path | None = None, device: str = "auto"
) -> CheckpointModel:
    """Open a checkpoint that generates text. Raise UserError as `open_checkpoint` does, and for a
    masked model.
    """
    opened = open_checkpoint(checkpoint, tokenizer=tokenizer, device=device, document_mask=False)
    if opened.run.objective != "causal":
        next_step = "name the checkpoint of a causal run"
        raise UserError(
            "a masked model cannot generate text.", checkpoint=opened.name, next=next_step
        )
    return opened


def continue_prompt(
    prompt: str,
    prompt_ids: Sequence[int],
    opened: CheckpointModel,
    engine: Tokenizer,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    cached: bool = True,
    on_text: Callable[[str], None] = lambda text: None,
) -> tuple[str, list[int]]:
    """Return the (text, tokens) that continue one prompt, whose ids begin with BOS. Raise UserError
    if the prompt fills all positions.
    """
    ids = list(prompt_ids)
    if len(ids) >= opened.positions:
        raise UserError(
            "the prompt leaves no room for a token.",
            prompt=f"{len(ids):,} tokens, BOS included",
            model=f"reads at most {opened.positions:,}",
            next="shorten it",
        )
    new: list[int] = []
    before = len(engine.decode(ids))
    shown = 0

    def text_behind() -> str:  # decoded with the prompt: some tokenizers drop a leading space
        ended = new[-1:] == [engine.eos_id]
        return engine.decode(ids + (new[:-1] if ended else new))[before:]

    def on_token(token: int) -> None:
        nonlocal shown
        new.append(token)
        text = text_behind()
        if not text.endswith(BROKEN):
            on_text(text[shown:])
            shown = len(text)

    on_text(prompt)
    generate(
        opened.model,
        prompt=ids,
        max_new_tokens=max_new_tokens,
        positions=opened.positions,
        vocabulary_size=engine.vocabulary_size,
        stop_id=engine.eos_id,
        sampling=sampling,
        device=opened.device,
        cached=cached,
        on_token=on_token,
    )
    text = text_behind()
    on_text(text[shown:] + "\n")
    return text, new
