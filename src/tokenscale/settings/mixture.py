"""Settings of mixtures: several corpora in one run, with weights that may change by stages."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenscale.settings.data import CorpusSettings
from tokenscale.settings.options import STRICT, option

#: smallest positive weight, as a share of a stage's weights: a block of the order has ten sequences of such a source
SMALLEST_WEIGHT = 1e-4


@dataclass(frozen=True)
class NamedStage:
    """Stage of a mixture in config.yaml."""

    __pydantic_config__ = STRICT

    tokens: int | None = option(
        None,
        "length of the stage: sequences × sequence_length, over all ranks and rounded up to whole sequences. The last "
        "stage has none and lasts to the end",
        ge=1,
    )
    weights: dict[str, float] = option(dict, "corpus → weight of its sequences; corpora without a weight are left out")


@dataclass(frozen=True)
class NamedMixture:
    """Mixture in config.yaml. A run reads it if its `corpus` is the mixture's name."""

    __pydantic_config__ = STRICT

    weights: dict[str, float] = option(
        dict,
        "corpus → weight of its sequences, of any sum. A corpus of weight 0 is not trained on, and is still validated",
    )
    stages: tuple[NamedStage, ...] = option(tuple, "weights that change during the run, instead of `weights`")
    maximum_repetitions: float | dict[str, float | None] | None = option(
        1.0,
        "passes that a run may make over a corpus, for all corpora or corpus → number (1 for those that are not "
        "named); null: no limit. A run that needs more is refused before it starts",
    )


@dataclass(frozen=True)
class MixtureSource:
    """Corpus of a mixture."""

    __pydantic_config__ = STRICT

    corpus: CorpusSettings = option(CorpusSettings, "settings of the corpus")
    maximum_repetitions: float | None = option(1.0, "passes that a run may make over the corpus; null: no limit")


@dataclass(frozen=True)
class MixtureStage:
    """Stage of a mixture. `weights` has one share for each source; they add up to 1."""

    __pydantic_config__ = STRICT

    tokens: int | None = option(None, "length in tokens; null: to the end")
    weights: tuple[float, ...] = option(tuple, "share of each source in the sequences")


@dataclass(frozen=True)
class MixtureSettings:
    """Mixture of a run, with the settings of its corpora."""

    __pydantic_config__ = STRICT

    sources: tuple[MixtureSource, ...] = option(tuple, "corpora of the mixture")
    stages: tuple[MixtureStage, ...] = option(tuple, "stages, of which the last one lasts to the end")

    @property
    def names(self) -> list[str]:
        """Names of the corpora, in the order of the stages' weights."""
        return [source.corpus.name for source in self.sources]

    def shares(self, sequences: int, sequence_length: int) -> dict[str, float]:
        """Return corpus → its share of the first sequences, from the lengths and weights of the stages."""
        starts = [*self.stage_starts(sequence_length), sequences]
        parts = [max(0, min(end, sequences) - start) for start, end in zip(starts, starts[1:], strict=False)]
        parts[-1] = max(0, sequences - starts[-2])
        return {
            name: sum(part * stage.weights[n] for part, stage in zip(parts, self.stages, strict=True)) / sequences
            for n, name in enumerate(self.names)
        }

    def stage_starts(self, sequence_length: int) -> list[int]:
        """Return the first sequence of each stage, numbered from 0 over all ranks."""
        starts = [0]
        for stage in self.stages[:-1]:
            starts.append(starts[-1] + -(-(stage.tokens or 0) // sequence_length))
        return starts


def resolve_mixture(named: NamedMixture, corpora: Mapping[str, CorpusSettings]) -> MixtureSettings:
    """Return a mixture with the settings of its corpora, and weights as shares. The names must be known corpora.

    Corpora are in the order of their names: the order of keys in a configuration has no meaning.
    """
    stages = named.stages or (NamedStage(weights=named.weights),)
    names = sorted({name for stage in stages for name in stage.weights})
    limits = named.maximum_repetitions
    by_name = limits if isinstance(limits, dict) else dict.fromkeys(names, limits)
    sums = [math.fsum(stage.weights.values()) for stage in stages]
    return MixtureSettings(
        tuple(MixtureSource(corpora[name], by_name.get(name, 1.0)) for name in names),
        tuple(
            MixtureStage(stage.tokens, tuple(float(stage.weights.get(name, 0)) / total for name in names))
            for stage, total in zip(stages, sums, strict=True)
        ),
    )


def find_mixture_problem(named: NamedMixture) -> tuple[str, str, str] | None:
    """Return (key, what is wrong, next step) of the first problem of a mixture in config.yaml, or None."""
    if bool(named.weights) == bool(named.stages):
        what = "a mixture has either `weights` or `stages`."
        return "weights", what, "keep one of them" if named.weights else "weights: {CORPUS: 0.7, OTHER: 0.3}"
    for number, stage in enumerate(named.stages):
        last = number == len(named.stages) - 1
        if last != (stage.tokens is None):
            what = "the last stage of a mixture lasts to the end." if last else "a stage needs its length in tokens."
            return f"stages.{number}.tokens", what, "remove `tokens`" if last else "set `tokens`"
    keyed = [(f"stages.{number}.weights", stage.weights) for number, stage in enumerate(named.stages)]
    for key, weights in keyed or [("weights", named.weights)]:
        if (problem := _find_weight_problem(weights)) is not None:
            return f"{key}{problem[0]}", *problem[1:]
    limits: dict[str, Any] = named.maximum_repetitions if isinstance(named.maximum_repetitions, dict) else {}
    known = {name for _, weights in keyed or [("", named.weights)] for name in weights}
    for name in limits:
        if name not in known:
            return f"maximum_repetitions.{name}", "the mixture has no such corpus.", "remove it, or give it a weight"
    values = [*limits.values()] or [named.maximum_repetitions]
    if any(value is not None and not (isinstance(value, int | float) and value > 0) for value in values):
        return "maximum_repetitions", "a number of passes must be above 0.", "1, for example; null: no limit"
    return None


def _find_weight_problem(weights: Mapping[str, float]) -> tuple[str, str, str] | None:
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            return f".{name}", f"a weight must be a number of at least 0, not {weight:g}.", "0 leaves the corpus out"
    total = math.fsum(weights.values())
    if not total > 0 or not math.isfinite(total):
        return "", "the weights of a mixture add up to nothing.", "give at least one corpus a weight above 0"
    for name, weight in weights.items():
        if 0 < weight / total < SMALLEST_WEIGHT:
            what = f"a weight is below {SMALLEST_WEIGHT:g} of the sum, which cannot be kept exactly."
            return f".{name}", what, "raise it, or set it to 0"
    return None
