"""Run one rank of a run, or a run that only reads, as torchrun, srun or our own launcher starts it.

The modules imported here are the code of a training.
"""

import argparse
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tokenscale.runs.launch.ranks import PORT_TAKEN

#: variable of srun → variable that ranks read
SRUN = {"SLURM_PROCID": "RANK", "SLURM_NTASKS": "WORLD_SIZE", "SLURM_LOCALID": "LOCAL_RANK"}


if TYPE_CHECKING:
    from tokenscale.data.batches.batch import Inputs
    from tokenscale.settings.run import RunSettings
    from tokenscale.train.watchdog import Signals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the run. Input paths are manifests; the data beside them is
    read.
    """
    # not `--run`: torchrun takes that for an abbreviation of an option of its own
    parser.add_argument("--settings", required=True, help="the run's settings as canonical JSON")
    parser.add_argument("--directory", required=True, type=Path, help="results/runs/<run id>")
    parser.add_argument("--attempt", type=int, default=0, help="number of this attempt")
    of_corpus = "manifest of the raw corpus (to tokenize while training, to translate)"
    parser.add_argument("--corpus", type=Path, help=of_corpus)
    parser.add_argument(
        "--tokenizer", type=Path, help="manifest of the tokenizer (the same approaches)"
    )
    parser.add_argument(
        "--store", type=Path, help="manifest of the token store (the other approaches)"
    )
    parser.add_argument(
        "--validation-store", type=Path, help="manifest of the packed validation store"
    )
    parser.add_argument(
        "--arm", type=Path, help="another trainer: results/arms/NAME/environment.json"
    )
    parser.add_argument(
        "--srun", action="store_true", help="started by srun: take the rank from its variables"
    )
    of_hang = "seconds without a step after which the rank ends; 0: never"
    parser.add_argument("--hang-s", type=float, default=0, help=of_hang)
    parser.add_argument("--nodes", type=int, help="refuse another number of nodes")
    parser.add_argument("--network", help="refuse another network between nodes, as NCCL names it")
    parser.add_argument(
        "--least-links", type=json.loads, help="refuse slower links: GB/s by kind, as JSON"
    )
    parser.add_argument(
        "--by-local-rank", type=json.loads, default={}, help="variables by local rank, as JSON"
    )


def run(arguments: argparse.Namespace) -> int:
    """Join the process group, train, and tear the process group down; or train one rank of another
    trainer.
    """
    if arguments.srun:
        os.environ.update({ours: os.environ[theirs] for theirs, ours in SRUN.items()})
    place = int(os.environ.get("LOCAL_RANK", 0))
    os.environ.update({name: values[place] for name, values in arguments.by_local_rank.items()})

    from tokenscale.settings.run import READERS, RunSettings

    settings = RunSettings.from_json(arguments.settings)
    if settings.arm in READERS:
        from tokenscale.arms.reader import read

        read(settings, _inputs(arguments), arguments.directory, arguments.attempt)
        return 0
    if arguments.arm is not None:
        from tokenscale.arms.train import train as train_arm
        from tokenscale.train.watchdog import FIRST_TIMES

        ranks = {
            "rank": int(os.environ.get("RANK", 0)),
            "world_size": int(os.environ.get("WORLD_SIZE", 1)),
        }
        more = {"attempt": arguments.attempt, **ranks}
        train_arm(
            settings,
            arguments.store,
            arguments.arm,
            arguments.directory,
            **more,
            # nobody knows where its start ends
            hang_s=arguments.hang_s * FIRST_TIMES,
        )
        return 0

    from tokenscale.train.watchdog import Signals

    # from the start: imports, containers and first communicators take a minute
    with Signals() as signals:
        return _run(settings, arguments, signals)


def _inputs(arguments: argparse.Namespace) -> "Inputs":
    from tokenscale.data.batches.batch import Inputs

    def folder(manifest: Path | None) -> Path | None:
        return manifest.parent if manifest else None

    return Inputs(
        corpus=folder(arguments.corpus),
        tokenizer=folder(arguments.tokenizer),
        store=arguments.store,  # the manifest: a store may be one file among others of its folder
        validation_store=arguments.validation_store,
    )


def _run(settings: "RunSettings", arguments: argparse.Namespace, signals: "Signals") -> int:
    from tokenscale.cli.main import translate_errors
    from tokenscale.train.loop import train
    from tokenscale.train.parallel.preflight import check_links
    from tokenscale.train.parallel.world import PortTaken, join, wait_for_root_cause
    from tokenscale.train.watchdog import Interrupted

    try:
        world = join(
            settings.layout.world_size,
            settings.device,
            nodes=arguments.nodes,
            network=arguments.network,
            hang_s=arguments.hang_s,
        )
    except PortTaken as error:
        print(error.render(), file=sys.stderr)
        return PORT_TAKEN
    with wait_for_root_cause(world), translate_errors():
        if arguments.least_links:
            world = check_links(world, least=arguments.least_links)
        # an interruption is not a failure, which would kill the other ranks; the launcher reads it
        # from the log
        with suppress(Interrupted):
            train(
                settings,
                _inputs(arguments),
                arguments.directory,
                world,
                arguments.attempt,
                signals,
                arguments.hang_s,
            )
    world.close()
    return 0
