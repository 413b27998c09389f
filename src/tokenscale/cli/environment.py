"""Print the packages of the environment that built a report or trained a run, as requirements for
pip.
"""

import argparse
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, report_malformed, write_text
from tokenscale.runs.records.provenance import name_differences


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        help="the folder of a report (results/report) or of a run (results/runs/ID)",
    )
    parser.add_argument(
        "--output", type=Path, help="write the requirements here in place of the terminal"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print or write the requirements."""
    text = write_requirements(arguments.path)
    if arguments.output is None:
        print(text, end="")
    else:
        write_text(arguments.output, text)
    return 0


def write_requirements(folder: Path) -> str:
    """Return what a report's `provenance.json` or a run's `run.json` records, as text that `pip
    install -r` takes.

    Runs of a report that were trained with other packages are comments. Raises UserError for a
    folder without a record.
    """
    path = next(
        (folder / name for name in ("provenance.json", "run.json") if (folder / name).is_file()),
        None,
    )
    if path is None:
        facts = {"folder": folder, "expected": "provenance.json (a report) or run.json (a run)"}
        following = "build a report first: snakemake report  (writes results/report)"
        raise UserError("there is no record of an environment here.", **facts, next=following)
    record = read_json(path, what="record of an environment")
    with report_malformed(
        path, what="record of an environment", next="build the report again, or train the run again"
    ):
        main: dict[str, str] = dict(
            record["versions"] if path.name == "run.json" else record["packages"]
        )
        python = main.pop("python")
        version = record.get("tokenscale") or main.get("tokenscale", "")
        main.pop("tokenscale", None)
        installed = record.get("installed") or main
        commit = (record.get("git") or {}).get("commit")
        lines = [f"# The environment of {folder}: Python {python}, tokenscale {version}"]
        if commit:
            lines[0] += f" of commit {commit}"
        if "installed" not in record:
            lines += ["# The record has only the main packages."]
        lines += [_requirement(name, version=installed[name]) for name in sorted(installed)]
        differing: dict[str, list[str]] = {}
        for part in record.get("experiments", {}).values():
            for run, facts in part["runs"].items():
                own = {
                    name: version
                    for name, version in facts["packages"].items()
                    if name in installed
                }
                if found := name_differences(installed | own, now=installed):
                    differing.setdefault(
                        ", ".join(text.partition(" then")[0] for text in found), []
                    ).append(run)
        lines += [
            f"# trained with {packages}: {', '.join(runs)}" for packages, runs in differing.items()
        ]
    return "".join(f"{line}\n" for line in lines)


def _requirement(name: str, version: str) -> str:
    """Return a line for pip. Registries have no local versions such as `2.13.0+cpu`: the build is a
    comment.

    >>> _requirement("torch", "2.13.0+cpu")
    'torch==2.13.0  # recorded: 2.13.0+cpu'
    """
    public = version.partition("+")[0]
    return f"{name}=={public}" + (f"  # recorded: {version}" if public != version else "")
