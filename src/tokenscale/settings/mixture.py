"""Mixtures: several corpora with weights that may change by stages, in a run and in the
configuration.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tokenscale.settings.data import CorpusSettings
from tokenscale.settings.options import option, settings_class


@settings_class
class MixtureSource:
    """Corpus of a mixture."""

    corpus: CorpusSettings = option(CorpusSettings, description="settings of the corpus")
    maximum_repetitions: float | None = option(
        1.0, description="passes over the corpus; null: no limit", science=False
    )


@settings_class
class MixtureStage:
    """Stage of a mixture. `weights` has one share for each source; they add up to 1."""

    tokens: int | None = option(None, description="length in tokens; null: to the end")
    weights: tuple[float, ...] = option(tuple, description="share of each source in the sequences")


@settings_class
class MixtureSettings:
    """Mixture of a run, with the settings of its corpora."""

    sources: tuple[MixtureSource, ...] = option(tuple, description="corpora of the mixture")
    stages: tuple[MixtureStage, ...] = option(
        tuple, description="stages, of which the last one lasts to the end"
    )

    @property
    def names(self) -> list[str]:
        return [source.corpus.name for source in self.sources]

    @property
    def trained(self) -> list[int]:
        """Numbers of the sources that have a weight in some stage; the others are only
        validated.
        """
        return [
            n for n in range(len(self.sources)) if any(stage.weights[n] for stage in self.stages)
        ]

    @property
    def trained_sources(self) -> list[MixtureSource]:
        return [self.sources[n] for n in self.trained]

    def shares(self, sequences: int, sequence_length: int) -> dict[str, float]:
        """Return corpus → its share of the first sequences, from the lengths and weights of the
        stages.
        """
        starts = [*self.stage_starts(sequence_length), sequences]
        parts = [
            max(0, min(end, sequences) - start)
            for start, end in zip(starts, starts[1:], strict=False)
        ]
        parts[-1] = max(0, sequences - starts[-2])
        return {
            name: sum(
                part * stage.weights[n] for part, stage in zip(parts, self.stages, strict=True)
            )
            / sequences
            for n, name in enumerate(self.names)
        }

    def stage_starts(self, sequence_length: int) -> list[int]:
        """Return the first sequence of each stage, numbered from 0 over all ranks."""
        starts = [0]
        for stage in self.stages[:-1]:
            starts.append(starts[-1] + -(-(stage.tokens or 0) // sequence_length))
        return starts


#: smallest positive share: a block of the order then has at least ten sequences of each corpus
SMALLEST_SHARE = 1e-4
LARGEST_WEIGHT = 1e12
#: digits of shares: weights of another scale give the same shares
SHARE_DIGITS = 12


@settings_class
class NamedStage:
    """Stage of a mixture in config.yaml."""

    tokens: int | None = option(
        None,
        description="length of the stage: sequences × sequence_length, over all ranks and rounded up to "
        "whole sequences. The last "
        "stage has none and lasts to the end",
        ge=1,
        le=1 << 53,
    )
    weights: dict[str, Any] = option(
        dict, description="corpus → weight of its sequences in this stage; 0 for other corpora"
    )


@settings_class
class NamedMixture:
    """Mixture in config.yaml. A run reads it if its `corpus` is the mixture's name."""

    weights: dict[str, Any] = option(
        dict,
        description=(
            "corpus → weight of its sequences, of any sum. A corpus of weight 0 is not trained on, "
            "and is still validated"
        ),
    )
    stages: tuple[NamedStage, ...] = option(
        tuple, description="weights that change during the run, instead of `weights`"
    )
    maximum_repetitions: Any = option(
        1.0,
        description="passes that a run may make over a corpus: a number for all corpora, or corpus → number "
        "(1 for those that are "
        "not named); null: no limit. A run that needs more is refused before it starts",
    )

    @property
    def weights_by_key(self) -> dict[str, dict[str, Any]]:
        """Key of the weights of each stage → weights."""
        stages = {
            f"stages.{number}.weights": stage.weights for number, stage in enumerate(self.stages)
        }
        return stages or {"weights": self.weights}

    @property
    def names(self) -> set[str]:
        return {name for weights in self.weights_by_key.values() for name in weights}


def resolve_mixture(named: NamedMixture, corpora: Mapping[str, CorpusSettings]) -> MixtureSettings:
    """Return a mixture with the settings of its corpora, and weights as shares.

    `find_mixture_problems` has found none, and the names are known corpora. Corpora are in the
    order of their names: the order of keys in a configuration has no meaning.
    """
    stages = named.stages or (NamedStage(weights=named.weights),)
    names = sorted(named.names)
    limits = named.maximum_repetitions
    by_name = limits if isinstance(limits, dict) else dict.fromkeys(names, limits)
    sums = [math.fsum(stage.weights.values()) for stage in stages]
    return MixtureSettings(
        tuple(
            MixtureSource(corpora[name], maximum_repetitions=by_name.get(name, 1.0))
            for name in names
        ),
        stages=tuple(
            MixtureStage(
                stage.tokens,
                weights=tuple(
                    round(stage.weights.get(name, 0) / total, SHARE_DIGITS) for name in names
                ),
            )
            for stage, total in zip(stages, sums, strict=True)
        ),
    )


def find_mixture_problems(named: NamedMixture) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong) for the problems of a mixture in config.yaml."""
    if bool(named.weights) == bool(named.stages):
        both = "keep one of them; the keys of several configuration files are merged"
        hint = both if named.weights else "weights: {CORPUS: 0.7, OTHER: 0.3}"
        yield "weights", f"a mixture has either `weights` or `stages`: {hint}"
        return
    yield from _find_stage_problems(named)
    for key, weights in named.weights_by_key.items():
        yield from _find_weight_problems(key, weights)
    yield from _find_repetition_problems(named)


def _find_stage_problems(named: NamedMixture) -> Iterator[tuple[str, str]]:
    lengths = [stage.tokens for stage in named.stages]
    for number, tokens in enumerate(lengths[:-1]):
        if tokens is None:
            yield f"stages.{number}.tokens", "a stage needs its length in tokens"
    if lengths and lengths[-1] is not None:
        last = len(lengths) - 1
        text = "the last stage of a mixture lasts to the end: remove `tokens`"
        yield f"stages.{last}.tokens", text


def _find_weight_problems(key: str, weights: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    wrong = [
        name
        for name, weight in weights.items()
        if not (_is_number(weight) and 0 <= weight <= LARGEST_WEIGHT)
    ]
    for name in wrong:
        text = f"a weight is a number from 0 to {LARGEST_WEIGHT:g}, not {weights[name]!r}"
        yield f"{key}.{name}", text
    if wrong:
        return
    total = math.fsum(weights.values())
    if not total:
        yield key, "the weights of a mixture add up to 0: give a corpus a weight above 0"
        return
    for name, weight in weights.items():
        if 0 < weight / total < SMALLEST_SHARE:
            text = f"below {SMALLEST_SHARE:g} of the sum no share can be kept exactly"
            yield f"{key}.{name}", f"{text}: use more, or 0"


def _find_repetition_problems(named: NamedMixture) -> Iterator[tuple[str, str]]:
    limits = named.maximum_repetitions
    if not isinstance(limits, dict):
        limits = {"": limits}
    for name, limit in limits.items():
        key = f"maximum_repetitions.{name}" if name else "maximum_repetitions"
        if name and name not in named.names:
            yield key, "the mixture has no such corpus"
        elif limit is not None and not (_is_number(limit) and 0 < limit <= LARGEST_WEIGHT):
            yield key, f"a number of passes is above 0 (null: no limit), not {limit!r}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
