"""Weights and resume states on disk: safetensors and JSON, never a pickle; complete or absent.

A checkpoint is a folder. Each rank writes `rank=NNNNN.safetensors` with the pieces of tensors that it owns, and
`rank=NNNNN.json` with their index, its random state and its place in the data; rank 0 then writes `checkpoint.json`,
which names every file with its hash, and renames the folder into place. So a folder without the suffix `.partial` is
complete, and any layout can read what another wrote: pieces say where in the whole tensor they lie.

Names are those of the model's parameters, behind `model.`, and behind `optimizer.<moment>.` for the optimizer's state.
"""

import hashlib
import math
import shutil
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tokenscale.base.errors import UserError
from tokenscale.base.files import atomic, check_types, read_json, report_malformed, sync, write_json, xxh3_128
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import from_dict

VERSION = 1
RECORD = "checkpoint.json"
PARTIAL = ".partial"
NEXT = "take an older checkpoint, or train again"
NUMBER = (int, float)
#: types as safetensors names them → as torch does
DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "U8": "uint8"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
}
#: what records hold that are read: of a checkpoint, of a resume state, of a rank, of a rank's resume state
WEIGHTS = {"ranks": dict, "run_id": str, "run": dict, "model": dict, "step": int}
RESUME = WEIGHTS | {
    **{"begins_at": int, "begins_at_useful_tokens": int, "best_validation_loss": (*NUMBER, type(None))},
    **{"budget": {"useful_tokens": NUMBER, "seconds": NUMBER, "warm": NUMBER}, "loss_scale": dict},
}
RANK = {"file": str, "index": dict, "state": dict}
RANK_RESUME = {"data": {"step": int}, "random": {"cpu": str}}
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
        """Return a piece that is the whole tensor."""
        return cls(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


@dataclass
class State:
    """One rank's contribution to a checkpoint. `pieces` are those it owns: each piece has one owner."""

    pieces: dict[str, Piece]
    rank_record: dict[str, Any] = field(default_factory=dict)  # random state, place in the data

    def snapshot(self) -> "State":
        """The same in memory of its own on the CPU, so that training can go on."""
        copied = {
            name: Piece(p.tensor.detach().to("cpu", copy=True).contiguous(), p.offsets, p.whole)
            for name, p in self.pieces.items()
        }
        return State(copied, self.rank_record)


def write_rank(folder: Path, rank: int, state: State) -> None:
    """Write this rank's two files into `folder` + `.partial`. The JSON is written last and marks the tensors as
    complete.
    """
    partial = partial_of(folder)
    partial.mkdir(parents=True, exist_ok=True)
    name = f"rank={rank:05d}"
    tensors = {key: p.tensor.detach().to("cpu").contiguous() for key, p in state.pieces.items()}
    with atomic(partial / f"{name}.safetensors") as temporary:
        save_file(tensors, str(temporary))
    index = {
        key: {"offsets": list(p.offsets), "whole": list(p.whole), "dtype": str(p.tensor.dtype).removeprefix("torch.")}
        for key, p in state.pieces.items()
    }
    file = f"{name}.safetensors"
    facts = {"file": file, **_fingerprint(partial / file), "index": index, "state": state.rank_record}
    write_json(partial / f"{name}.json", facts)


def commit(folder: Path, world_size: int, record: dict[str, Any], *, patience_s: float = PATIENCE_S) -> None:
    """Rank 0: wait for the files of all ranks, write `checkpoint.json`, rename the folder into place.

    Raises TimeoutError where a rank's files do not come: that rank has failed, and its own error says why.
    """
    partial, deadline = partial_of(folder), time.monotonic() + patience_s
    names = [f"rank={r:05d}.json" for r in range(world_size)]
    while missing := [name for name in names if not (partial / name).is_file()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{partial}: {', '.join(missing)} did not come within {patience_s:.0f} s")
        time.sleep(0.02)
    ranks = {name: _fingerprint(partial / name) for name in names}
    write_json(partial / RECORD, {"schema": VERSION, **record, "world_size": world_size, "ranks": ranks})
    if folder.exists():  # an older one of the same name, such as `best`
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
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
    """A complete checkpoint, opened for reading. Tensors are read on request, and only the needed parts of them.

    Raises UserError where a file is missing, cut off, changed or not what its index says.
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
        #: names of its files, but for the tokenizer's
        self.files = {RECORD}
        self.ranks: list[dict[str, Any]] = []
        self._parts: dict[str, list[tuple[str, list[int]]]] = {}
        self.shapes: dict[str, list[int]] = {}
        #: offsets and shapes of the pieces of each tensor
        self._sizes: defaultdict[str, list[tuple[list[int], list[int]]]] = defaultdict(list)
        with report_malformed(self.folder / RECORD, "checkpoint's record", NEXT):
            known = {"begins_at_useful_tokens": 0} | self.record  # states of earlier code lack it
            check_types(known, RESUME if self.record["kind"] == "resume" else WEIGHTS)
            for name, stated in self.record["ranks"].items():
                self._check(name, stated, verify)
        for name in self.record["ranks"]:
            with report_malformed(self.folder / name, "checkpoint's record of a rank", NEXT):
                self._add(self._json(name), verify)
        with report_malformed(self.folder / RECORD, "checkpoint", NEXT):
            self._check_pieces()

    def _add(self, rank: dict[str, Any], verify: bool) -> None:
        """Add the index of one rank's file."""
        check_types(rank, RANK)
        self._check(rank["file"], rank, verify)
        if self.record["kind"] == "resume":
            check_types(rank["state"], RANK_RESUME)
            for state in rank["state"]["random"].values():
                bytes.fromhex(state)
        self.ranks.append(rank["state"])
        for key, part in rank["index"].items():
            offsets, whole = ([int(n) for n in part[name]] for name in ("offsets", "whole"))
            if len(offsets) != len(whole) or min(offsets + whole, default=0) < 0:
                raise ValueError(f"{key} at {offsets} of {whole}")
            if self.shapes.setdefault(key, whole) != whole:
                raise ValueError(f"{key} is {whole} and {self.shapes[key]}")
            self._parts.setdefault(key, []).append((rank["file"], offsets))
        self._compare_header(rank["file"], rank["index"])

    def _compare_header(self, file: str, index: dict[str, Any]) -> None:
        """Compare the index with the header of its file of tensors: names, types and places."""
        try:
            with safe_open(str(self.folder / file), framework="pt") as tensors:
                slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
                found = {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
        except (SafetensorError, OSError, ValueError) as error:
            raise self._error("a file of the checkpoint cannot be read.", file=file, reason=error) from None
        if found.keys() != index.keys():
            raise ValueError(f"{file} and its index differ in {sorted(found.keys() ^ index.keys())[0]}")
        for name, (shape, dtype) in found.items():
            offsets, whole = index[name]["offsets"], index[name]["whole"]
            inside = len(shape) == len(whole) and all(o + n <= w for o, n, w in zip(offsets, shape, whole, strict=True))
            if not inside or DTYPES.get(dtype) != index[name]["dtype"]:
                stated = f"{index[name]['dtype']} at {offsets} of {whole}"
                raise ValueError(f"{name} is {DTYPES.get(dtype, dtype)} of shape {shape}, its index says {stated}")
            self._sizes[name].append((offsets, shape))

    def _check_pieces(self) -> None:
        """Raise ValueError where the pieces of a tensor overlap or leave a gap."""
        for name, pieces in self._sizes.items():
            if sum(math.prod(shape) for _, shape in pieces) != math.prod(self.shapes[name]) or any(
                all(o < p + m and p < o + n for o, n, p, m in zip(*a, *b, strict=True))
                for a, b in combinations(pieces, 2)
                if math.prod(a[1]) and math.prod(b[1])
            ):
                raise ValueError(f"the pieces of {name} do not make up the tensor once")

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of tensors that begin with `prefix`, without it."""
        return [key.removeprefix(prefix) for key in self._parts if key.startswith(prefix)]

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor, assembled from its pieces, on the CPU."""
        return self.part(name, (0,) * len(self.shapes[name]), tuple(self.shapes[name]))

    def part(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return the part [offsets, offsets + shape) of a tensor, from the pieces that overlap it, on the CPU."""
        if name not in self._parts:
            raise self._error("the checkpoint has no such tensor.", tensor=name)
        result, filled = None, 0
        for file, begin in self._parts[name]:
            try:
                with safe_open(str(self.folder / file), framework="pt") as tensors:
                    piece = tensors.get_slice(name)
                    size = piece.get_shape()
                    low = [max(o, b) for o, b in zip(offsets, begin, strict=True)]
                    high = [min(o + n, b + m) for o, n, b, m in zip(offsets, shape, begin, size, strict=True)]
                    if any(a >= b for a, b in zip(low, high, strict=True)):
                        continue
                    inside = tuple(slice(a - b, c - b) for a, b, c in zip(low, begin, high, strict=True))
                    values = piece[inside] if inside else tensors.get_tensor(name)
            except (SafetensorError, OSError, ValueError) as error:
                raise self._error("a file of the checkpoint cannot be read.", file=file, reason=error) from None
            if tuple(values.shape) == tuple(shape):
                return values.contiguous()  # a view of wider rows else, which the fused update takes for dense
            if result is None:
                result = torch.empty(shape, dtype=values.dtype)
            result[tuple(slice(a - o, c - o) for a, o, c in zip(low, offsets, high, strict=True))] = values
            filled += values.numel()
        if result is None or filled != math.prod(shape):
            raise self._error("pieces of a tensor are missing.", tensor=name)
        return result

    def _json(self, name: str) -> Any:
        if name == RECORD and not (self.folder / name).is_file():
            raise self._error("this is no checkpoint.", expected=f"a folder with {RECORD}")
        return read_json(self.folder / name, "checkpoint's record", NEXT)

    def _check(self, name: str, stated: dict[str, Any], verify: bool) -> None:
        path = self.folder / name
        if not isinstance(name, str) or Path(name).name != name or not path.is_file():
            raise self._error("a file of the checkpoint is missing.", file=name)
        if path.stat().st_size != stated["bytes"] or (verify and not _matches(path, stated)):
            raise self._error("a file of the checkpoint is not the one that was written.", file=name)
        self.files.add(name)

    def _error(self, what: str, **facts: object) -> UserError:
        return UserError(what, checkpoint=self.folder, **facts, next=NEXT)


def read_model(folder: str | Path) -> tuple[ModelSettings, dict[str, Tensor]]:
    """Return (shape, parameters by name) of a checkpoint of any layout. The shape's vocabulary is resolved."""
    checkpoint = Checkpoint(folder)
    with report_malformed(checkpoint.folder / RECORD, "checkpoint's record", NEXT):
        shape = from_dict(ModelSettings, checkpoint.record["model"])
    weights = {name: checkpoint.tensor("model." + name) for name in checkpoint.names("model.")}
    for name, weight in weights.items():
        if not torch.isfinite(weight).all():
            raise UserError(
                "the weights of the checkpoint are not finite.",
                checkpoint=folder,
                tensor=name,
                found=f"{int((~torch.isfinite(weight)).sum()):,} of {weight.numel():,} values are NaN or infinite",
                next="take an earlier checkpoint, or train again with a lower learning rate",
            )
    return shape, weights


def _fingerprint(path: Path) -> dict[str, Any]:
    kind = "xxh3_128" if xxh3_128 else "sha256"
    return {"bytes": path.stat().st_size, kind: _hash(path, kind)}


def _matches(path: Path, stated: dict[str, Any]) -> bool:
    kind = "sha256" if "sha256" in stated else "xxh3_128"
    if kind == "xxh3_128" and xxh3_128 is None:
        return True  # the size has been compared; a torn file would differ there
    return _hash(path, kind) == stated[kind]


def _hash(path: Path, kind: str) -> str:
    digest = xxh3_128() if kind == "xxh3_128" else hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def to_json_bytes(state: Tensor) -> str:
    """Return a byte tensor (a random generator's state) as hex text."""
    return bytes(state.tolist()).hex()


def from_json_bytes(text: str) -> Tensor:
    """Return the tensor that `to_json_bytes` encoded."""
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
