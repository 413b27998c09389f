"""Weights in the format of `torch.distributed.checkpoint` (DCP), by torchtitan's names for Llama.

DCP states no shape of a model: `config.json` of `transformers` lies beside its files. Its index
`.metadata` is a pickle, of which DCP's own classes alone are read.
"""

import os
import pickle
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO, IOBase
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tokenscale.base.errors import UserError
from tokenscale.base.files import check_file_name, open_file

#: name in transformers → in torchtitan's Llama
TITAN = {
    "model.embed_tokens": "tok_embeddings",
    "model.layers.*.input_layernorm": "layers.*.attention_norm",
    "model.layers.*.self_attn.q_proj": "layers.*.attention.wq",
    "model.layers.*.self_attn.k_proj": "layers.*.attention.wk",
    "model.layers.*.self_attn.v_proj": "layers.*.attention.wv",
    "model.layers.*.self_attn.o_proj": "layers.*.attention.wo",
    "model.layers.*.post_attention_layernorm": "layers.*.ffn_norm",
    "model.layers.*.mlp.gate_proj": "layers.*.feed_forward.w1",
    "model.layers.*.mlp.up_proj": "layers.*.feed_forward.w3",
    "model.layers.*.mlp.down_proj": "layers.*.feed_forward.w2",
    "model.norm": "norm",
    "lm_head": "output",
}
#: the embedding, behind what the state calls its model
EMBEDDING = re.compile(
    r"(.*?)(?:(?:model\.)?embed_tokens|(?:transformer\.)?wte|tok_embeddings)\.weight"
)
#: what a state holds beside a model that has no name in it
OTHERS = ("optim", "lr_scheduler", "train_state", "dataloader")
HOME = metadata.__name__
#: what an index names; types of numbers come on top
ALLOWED = {
    *(
        (c.__module__, c.__name__)
        for c in vars(metadata).values()
        if isinstance(c, type) and c.__module__ == HOME
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")),
    *(
        ("pathlib._local", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("collections", "OrderedDict"),
    ),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        number = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if number or (module, name) in ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of DCP has")


class _RegularFiles(FileSystem):
    """Files by plain names in one folder. torch itself would wait for a pipe."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IOBase]:
        with BufferedReader(FileIO(open_file(Path(path)))) as file:
            yield file

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> Path:
        return Path(path, check_file_name(suffix))


class _Reader(dcp.FileSystemReader):
    """A reader that runs nothing of what it reads, and opens no file outside its folder."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.fs = _RegularFiles()

    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        with open(open_file(Path(self.path) / ".metadata"), "rb") as file:
            found = _Unpickler(file).load()
        for info in found.storage_data.values():
            check_file_name(info.relative_path)
        for name, stated in found.state_dict_metadata.items():
            if not isinstance(stated, TensorStorageMetadata):
                continue
            elements = sum(chunk.sizes.numel() for chunk in stated.chunks)
            if elements != stated.size.numel():
                raise ValueError(f"the pieces of {name} do not make up the tensor once")
        return found


def read_dcp(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model by their names in a checkpoint of any number of processes, on
    the CPU.

    Raises UserError where a file is missing or damaged, and for an index that names anything but
    DCP's classes.
    """
    with _reading(folder):
        reader = _Reader(folder)
        index = reader.read_metadata().state_dict_metadata
        stated = {
            k: m
            for k, m in index.items()
            if isinstance(m, TensorStorageMetadata) and not k.startswith(OTHERS)
        }
        models = [match[1] for name in stated if (match := EMBEDDING.fullmatch(name))]
        if len(models) != 1:
            raise ValueError(f"it holds {len(models) or 'no'} embeddings of a decoder")
        stated = {name: m for name, m in stated.items() if name.startswith(models[0])}
        found = {name: torch.empty(m.size, dtype=m.properties.dtype) for name, m in stated.items()}
        with _quiet():
            dcp.load(found, storage_reader=reader, no_dist=True)
    return {name.removeprefix(models[0]): tensor for name, tensor in found.items()}


def write_dcp(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write tensors into an existing folder, as one process does."""
    with _quiet():
        dcp.save(weights, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():  # that there is one process
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:
        raise UserError(
            "the checkpoint of torch.distributed.checkpoint cannot be read.",
            checkpoint=folder,
            reason=(str(error).strip().splitlines() or [type(error).__name__])[-1],
            next="take another checkpoint, or write this one again",
        ) from None


def to_titan(config: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of transformers by torchtitan's names; unchanged where its Llama has no such
    layers.
    """
    if config["model_type"] != "llama":
        return weights
    whole = config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]
    if not whole or any(name.endswith(".bias") for name in weights):
        return weights
    return {
        _rename(name, table=TITAN): _reorder(
            name,
            weight=w,
            config=config,
            split=(2, -1),
        )
        for name, w in weights.items()
    }


def from_titan(config: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by their names in transformers, from those by torchtitan's."""
    names = {
        _rename(name, table={theirs: ours for ours, theirs in TITAN.items()}): w
        for name, w in weights.items()
    }
    return {
        name: _reorder(
            name,
            weight=w,
            config=config,
            split=(-1, 2),
        )
        for name, w in names.items()
    }


def _rename(name: str, table: dict[str, str]) -> str:
    number = next(iter(re.findall(r"\.(\d+)\.", name)), "")
    found = table.get(name.removesuffix(".weight").replace(f".{number}.", ".*."))
    return name if found is None else found.replace("*", number) + ".weight"


def _reorder(name: str, weight: Tensor, config: dict[str, Any], split: tuple[int, int]) -> Tensor:
    """Return the rows of a query or key in the other order: transformers rotates halves of a head,
    torchtitan pairs.
    """
    if not name.endswith((".q_proj.weight", ".k_proj.weight")):
        return weight
    heads = config["num_attention_heads"]
    if name.endswith(".k_proj.weight"):
        heads = config.get("num_key_value_heads") or heads
    return weight.unflatten(0, (heads, *split)).transpose(1, 2).flatten(0, 2).contiguous()
