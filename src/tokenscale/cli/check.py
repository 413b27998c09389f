"""Check the configuration and the design of experiments; with --write, renew schemas and key tables.

Without names every experiment is checked, without --scale at every scale. What is refused would show something wrong:
exit code 2. Warnings and notes say what it will not show.
"""

import argparse
from pathlib import Path

from tokenscale.cli import configuration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to check, and for which machine."""
    parser.add_argument("experiment", nargs="*", help="names of experiments; by default all of them")
    parser.add_argument("--scale", help="one overlay; by default each of them")
    configuration.add_arguments(parser)
    parser.add_argument("--machine", help="file of the machine it is to run on, such as profiles/alps/machine.toml")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write workflow/schemas/*.json, the tables of config/README.md, and config/experiments/README.md",
    )


def run(arguments: argparse.Namespace) -> int:
    """Raise UserError at the first thing that cannot be read; 2 where a design is refused."""
    from tokenscale.base.files import write_json
    from tokenscale.cli.check_command import check
    from tokenscale.report import findings
    from tokenscale.settings import guide, reference
    from tokenscale.settings.config import CONFIG_FILE, load, schemas
    from tokenscale.settings.scales import SCALES

    if arguments.write:
        for name, schema in schemas().items():
            write_json(Path("workflow/schemas") / name, schema)
        reference.update(Path("config/README.md"))
        at = {scale: load(overrides={"scale": scale}) for scale in SCALES}
        guide.update(Path("config/experiments/README.md"), at)
        findings.update(Path("README.md"), Path("evidence"))
        return 0
    overrides = {key: value for key in ("scale", "machine") if (value := getattr(arguments, key)) is not None}
    configured = configuration.configuration(arguments, overrides)
    one_scale = configured.file_of("scale") != CONFIG_FILE
    refused = False
    for scale in [configured.settings.scale] if one_scale else SCALES:
        config = configuration.configuration(arguments, {**overrides, "scale": scale})
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
