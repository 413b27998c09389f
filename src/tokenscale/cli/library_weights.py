"""Weights of a library's model, counted before a run where the library is at hand."""

from dataclasses import replace

from tokenscale.base.errors import UserError
from tokenscale.settings.run import RunSettings


def count_library_weights(run: RunSettings, vocabulary_size: int | None) -> RunSettings:
    """Return the run with the weights of a model of `transformers` counted, where the library is
    installed and can build it. Other runs are returned as they are.
    """
    entries = run.model.vocabulary_size or run.tokenizer.vocabulary_size or vocabulary_size
    if run.model.transformers is None or entries is None:
        return run
    shape = run.model.with_vocabulary(entries).with_positions(run.sequence_length)
    try:
        from tokenscale.train.models.library import count_weights

        return replace(run, model=count_weights(shape))
    except (ImportError, UserError):
        return run
