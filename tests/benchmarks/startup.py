"""Measure how one rank of many starts: initial weights, a state that it loads, and torch's own
format beside ours.

    python tests/benchmarks/startup.py initialise --ranks 4  # one rank of four, sharded (FSDP), alone in a process
    python tests/benchmarks/startup.py load --ranks 16  # the same, from a state that 16 ranks would have written
    python tests/benchmarks/startup.py compare --model gpt2-124m  # torch.distributed.checkpoint, on one rank

The other ranks are those of torch's fake process group, which sends nothing. The files of the state
have the real sizes and no content (holes), so that loading measures this machine's memory and not
its disk. Each command prints one line of JSON. The peak is that of the process (VmHWM) above what
it had after its imports.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenscale.base.files import write_json, write_sealed
from tokenscale.data.order.permutation import shard_rows
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import RunSettings
from tokenscale.train import checkpoint
from tokenscale.train.checkpoint import Checkpoint, Piece, State, commit, write_rank
from tokenscale.train.models.build import build
from tokenscale.train.parallel.world import World
from tokenscale.train.trainer import Trainer

MOMENTS = ("exp_avg", "exp_avg_sq")
#: vocabulary of presets that leave it open
VOCABULARY = 50_257


class Measured:
    """Wall and CPU seconds, and the peak of memory, of what is done inside."""

    def __enter__(self) -> "Measured":
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._memory = _status("VmRSS")
        self._wall = time.monotonic()
        self._cpu = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.facts = {
            "seconds": round(time.monotonic() - self._wall, 2),
            "cpu_seconds": round(time.process_time() - self._cpu, 2),
            "peak_gb": round((_status("VmHWM") - self._memory) * 1024 / 1e9, 3),
        }


def _status(key: str) -> int:
    """Return a value of this process, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def shape_of(name: str) -> ModelSettings:
    """Return a preset with its vocabulary."""
    shape = PRESETS[name]
    return shape if shape.vocabulary_size else shape.with_vocabulary(VOCABULARY)


def parameters_of(shape: ModelSettings) -> dict[str, Tensor]:
    """Return the parameters of a model, without storage."""
    with torch.device("meta"):
        return dict(build(shape, 1024, objective="causal", kernel="sdpa").named_parameters())


def trainer_of(shape: ModelSettings, ranks: int, rank: int, *, unset: bool) -> Trainer:
    """Return the trainer of one rank of a sharded layout; the others do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    layout = LayoutSettings(shard=ranks) if ranks > 1 else LayoutSettings()
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    run = RunSettings(
        model=shape, sequence_length=1024, global_batch=ranks, micro_batch=1, layout=layout
    )
    return Trainer(run, shape, World(rank, ranks, 0, torch.device("cpu")), "sdpa", unset=unset)


def initialise(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build a rank's part of a model with its initial weights."""
    shape = shape_of(arguments.model)
    with Measured() as measured:
        trainer = trainer_of(shape, arguments.ranks, arguments.rank, unset=False)
    mine = sum(shard.tensor.nbytes for shard in trainer.shards.by_name.values())
    return {"parameters": trainer.parameters, "shard_gb": round(mine / 1e9, 3), **measured.facts}


