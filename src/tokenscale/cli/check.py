"""Check the configuration and the design of experiments.

Without names, every experiment is checked; without --scale, at every scale. A refused design would give wrong
conclusions: exit code 2. Warnings and notes list what a design cannot show.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenscale.analysis.design import Design, Problem, find_problems
from tokenscale.analysis.readings import read_sizes
from tokenscale.base.errors import few
from tokenscale.cli import main
from tokenscale.data.batches.batch import Inputs
from tokenscale.data.batches.open import count_labelled_rows
from tokenscale.runs.launch.submission import install_hint
from tokenscale.runs.records.provenance import count_cores
from tokenscale.settings.closure import find_missing_packages
from tokenscale.settings.config import Config
from tokenscale.settings.manifests import list_manifests
from tokenscale.settings.run import RunSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the experiments, the configuration and the machine."""
    parser.add_argument("experiment", nargs="*", help="names of experiments; by default all of them")
    parser.add_argument("--scale", help="one overlay; by default each of them")
    main.add_configuration_arguments(parser)
    parser.add_argument("--machine", help="file of the machine it is to run on, such as profiles/alps/machine.toml")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings of every check. Return 2 if a design is refused; raise UserError for an unreadable file."""
    from tokenscale.settings.experiments import SCALES
    from tokenscale.settings.profile import CONFIG_FILE

    overrides = {key: value for key in ("scale", "machine") if (value := getattr(arguments, key)) is not None}
    configured = main.load_configuration(arguments, overrides)
    one_scale = configured.file_of("scale") != CONFIG_FILE
    refused = False
    for scale in [configured.settings.scale] if one_scale else SCALES:
        config = main.load_configuration(arguments, {**overrides, "scale": scale})
        here = scale == configured.settings.scale
        names = arguments.experiment
        if names and not one_scale:  # each experiment at the scales that it has
            names = [name for name in names if config.has_scale(name)]
        if names or not arguments.experiment:
            for line, refuses in check(config, names, here=here):
                print(line)
                refused |= refuses
        if not arguments.experiment and (note := config.left_out_note):
            print(f"{scale:<12} {note}")
    return 2 if refused else 0


def check(
    config: Config, names: list[str], *, here: bool, results: Path = Path("results")
) -> Iterator[tuple[str, bool]]:
    """Yield (line, whether it refuses) for each experiment and each of its problems; all experiments without names.

    `here`: the experiments are meant for this machine, so that its GPUs and cores count.
    """
    scale = config.settings.scale
    usable = names or config.usable([n for n in config.settings.experiments if config.has_scale(n)])
    for name, error in ({} if names else config.unusable).items():
        other_corpus = error.facts.get("key") == "corpus"
        yield f"{scale:<12} {name}: {error.what} {error.facts.get('reason', '')}".rstrip(), not other_corpus
    if config.machine.container is not None and config.machine.container_digest is None:
        what, next = (
            f"the image of {config.machine.container} has no digest",
            "sha256sum IMAGE, then container_digest = ",
        )
        yield _line(config, scale, Problem("refuse", what, "container_digest", f'{next}"sha256:…" there'))
    for name in usable:
        runs = config.runs(name)
        yield f"{scale:<12} {name}: {len(runs)} runs", False
        settings = [run.settings for run in runs]
        manifests = (sorted(results.glob(f"{where}/manifest.json")) for where in ("tokens/*/*/*", "corpus/*"))
        sizes, here_has = read_sizes(settings, *manifests), count_gpus_and_cores() if here else ()
        design = Design(config.experiment(name), runs, sizes, config.machine, *here_has)
        for problem in (*find_problems(design), *check_labels(settings, results), *check_packages(config, name)):
            yield _line(config, f"{name} at {scale}", problem, config.available[name])


def check_labels(runs: list[RunSettings], results: Path) -> Iterator[Problem]:
    """Yield the share of rows that keep a label, of runs that do not predict all tokens and whose inputs are built."""
    asked = set()
    for run in runs:
        places = {role: results.parent / path for role, path in list_manifests(run).items()}
        which = (*places.values(), run.approach, run.labels, run.objective, run.sequence_length)
        if (run.labels == "all" and run.objective != "masked") or which in asked:
            continue
        asked.add(which)
        if not all(path.is_file() for path in places.values()):
            continue
        folders: dict[str, Any] = {role: path if "store" in role else path.parent for role, path in places.items()}
        labelled, rows = count_labelled_rows(run, Inputs(**folders))
        level = "refuse" if labelled == 0 else "warn" if labelled < rows / 2 else "note"
        what = f"{run.approach} of {run.corpus.name}: {labelled} of the first {rows} rows keep a label"
        yield Problem(level, what, "runs.sequence_length", "raise it, so that rows reach their targets")


def check_packages(config: Config, name: str) -> Iterator[Problem]:
    """Yield each package that runs import and the machine's container lacks."""
    machine, key = config.machine, "container_packages"
    if machine.container is None:
        return
    if not machine.container_packages:
        what = f"the packages in the image of {machine.container} are not listed"
        yield Problem("note", what, key, "list them there")
        return
    runs = {run.run_id: run.settings for run in config.runs(name)}
    for package, run_ids in find_missing_packages(runs, machine.container_packages).items():
        what = f"{len(run_ids)} runs import {package}, which the container's image lacks ({few(run_ids)})"
        yield Problem("refuse", what, key, install_hint([package], machine.container))


def _line(config: Config, where: str, problem: Problem, file: object = "") -> tuple[str, bool]:
    """Return the line of a problem, with the file that its key stands in, and whether it refuses."""
    if problem.key.startswith("corpora."):
        file = config.file_of(problem.key)
    elif problem.key.startswith("container_"):
        file = config.settings.machine
    text = f"{where}: {problem.what} ({file}: {problem.key}). Next: {problem.next}"
    return f"  {problem.level:<6}  {text}", problem.level == "refuse"


def count_gpus_and_cores() -> tuple[int, int]:
    """Count the GPUs that this process may use, without torch, and the cores that it can keep busy."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if chosen is not None:
        there = min(there, len([entry for entry in chosen.split(",") if entry.strip() not in ("", "-1")]))
    return there, count_cores()
