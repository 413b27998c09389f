"""Check the configuration and the design of experiments.

Without names, every experiment is checked; without --scale, at every scale. A refused design would
give wrong conclusions: exit code 2. Warnings and notes list what a design cannot show.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError, as_typed, few
from tokenscale.cli import main
from tokenscale.cli.doctor import is_importable
from tokenscale.cli.plan_prices import RunPrices
from tokenscale.costs.flops import weights
from tokenscale.data.batches.batch import Inputs
from tokenscale.data.batches.open import count_labelled_rows
from tokenscale.data.corpus.files import check_files
from tokenscale.referee.design import Design, Problem
from tokenscale.referee.design import find_problems as find_design_problems
from tokenscale.referee.readings import read_sizes
from tokenscale.runs.launch.image import find_image_error
from tokenscale.runs.launch.submission import install_hint
from tokenscale.runs.records.provenance import count_cores, count_gpus
from tokenscale.settings.claims import load_claims
from tokenscale.settings.closure import ONLY_FOR, find_missing_packages
from tokenscale.settings.config import Config
from tokenscale.settings.data import LOSS_CAUTION
from tokenscale.settings.manifests import list_manifests
from tokenscale.settings.run import OURS, RunSettings

#: largest share of a model's weights in tables of the vocabulary that passes without a warning
MOST_VOCABULARY = 0.95


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "experiment", nargs="*", help="names of experiments; by default all of them"
    )
    main.add_configuration_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings of every check. Return 2 if a design is refused; raise UserError for an
    unreadable file.
    """
    from tokenscale.settings.experiments import SCALES
    from tokenscale.settings.profile import CONFIG_FILE

    configured = main.load_configuration(arguments)
    if Path(configured.settings.claims).is_file() or configured.file_of("claims") != CONFIG_FILE:
        load_claims(Path(configured.settings.claims))
    one_scale = configured.file_of("scale") != CONFIG_FILE
    refused = False
    for scale in [configured.settings.scale] if one_scale else SCALES:
        config = main.load_configuration(arguments, overrides={"scale": scale})
        if not arguments.experiment:
            refused |= _print_unusable(config, scale)
        names = _select_names(config, given=arguments.experiment, one_scale=one_scale)
        here = scale == configured.settings.scale
        for name, problems in find_problems(config, names, here=here).items():
            refused |= _print_problems(
                config,
                scale,
                name=name,
                problems=problems,
            )
        if not arguments.experiment and (note := config.left_out_note):
            print(f"{scale:<12} {note}")
    return 2 if refused else 0


def _select_names(config: Config, given: list[str], one_scale: bool) -> list[str]:
    """Return the given experiments, or all that can be read; each at the scales that it has."""
    if not given:
        return config.usable([n for n in config.settings.experiments if config.has_scale(n)])
    if one_scale:
        return given
    return [name for name in given if config.has_scale(name)]


def _print_unusable(config: Config, scale: str) -> bool:
    """Print why experiments cannot be read at a scale. Return whether that refuses one: a corpus
    that is not there yet does not.
    """
    refused = False
    for name, error in config.unusable.items():
        print(f"{scale:<12} {name}: {error.what} {error.facts.get('reason', '')}".rstrip())
        refused |= error.facts.get("key") != "corpus"
    return refused


def _print_problems(config: Config, scale: str, name: str, problems: list[Problem]) -> bool:
    """Print the findings of an experiment, or as "" of what several share. Return whether one
    refuses it.
    """
    if name:
        print(f"{scale:<12} {name}: {len(config.runs(name))} runs")
    where = f"{name} at {scale}" if name else scale
    for problem in problems:
        what = describe(config, name, problem=problem)
        print(f"  {problem.level:<6}  {where}: {what}. Next: {as_typed(problem.next)}")
    return any(problem.level == "refuse" for problem in problems)


def describe(config: Config, name: str, problem: Problem) -> str:
    """Return what is wrong, with the file and the key that decide it."""
    file: object = config.available.get(name, config.file_of(problem.key))
    if problem.key.startswith("corpora."):
        file = config.file_of(problem.key)
    elif problem.key.startswith("container_"):
        file = config.settings.machine
    return f"{problem.what} ({file}: {problem.key})" if problem.key else problem.what


def find_problems(
    config: Config, names: Sequence[str], *, here: bool, results: Path = Path("results")
) -> dict[str, list[Problem]]:
    """Return experiment → its problems, and as "" those of the machine's file and of corpora that
    several may share.

    `here`: the experiments are meant for this machine, so that its GPUs, cores, packages and text
    files count.
    """
    found: dict[str, list[Problem]] = {"": []}
    if names and (error := find_image_error(config.machine)) is not None:
        found[""].append(
            Problem(
                level="refuse",
                what=error.what.rstrip("."),
                key="container_record",
                next=str(error.facts["next"]),
            )
        )
    if here:
        found[""] += check_sources(config, names, results=results)
    for name in names:
        runs = config.runs(name)
        settings = [run.settings for run in runs]
        manifests = (
            sorted(results.glob(f"{where}/manifest.json")) for where in ("tokens/*/*/*", "corpus/*")
        )
        on_nodes = config.machine.starter == "srun"
        sizes = read_sizes(settings, *manifests)
        here_has = (count_gpus(), count_cores()) if here and not on_nodes else ()
        found[name] = find_design_problems(
            Design(config.experiment(name), runs, sizes, config.machine, *here_has)
        )
        found[name] += check_labels(settings, results)
        found[name] += check_tokenizers(
            settings, prices=RunPrices(config, results), results=results
        )
        found[name] += check_packages(config, name, here=here)
    return found


