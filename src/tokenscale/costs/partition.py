"""Which layers a stage of a pipeline gets, so that the slowest stage is as fast as it can be."""

from itertools import accumulate

from tokenscale.costs.flops import Convention, flops_per_token
from tokenscale.settings.model import ModelSettings


def stages_of(model: ModelSettings, sequence_length: int, stages: int) -> list[range]:
    """The layers of each stage, weighed by their FLOPs; the last stage also has the output head.

    Of a model whose vocabulary is known. Each stage has a layer at least: there are no more stages than layers.

    >>> from tokenscale.settings.presets import PRESETS
    >>> [len(layers) for layers in stages_of(PRESETS["gpt2-124m"], 1024, 4)]
    [4, 4, 3, 1]
    """
    head = 6 * model.vocabulary_size * model.dimension
    block = round((flops_per_token(model, sequence_length, Convention.FULL) - head) / model.layers)
    return balanced([block] * (model.layers - 1) + [block + head], stages)


def balanced(costs: list[int], stages: int) -> list[range]:
    """Runs of consecutive items, each with one at least, whose most expensive is as cheap as can be.

    Of several such ways, the one whose first stages have more.

    >>> balanced([1, 1, 1, 1, 3], 3)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} layers in {stages} stages")
    sums = [0, *accumulate(costs)]
    # best[n]: (cost of the most expensive, minus the ends of the stages) of the first n items
    best = {n: (sums[n], (-n,)) for n in range(1, len(costs) + 1)}
    for stage in range(2, stages + 1):
        best = {
            n: min((max(best[cut][0], sums[n] - sums[cut]), (*best[cut][1], -n)) for cut in range(stage - 1, n))
            for n in range(stage, len(costs) + 1)
        }
    ends = [-end for end in best[len(costs)][1]]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
