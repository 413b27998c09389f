"""Run `train` under torchrun: the ranks agree on a run first and then train it, in process.

Rank 0 alone reads the flags, prepares the inputs and locks the run's folder. The others wait,
without a short timeout, and receive the run's settings and its data paths, as JSON in a tensor, not
pickled.
"""

import argparse
import datetime
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tokenscale.base.errors import UserError
from tokenscale.cli.train.inputs import prepare, print_summary, report_failure
from tokenscale.cli.train.request import parse_request
from tokenscale.data.batches.batch import Inputs
from tokenscale.runs.launch.attempts import RESUME_EXIT_CODE, write_done_file
from tokenscale.runs.launch.start import open_run
from tokenscale.settings.run import RunSettings
from tokenscale.train.loop import train
from tokenscale.train.parallel.world import World, join
from tokenscale.train.watchdog import Interrupted

#: timeout of the broadcast: preparing may download and tokenize for hours; the default is minutes
BROADCAST_TIMEOUT = datetime.timedelta(days=2)


def train_together(arguments: argparse.Namespace) -> int:
    """Train the run that the flags request, as one rank of torchrun. Return the exit code, equal on
    every rank.

    Only rank 0 prints its UserError.
    """
    # joining needs only this setting; rank 0 reports a value that is not allowed, like all others
    world = join(None, device=arguments.device or "auto")
    with ExitStack() as stack:
        plan = None
        failure = None
        finishing = None
        if world.rank == 0:
            try:
                plan, finishing = _make_plan(arguments, world, stack=stack)
            except UserError as error:
                print(error.render(), file=sys.stderr, flush=True)
                plan = {"exit": 2}
            except Exception as error:  # a bug: the other ranks must not wait forever
                plan = {"exit": 1}
                failure = error
        plan = broadcast_from_rank_0(plan, world)
        if failure is not None:
            raise failure
        if "exit" not in plan:
            run = RunSettings.from_json(plan["run"])
            inputs: dict[str, Any] = {role: Path(path) for role, path in plan["inputs"].items()}
            try:
                train(
                    run,
                    inputs=Inputs(**inputs),
                    directory=Path(plan["directory"]),
                    world=world,
                    attempt=plan["attempt"],
                )
                plan["exit"] = 0
                if finishing is not None and not write_done_file(*finishing):
                    plan["exit"] = 1
            except Interrupted:
                plan["exit"] = RESUME_EXIT_CODE
        world.close()
    if finishing is not None and plan["exit"] == 0:
        print_summary(finishing[0])
        return report_failure(finishing[1])
    return plan["exit"]


def _make_plan(
    arguments: argparse.Namespace, world: World, stack: ExitStack
) -> tuple[dict[str, Any], tuple]:
    """Return rank 0's plan for all ranks, and what seals the run. The run's folder stays locked."""
    job = prepare(parse_request(arguments, world_size=world.size))
    identity, attempt, _ = stack.enter_context(
        open_run(job.run, output=job.output, manifests=job.manifests)
    )
    finishing = (job.output.parent, job.output, identity, job.run)
    if attempt is None:
        return {"exit": 0}, finishing
    # a store is named by its manifest, because it may share a folder; corpus and tokenizer are
    # named by their folders
    inputs = {
        role: path if "store" in role else path.parent for role, path in job.manifests.items()
    }
    plan: dict[str, Any] = {
        "inputs": {role: str(path.resolve()) for role, path in inputs.items()},
        "attempt": attempt,
    }
    return plan | {
        "run": job.run.to_json(),
        "directory": str(job.output.parent.resolve()),
    }, finishing


def broadcast_from_rank_0(message: dict[str, Any] | None, world: World) -> dict[str, Any]:
    """Broadcast rank 0's message to every rank. A collective."""
    if world.size == 1:
        assert message is not None  # rank 0 has one
        return message
    # on the CPU, whatever device the ranks use
    group = dist.new_group(backend="gloo", timeout=BROADCAST_TIMEOUT)
    data = torch.tensor(list(json.dumps(message).encode()), dtype=torch.uint8)
    length = torch.tensor([len(data)])
    dist.broadcast(length, 0, group=group)
    data = data if world.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, 0, group=group)
    return json.loads(bytes(data.tolist()))
