"""Weights and resume states on disk: safetensors and JSON, never a pickle; complete or absent.

A checkpoint is a folder. Each rank writes `rank=NNNNN.safetensors` with the pieces of tensors that
it owns, and `rank=NNNNN.json` with their index, its random state and its place in the data; rank 0
then writes `checkpoint.json`, which names every file with its hash, and renames the folder into
place. So a folder without the suffix `.partial` is complete, and any layout can read what another
wrote: pieces say where in the whole tensor they lie.

Names are those of the model's parameters, behind `model.`, and behind `optimizer.<moment>.` for the
optimizer's state.
"""

import math
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from xxhash import xxh3_128

from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    UMASK,
    check_types,
    is_sealed,
    naming,
    read_json,
    remove_tree,
    report_malformed,
    sync,
    write_json,
    write_sealed,
)
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import decode

VERSION = 1
RECORD = "checkpoint.json"
PARTIAL = ".partial"
NEXT = "take an older checkpoint, or train again"
NUMBER = (int, float)
#: what records hold that are read: of a checkpoint, of a resume state, of a rank
WEIGHTS = {"ranks": dict, "run_id": str, "run": dict, "model": dict, "step": int}
RESUME = WEIGHTS | {
    "begins_at": int,
    "begins_at_useful_tokens": int,
    "best_validation_loss": (*NUMBER, type(None)),
    "budget": {"useful_tokens": NUMBER, "seconds": NUMBER, "warm": NUMBER},
    "loss_scale": dict,
}
RANK = {"file": str, "index": dict}
#: threads that hash and read files
THREADS = 8
#: how long rank 0 waits for the files of the others
PATIENCE_S = 1800.0


@dataclass(frozen=True)
class Piece:
    """A part of a tensor [offsets, offsets + shape), or all of it, held by one rank."""

    tensor: Tensor
    offsets: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Piece":
        return cls(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


@dataclass
class State:
    """One rank's contribution to a checkpoint. `pieces` are those it owns: each piece has one
    owner.
    """

    pieces: dict[str, Piece]

    def snapshot(self) -> "State":
        """Return a copy in CPU memory, so that training can continue."""
        copied = {
            name: Piece(
                tensor=p.tensor.detach().to("cpu", copy=True).contiguous(),
                offsets=p.offsets,
                whole=p.whole,
            )
            for name, p in self.pieces.items()
        }
        return State(copied)


def write_rank(folder: Path, rank: int, state: State) -> None:
    """Write this rank's two files into `folder` + `.partial`. The JSON is last and marks the
    tensors as complete.
    """
    partial = partial_of(folder)
    partial.mkdir(parents=True, exist_ok=True)
    name = f"rank={rank:05d}"
    tensors = {key: p.tensor.detach().to("cpu").contiguous() for key, p in state.pieces.items()}
    path = partial / f"{name}.safetensors"
    # which writes a file of its own and renames it: no lock of ours would hold
    save_file(tensors, str(path))
    path.chmod(0o666 & ~UMASK)
    sync(path)
    index = {
        key: {
            "offsets": list(p.offsets),
            "shape": list(p.tensor.shape),
            "whole": list(p.whole),
            "dtype": str(p.tensor.dtype).removeprefix("torch."),
        }
        for key, p in state.pieces.items()
    }
    file = f"{name}.safetensors"
    facts = {
        "file": file,
        **_fingerprint(partial / file),
        "index": index,
    }
    write_json(partial / f"{name}.json", value=facts)


def commit(
    folder: Path, world_size: int, record: dict[str, Any], *, patience_s: float = PATIENCE_S
) -> None:
    """Rank 0: wait for the files of all ranks, write `checkpoint.json`, rename the folder into
    place.

    Raises TimeoutError where a rank's files do not come: that rank has failed, and its own error
    says why.
    """
    partial = partial_of(folder)
    deadline = time.monotonic() + patience_s
    names = [f"rank={r:05d}.json" for r in range(world_size)]
    while missing := [name for name in names if not (partial / name).is_file()]:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{partial}: {', '.join(missing)} did not come within {patience_s:.0f} s"
            )
        time.sleep(0.02)
    ranks = {name: _fingerprint(partial / name) for name in names}
    write_sealed(
        partial / RECORD,
        record={"schema": VERSION, **record, "world_size": world_size, "ranks": ranks},
    )
    if folder.exists():  # an older one of the same name, such as `best`
        old = folder.with_name(folder.name + ".old")
        remove_tree(old)
        folder.rename(old)
        partial.rename(folder)
        sync(folder.parent)
        shutil.rmtree(old)
    else:
        partial.rename(folder)
        sync(folder.parent)


