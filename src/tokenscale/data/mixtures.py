"""Sources of a run, and the order of their samples: one corpus or store, or those of a mixture.

The manifest of a mixture lies in `results/mixtures/NAME/`. It lists the manifests of the corpora,
or of their token stores, by relative path and hash. Weights are not in it: they are settings of the
run.
"""

import os
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.base.files import check_types, read_manifest_file, report_malformed, sha256_file
from tokenscale.data.order.mixture import MixtureOrder
from tokenscale.data.order.permutation import ShuffledOrder
from tokenscale.settings.run import RunSettings

VERSION = 1


def manifest_path(where: Path) -> Path:
    """Return the path of a manifest from itself or its folder."""
    return Path(where) if Path(where).suffix == ".json" else Path(where) / "manifest.json"


def list_sources(run: RunSettings, where: Path, *, held_out: bool = False) -> list[Path]:
    """Return the folders or manifests of the corpora, or of the stores, that a run reads at
    `where`.

    With a mixture, `where` is its manifest, or its folder. With `held_out` the sources are all its
    corpora, otherwise those that are trained on. Raises UserError if the manifest has other sources
    than the run, and as `read_mixture` does.
    """
    if run.mixture is None:
        return [Path(where)]
    path = manifest_path(where)
    found = read_mixture(path)
    expected = [corpus.name for corpus in (run.corpora if held_out else run.trained_corpora)]
    if list(found) != expected:
        what = "the manifest of the mixture has other sources than the run."
        next_step = f"snakemake -f {path}"
        raise UserError(
            what, file=path, expected=", ".join(expected), found=", ".join(found), next=next_step
        )
    return list(found.values())


def read_mixture(path: Path) -> dict[str, Path]:
    """Return source → its manifest, in the order of the mixture.

    Raises UserError for a manifest of a mixture that is missing or malformed, and for a source that
    is missing or has changed.
    """
    next_step = f"snakemake -f {path}"
    manifest = read_manifest_file(
        path,
        what="mixture",
        newest=VERSION,
        next=next_step,
        sealed=True,
    )
    found = {}
    with report_malformed(path, what="manifest of the mixture", next=next_step):
        for source in manifest["sources"]:
            check_types(source, fields={"name": str, "manifest": str, "sha256": str})
    for source in manifest["sources"]:
        file = Path(os.path.normpath(path.parent / source["manifest"]))
        if not file.is_file():
            raise UserError(
                "a source of the mixture is missing.",
                source=source["name"],
                path=file,
                next=f"snakemake {file}",
            )
        if (digest := sha256_file(file)) != source["sha256"]:
            what = "a source of the mixture was built again with other content."
            expected = source["sha256"]
            raise UserError(
                what,
                source=source["name"],
                file=file,
                expected=expected,
                found=digest,
                next=next_step,
            )
        found[source["name"]] = file
    return found


def open_order(run: RunSettings, sizes: list[int]) -> ShuffledOrder | MixtureOrder:
    """Return the global order of samples, for trained sources of these sizes. Raises UserError for
    an empty source of a mixture.
    """
    if (mixture := run.mixture) is None:
        return ShuffledOrder(sizes[0], run.effective_seed)
    for corpus, size in zip(run.trained_corpora, sizes, strict=True):
        if size == 0:
            what = "a source of the mixture has no training documents."
            next_step = "give it documents, or the weight 0"
            raise UserError(what, mixture=run.corpus.name, source=corpus.name, next=next_step)
    weights = [[stage.weights[n] for n in mixture.trained] for stage in mixture.stages]
    starts = mixture.stage_starts(run.sequence_length)
    return MixtureOrder(
        sizes=sizes, stages=list(zip(starts, weights, strict=True)), seed=run.effective_seed
    )
