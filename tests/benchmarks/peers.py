"""The data benchmark with other libraries' readers in the same rounds, on the same rows.

Each library reads in its own process and Python environment, and its tokens are compared with the
rows.
"""

import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.benchmark import data, machine
from tokenscale.benchmark.machine import make_timing_record
from tokenscale.cli.main import Parser, exit_code
from tokenscale.data.order.permutation import get_samples
from tokenscale.settings.benchmarks import DataBenchmarkSettings
from tokenscale.settings.options import from_json

READER = Path(__file__).with_name("peer_reader.py")

#: peer → module whose import shows that it is installed
MODULES = {
    "datasets": "datasets",
    "mosaicml-streaming": "streaming",
    "litdata": "litdata",
    "litdata, rows in file order": "litdata",
    "nanogpt": "numpy",
}
LIMIT_S = 600


class Peers:
    """Peers installed for the Python `interpreter`, reading `rows` [rows, T + 1]. Files are written
    below `folder`.
    """

    def __init__(self, rows: np.ndarray, folder: Path, interpreter: str = sys.executable):
        self._folder = folder
        self._interpreter = interpreter
        self._rows = folder / "rows.npy"
        folder.mkdir(parents=True, exist_ok=True)
        np.save(self._rows, rows.astype(np.int32))
        self._count = len(rows)
        self.versions: dict[str, str] = {}
        self.left_out = self._find_missing()
        self.names = [peer for peer in MODULES if peer not in self.left_out]

    def __len__(self) -> int:
        return self._count

    def measure(self, peer: str, order: np.ndarray, workers: int | None = None) -> dict[str, Any]:
        """Open the peer and read `order` [batches, n]. Returns `open_s`, `batch_s` and
        `memory_bytes`.

        With `workers`, batches are read through a DataLoader, whose first batch belongs to the
        opening. Raises RuntimeError if the peer fails or returns other tokens than the rows.
        """
        name, _, in_order = peer.partition(", ")
        if in_order:
            order = np.arange(order.size).reshape(order.shape) % len(
                np.load(self._rows, mmap_mode="r")
            )
        paths = self._folder / "order.npy", self._folder / name, self._folder / f"{name}.json"
        np.save(paths[0], order)
        script = [self._interpreter, str(READER), name, str(self._rows), *map(str, paths)]
        script += [] if workers is None else [str(workers)]
        paths[2].unlink(missing_ok=True)
        done = subprocess.run(script, capture_output=True, text=True, timeout=LIMIT_S)
        if not paths[2].exists():
            raise RuntimeError(
                f"{peer} "
                f"failed{'' if workers is None else f' with {workers} workers'}:\n{done.stderr[-2000:]}"
            )
        found = json.loads(paths[2].read_text())
        if found["crc32"] != _digest(np.load(self._rows, mmap_mode="r"), order):
            raise RuntimeError(
                f"{peer} returns other tokens than were written; its times are not used"
            )
        self.versions[name] = found["version"]
        return {name: found[name] for name in ("open_s", "batch_s", "memory_bytes")}

    def _find_missing(self) -> dict[str, str]:
        """Return peer → reason why it cannot be imported."""
        try:
            command = [self._interpreter, "-c", _IMPORTS, *dict.fromkeys(MODULES.values())]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except OSError as error:
            raise UserError(
                "the Python of the peers cannot be started.",
                flag="--peers",
                file=self._interpreter,
                reason=error.strerror,
                next="pass the python of an environment with these libraries",
            ) from None
        reasons = json.loads(done.stdout.splitlines()[-1])
        return {peer: reasons[module] for peer, module in MODULES.items() if reasons[module]}


#: script that imports the named modules, and prints errors as one line of JSON
_IMPORTS = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        import torch
        importlib.import_module(name)
        found[name] = ""
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
print()
print(json.dumps(found))
"""


def _digest(rows: np.ndarray, order: np.ndarray) -> int:
    """Return the CRC-32 of inputs and labels of all batches, as `peer_reader` computes it."""
    digest = 0
    for indices in order:
        wide = rows[indices].astype(np.int64)
        digest = zlib.crc32(np.ascontiguousarray(wide[:, :-1]).data, digest)
        digest = zlib.crc32(np.ascontiguousarray(wide[:, 1:]).data, digest)
    return digest


class Sources(data.Sources):
    """Sources of the data benchmark and of the peers, which read full rows, whose tokens are all
    useful.
    """

    readers: Peers

    def list_arms(self) -> tuple[list[data.Arm], dict[str, str]]:
        """Return (arms, arm → reason why it is left out)."""
        arms, left_out = super().list_arms()
        arms += [
            data.Arm(peer, workers=n)
            for peer in self.readers.names
            for n in (None, *self.settings.workers)
        ]
        return arms, left_out | self.readers.left_out

    def measure_arm(self, arm: data.Arm, count: int) -> tuple[dict[str, Any], Any]:
        """Measure one arm. Returns (record, object that keeps the arm's memory alive)."""
        if arm.what not in self.readers.names:
            return super().measure_arm(arm, count)
        rows = self.settings.rows
        total = len(self.readers)
        # a loader's first batch belongs to its opening
        batches = count if arm.workers is None else count + 1
        order = get_samples(np.arange(batches * rows), total, self.runs["packed"].effective_seed)
        with machine.pin_to_cores(set() if arm.workers is None else self.cores):
            found = self.readers.measure(arm.what, order.reshape(batches, rows), arm.workers)
        self.peers = self.readers.versions
        tokens = count * rows * self.settings.sequence_length
        times = make_timing_record(found["open_s"], found["batch_s"], tokens, tokens)
        return times | {"memory_bytes": found["memory_bytes"]}, None


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, and print the table. Return the exit code."""
    parser = Parser(prog="python tests/benchmarks/peers.py", description=__doc__)
    data.add_arguments(parser)
    parser.add_argument(
        "--peers",
        required=True,
        metavar="PYTHON",
        help="a Python with datasets, mosaicml-streaming or litdata",
    )
    parsed = parser.parse_args(arguments)

    def open_sources(*inputs: Any) -> Sources:
        found = Sources(*inputs)
        found.readers = Peers(
            found.packed_rows(),
            parsed.output.with_name(f"{parsed.output.stem}-peers"),
            parsed.peers,
        )
        return found

    def run() -> None:
        settings = from_json(DataBenchmarkSettings, parsed.settings)
        folders = parsed.corpus.parent, parsed.tokenizer.parent, parsed.stores
        print(data.format_table(data.measure(settings, *folders, parsed.output, open_sources)))

    return exit_code(run, f"{parser.prog} --help")


if __name__ == "__main__":
    raise SystemExit(main())
