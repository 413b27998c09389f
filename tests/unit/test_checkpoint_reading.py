"""Reading of checkpoints: any part from any pieces, and every needed file opened once."""

import builtins
import io
import itertools
import math
import os
import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, write_json, write_sealed
from tokenscale.data.order.permutation import shard_rows
from tokenscale.train import checkpoint as module
from tokenscale.train.checkpoint import Checkpoint, Piece, State, commit, write_rank

#: parameters whose rows 128 ranks share evenly, unevenly, and not at all
SHAPES = {
    "embedding.weight": (512, 8),
    "head.weight": (500, 8),
    "norm.weight": (8,),
    **{f"blocks.{k}.attention.query.weight": (256, 8) for k in range(3)},
    **{f"blocks.{k}.feed_forward.down.weight": (128, 24) for k in range(3)},
}
MOMENTS = ("exp_avg", "exp_avg_sq")
RANKS = 128


def values_of(name, shape):
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + len(name)


def write_checkpoint(folder, ranks):
    for rank, pieces in enumerate(ranks):
        write_rank(folder, rank, State(pieces))
    facts = {"kind": "model", "run_id": "tiny", "run": {}, "model": {}, "step": 2}
    commit(folder, len(ranks), facts, patience_s=0)  # all are there
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A state of 128 ranks, as FSDP writes it: rows of every tensor, and a number of steps from
    whoever begins it.
    """
    ranks = []
    for rank in range(RANKS):
        pieces = {}
        for name, shape in SHAPES.items():
            rows = shard_rows(shape[0], rank, RANKS)
            if not rows:
                continue
            offsets = (rows.start, *(0,) * (len(shape) - 1))
            for key in ("model." + name, *(f"optimizer.{moment}.{name}" for moment in MOMENTS)):
                part = values_of(key, shape)[rows.start : rows.stop].clone()
                pieces[key] = Piece(part, offsets, shape)
            if rank == 0:
                pieces[f"optimizer.step.{name}"] = Piece.of(torch.tensor(7.0))
        ranks.append(pieces)
    return write_checkpoint(tmp_path_factory.mktemp("sharded") / "step=00000002", ranks)


@pytest.fixture
def opened(sharded, monkeypatch):
    """The names of the files of the state, as often as they are opened."""
    names = []

    def note(function):
        def call(path, *arguments, **options):
            if str(sharded) in str(path):
                names.append(Path(path).name)
            return function(path, *arguments, **options)

        return call

    for place, name in ((module, "safe_open"), (io, "open"), (builtins, "open"), (os, "open")):
        monkeypatch.setattr(place, name, note(getattr(place, name)))
    return names


def shard_of(rank, ranks, columns=1):
    """What a rank of a layout wants: rows of its column of the mesh. Name → (offsets, empty
    tensor).
    """
    wanted = []
    for name, shape in SHAPES.items():
        rows = shard_rows(shape[0], rank // columns, ranks // columns)
        offsets = [rows.start, *(0,) * (len(shape) - 1)]
        extent = [len(rows), *shape[1:]]
        if len(shape) == 2:
            part = shard_rows(shape[1], rank % columns, columns)
            offsets[1], extent[1] = part.start, len(part)
        keys = ["model." + name, *(f"optimizer.{moment}.{name}" for moment in MOMENTS)]
        wanted += [(key, tuple(offsets), torch.full(extent, torch.nan)) for key in keys]
        wanted.append((f"optimizer.step.{name}", (), torch.tensor(torch.nan)))
    return wanted


def writers_of(wanted):
    """The files that have any of these values: those of ranks with some of the rows, and of the
    numbers of steps.
    """
    found = {0}
    for name, offsets, into in wanted:
        for rank in range(RANKS) if offsets else ():
            rows = shard_rows(SHAPES[parameter_of(name)][0], rank, RANKS)
            if rows.start < offsets[0] + len(into) and offsets[0] < rows.stop:
                found.add(rank)
    return {f"rank={rank:05d}.safetensors" for rank in found}


def parameter_of(name):
    kind, rest = name.split(".", 1)
    return rest if kind == "model" else rest.split(".", 1)[1]


@pytest.mark.parametrize(
    "rank, ranks, columns",
    [(0, 128, 1), (77, 128, 1), (127, 128, 1), (5, 64, 1), (2, 4, 1), (3, 8, 4), (0, 1, 1)],
)
def test_a_rank_opens_each_needed_file_once(sharded, opened, rank, ranks, columns):
    wanted = shard_of(rank, ranks, columns)
    Checkpoint(sharded, verify=False).read(wanted)
    for name, offsets, into in wanted:
        place = tuple(slice(o, o + n) for o, n in zip(offsets, into.shape, strict=True))
        expected = (
            values_of(name, SHAPES[parameter_of(name)])[place] if offsets else torch.tensor(7.0)
        )
        assert torch.equal(into, expected), name
    tensors = {name for name in opened if name.endswith(".safetensors")}
    assert tensors == writers_of(wanted) and len(tensors) >= RANKS * columns // ranks
    assert len(opened) == len(set(opened)) == 1 + RANKS + len(tensors), (
        "the record, the indices, and needed files once"
    )


def test_every_part_is_read_from_any_pieces(tmp_path):
    pick = random.Random(0)
    shape = (7, 5, 6)
    cuts = ([0, 3, 4, 7], [0, 2, 5], [0, 1, 6])
    for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.bool):
        whole = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
        ranks = []
        for corner in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
            part = whole[tuple(slice(a, b) for a, b in corner)].clone()
            ranks.append({"model.a": Piece(part, tuple(a for a, _ in corner), shape)})
        folder = write_checkpoint(tmp_path / f"{dtype}", ranks)
        opened = Checkpoint(folder, verify=False)
        assert torch.equal(opened.tensor("model.a").double(), whole.double())
        for _ in range(60):
            begin = [pick.randrange(n) for n in shape]
            end = [pick.randint(b + 1, n) for b, n in zip(begin, shape, strict=True)]
            place = tuple(slice(b, e) for b, e in zip(begin, end, strict=True))
            part = opened.part(
                "model.a", tuple(begin), tuple(e - b for b, e in zip(begin, end, strict=True))
            )
            assert part.dtype == dtype and torch.equal(part.double(), whole[place].double())


@pytest.mark.parametrize("killed", [False, True])
def test_a_second_checkpoint_of_a_name_replaces_the_first_and_leaves_nothing_beside_it(
    tmp_path, killed
):
    """Nor does it leave what an earlier replacement, which was killed, had put aside."""
    if killed:
        write_checkpoint(tmp_path / "best.old", [{"model.a": Piece.of(torch.zeros(3))}])
    for value in (1.0, 2.0):
        folder = write_checkpoint(
            tmp_path / "best", [{"model.a": Piece.of(torch.full((3,), value))}]
        )
    assert Checkpoint(folder).tensor("model.a").tolist() == [2.0] * 3
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("comes_after_s", [5.0, math.inf])
def test_the_first_rank_waits_for_the_files_of_others(tmp_path, monkeypatch, comes_after_s):
    now = 0.0

    def sleep(seconds):
        nonlocal now
        assert seconds > 0
        now += seconds
        if now > comes_after_s and not list(tmp_path.glob("c.partial/rank=00001.json")):
            write_rank(tmp_path / "c", 1, State({"b": Piece.of(torch.ones(2))}))

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    write_rank(tmp_path / "c", 0, State({"a": Piece.of(torch.zeros(2))}))
    late = comes_after_s > 60
    said = r"c\.partial: rank=00001\.json did not come within 60 s"
    with pytest.raises(TimeoutError, match=said) if late else nullcontext():
        commit(tmp_path / "c", 2, {"run": {}}, patience_s=60)
    assert now == pytest.approx(min(comes_after_s, 60), abs=0.1)
    assert (tmp_path / "c").exists() is not late


def test_files_of_a_checkpoint_are_as_readable_as_any_file(tmp_path):
    write_checkpoint(tmp_path / "c", [{"a": Piece.of(torch.zeros(2))}])
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "c").iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode}


def test_parts_go_into_other_formats_and_strided_memory(sharded):
    into = torch.zeros(20, 16, dtype=torch.float64)
    Checkpoint(sharded).read([("model.embedding.weight", (100, 2), into[:, 4:8])])
    assert torch.equal(
        into[:, 4:8].float(), values_of("model.embedding.weight", (512, 8))[100:120, 2:6]
    )
    assert not into[:, :4].any() and not into[:, 8:].any()


def test_states_of_earlier_code_have_no_shapes_in_their_index(sharded, tmp_path):
    folder = tmp_path / "step=00000002"
    folder.mkdir()
    record = read_json(sharded / "checkpoint.json")
    for path in sharded.iterdir():
        if path.suffix == ".safetensors":
            os.link(path, folder / path.name)
    for name in record["ranks"]:
        rank = read_json(sharded / name)
        for entry in rank["index"].values():
            del entry["shape"]
        write_json(folder / name, rank)
        record["ranks"][name] = module._fingerprint(folder / name)
    write_sealed(folder / "checkpoint.json", record)
    for verify in (True, False):
        found = Checkpoint(folder, verify=verify).tensor("model.head.weight")
        assert torch.equal(found, values_of("model.head.weight", (500, 8)))


@pytest.mark.parametrize(
    "spoil",
    [
        None,
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content + b"0",
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: bytes(8) + content[8:],
        lambda content: content.replace(b"{", b"[", 1),
        lambda content: content.replace(b"[3,4]", b"[4,3]"),
        lambda content: content.replace(b"[3,4]", b"[3,5]"),
        lambda content: content.replace(b'"F32"', b'"I32"'),
        lambda content: content.replace(b'"F32"', b'"Q32"'),
        lambda content: content.replace(b"model.a", b"model.b"),
    ],
    ids=[
        "gone",
        "empty",
        "cut",
        "longer",
        "length",
        "no-length",
        "json",
        "shape",
        "size",
        "type",
        "no-type",
        "name",
    ],
)
def test_damage_that_comes_after_the_verification_is_one_message(tmp_path, spoil):
    """Rank 0 verifies; what changes from then on is found by the rank that reads it."""
    pieces = [{"model.a": Piece(torch.ones(3, 4), (3 * rank, 0), (6, 4))} for rank in range(2)]
    folder = write_checkpoint(tmp_path / "step=00000002", pieces)
    opened = Checkpoint(folder, verify=False)
    path = folder / "rank=00001.safetensors"
    path.unlink() if spoil is None else path.write_bytes(spoil(path.read_bytes()))
    assert opened.part("model.a", (0, 0), (3, 4)).sum() == 12, "the other file is whole"
    with pytest.raises(UserError, match="cannot be read") as error:
        opened.tensor("model.a")
    assert error.value.facts["file"] == path.name and error.value.facts["next"]


@pytest.mark.parametrize("axis", [0, 1])
def test_pieces_that_overlap_are_found_wherever_they_lie(tmp_path, axis):
    """Pieces of one column or row each, of which two cover one, and none another."""
    places = [[(at, 0), (0, at)][axis] for at in (0, 1, 2, 2, 4, 5)]
    pieces = [
        {"model.a": Piece(torch.ones([(1, 6), (6, 1)][axis]), place, (6, 6))} for place in places
    ]
    with pytest.raises(UserError, match="do not make up the tensor once"):
        Checkpoint(write_checkpoint(tmp_path / "step=00000002", pieces))
