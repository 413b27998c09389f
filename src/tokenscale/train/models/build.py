"""Models and objectives from settings: the decoder of this project, or a model of the library
`transformers`.
"""

from tokenscale.base.errors import UserError
from tokenscale.settings import registry
from tokenscale.settings.extensions import load_extension
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.run import RunSettings
from tokenscale.train.models import decoder
from tokenscale.train.models.objective import LanguageModel, Objective

#: objective → class of a model with its loss
OBJECTIVES: dict[str, type[Objective]] = {
    "causal": Objective,
    "masked": Objective,
}


def build(
    shape: ModelSettings, sequence_length: int, *, objective: str, kernel: str
) -> LanguageModel:
    """Build a model on torch's default device. Its weights are unset until `initialise`, or until
    others are set.

    `objective` says whether each position sees those before it (`causal`) or the whole row
    (`masked`); `kernel` is one that `models.attention` has chosen. The vocabulary must be resolved.
    Raises UserError for a shape that cannot be.
    """
    if shape.transformers is not None:
        from tokenscale.train.models import library  # code of such runs alone (settings/closure.py)

        return library.build(shape, sequence_length, objective=objective, kernel=kernel)
    return decoder.Decoder(
        model=shape,
        sequence_length=sequence_length,
        causal=registry.OBJECTIVES[objective].causal,
        kernel=kernel,
    )


def resolve_shape(run: RunSettings, vocabulary_size: int) -> ModelSettings:
    """Return the run's model with the vocabulary and the positions that it is built with; a model
    of `transformers` with its weights counted.
    """
    shape = run.model.with_vocabulary(vocabulary_size).with_positions(run.sequence_length)
    if shape.transformers is None:
        return shape
    from tokenscale.train.models import library

    return library.count_weights(shape)


def initialise(model: LanguageModel, seed: int) -> None:
    """Set every weight of a whole model from the seed alone, the same on any rank, device and
    thread count.
    """
    if isinstance(model, decoder.Decoder):
        decoder.initialise(model, seed)
    else:
        from tokenscale.train.models import library

        assert isinstance(model, library.LibraryModel)
        library.initialise(model, seed)


def objective_of(name: str, model: LanguageModel, *, loss_chunk: int, compiled: bool) -> Objective:
    """Return the objective of this name around a model. Raises UserError for an extension that is no
    objective.
    """
    kind = OBJECTIVES.get(name) or load_extension(name, "objective")
    if not (isinstance(kind, type) and issubclass(kind, Objective)):
        raise UserError(
            "an own objective is no subclass of Objective.",
            objective=name,
            found=type(kind).__name__ if not isinstance(kind, type) else kind.__mro__[1].__name__,
            next="derive it from tokenscale.train.models.objective.Objective",
        )
    return kind(model, loss_chunk=loss_chunk, compiled=compiled)
