"""Check the configuration and the design of experiments; with --write, renew schemas and key tables.

Without names every experiment is checked, without --scale at every scale. What is refused would show something wrong:
exit code 2. Warnings and notes say what it will not show.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to check, and for which machine."""
    parser.add_argument("experiment", nargs="*", help="names of experiments; by default all of them")
    parser.add_argument("--config", default="config/config.yaml", help="configuration file")
    parser.add_argument("--scale", help="one overlay; by default each of them")
    parser.add_argument("--profile", help="Snakemake's profile, such as alps: its scale and its machine")
    parser.add_argument("--machine", help="file of the machine it is to run on, such as profiles/alps/machine.toml")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write workflow/schemas/*.json, the tables of config/README.md, and config/experiments/README.md",
    )


def run(arguments: argparse.Namespace) -> int:
    """Raise UserError at the first thing that cannot be read; 2 where a design is refused."""
    from tokenscale.commands.check import check
    from tokenscale.files import write_json
    from tokenscale.report import findings
    from tokenscale.settings import config as configuration
    from tokenscale.settings import guide, profile, reference
    from tokenscale.settings.scales import SCALES

    if arguments.write:
        for name, schema in configuration.schemas().items():
            write_json(Path("workflow/schemas") / name, schema)
        reference.update(Path("config/README.md"))
        at = {s: configuration.load(arguments.config, overrides={"scale": s}) for s in SCALES}
        guide.update(Path("config/experiments/README.md"), at)
        findings.update(Path("README.md"), Path("evidence"))
        return 0
    overrides = profile.configuration(arguments.profile) if arguments.profile else {}
    overrides |= {k: v for k in ("scale", "machine") if (v := getattr(arguments, k)) is not None}
    configured = configuration.load(arguments.config, overrides=overrides).settings.scale
    refused = False
    for scale in [configured] if "scale" in overrides else SCALES:
        config = configuration.load(arguments.config, overrides={**overrides, "scale": scale})
        for line, refuses in check(config, arguments.experiment or list(config.available), here=scale == configured):
            print(line)
            refused |= refuses
    return 2 if refused else 0
