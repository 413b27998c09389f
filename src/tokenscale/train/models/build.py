"""Models from their shapes: the decoder of this project, or a model of the library `transformers`.

Both offer `hidden(tokens_bt, bounds=None) -> [B, T, d]`, what goes into the output head; `head`, the nn.Linear behind
it; `forward`, the logits; `blocks`, the nn.ModuleList of equal parts; and `settings`, the shape with nothing left open.
"""

import importlib
from types import ModuleType

from torch import nn

from tokenscale.settings.model import ModelSettings
from tokenscale.settings.registry import MODELS, OBJECTIVES
from tokenscale.train.models import decoder


def build(shape: ModelSettings, sequence_length: int, *, objective: str, kernel: str) -> nn.Module:
    """Build a model on torch's default device. Its weights are unset until `initialise`.

    `objective` says whether each position sees those before it (`causal`) or the whole row (`masked`); `kernel` is one
    that `models.attention` has chosen. The vocabulary must be resolved. Raises UserError for a shape that cannot be.
    """
    if shape.transformers is not None:
        return _library().build(shape, sequence_length, objective=objective, kernel=kernel)
    return decoder.Decoder(shape, sequence_length, causal=OBJECTIVES[objective].causal, kernel=kernel)


def initialise(model: nn.Module, seed: int) -> None:
    """Set every weight from the seed alone, the same on any rank, device and thread count."""
    if model.settings.transformers is not None:
        _library().initialise(model, seed)
    else:
        decoder.initialise(model, seed)


def _library() -> ModuleType:
    """By its dotted name, so that only runs of such a model depend on that code."""
    return importlib.import_module(MODELS["transformers"])
