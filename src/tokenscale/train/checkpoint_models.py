"""Models from checkpoints, ready for evaluation and generation."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json, read_json
from tokenscale.settings.registry import OBJECTIVES
from tokenscale.settings.run import RunSettings
from tokenscale.train.checkpoint import RECORD, read_model
from tokenscale.train.models.attention import choose_kernel
from tokenscale.train.models.build import build
from tokenscale.train.models.language_model import LanguageModel

#: sixteen bits of a run's precision
HALF = {"bf16": torch.bfloat16, "bf16-true": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class CheckpointModel:
    """A model without dropout on its device, the run that made it, and the folder of its tokenizer."""

    folder: Path
    model: LanguageModel
    run: RunSettings
    record: dict[str, Any]
    tokenizer: Path
    device: torch.device
    positions: int  # as many as a row may have

    @property
    def name(self) -> str:
        """Return the model's name for terminal output."""
        return f"{self.folder}: {self.record['run_id']}, after {self.record['step']:,} steps"


def open_checkpoint(
    folder: Path,
    *,
    tokenizer: Path | None = None,
    device: str = "auto",
    sequence_length: int = 0,
    document_mask: bool | None = None,
) -> CheckpointModel:
    """Read a checkpoint of any layout. Rows may be as long as those it was trained on, or of `sequence_length` where
    that is more; weights keep their number format. `document_mask` None: attention as in training.

    Raises UserError for what is no checkpoint, for a sequence that is longer than a table of positions, and where
    neither the checkpoint nor `tokenizer` has a tokenizer.
    """
    shape, weights = read_model(folder)
    record = read_json(folder / RECORD, "checkpoint's record")
    run = RunSettings.from_json(canonical_json(record["run"]))
    if OBJECTIVES[run.objective].causal:  # whatever its loss was, what it left answers as any causal model
        run = replace(run, objective="causal")
    held = folder / "tokenizer"
    if tokenizer is None and not held.is_dir():
        raise UserError(
            "the checkpoint holds no tokenizer.",
            checkpoint=folder,
            next="name the folder of the one that the model was trained with: --tokenizer results/tokenizers/NAME",
        )
    where = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else "cpu")
    kernel = choose_kernel(
        "auto",
        device=where,
        bounds=run.document_mask if document_mask is None else document_mask,
        dtype=HALF.get(run.precision, torch.float32),
        dropout=0.0,
    )
    positions = max(run.sequence_length, sequence_length)
    model = build(shape, positions, objective=run.objective, kernel="sdpa" if shape.transformers else kernel)
    for name, weight in model.named_parameters():
        weight.data = weights[name]
    return CheckpointModel(folder, model.to(where).eval(), run, record, tokenizer or held, where, positions)