def check_sources(
    config: Config, names: Sequence[str], results: Path = Path("results")
) -> Iterator[Problem]:
    """Yield each corpus of the experiments whose files are missing or not readable, as Snakemake
    refuses it.
    """
    for name in config.list_corpora(list(names)):
        corpus = config.corpora[name]
        try:
            if corpus.source.kind == "files":
                check_files(corpus, folder=results / "corpus", file_of=config.file_of)
        except UserError as error:
            data = (
                error.facts.get("requested")
                or error.facts.get("data")
                or error.facts.get("found", "")
            )
            what = f"corpus {name}: {error.what.rstrip('.')}: {data}".removesuffix(": ")
            yield Problem(
                level="refuse",
                what=what,
                key=error.facts.get("key", f"corpora.{name}"),
                next=error.facts.get("next", ""),
            )


def check_labels(runs: list[RunSettings], results: Path) -> Iterator[Problem]:
    """Yield the share of rows that keep a label, of runs that do not predict all tokens and whose
    inputs are built.
    """
    asked = set()
    for run in runs:
        places = {role: results.parent / path for role, path in list_manifests(run).items()}
        which = (*places.values(), run.approach, run.labels, run.objective, run.sequence_length)
        if (run.labels == "all" and run.objective != "masked") or which in asked:
            continue
        asked.add(which)
        if not all(path.is_file() for path in places.values()):
            continue
        folders: dict[str, Any] = {
            role: path if "store" in role else path.parent for role, path in places.items()
        }
        counted = count_labelled_rows(run, inputs=Inputs(**folders))
        if counted is None:
            continue
        labelled, rows = counted
        if labelled == 0:
            level = "refuse"
        elif labelled < rows / 2:
            level = "warn"
        else:
            level = "note"
        what = (
            f"{run.approach} of {run.corpus.name}: {labelled} of the first {rows} rows keep a label"
        )
        yield Problem(
            level=level,
            what=what,
            key="runs.sequence_length",
            next="raise it, so that rows reach their targets",
        )


def check_tokenizers(
    runs: list[RunSettings], prices: RunPrices, results: Path
) -> Iterator[Problem]:
    """Yield tokenizers that lose text, as stores that are built have measured, and that dwarf the
    model.
    """
    for corpus, tokenizer in {
        (c.name, run.tokenizer): None for run in runs for c in run.trained_corpora
    }:
        stores = sorted((results / "tokens" / corpus / tokenizer.name).glob("*/"))
        samples = [
            (prices.read_manifest("tokens", corpus, tokenizer.name, store.name) or {})
            for store in stores
        ]
        sample: dict[str, Any] = next(
            (found["text_sample"] for found in samples if "text_sample" in found), {}
        )
        lost = sample.get("lost", 0)
        unknown = sample.get("unknown", 0)
        if max(lost, unknown) > LOSS_CAUTION:
            what = (
                f"tokenizer {tokenizer.name} does not fit {corpus}: {lost:.2%} of its bytes are "
                "lost"
            )
            if unknown > 0:
                what += f", {unknown:.2%} of its ids are unknown"
            level = "refuse" if lost > tokenizer.accepted_loss else "warn"
            yield Problem(
                level=level,
                what=what,
                key="runs.tokenizer",
                next="choose a tokenizer that falls back to bytes",
            )
    for run in {(run.model, run.tokenizer.name): run for run in runs if run.arm == OURS}.values():
        entries = (
            run.model.vocabulary_size
            or run.tokenizer.vocabulary_size
            or prices.read_vocabulary(run)
        )
        if entries is None or run.model.transformers is not None:
            continue
        counted = weights(run.model.with_vocabulary(entries).with_positions(run.sequence_length))
        share = 1 - counted.blocks / counted.total
        if share > MOST_VOCABULARY:
            what = (
                f"the {entries:,} entries of {run.tokenizer.name} take {share:.0%} of the "
                "weights of "
            )
            following = "a tokenizer with fewer entries, or a larger model"
            yield Problem(
                level="warn",
                what=what + run.model.name,
                key="runs.tokenizer",
                next=following,
            )


def check_packages(config: Config, name: str, *, here: bool) -> Iterator[Problem]:
    """Yield packages that runs import, and that the machine's container lacks or, of optional ones,
    this Python.
    """
    machine = config.machine
    key = "container_packages"
    runs = {run.run_id: run.settings for run in config.runs(name)}
    if machine.container is None:  # what every run needs is a finding of `doctor`
        for package, needs in ONLY_FOR.items() if here else ():
            # other trainers have their own environment
            run_ids = [run_id for run_id, run in runs.items() if run.arm == OURS and needs(run)]
            if run_ids and not is_importable(package):
                what = (
                    f"{len(run_ids)} runs import {package}, which this Python lacks "
                    f"({few(run_ids)})"
                )
                yield Problem(
                    level="refuse",
                    what=what,
                    key="",
                    next=f"{sys.executable} -m pip install {package.replace('_', '-')}",
                )
    elif not machine.container_packages:
        what = f"the packages in the image of {machine.container} are not listed"
        yield Problem(
            level="note",
            what=what,
            key=key,
            next="list them there",
        )
    else:
        for package, run_ids in find_missing_packages(
            runs, packages=machine.container_packages
        ).items():
            what = (
                f"{len(run_ids)} runs import {package}, which the container lacks ({few(run_ids)})"
            )
            yield Problem(
                level="refuse",
                what=what,
                key=key,
                next=install_hint([package], container=machine.container),
            )
