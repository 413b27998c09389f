"""Benchmark of collectives: all-reduce, all-gather and reduce-scatter over buffer sizes.

Each round measures every collective and size once, in a changing order, so that drift affects all
equally. A time is the mean of several calls in a row on the slowest rank. Alpha (seconds per hop)
and beta (seconds per byte) of `costs.communication` are fitted to the medians over rounds; fits of
single rounds give their spread. Gloo on CPUs, NCCL on GPUs. Started alone it starts its ranks on
this machine; under torchrun it is one of them.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import read_json, write_json
from tokenscale.benchmark.rounds import interleave
from tokenscale.costs.communication import COLLECTIVES, bandwidths, fit_link
from tokenscale.runs.launch.ranks import run_ranks
from tokenscale.runs.records import provenance
from tokenscale.runs.records.provenance import find_versions
from tokenscale.train.collectives import all_gather, reduce_scatter
from tokenscale.train.parallel.world import World, join

#: bytes of the whole buffer, from latency-bound to bandwidth-bound
SIZES = tuple(4096 * 4**n for n in range(8))
#: bytes per measurement, and bounds of its number of calls
MOVED = 32 * 2**20
FEWEST = 2
MOST = 50
BYTES = 4  # per number in the buffer (fp32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--world-size", type=int, default=2, metavar="N", help="ranks (default 2; torchrun's own)"
    )
    sizes = "default 4 KiB to 64 MiB, by fours"
    cpu = "cpu: gloo, even where there is a GPU"
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="BYTES", help=sizes)
    parser.add_argument(
        "--collectives", nargs="+", default=COLLECTIVES, metavar="NAME", help=", ".join(COLLECTIVES)
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="everything is timed once in each round"
    )
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help=cpu)
    parser.add_argument("--output", type=Path, metavar="FILE", help="the JSON to write")


def run(arguments: argparse.Namespace) -> None:
    """Run the sweep and print its table, on the first rank."""
    names = ("world_size", "sizes", "collectives", "rounds", "device")
    result = measure(arguments.output, **{name: getattr(arguments, name) for name in names})
    if result is not None:
        print(format_table(result))


def measure(
    output: Path | None = None,
    *,
    world_size: int = 2,
    sizes: Sequence[int] = SIZES,
    collectives: Sequence[str] = COLLECTIVES,
    rounds: int = 5,
    device: str = "auto",
) -> dict[str, Any] | None:
    """Measure seconds per call of each collective, size (bytes of the whole buffer) and round, and
    fit the links.

    Under an external launcher, whose world size is used, returns None on ranks other than the
    first. Raises UserError for fewer than two ranks, sizes or rounds, for a size with fewer numbers
    than ranks, and if a rank fails.
    """
    started = "RANK" in os.environ
    world_size = int(os.environ["WORLD_SIZE"]) if started else world_size
    settings = {
        "world_size": world_size,
        "sizes": sorted(set(sizes)),
        "collectives": list(dict.fromkeys(collectives)),
    }
    settings |= {"rounds": rounds, "device": device}
    _check_settings(settings)
    if started:
        return _run_rank(settings, output)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "collectives.json"
        code = run_ranks(
            [sys.executable, "-m", __name__, json.dumps(settings), str(written)], world_size
        )
        if code:
            raise UserError(
                "a rank of the sweep failed.", code=code, next="see the rank's own error above"
            )
        result = read_json(written)
    if output is not None:
        write_json(output, value=result)
    return result


def format_table(result: dict[str, Any]) -> str:
    """Format median times, algorithm and bus bandwidth (as in nccl-tests), and alpha and beta with
    residuals.
    """
    place = (
        f"{result['world_size']} ranks on {result['nodes']} node(s), {result['backend']}, "
        f"{result['device']}"
    )
    lines = [
        place,
        (
            f"{'collective':<15} {'bytes':>12} {'us':>10} {'rounds':>19} {'algbw GB/s':>11} "
            f"{'busbw GB/s':>11}"
        ),
    ]
    for collective in result["fits"]:
        for size, seconds in _group_times(result, collective).items():
            median = statistics.median(seconds)
            algorithm, bus = bandwidths(
                collective,
                size_bytes=size,
                ranks=result["world_size"],
                seconds=median,
            )
            spread = f"{min(seconds) * 1e6:.0f}-{max(seconds) * 1e6:.0f}"
            shown = (
                f"{median * 1e6:>10.1f} {spread:>19} {algorithm / 1e9:>11.3f} {bus / 1e9:>11.3f}"
            )
            lines.append(f"{collective:<15} {size:>12} {shown}")
    lines.append("")
    for collective, found in result["fits"].items():
        alphas = found["alpha_s_of_rounds"]
        betas = found["beta_s_per_byte_of_rounds"]
        worst = max(found["residuals"], key=lambda r: abs(r["relative"]))
        spread = f"({min(alphas) * 1e6:.1f}-{max(alphas) * 1e6:.1f} over rounds)"
        alpha = f"alpha {found['alpha_s'] * 1e6:.1f} us a hop {spread}"
        beta = (
            f"beta {found['beta_s_per_byte'] * 1e9:.4f} ns a byte "
            f"({min(betas) * 1e9:.4f}-{max(betas) * 1e9:.4f})"
        )
        residual = f"largest residual {100 * worst['relative']:+.0f} % at {worst['bytes']} bytes"
        lines.append(f"{collective:<15} {alpha}, {beta}; {residual}")
    return "\n".join(lines)


def _check_settings(settings: dict[str, Any]) -> None:
    for flag, found, least in (
        ("--world-size", settings["world_size"], 2),
        ("--rounds", settings["rounds"], 1),
    ):
        if found < least:
            raise UserError(
                f"{flag} must be at least {least}.", found=found, next=f"use {flag} {least}"
            )
    for collective in settings["collectives"]:
        if collective not in COLLECTIVES:
            raise unknown("collective", word=collective, words=COLLECTIVES)
    least = BYTES * settings["world_size"]
    # rounded down to a multiple, as measured
    sizes = [size // least * least for size in settings["sizes"]]
    if len(sizes) < 2 or sizes[0] < least or len(set(sizes)) < len(sizes):
        what = "--sizes needs at least two sizes, each with at least one number per rank."
        expected = f"two multiples of {least} bytes; others are rounded down to one"
        found = ", ".join(map(str, settings["sizes"]))
        raise UserError(
            what, found=found, expected=expected, next=f"use --sizes {least} {4 * least}"
        )


def _run_rank(settings: dict[str, Any], output: Path | None) -> dict[str, Any] | None:
    """Run the sweep on one rank. The first rank gathers, fits, writes and returns the result."""
    world = join(settings["world_size"], device=settings["device"])
    cells = [(name, size) for name in settings["collectives"] for size in settings["sizes"]]
    calls = {cell: _Call(*cell, world) for cell in cells}
    for call in calls.values():
        call.seconds()  # warm up connections, buffers and algorithms
    records = []
    for number, cell in interleave(cells, rounds=settings["rounds"]):
        call = calls[cell]
        place = {
            "collective": cell[0],
            "bytes": call.size_bytes,
            "round": number,
            "calls": call.calls,
        }
        records.append(place | {"seconds": call.seconds()})
    result = _build_result(settings, world, records=records) if world.rank == 0 else None
    if result is not None and output is not None:
        write_json(output, value=result)
    world.close()
    return result


class _Call:
    """Collective over a buffer of about `size` bytes, rounded to a multiple of the ranks."""

    def __init__(self, collective: str, size: int, world: World):
        each = size // (BYTES * world.size)
        self.size_bytes = each * world.size * BYTES
        self.calls = max(FEWEST, min(MOST, MOVED // self.size_bytes))
        self._world = world
        whole = torch.zeros(each * world.size, device=world.device)
        own = torch.zeros(each, device=world.device)
        self._call: Callable[[], Any] = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: all_gather(whole, own),
            "reduce_scatter": lambda: reduce_scatter(own, whole),
        }[collective]

    def seconds(self) -> float:
        """Return the seconds per call on the slowest rank."""
        self._synchronize()
        self._world.barrier()
        self._synchronize()
        start = time.perf_counter()
        for _ in range(self.calls):
            self._call()
        self._synchronize()
        slowest = torch.tensor((time.perf_counter() - start) / self.calls, dtype=torch.float64)
        slowest = slowest.to(self._world.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()

    def _synchronize(self) -> None:
        """Wait until the device has finished."""
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)


def _build_result(
    settings: dict[str, Any], world: World, records: list[dict[str, Any]]
) -> dict[str, Any]:
    cuda = world.device.type == "cuda"
    nodes = max(1, len(world.nodes))
    result = {
        "schema_version": 1,
        "benchmark": "collectives",
        "settings": settings,
        "backend": "nccl" if cuda else "gloo",
        "device": torch.cuda.get_device_name(world.device) if cuda else "cpu",
        "network": world.network,
        "world_size": world.size,
        "nodes": nodes,
        "ranks_per_node": -(-world.size // nodes),
        "latency": "tree" if cuda else "ring",
        "hardware": provenance.describe_machine(),
        "versions": find_versions(),
        "records": records,
    }
    return result | {
        "fits": {name: _fit_link(result, collective=name) for name in settings["collectives"]}
    }


def _fit_link(result: dict[str, Any], collective: str) -> dict[str, Any]:
    """Fit alpha and beta of the limiting link: between nodes if there are several, else between
    ranks of a node.

    Between nodes each rank of a node sends its own share of the buffer.
    """
    nodes = result["nodes"]
    each = result["ranks_per_node"]
    ranks, parts = (nodes, each) if nodes > 1 else (result["world_size"], 1)
    times = _group_times(result, collective)
    sizes = [size / parts for size in times]

    def link(seconds: Sequence[float]) -> Any:
        return fit_link(
            collective,
            sizes,
            seconds=seconds,
            ranks=ranks,
            latency=result["latency"],
        )

    found, residuals = link([statistics.median(seconds) for seconds in times.values()])
    rounds = [link(seconds)[0] for seconds in zip(*times.values(), strict=True)]
    return {
        "alpha_s": found.alpha_s,
        "beta_s_per_byte": found.beta_s_per_byte,
        "residuals": [{"bytes": b, "relative": r} for b, r in zip(times, residuals, strict=True)],
        "alpha_s_of_rounds": [r.alpha_s for r in rounds],
        "beta_s_per_byte_of_rounds": [r.beta_s_per_byte for r in rounds],
    }


def _group_times(result: dict[str, Any], collective: str) -> dict[int, list[float]]:
    """Return bytes → seconds of the rounds."""
    times: dict[int, list[float]] = {}
    for record in sorted(result["records"], key=lambda r: (r["bytes"], r["round"])):
        if record["collective"] == collective:
            times.setdefault(record["bytes"], []).append(record["seconds"])
    return times


if __name__ == "__main__":
    _run_rank(json.loads(sys.argv[1]), output=Path(sys.argv[2]))
