"""Models from their shapes: the decoder of this project, or a model of the library `transformers`."""

import importlib
from types import ModuleType

from tokenscale.settings.model import ModelSettings
from tokenscale.settings.registry import MODELS, OBJECTIVES
from tokenscale.train.models import decoder
from tokenscale.train.models.objective import LanguageModel


def build(shape: ModelSettings, sequence_length: int, *, objective: str, kernel: str) -> LanguageModel:
    """Build a model on torch's default device. Its weights are unset until `initialise`, or until others are set.

    `objective` says whether each position sees those before it (`causal`) or the whole row (`masked`); `kernel` is one
    that `models.attention` has chosen. The vocabulary must be resolved. Raises UserError for a shape that cannot be.
    """
    if shape.transformers is not None:
        return _library().build(shape, sequence_length, objective=objective, kernel=kernel)
    return decoder.Decoder(shape, sequence_length, causal=OBJECTIVES[objective].causal, kernel=kernel)


def initialise(model: LanguageModel, seed: int) -> None:
    """Set every weight of a whole model from the seed alone, the same on any rank, device and thread count."""
    if isinstance(model, decoder.Decoder):
        decoder.initialise(model, seed)
    else:
        _library().initialise(model, seed)


def _library() -> ModuleType:
    """Import the library models by name, so that only runs of such a model depend on that code."""
    return importlib.import_module(MODELS["transformers"])
