"""Write the manifest of a mixture, which lists the corpora or the token stores that its runs
read.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_record, sha256_file, write_sealed

VERSION = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--names", nargs="+", required=True, metavar="CORPUS", help="names of the corpora"
    )
    text = "their manifests, or those of stores"
    parser.add_argument("--sources", nargs="+", required=True, type=Path, metavar="FILE", help=text)
    parser.add_argument(
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help="results/mixtures/…/manifest.json",
    )


def run(arguments: argparse.Namespace) -> None:
    if len(arguments.names) != len(arguments.sources):
        found = f"{len(arguments.names)} names, {len(arguments.sources)} manifests"
        raise UserError(
            "--names and --sources differ in number.",
            found=found,
            next="one manifest for each name",
        )
    write_mixture(dict(zip(arguments.names, arguments.sources, strict=True)), path=arguments.output)
    print(f"{arguments.output}: {', '.join(arguments.names)}")


def write_mixture(sources: dict[str, Path], path: Path) -> dict[str, Any]:
    """Write and return the manifest of a mixture; `sources` are corpus → manifest of the corpus or
    of its store.

    A manifest that is equal is not written again. Raises UserError for a missing source.
    """
    listed = []
    for name, manifest in sources.items():
        if not manifest.is_file():
            what = "a source of the mixture is missing."
            next_step = f"snakemake {manifest}"
            raise UserError(what, source=name, path=manifest, next=next_step)
        relative = os.path.relpath(manifest, path.parent)
        listed.append({"name": name, "manifest": relative, "sha256": sha256_file(manifest)})
    content = {"schema_version": VERSION, "sources": listed}
    try:
        same = read_record(path, what="mixture") == content
    except UserError:
        same = False
    if not same:
        write_sealed(path, record=content)
    return content