def load(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load a rank's part of a state that as many ranks have written, other than the rank that
    verifies.
    """
    shape = shape_of(arguments.model)
    opened = []
    read_header = checkpoint._map
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        written = Path(folder) / "step=00000001"
        _write_holes(written, parameters_of(shape), arguments.ranks)
        sys.addaudithook(
            lambda event, args: opened.append(str(args[0])) if event == "open" else None
        )
        # safetensors opens files outside Python, where no hook sees it
        checkpoint._map = lambda path: (opened.append(str(path)), read_header(path))[1]
        trainer = trainer_of(shape, arguments.ranks, arguments.rank, unset=True)
        with Measured() as measured:
            trainer.load(Checkpoint(written, verify=False))
    return {"opens": sum(str(written) in path for path in opened), **measured.facts}


def _write_holes(folder: Path, parameters: dict[str, Tensor], ranks: int) -> None:
    """Write a resume state of a sharded layout whose files have the right sizes, and zeros that
    take no room.
    """
    folder.mkdir()
    records = {}
    for rank in range(ranks):
        header = {}
        index = {}
        end = 0
        for name, weight in parameters.items():
            rows = shard_rows(len(weight), rank, ranks)
            keys = ["model." + name, *(f"optimizer.{moment}.{name}" for moment in MOMENTS)]
            for key in keys if rows else ():
                part = (len(rows), *weight.shape[1:])
                begin = end
                end = end + 4 * math.prod(part)
                header[key] = {"dtype": "F32", "shape": part, "data_offsets": [begin, end]}
                offsets = (rows.start, *(0,) * (weight.dim() - 1))
                index[key] = {
                    "offsets": offsets,
                    "shape": part,
                    "whole": tuple(weight.shape),
                    "dtype": "float32",
                }
            if rank == 0:
                begin = end
                end = end + 4
                header[f"optimizer.step.{name}"] = {
                    "dtype": "F32",
                    "shape": [],
                    "data_offsets": [begin, end],
                }
                index[f"optimizer.step.{name}"] = {
                    "offsets": [],
                    "shape": [],
                    "whole": [],
                    "dtype": "float32",
                }
        text = json.dumps(header).encode()
        path = folder / f"rank={rank:05d}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + end)
        facts = {"file": path.name, "bytes": path.stat().st_size, "index": index}
        write_json(folder / f"rank={rank:05d}.json", facts)
        records[f"rank={rank:05d}.json"] = {
            "bytes": (folder / f"rank={rank:05d}.json").stat().st_size
        }
    record = {
        "schema": 1,
        "kind": "model",
        "run_id": "holes",
        "run": {},
        "model": {},
        "step": 1,
        "ranks": records,
    }
    write_sealed(folder / "checkpoint.json", record)


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Save and load a model with its moments in one process: our format, which hashes all files,
    and torch's.
    """
    import torch.distributed.checkpoint as peer

    tensors = {
        f"{kind}.{name}": torch.full(weight.shape, 0.5)
        for name, weight in parameters_of(shape_of(arguments.model)).items()
        for kind in ("model", *(f"optimizer.{moment}" for moment in MOMENTS))
    }
    found: dict[str, Any] = {
        "values_gb": round(sum(tensor.nbytes for tensor in tensors.values()) / 1e9, 3)
    }
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        ours = Path(folder) / "ours"
        theirs = Path(folder) / "torch"

        def save_ours() -> None:
            write_rank(ours, 0, State({name: Piece.of(tensor) for name, tensor in tensors.items()}))
            commit(
                ours, 1, {"kind": "model", "run_id": "compare", "run": {}, "model": {}, "step": 1}
            )

        def load_ours() -> None:
            Checkpoint(ours).read(
                [(name, (0,) * tensor.dim(), tensor) for name, tensor in tensors.items()]
            )

        passes: dict[str, Callable[[], object]] = {
            "torch_save": lambda: peer.save(tensors, checkpoint_id=theirs, no_dist=True),
            "ours_save": save_ours,
            "torch_load": lambda: peer.load(tensors, checkpoint_id=theirs, no_dist=True),
            "ours_load": load_ours,
        }
        for name, run in passes.items():
            with Measured() as measured:
                run()
            found[name] = measured.facts
        for name, path in (("torch", theirs), ("ours", ours)):
            files = [file for file in path.rglob("*") if file.is_file()]
            found[name] = {"files": len(files), "bytes": sum(file.stat().st_size for file in files)}
    return found


COMMANDS = {"initialise": initialise, "load": load, "compare": compare}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python tests/benchmarks/startup.py",
    )
    parser.add_argument("measure", choices=COMMANDS)
    parser.add_argument("--model", choices=sorted(PRESETS), default="llama-3.1-8b")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--folder", help="folder for the state (default: that of temporary files)")
    arguments = parser.parse_args()
    arguments.rank %= arguments.ranks
    facts = {"measure": arguments.measure, "model": arguments.model}
    if arguments.measure != "compare":
        facts |= {"ranks": arguments.ranks, "rank": arguments.rank}
    print(json.dumps(facts | COMMANDS[arguments.measure](arguments)))
