import dataclasses
import json

import pytest

from tokenscale.errors import UserError
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.options import from_dict, to_dict
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import LayoutSettings, OptimizerSettings, RunSettings, StorageSettings


def run(**changes) -> RunSettings:
    return RunSettings(**{"model": PRESETS["llama-tiny"], "sequence_length": 256, **changes})


def test_ids_of_runs_stay_what_they_were():
    """Golden ids: a new option must not change the identity of runs that do not use it."""
    assert run().identity == "packed-llama-tiny-single-w1-ef886c7152"
    changed = run(approach="padded", layout=LayoutSettings(data=4), repeat=2, optimizer=OptimizerSettings(beta2=0.99))
    assert changed.identity == "padded-llama-tiny-ddp-w4-63550b0c44"
    assert run(layout=LayoutSettings(shard=4)).identity == "packed-llama-tiny-fsdp-w4-e4918f6b2c"
    hybrid = LayoutSettings(data=2, shard=2, sharding="zero2")
    assert run(layout=hybrid).identity == "packed-llama-tiny-hsdp-w4-52026822b7"


def test_names_never_enter_the_identity():
    renamed = run(corpus=dataclasses.replace(run().corpus, name="other"))
    assert renamed.identity == run().identity


@pytest.mark.parametrize(
    "change",
    [
        {"repeat": 1},
        {"seed": 1},
        {"global_batch": 16},
        {"approach": "padded"},
        {"layout": LayoutSettings(data=2)},
        {"storage": StorageSettings(codec="snappy"), "approach": "token-list"},
        {"model": dataclasses.replace(PRESETS["llama-tiny"], layers=3)},
    ],
)
def test_science_changes_the_identity(change):
    assert run(**change).identity != run().identity


def test_a_run_survives_its_json():
    before = run(approach="token-list", storage=StorageSettings(codec="zstd", codec_level=9), seed=3)
    assert RunSettings.from_json(before.to_json()) == before


def test_json_leaves_defaults_out():
    assert json.loads(run(global_batch=8).to_json()).keys() == {"model", "sequence_length"}


def test_foreign_json_is_refused():
    with pytest.raises(UserError, match="colour"):
        from_dict(RunSettings, {"colour": "red"})
    for text in ("{", "3", '{"layout": {"dta": 2}}'):
        with pytest.raises(UserError):
            RunSettings.from_json(text)


@pytest.mark.parametrize(
    "store",
    [
        StoreSettings("padded"),
        StoreSettings("padded", sequence_length=2048, codec="snappy", dtype="int64", eos=True),
        StoreSettings("token-list", codec_level=22, row_group_rows=50),
        StoreSettings("packed", split="validation", sequence_length=256),
    ],
)
def test_a_store_is_its_folders_name(store):
    assert StoreSettings.parse(store.directory) == store


def test_store_names_have_one_spelling():
    for name in (
        "padded-sequence_length=1024",
        "padded-eos=false",
        "packed-codec=zstd",
        "padded-sequence_length=0",
        "pad",
    ):
        with pytest.raises(UserError):
            StoreSettings.parse(name)


def test_only_differences_are_written():
    assert to_dict(StoreSettings("padded", sequence_length=2048)) == {"format": "padded", "sequence_length": 2048}


@pytest.mark.parametrize(
    "layout, method, ranks",
    [
        (LayoutSettings(), "single", 1),
        (LayoutSettings(data=2), "ddp", 2),
        (LayoutSettings(shard=3, sharding="zero1"), "zero1", 3),
        (LayoutSettings(shard=2, sharding="zero2"), "fsdp", 2),
        (LayoutSettings(shard=2), "fsdp", 2),
        (LayoutSettings(data=2, shard=4), "hsdp", 8),
    ],
)
def test_a_layout_is_named_by_its_method_and_has_the_product_of_its_degrees(layout, method, ranks):
    assert (layout.method, layout.world_size, run(layout=layout).problems()) == (method, ranks, [])


@pytest.mark.parametrize(
    "layout, field, words",
    [
        (LayoutSettings(shard=9), "layout.shard", "9 ranks share 8 rows"),
        (LayoutSettings(data=3, shard=3), "layout.data", "9 ranks share 8 rows"),
        (LayoutSettings(sharding="zero1"), "layout.sharding", "set layout.shard"),
        (LayoutSettings(data=2, sharding="zero2"), "layout.sharding", "set layout.shard"),
        (LayoutSettings(data=2, shard=2, sharding="zero1"), "layout.data", "data 1 and shard 4"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_nearest_that_can(layout, field, words):
    ((key, text),) = run(layout=layout).problems()
    assert key == field and words in text
