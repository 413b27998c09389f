"""Other trainers as arms of an experiment: list them, or build the environment of one."""

import argparse
import os
import sys
from pathlib import Path

from tokenscale.arms.environments import list_arms, load_arm, prepare
from tokenscale.base.errors import as_typed
from tokenscale.base.files import read_json
from tokenscale.base.wording import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="an arm; without one, all arms are listed"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default results/arms/NAME/environment.json"
    )


def run(arguments: argparse.Namespace) -> int:
    """List the arms, or build the environment of one and report its size."""
    if arguments.name is None:
        for name in list_arms():
            print(f"{name:<12} {load_arm(name).description}")
        return 0
    record = arguments.output or Path(f"results/arms/{arguments.name}/environment.json")
    found = prepare(arguments.name, record)
    if found["error"]:
        lines = f"tokenscale: {found['error']}\n  next  correct that, and  snakemake -f {record}"
        print(as_typed(lines), file=sys.stderr)
        return 0  # the runs of this arm become invalid, and others go on
    build = read_json(record.with_name("build.json"))
    packages = len(found["packages"])
    size = f"{format_bytes(build['bytes'])}, {build['seconds']:.0f} s"
    print(f"arm {arguments.name}: {packages} packages, {size}  ({os.path.relpath(record)})")
    return 0
