"""`train` under torchrun: the ranks are there already, so they agree on a run first and then train it, in process.

Rank 0 alone reads the flags, prepares and holds the run's folder; the others wait, however long that takes, and hear
from it the run's settings and where its data lie. JSON in a tensor, no pickle.
"""

import argparse
import datetime
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tokenscale.base.errors import UserError
from tokenscale.cli.train_inputs import prepare, print_summary
from tokenscale.cli.train_request import request
from tokenscale.runs.launch.attempts import AGAIN, finish
from tokenscale.runs.launch.start import opened
from tokenscale.settings.run import RunSettings
from tokenscale.train.loop import Inputs, train
from tokenscale.train.parallel.world import World, join
from tokenscale.train.signals import Interrupted

#: preparing may download and tokenize for hours; the default of a process group is minutes
PATIENCE = datetime.timedelta(days=2)


def train_together(arguments: argparse.Namespace) -> int:
    """Train the run that the flags ask for, as one rank of torchrun's. Returns the exit code, the same on every rank.

    A UserError of rank 0 is printed by it alone.
    """
    # the one setting that joining needs; a value that is not allowed is told by rank 0, like all others
    world = join(int(os.environ["WORLD_SIZE"]), arguments.device or "auto")
    with ExitStack() as held:
        plan, failure, finishing = None, None, None
        if world.rank == 0:
            try:
                plan, finishing = _plan(arguments, world, held)
            except UserError as error:
                print(error.render(), file=sys.stderr, flush=True)
                plan = {"exit": 2}
            except Exception as error:  # a bug: the others must not wait for ever
                plan, failure = {"exit": 1}, error
        plan = tell(plan, world)
        if failure is not None:
            raise failure
        if "exit" not in plan:
            run = RunSettings.from_json(plan["run"])
            inputs = {role: Path(path) for role, path in plan["inputs"].items()}
            try:
                train(run, Inputs(**inputs), Path(plan["directory"]), world, plan["attempt"])
                plan["exit"] = 0
                if world.rank == 0 and not finish(*finishing):
                    plan["exit"] = 1
            except Interrupted:
                plan["exit"] = AGAIN
        world.close()
    if world.rank == 0 and plan["exit"] == 0:
        print_summary(finishing[0])
    return plan["exit"]


def _plan(arguments: argparse.Namespace, world: World, held: ExitStack) -> tuple[dict[str, Any], tuple]:
    """What rank 0 tells the others, and what it seals the run with. The run's folder stays held."""
    job = prepare(request(arguments, world.size), lambda line: print(line, flush=True))
    identity, attempt, _ = held.enter_context(opened(job.run, job.output, job.manifests))
    directory = job.output.parent.resolve()
    finishing = (job.output.parent, job.output, identity, job.run)
    if attempt is None:
        return {"exit": 0}, finishing
    # a store is named by its manifest, since it may be one file among others; corpus and tokenizer by their folders
    inputs = {role: path if "store" in role else path.parent for role, path in job.manifests.items()}
    plan = {
        "run": job.run.to_json(),
        "inputs": {role: str(path.resolve()) for role, path in inputs.items()},
        "directory": str(directory),
        "attempt": attempt,
    }
    return plan, finishing


def tell(message: dict[str, Any] | None, world: World) -> dict[str, Any]:
    """Rank 0's message, on every rank. A collective."""
    if world.size == 1:
        return message
    group = dist.new_group(backend="gloo", timeout=PATIENCE)  # on the CPU, whatever the ranks compute on
    data = torch.tensor(list(json.dumps(message).encode()), dtype=torch.uint8)
    length = torch.tensor([len(data)])
    dist.broadcast(length, 0, group=group)
    data = data if world.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, 0, group=group)
    return json.loads(bytes(data.tolist()))
