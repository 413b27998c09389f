"""Folders of `torch.distributed.checkpoint`: written by us and read by torch, written by torch and
read by us.
"""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from tests.distributed.ranks import run_ranks
from tests.unit.test_models_convert import LENGTH, SHAPES, converted, named
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, write_json
from tokenscale.train.checkpoint_models import read_published
from tokenscale.train.models.convert_hf import to_hf
from tokenscale.train.models.dcp import to_titan, write_dcp
from tokenscale.train.models.decoder import rotary_frequencies

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def written(folder: Path, name="llama", convert=lambda weights: weights):
    """A folder with a model's configuration and its weights by torchtitan's names, or by the
    library's.
    """
    model, config, weights = converted(name)
    folder.mkdir()
    write_json(folder / "config.json", config)
    write_dcp(folder, convert(to_titan(config, weights)))
    return folder, named(model)


def same(folder, expected):
    _, found, _, _ = read_published(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_written_torch_reads_and_we_read_back_to_the_last_bit(tmp_path, name):
    folder, expected = written(tmp_path / "out", name)
    config, weights = to_hf(SHAPES[name], expected, LENGTH)
    weights = to_titan(config, weights)
    assert ("layers.1.attention.wq.weight" in weights) == (
        name in ("llama", "llama-tied", "llama-3.1", "llama-3.2")
    )
    found = {key: torch.zeros_like(weight) for key, weight in weights.items()}
    dcp.load(found, checkpoint_id=folder)
    assert all(torch.equal(found[key], weight) for key, weight in weights.items())
    same(folder, expected)


def test_rows_of_a_head_are_in_the_order_of_torchtitan(tmp_path):
    """Its rotation multiplies pairs (2i, 2i+1) of a head by complex numbers: scores are those of
    our rotation.
    """
    model, config, weights = converted("llama")
    shape = model.settings
    titan = to_titan(config, weights)
    width = shape.head_dimension
    x = torch.randn(LENGTH, shape.dimension, generator=torch.Generator().manual_seed(0))
    angles = torch.outer(
        torch.arange(LENGTH, dtype=torch.float64), rotary_frequencies(shape)
    ).float()
    turns = torch.polar(torch.ones_like(angles), angles)

    def complex_pairs(name, heads):
        rows = (x @ titan[f"layers.0.attention.{name}.weight"].t()).view(
            LENGTH, heads, width // 2, 2
        )
        return torch.view_as_real(torch.view_as_complex(rows) * turns[:, None]).flatten(2)

    def halves(name, heads):
        rows = (x @ weights[f"model.layers.0.self_attn.{name}.weight"].t()).view(
            LENGTH, heads, 2, width // 2
        )
        first, second = rows.unbind(2)
        cosine = angles.cos()[:, None]
        sine = angles.sin()[:, None]
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)

    group = shape.heads // shape.key_value_heads
    scores = []
    for rotate, q, k in ((complex_pairs, "wq", "wk"), (halves, "q_proj", "k_proj")):
        keys = rotate(k, shape.key_value_heads).repeat_interleave(group, 1)
        scores.append(torch.einsum("thd,shd->hts", rotate(q, shape.heads), keys))
    torch.testing.assert_close(*scores)


def save_sharded(world, weights, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.size,))
    sharded = {
        name: distribute_tensor(weight, mesh, [Shard(0)]) for name, weight in weights.items()
    }
    moments = {f"{name}.exp_avg": torch.ones(3) for name in weights}
    dcp.save({"model": sharded, "optimizer": {"state": moments}, "step": 3}, checkpoint_id=folder)


@pytest.mark.distributed
def test_a_state_of_two_processes_that_torch_wrote_is_read(tmp_path):
    folder, expected = written(tmp_path / "out")
    config, weights = to_hf(SHAPES["llama"], expected, LENGTH)
    (folder / ".metadata").unlink()
    run_ranks(save_sharded, 2, to_titan(config, weights), folder)
    assert len(list(folder.glob("*.distcp"))) == 2
    same(folder, expected)


