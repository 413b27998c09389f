"""Compare two recorded trainings: equal, equal to rounding, or different, and the cause of the
first difference.

Both training scripts record with src/tokenscale/parity/recorder.py, which works without this
package.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of_a = "folder of the reference's recording, with floor-1, floor-2 …"
    parser.add_argument("a", type=Path, metavar="A", help=of_a)
    parser.add_argument(
        "b", type=Path, metavar="B", help="folder of the recording that is compared"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="also write the certificate (JSON)"
    )
    of_always = "with --output: where there is no verdict, write why, and return 0"
    parser.add_argument("--always", action="store_true", help=of_always)
    of_names = "JSON: A's parameter → B's, where their values do not align them"
    parser.add_argument("--names", type=Path, metavar="FILE", help=of_names)


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict. Return 0 where both are equal or equal to rounding, 1 where they
    differ.
    """
    from tokenscale.base.errors import UserError
    from tokenscale.base.files import read_json, write_sealed
    from tokenscale.parity.certificate import certify, summarise
    from tokenscale.parity.comparison import CERTIFICATE_VERSION, DIFFERENT, compare
    from tokenscale.parity.recording import read_recording

    if arguments.always and arguments.output is None:
        raise UserError("--always needs --output.", next="--output certificate.json")
    names = read_json(arguments.names, what="map of names") if arguments.names else {}
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        expected = '{"A\'s name": "B\'s name", …}'
        next = "write the names of parameters that the command lists as in one model only"
        raise UserError(
            "the map of names is not one.", file=arguments.names, expected=expected, next=next
        )
    try:
        certificate = certify(
            compare(read_recording(arguments.a), b=read_recording(arguments.b), names=names)
        )
    except UserError as error:
        if not arguments.always:
            raise
        outcomes = [folder / "outcome.json" for folder in (arguments.a, arguments.b)]
        reasons = [read_json(path).get("reason") for path in outcomes if path.is_file()]
        reason = [*filter(None, reasons), error.what][0]
        write_sealed(
            arguments.output,
            record={"schema_version": CERTIFICATE_VERSION, "verdict": "none", "reason": reason},
        )
        print(f"no certificate: {reason}")
        return 0
    print(summarise(certificate))
    if arguments.output:
        write_sealed(arguments.output, record=certificate)
    return int(certificate["verdict"] == DIFFERENT and not arguments.always)
