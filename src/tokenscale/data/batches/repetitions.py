"""Check that a run with a mixture repeats no corpus more often than allowed, before its ranks
start.
"""

from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.data.corpus.raw_text import read_corpus_manifest
from tokenscale.data.mixtures import list_sources, open_order
from tokenscale.data.order.mixture import MixtureOrder
from tokenscale.data.stores.manifest import read_store_manifest
from tokenscale.settings.registry import BATCHES
from tokenscale.settings.run import RunSettings


def check_repetitions(run: RunSettings, manifests: dict[str, Path]) -> None:
    """Raise UserError if the run repeats a corpus more often than its maximum number of repetitions
    allows.

    `manifests` are the inputs of the run by role. For a stream, a repetition is as many tokens as
    the corpus has. Reads manifests only.
    """
    mixture = run.mixture
    if mixture is None:
        return
    sources = mixture.trained_sources
    if all(source.maximum_repetitions is None for source in sources):
        return  # the run may have another budget than steps
    order = open_order(run, sizes=[1] * len(sources))
    assert isinstance(order, MixtureOrder)
    needed = order.count(run.budget.steps * run.global_batch).tolist()
    available = count_sequences(run, manifests)
    for source, sequences, per_pass in zip(sources, needed, available, strict=True):
        limit = source.maximum_repetitions
        name = source.corpus.name
        if limit is not None and sequences > limit * per_pass:
            passes = (
                f"{sequences / per_pass:.3g} passes over its {per_pass:,.0f}"
                if per_pass
                else "it has none"
            )
            what = (
                "the run needs more text of a source than its maximum number of repetitions allows."
            )
            needs = {
                "needed": f"{sequences:,} sequences: {passes}",
                "allowed": f"{limit:g}  (maximum_repetitions)",
            }
            key = f"mixtures.{run.corpus.name}.maximum_repetitions"
            next_step = f"raise {key}, lower the weight of {name}, or train fewer steps"
            raise UserError(what, mixture=run.corpus.name, source=name, **needs, next=next_step)


def count_sequences(run: RunSettings, manifests: dict[str, Path]) -> list[float]:
    """Return sequences per pass over each trained source."""
    assert run.mixture is not None
    streams = BATCHES[run.approach].streams
    if run.store is not None:
        stores = [read_store_manifest(path) for path in list_sources(run, where=manifests["store"])]
        return [m["tokens_total"] / run.sequence_length if streams else m["rows"] for m in stores]
    folders = [path.parent for path in list_sources(run, where=manifests["corpus"])]
    return [read_corpus_manifest(folder)["splits"]["train"]["rows"] for folder in folders]