@pytest.mark.parametrize("prefix", ["", "model.", "app.model.", "module."])
def test_a_state_that_torch_wrote_is_read_by_its_model_alone(tmp_path, prefix):
    folder, expected = written(
        tmp_path / "out",
        convert=lambda weights: {
            **{prefix + name: weight for name, weight in weights.items()},
            **{f"optimizer.state.{name}.exp_avg": weight for name, weight in weights.items()},
            "train_state": torch.ones(2),
            "step": 3,
        },
    )
    same(folder, expected)


class Evil:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("place", ["whole", "planner_data", "storage_data"])
@pytest.mark.parametrize(
    "function, arguments",
    [
        (os.mkdir, ["{mark}"]),
        (os.system, ["mkdir {mark}"]),
        (eval, ["__import__('os').mkdir('{mark}')"]),
        (shutil.copytree, ["{folder}", "{mark}"]),
    ],
    ids=["mkdir", "system", "eval", "copytree"],
)
def test_an_index_that_would_run_something_is_refused_and_runs_nothing(
    tmp_path, place, function, arguments
):
    folder, _ = written(tmp_path / "out")
    mark = tmp_path / "ran"
    evil = Evil(function, *(argument.format(mark=mark, folder=folder) for argument in arguments))
    index = pickle.loads((folder / ".metadata").read_bytes())
    if place != "whole":
        setattr(index, place, evil)
    (folder / ".metadata").write_bytes(pickle.dumps(evil if place == "whole" else index))
    with pytest.raises(UserError, match="no index of DCP has") as error:
        read_published(folder)
    assert {"checkpoint", "next"} <= set(error.value.facts) and not mark.exists()
    pickle.loads((folder / ".metadata").read_bytes())  # as torch does
    assert mark.exists()
    # a dotted name reaches no other module
    for module in (b"torch", b"torch.distributed.checkpoint.metadata"):
        code = b"\x80\x04\x8c" + bytes([len(module)]) + module + b"\x8c\x09os.getcwd\x93)R."
        (folder / ".metadata").write_bytes(code)
        with pytest.raises(UserError, match="getcwd"):
            read_published(folder)


def configured(folder, **changes):
    write_json(folder / "config.json", read_json(folder / "config.json") | changes)


def edited(change):
    def edit(folder):
        index = pickle.loads((folder / ".metadata").read_bytes())
        change(index)
        (folder / ".metadata").write_bytes(pickle.dumps(index))

    return edit


def output_of(rows, size=None):
    """The index with another size of the head's only piece, and of the whole if it is given."""

    def change(index):
        stated = index.state_dict_metadata["output.weight"]
        stated.size = size or stated.size
        stated.chunks = [
            ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((rows, stated.size[1])))
        ]

    return edited(change)


def outside(index):
    for info in index.storage_data.values():
        info.relative_path = "../" + info.relative_path


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "__0_0.distcp").unlink(),
        lambda folder: os.truncate(folder / "__0_0.distcp", 5000),
        lambda folder: os.truncate(folder / ".metadata", 300),
        lambda folder: (folder / ".metadata").write_bytes(b""),
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(["no", "index"])),
        output_of(95),
        output_of(1 << 40, torch.Size((1 << 40, 1 << 20))),
        edited(outside),
        edited(lambda index: index.state_dict_metadata.pop("layers.1.attention.wq.weight")),
        edited(lambda index: index.state_dict_metadata.pop("tok_embeddings.weight")),
        edited(lambda index: setattr(index, "storage_data", None)),
        lambda folder: write_json(folder / "config.json", {"model_type": "llama"}),
        lambda folder: configured(folder, num_attention_heads=5),
        lambda folder: configured(folder, num_hidden_layers=3),
    ],
)
def test_a_damaged_folder_is_one_message(tmp_path, damage):
    folder, _ = written(tmp_path / "out")
    damage(folder)
    with pytest.raises(UserError) as error:
        read_published(folder)
    assert str(tmp_path) in str(error.value) and "next" in error.value.facts
    assert len(str(error.value).splitlines()) < 9
