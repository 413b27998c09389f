"""Compare two recorded trainings: equal, equal to rounding, or different, and the cause of the
first difference.

Both training scripts record with src/tokenscale/parity/recorder.py, which works without this
package.
"""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenscale import __version__
from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    read_file,
    read_json,
    read_manifest_file,
    report_malformed,
    write_sealed,
)
from tokenscale.base.manifests import walk

if TYPE_CHECKING:
    from tokenscale.parity.recording import Recording

RECORDER = Path(__file__).parents[1] / "parity/recorder.py"
RECORD = f"""cp {RECORDER} .   # beside the training script, which then has these lines:
recorder = ParityRecorder("{{folder}}", model, optimizer)   # from recorder import ParityRecorder
recorder.loss(loss)   # after each loss.backward()
recorder.close()   # after the last step; docs/other-trainers.md has an example"""


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
    from tokenscale.parity.certificate import summarise
    from tokenscale.parity.comparison import CERTIFICATE_VERSION, DIFFERENT

    if arguments.always and arguments.output is None:
        raise UserError("--always needs --output.", next="--output certificate.json")
    names = read_json(arguments.names, what="map of names") if arguments.names else {}
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        expected = '{"A\'s name": "B\'s name", …}'
        next_step = "write the names of parameters that the command lists as in one model only"
        raise UserError(
            "the map of names is not one.", file=arguments.names, expected=expected, next=next_step
        )
    try:
        certificate = _certify(arguments.a, b=arguments.b, names=names)
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


def _certify(a: Path, b: Path, names: dict[str, str]) -> dict[str, Any]:
    from tokenscale.parity.certificate import certify
    from tokenscale.parity.comparison import compare
    from tokenscale.parity.recording import RecordingError

    try:
        certificate = certify(compare(read_recording(a), b=read_recording(b), names=names))
    except RecordingError as error:
        raise UserError(error.what, **error.facts) from None
    return certificate | {"tokenscale": __version__}


def read_recording(folder: Path) -> "Recording":
    """Read a recording and its floors. Raises UserError where it is missing, truncated or not
    finite.
    """
    from safetensors.torch import load_file

    from tokenscale.parity.recorder import SCHEMA_VERSION
    from tokenscale.parity.recording import RECORD_AGAIN, SCALARS, Recording

    path = folder / "recording.json"
    if not path.exists():
        truncated = (folder / "steps.jsonl").exists()
        raise UserError(
            f"the recording is {'truncated' if truncated else 'missing'}.",
            folder=folder,
            expected="recording.json, which recorder.close() writes after the last step",
            next=RECORD_AGAIN if truncated else RECORD.format(folder=folder),
        )
    next_step = "use the recorder.py of this version of tokenscale, and record again"
    facts = read_manifest_file(
        path,
        what="recording",
        newest=SCHEMA_VERSION,
        next=next_step,
        oldest=SCHEMA_VERSION,
        sealed=True,
    )
    with report_malformed(path, what="recording", next=RECORD_AGAIN):
        for name, fault in walk(
            folder, files=[{"name": name, "sha256": s} for name, s in facts["files"].items()]
        ):
            raise UserError(
                "the recording is truncated.", file=folder / name, found=fault, next=RECORD_AGAIN
            )
        steps = [json.loads(line) for line in read_file(folder / "steps.jsonl").splitlines()]
        if len(steps) != facts["steps"]:
            found = f"{len(steps)} steps"
            raise UserError(
                "the recording is truncated.",
                found=found,
                expected=facts["steps"],
                next=RECORD_AGAIN,
            )
        if not steps:
            next_step = "call optimizer.step() between ParityRecorder(…) and recorder.close()"
            raise UserError("the recording has no optimizer step.", next=next_step)
        for step, name in ((step, name) for step in steps for name in SCALARS):
            if step[name] is None:
                raise UserError(
                    "the recording has no loss.", next="call recorder.loss(loss) in each step"
                )
            if not math.isfinite(step[name]):
                where = f"{name.replace('_', ' ')} of step {step['step']}"
                next_step = "find out why it is not finite first"
                raise UserError(
                    "a recorded value is not finite.",
                    found=f"{step[name]}",
                    where=where,
                    next=next_step,
                )
        try:
            trace, details = (
                load_file(folder / f"{name}.safetensors") for name in ("trace", "details")
            )
        except Exception as error:  # safetensors' own class, and OSError
            raise UserError(
                "the recording is truncated.", reason=error, next=RECORD_AGAIN
            ) from None
    floors = [read_recording(path) for path in sorted(folder.glob("floor-*"))]
    return Recording(folder, facts, steps=steps, trace=trace, details=details, floors=floors)
