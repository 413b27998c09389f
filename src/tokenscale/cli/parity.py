"""Compare two recorded trainings: equal, equal to rounding, or different, and the cause of the first difference.

Both training scripts record with src/tokenscale/parity/recorder.py, which works without this package.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the two recordings and the output file."""
    parser.add_argument(
        "a", type=Path, metavar="A", help="folder of the reference's recording, with floor-1, floor-2 …"
    )
    parser.add_argument("b", type=Path, metavar="B", help="folder of the recording that is compared")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the certificate (JSON)")
    parser.add_argument(
        "--names", type=Path, metavar="FILE", help="JSON: A's parameter → B's, where their values do not align them"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict. Return 0 where both are equal or equal to rounding, 1 where they differ."""
    from tokenscale.base.errors import UserError
    from tokenscale.base.files import read_json, write_json
    from tokenscale.parity.certificate import DIFFERENT, certify, compare, summarise
    from tokenscale.parity.recording import read_recording

    names = read_json(arguments.names, "map of names") if arguments.names else {}
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        expected = '{"A\'s name": "B\'s name", …}'
        next = "write the names of parameters that the command lists as in one model only"
        raise UserError("the map of names is not one.", file=arguments.names, expected=expected, next=next)
    certificate = certify(compare(read_recording(arguments.a), read_recording(arguments.b), names))
    print(summarise(certificate))
    if arguments.output:
        write_json(arguments.output, certificate)
    return int(certificate["verdict"] == DIFFERENT)
