"""Mixture of a run: several corpora with weights that may change by stages."""

from dataclasses import dataclass

from tokenscale.settings.data import CorpusSettings
from tokenscale.settings.options import STRICT, option


@dataclass(frozen=True)
class MixtureSource:
    """Corpus of a mixture."""

    __pydantic_config__ = STRICT

    corpus: CorpusSettings = option(CorpusSettings, "settings of the corpus")
    maximum_repetitions: float | None = option(
        1.0, "passes that a run may make over the corpus; null: no limit", science=False
    )


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

    @property
    def trained(self) -> list[int]:
        """Numbers of the sources that have a weight in some stage; the others are only validated."""
        return [n for n in range(len(self.sources)) if any(stage.weights[n] for stage in self.stages)]

    @property
    def trained_sources(self) -> list[MixtureSource]:
        return [self.sources[n] for n in self.trained]

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
