"""Manifest of a mixture: the corpora, or the token stores, that a run with a mixture reads.

It lies in `results/mixtures/NAME/` and lists the manifests of its sources by relative path and hash. Weights are not in
it: they are settings of the run.
"""

import math
import os
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    check_types,
    pretty_json,
    read_manifest_file,
    report_malformed,
    sha256_file,
    write_json,
)
from tokenscale.data.order.mixture import MixtureOrder
from tokenscale.settings.registry import BATCHES
from tokenscale.settings.run import RunSettings

VERSION = 1


def write_mixture(sources: dict[str, Path], path: Path) -> dict[str, Any]:
    """Write and return the manifest of a mixture; `sources` are corpus → manifest of the corpus or of its store.

    Raises UserError for a missing manifest.
    """
    listed = []
    for name, manifest in sources.items():
        if not manifest.is_file():
            raise UserError(
                "a source of the mixture is missing.", source=name, path=manifest, next=f"snakemake {manifest}"
            )
        relative = os.path.relpath(manifest, path.parent)
        listed.append({"name": name, "manifest": relative, "sha256": sha256_file(manifest)})
    content = {"schema_version": VERSION, "sources": listed}
    if not (path.is_file() and path.read_text(encoding="utf-8") == pretty_json(content)):
        write_json(path, content)
    return content


def list_sources(run: RunSettings, where: Path) -> list[Path]:
    """Return the manifests of the corpora, or of the stores, that a run with a mixture reads.

    `where` is the mixture's manifest, or its folder. Raises UserError if it has other sources than the run, and as
    `read_mixture` does.
    """
    assert run.mixture is not None
    path = Path(where) if Path(where).suffix == ".json" else Path(where) / "manifest.json"
    found = read_mixture(path)
    if list(found) != run.mixture.names:
        raise UserError(
            "the manifest of the mixture has other sources than the run.",
            file=path,
            expected=", ".join(run.mixture.names),
            found=", ".join(found),
            next=f"snakemake -f {path}",
        )
    return list(found.values())


def read_mixture(path: Path) -> dict[str, Path]:
    """Return source → its manifest, in the order of the mixture.

    Raises UserError for a manifest of a mixture that is missing or malformed, and for a source that is missing or has
    changed.
    """
    next = f"snakemake -f {path}"
    manifest = read_manifest_file(path, "mixture", VERSION, next)
    found = {}
    with report_malformed(path, "manifest of the mixture", next):
        for source in manifest["sources"]:
            check_types(source, {"name": str, "manifest": str, "sha256": str})
    for source in manifest["sources"]:
        file = Path(os.path.normpath(path.parent / source["manifest"]))
        if not file.is_file():
            raise UserError(
                "a source of the mixture is missing.", source=source["name"], path=file, next=f"snakemake {file}"
            )
        if (digest := sha256_file(file)) != source["sha256"]:
            raise UserError(
                "a source of the mixture was built again with other content.",
                source=source["name"],
                file=file,
                expected=f"sha256 {source['sha256']}  ({path})",
                found=f"sha256 {digest}",
                next=next,
            )
        found[source["name"]] = file
    return found


def mixture_order(run: RunSettings, sizes: list[int]) -> MixtureOrder:
    """Return the order of the samples of a run with a mixture, for sources of these sizes.

    Raises UserError for an empty source with a weight.
    """
    mixture = run.mixture
    assert mixture is not None
    stages = list(
        zip(mixture.stage_starts(run.sequence_length), (stage.weights for stage in mixture.stages), strict=True)
    )
    for number, (name, size) in enumerate(zip(mixture.names, sizes, strict=True)):
        if size == 0 and any(weights[number] for _, weights in stages):
            raise UserError(
                "a source of the mixture has no training documents.",
                mixture=run.corpus.name,
                source=name,
                next="give it documents, or the weight 0",
            )
    return MixtureOrder(sizes, stages, run.effective_seed)


def check_repetitions(run: RunSettings, available: list[float]) -> None:
    """Raise UserError if the run needs more of a source than its maximum number of repetitions allows.

    `available` are the sequences in one pass over each source. Sources without a maximum are not checked; with one, the
    run has a budget of steps.
    """
    mixture = run.mixture
    assert mixture is not None
    if all(source.maximum_repetitions is None for source in mixture.sources):
        return
    needed = mixture_order(run, [int(bool(size)) for size in available]).count(run.budget.steps * run.global_batch)
    for source, sequences, once in zip(mixture.sources, needed.tolist(), available, strict=True):
        limit = source.maximum_repetitions
        if limit is None or sequences <= limit * once:
            continue
        passes, name = sequences / once, source.corpus.name
        raise UserError(
            "the run needs more text of a source than there is.",
            mixture=run.corpus.name,
            source=name,
            needed=f"{sequences:,} sequences: {passes:.3g} passes over its {once:,.0f}",
            allowed=f"{limit:g}  (maximum_repetitions)",
            next=f"raise mixtures.{run.corpus.name}.maximum_repetitions, lower the weight of {name}, or train "
            "fewer steps",
        )


def count_sequences(run: RunSettings, manifests: dict[str, Path]) -> list[float]:
    """Return the sequences in one pass over each source of a run; for streams, its tokens divided by their length.

    `manifests` are the run's inputs by role. Reads manifests only, except for approach padding-free, which tokenizes
    all documents of the sources with a maximum number of repetitions; without a maximum, infinity is returned.
    """
    from tokenscale.data.corpus.raw_text import read_corpus_manifest
    from tokenscale.data.stores.manifest import read_store_manifest

    assert run.mixture is not None
    streams = BATCHES[run.approach].streams
    if run.store is not None:
        stores = [read_store_manifest(path) for path in list_sources(run, manifests["store"])]
        return [m["tokens_total"] / run.sequence_length if streams else m["rows"] for m in stores]
    if not streams:
        folders = [path.parent for path in list_sources(run, manifests["corpus"])]
        return [read_corpus_manifest(folder)["splits"]["train"]["rows"] for folder in folders]
    from tokenscale.data.batches.online import open_documents

    opened = open_documents(run, manifests["corpus"], manifests["tokenizer"].parent)
    return [
        math.inf if source.maximum_repetitions is None else documents.total_tokens / run.sequence_length
        for source, documents in zip(run.mixture.sources, opened, strict=True)
    ]