def partial_of(folder: Path) -> Path:
    """Return the folder of a checkpoint until it is complete."""
    return folder.with_name(folder.name + PARTIAL)


class Checkpoint:
    """A complete checkpoint, opened for reading. Tensors are read on request, and only the needed
    parts of them.

    `verify` compares every file with its hash, and the indices with the headers of the files.
    Without it, a file of tensors is opened when values are read from it, once, and compared with
    its index then. Raises UserError where a file is missing, cut off, changed or not what its index
    says.
    """

    def __init__(self, folder: str | Path, *, verify: bool = True):
        self.folder = Path(folder)
        self.record: dict[str, Any] = self._json(RECORD)
        version = self.record.get("schema") if isinstance(self.record, dict) else None
        if not isinstance(version, int) or not 1 <= version <= VERSION:
            raise self._error(
                "the checkpoint was written by another version of tokenscale.",
                found=f"schema {version}",
                expected=f"schema {VERSION}",
            )
        if not is_sealed(self.record):
            raise self._error(
                "the checkpoint's record has changed since it was written.", file=RECORD
            )
        #: names of its files, but for the tokenizer's
        self.files = {RECORD}
        self.shapes: dict[str, list[int]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._parts: defaultdict[str, list[_Part]] = defaultdict(list)
        self._indices: dict[str, dict[str, Any]] = {}
        with report_malformed(self.folder / RECORD, what="checkpoint's record", next=NEXT):
            known = {"begins_at_useful_tokens": 0} | self.record  # states of earlier code lack it
            check_types(known, fields=RESUME if self.record["kind"] == "resume" else WEIGHTS)
            if (stated := re.fullmatch(r"step=(\d{8})", self.folder.name)) and self.record[
                "step"
            ] != int(stated[1]):
                raise ValueError(
                    f"step is {self.record['step']}, the folder's name says {int(stated[1])}"
                )
            names = list(self.record["ranks"])
        # hashing and reading wait for the disk, not for Python
        with ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(partial(self._read_rank, verify=verify), names))
        for name, (rank, header) in zip(names, found, strict=True):
            with report_malformed(
                self.folder / name, what="checkpoint's record of a rank", next=NEXT
            ):
                self._add(rank, header)
        with report_malformed(self.folder / RECORD, what="checkpoint", next=NEXT):
            self._check_pieces()

    def _read_rank(
        self, name: str, *, verify: bool
    ) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
        """Return a rank's record, and its tensors' header where it is verified or the index lacks
        shapes (earlier code).
        """
        with report_malformed(self.folder / RECORD, what="checkpoint's record", next=NEXT):
            self._check(name, self.record["ranks"][name], verify)
        with report_malformed(self.folder / name, what="checkpoint's record of a rank", next=NEXT):
            rank = self._json(name)
            check_types(rank, fields=RANK)
            self._check(rank["file"], rank, verify)
            if verify or not all("shape" in entry for entry in rank["index"].values()):
                with self._reading(rank["file"]):
                    return rank, _map(self.folder / rank["file"])
        return rank, None

    def _add(self, rank: dict[str, Any], header: dict[str, Tensor] | None) -> None:
        file = rank["file"]
        index = rank["index"]
        self._indices[file] = index
        if header is not None:
            self._compare_header(file, header)
        for key, entry in index.items():
            shape = entry["shape"] if header is None else header[key].shape
            offsets, whole, shape = (
                [int(n) for n in numbers] for numbers in (entry["offsets"], entry["whole"], shape)
            )
            if (
                not len(offsets) == len(whole) == len(shape)
                or min(offsets + whole + shape, default=0) < 0
            ):
                raise ValueError(f"{key} is {shape} at {offsets} of {whole}")
            if self.shapes.setdefault(key, whole) != whole:
                raise ValueError(f"{key} is {whole} and {self.shapes[key]}")
            dtype = getattr(torch, entry["dtype"], None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{key} has the type {entry['dtype']}")
            if self.dtypes.setdefault(key, dtype) != dtype:
                raise ValueError(f"{key} is {dtype} and {self.dtypes[key]}")
            self._parts[key].append(_Part(file=file, offsets=offsets, shape=shape))

    def _compare_header(self, file: str, header: dict[str, Tensor]) -> None:
        index = self._indices[file]
        if header.keys() != index.keys():
            raise ValueError(f"{file} and its index differ in {min(header.keys() ^ index.keys())}")
        for name, stored in header.items():
            offsets = index[name]["offsets"]
            whole = index[name]["whole"]
            shape = list(stored.shape)
            inside = len(shape) == len(whole) and all(
                o + n <= w for o, n, w in zip(offsets, shape, whole, strict=True)
            )
            dtype = str(stored.dtype).removeprefix("torch.")
            if not inside or dtype != index[name]["dtype"]:
                stated = f"{index[name]['dtype']} at {offsets} of {whole}"
                raise ValueError(f"{name} is {dtype} of shape {shape}, its index says {stated}")

    def _check_pieces(self) -> None:
        """Raise ValueError where the pieces of a tensor overlap or leave a gap."""
        for name, parts in self._parts.items():
            pieces = sorted(
                (part for part in parts if math.prod(part.shape)), key=lambda part: part.offsets
            )
            full = sum(math.prod(part.shape) for part in pieces) == math.prod(self.shapes[name])
            # earlier pieces with rows at or behind the first row of the next piece
            reaching: list[_Part] = []
            for part in pieces:
                reaching = [
                    p
                    for p in reaching
                    if not p.shape or p.offsets[0] + p.shape[0] > part.offsets[0]
                ]
                full = full and not any(
                    _overlap(
                        p.offsets,
                        shape=p.shape,
                        others=part.offsets,
                        extent=part.shape,
                    )
                    for p in reaching
                )
                reaching.append(part)
            if not full:
                raise ValueError(f"the pieces of {name} do not make up the tensor once")

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of tensors that begin with `prefix`, without it."""
        return [key.removeprefix(prefix) for key in self._parts if key.startswith(prefix)]

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor, assembled from its pieces, on the CPU."""
        self._find(name)
        return self.part(name, (0,) * len(self.shapes[name]), tuple(self.shapes[name]))

    def part(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return the part [offsets, offsets + shape) of a tensor, from the pieces that overlap it,
        on the CPU.
        """
        self._find(name)
        result = torch.empty(shape, dtype=self.dtypes[name])
        self.read([(name, offsets, result)])
        return result

    def read(self, wanted: Iterable[tuple[str, tuple[int, ...], Tensor]]) -> None:
        """Fill tensors with parts (name, offsets, into), on any device and in any format. Each file
        is read once, in its order.
        """
        boxes: defaultdict[str, list[tuple[str, _Part, tuple[slice, ...], Tensor]]] = defaultdict(
            list
        )
        for name, offsets, into in wanted:
            filled = 0
            for part in self._find(name):
                if box := _overlap(
                    offsets,
                    shape=tuple(into.shape),
                    others=part.offsets,
                    extent=part.shape,
                ):
                    here = into[_slices(box, origin=offsets)]
                    boxes[part.file].append((name, part, _slices(box, origin=part.offsets), here))
                    filled += here.numel()
            if filled != into.numel():
                raise self._error("pieces of a tensor are missing.", tensor=name)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(self._read_file, boxes, boxes.values()))

    @torch.no_grad()
    def _read_file(
        self, file: str, boxes: "list[tuple[str, _Part, tuple[slice, ...], Tensor]]"
    ) -> None:
        with self._reading(file):
            stored = _map(self.folder / file)
            self._compare_header(file, header=stored)
            for name, part, there, here in sorted(boxes, key=lambda box: stored[box[0]].data_ptr()):
                if (found := list(stored[name].shape)) != part.shape:
                    raise ValueError(f"{name} is of shape {found}, its index says {part.shape}")
                values = stored[name][there]
                # memory that a GPU reads directly, so that the next piece is read while this one is
                # copied
                here.copy_(values.pin_memory() if here.is_cuda else values, non_blocking=True)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError, ValueError) as error:
            raise self._error(
                "a file of the checkpoint cannot be read.", file=name, reason=error
            ) from None

    def _find(self, name: str) -> "list[_Part]":
        if name not in self._parts:
            raise self._error("the checkpoint has no such tensor.", tensor=name)
        return self._parts[name]

    def _json(self, name: str) -> Any:
        if name == RECORD and not (self.folder / name).is_file():
            following = "name one of those that `ls -d results/runs/*/checkpoints/*` lists"
            facts = {"checkpoint": self.folder, "expected": f"a folder with {RECORD}"}
            raise UserError("this is no checkpoint.", **facts, next=following)
        return read_json(self.folder / name, what="checkpoint's record", next=NEXT)

    def _check(self, name: str, stated: dict[str, Any], verify: bool) -> None:
        path = self.folder / name
        if not isinstance(name, str) or Path(name).name != name or not path.is_file():
            raise self._error("a file of the checkpoint is missing.", file=name)
        if path.stat().st_size != stated["bytes"] or (verify and _hash(path) != stated["xxh3_128"]):
            raise self._error(
                "a file of the checkpoint is not the one that was written.", file=name
            )
        self.files.add(name)

    def _error(self, what: str, **facts: object) -> UserError:
        return UserError(what, checkpoint=self.folder, **facts, next=NEXT)


@dataclass(frozen=True)
class _Part:
    """The piece [offsets, offsets + shape) of a tensor, and the file that has it."""

    file: str
    offsets: list[int]
    shape: list[int]


def _map(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of safetensors, mapped: their values are read from disk when
    they are used.
    """
    with naming(path), safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping


def _overlap(
    offsets: Sequence[int], shape: Sequence[int], others: Sequence[int], extent: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return (offsets, shape) of what two parts of a tensor have in common; None if that is
    nothing.
    """
    low = tuple(map(max, offsets, others))
    high = tuple(
        min(o + n, p + m) for o, n, p, m in zip(offsets, shape, others, extent, strict=True)
    )
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    return low, tuple(b - a for a, b in zip(low, high, strict=True))


def _slices(
    box: tuple[tuple[int, ...], tuple[int, ...]], origin: Sequence[int]
) -> tuple[slice, ...]:
    """Return where a box (offsets, shape) of a tensor lies in the part of it that begins at
    `origin`.
    """
    return tuple(slice(low - o, low - o + n) for low, n, o in zip(*box, origin, strict=True))


def read_model(folder: str | Path) -> tuple[ModelSettings, dict[str, Tensor]]:
    """Return (shape, parameters by name) of a checkpoint of any layout. The shape's vocabulary is
    resolved.
    """
    checkpoint = Checkpoint(folder)
    with report_malformed(checkpoint.folder / RECORD, what="checkpoint's record", next=NEXT):
        shape = decode(ModelSettings, values=checkpoint.record["model"])
    weights = {
        name: torch.empty(
            checkpoint.shapes["model." + name], dtype=checkpoint.dtypes["model." + name]
        )
        for name in checkpoint.names("model.")
    }
    checkpoint.read(
        [("model." + name, (0,) * weight.dim(), weight) for name, weight in weights.items()]
    )
    check_finite(checkpoint.folder, weights)
    return shape, weights


def check_finite(folder: Path, weights: dict[str, Tensor]) -> None:
    """Raise UserError where a weight of a checkpoint is not finite."""
    for name, weight in weights.items():
        if not torch.isfinite(weight).all():
            raise UserError(
                "the weights of the checkpoint are not finite.",
                checkpoint=folder,
                tensor=name,
                found=(
                    f"{int((~torch.isfinite(weight)).sum()):,} of {weight.numel():,} values are "
                    "NaN or infinite"
                ),
                next="take an earlier checkpoint, or train again with a lower learning rate",
            )


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "xxh3_128": _hash(path)}


def _hash(path: Path) -> str:
    digest = xxh3_128()
    with naming(path), open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
