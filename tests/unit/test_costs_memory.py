"""Predicted memory against counts by hand and against papers; `tests/experiments/test_memory.py`
measures it.
"""

from dataclasses import replace

import pytest

from tokenscale.costs.flops import parameters
from tokenscale.costs.memory import largest_memory, memory
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import RunSettings
from tokenscale.train.models.library import count_weights

LLAMA = PRESETS["llama-8b-nemo"]
#: weights and tensors of it: nine a block, two embeddings and the last norm
COUNT = 8_053_329_920
TENSORS = 32 * 9 + 3
SMALL = ModelSettings(
    dimension=16, layers=4, heads=4, key_value_heads=2, hidden=32, vocabulary_size=97
)


def run_of(layout=None, model=SMALL, **changes) -> RunSettings:
    settings = {"sequence_length": 32, "global_batch": 16, "micro_batch": 2}
    return RunSettings(model=model, layout=layout or LayoutSettings(), **(settings | changes))


def static(held) -> int:
    return held.parameters + held.gradients + held.optimizer


def test_tensors_add_up_to_the_weights_and_adamw_takes_16_bytes_a_parameter_in_fp32_and_8_in_bf16():
    for shape in (
        shape.with_vocabulary(512) for shape in PRESETS.values() if shape.transformers is None
    ):
        held = memory(run_of(model=shape), 0)
        assert held.parameters == held.gradients == 4 * parameters(shape.with_positions(32)), (
            shape.name
        )
    for precision, each in (("fp32", 16), ("bf16", 16), ("fp16", 16), ("bf16-true", 8)):
        held = memory(run_of(model=LLAMA, precision=precision), 0)
        assert static(held) == each * COUNT + 4 * TENSORS, precision


def test_zero_shares_out_what_the_table_of_its_paper_says():
    """Rajbhandari et al. 2020, figure 1, with 4 bytes a parameter and a gradient and 8 of optimizer
    state for its 2, 2 and 12: 64 ranks divide every row count of this shape.
    """
    expected = {
        "zero1": (4, 4, 8 / 64),
        "zero2": (4 / 64, 4 / 64, 8 / 64),
        "zero3": (4 / 64, 4 / 64, 8 / 64),
    }
    for sharding, (weights, gradients, state) in expected.items():
        for data in (1,) if sharding == "zero1" else (1, 2):
            layout = LayoutSettings(shard=64, sharding=sharding, data=data)
            held = memory(run_of(layout, model=LLAMA, global_batch=128), layout.world_size - 1)
            found = (held.parameters, held.gradients, held.optimizer - 4 * TENSORS)
            assert found == (weights * COUNT, gradients * COUNT, state * COUNT), sharding
    assert (
        static(memory(run_of(LayoutSettings(data=64), model=LLAMA, global_batch=64), 0))
        > 16 * COUNT
    )


def test_a_tensor_group_cuts_matrices_and_vocabulary_and_repeats_the_rest():
    """By hand: rows of 97 entries in 49 and 48; half of 4 heads of width 4, of 2 key heads, of 32
    hidden units.
    """
    block = 8 * 16 + 4 * 16 + 4 * 16 + 16 * 8 + 3 * 16 * 16 + 2 * 16
    for rank, entries in ((0, 49), (1, 48)):
        held = memory(run_of(LayoutSettings(tensor=2)), rank)
        assert held.parameters == 4 * (2 * entries * 16 + 4 * block + 16)
    gpt2 = replace(
        SMALL,
        norm="layer",
        positions="learned",
        activation="gelu",
        biases=True,
        tied_embeddings=True,
    )
    # biases: whole where they are added to the residual stream (two of 16), cut for what is cut
    block = 8 * 16 + 4 * 16 + 4 * 16 + 16 * 8 + 2 * 16 * 16 + 4 * 16 + 2 * 16 + (8 + 4 + 4 + 16)
    held = memory(run_of(LayoutSettings(tensor=2), model=gpt2), 0)
    assert held.parameters == 4 * (49 * 16 + 32 * 16 + 4 * block + 2 * 16)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_hold_the_model_between_them_and_a_tied_embedding_twice(tied):
    model = replace(SMALL, tied_embeddings=tied)
    run = run_of(LayoutSettings(pipeline=4, tensor=2, shard=2, sharding="zero3"), model=model)
    whole = sum(memory(run, rank).parameters for rank in range(16)) / 4
    norms = 4 * 2 * 16 + 16  # both ranks of a tensor group have them
    assert whole == parameters(model) + norms + (97 * 16 if tied else 0)


def test_gpt2s_activations_are_those_of_the_papers_for_a_gpu():
    """Korthikanti et al. 2022: 34 s b h a layer in 16 bits with dropout (equation 2, without the
    scores, which fused attention never keeps), and our four numbers a position of two norms and one
    a head and position of attention. With sequence parallelism 1/t of it (equation 4), but for what
    went into query, key and value, and into the feed-forward part: 4 s b h, whole here and gathered
    anew there.
    """
    model = ModelSettings(
        dimension=64,
        layers=8,
        heads=8,
        key_value_heads=8,
        hidden=256,
        vocabulary_size=96,
        norm="layer",
        positions="learned",
        activation="gelu",
        biases=True,
        dropout=0.1,
    )
    sbh = 2 * 32 * 64
    sb = 2 * 32

    def layer(tensor):
        runs = (
            run_of(LayoutSettings(tensor=tensor), replace(model, layers=n), precision="bf16-true")
            for n in (8, 7)
        )
        more, less = (memory(run, 0, "cuda").activations for run in runs)
        return more - less

    assert layer(1) == 34 * sbh + 16 * sb + 4 * 8 * sb
    assert layer(4) == (4 + 30 / 4) * sbh + (16 * sb + 4 * 8 * sb) / 4


def test_llamas_activations_by_hand():
    """Elements a position of a block in fp32: two norms of (x, 1/rms, x/rms), what goes into their
    products (2 d); query, key and value (2 d with half the key heads), result and its copy (2 d),
    log-sums (4 heads); gate, SiLU, up and product (4 h). Then ids, the last norm, what goes into
    the head, log-probabilities, labels; and in all cosines and sines [T, head width / 2], and a
    sum.
    """
    positions = 2 * 32
    d = 16
    h = 32
    block = 2 * (2 * d + 1) + 2 * d + 2 * d + 2 * d + 4 + 4 * h
    ends = 8 + 4 * (2 * d + 1 + d + 97) + 8
    held = memory(run_of(model=replace(SMALL, layers=3)), 0)
    assert held.activations == positions * (3 * 4 * block + ends) + 4 * 32 * 4 + 4
    assert held.sum_of_parts == static(held) + held.activations
    # blocks that are computed again keep their input
    again = memory(run_of(model=replace(SMALL, layers=3), activation_checkpointing="block"), 0)
    assert again.activations == positions * (3 * 4 * d + ends) + 4


def test_a_stage_holds_the_passes_that_its_schedule_has_in_flight():
    def passes(rank, **layout):
        held, one = (
            memory(
                run_of(LayoutSettings(pipeline=4, **layout), global_batch=batch), rank
            ).activations
            # activations and gradients, but for the ends
            - (batch if rank in (0, 3) else 2 * batch) * message
            for batch in (16, 2)  # 8 micro-batches, and one
        )
        return held / one

    message = 4 * 32 * SMALL.dimension  # a row's
    assert [passes(rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [passes(rank, schedule="gpipe") for rank in range(4)] == [8] * 4
    assert [passes(rank, schedule="naive") for rank in range(4)] == [1] * 4
    assert all(
        held >= 4 - rank
        for rank, held in enumerate(passes(rank, schedule="zero-bubble") for rank in range(4))
    )


def test_messages_of_a_gpus_pipeline_are_the_outputs_of_the_passes_in_flight():
    run = run_of(LayoutSettings(pipeline=4), global_batch=16, activation_checkpointing="block")
    output = 4 * 2 * 32 * SMALL.dimension
    # a recomputed block keeps its input; the first stage has token ids, too
    block = output
    ids = 2 * 32 * 8
    assert memory(run, 0, "cuda").activations == 4 * (block + output + ids)
    assert memory(run, 1, "cuda").activations == 3 * (block + output)


def test_gathered_weights_are_held_once_however_many_passes_are_in_flight():
    pipeline = LayoutSettings(pipeline=2, schedule="gpipe")
    sharded = replace(pipeline, shard=2, sharding="zero2")
    plain = memory(run_of(pipeline, global_batch=8), 1)
    gathered = memory(run_of(sharded, global_batch=16), 2)  # ranks 2 and 3 have the second stage
    rows_that_do_not_divide = 4 * 16  # 97 entries as twice 49
    assert gathered.activations - plain.activations == plain.parameters + rows_that_do_not_divide


@pytest.mark.parametrize(
    "layout",
    [
        LayoutSettings(data=2, shard=3),
        LayoutSettings(shard=5, sharding="zero1"),
        LayoutSettings(tensor=2, data=2),
        LayoutSettings(pipeline=4, tensor=2, shard=2, sharding="zero2"),
        LayoutSettings(pipeline=2, schedule="interleaved", stages_per_rank=2),
    ],
    ids=lambda layout: layout.method,
)
def test_no_rank_holds_more_than_the_one_with_the_most(layout):
    run = run_of(layout, micro_batch=1)
    assert largest_memory(run).total == max(
        memory(run, rank).total for rank in range(layout.world_size)
    )
    # the last stage may be it: it keeps log-probabilities of a large vocabulary for each pass in
    # flight
    run = run_of(LayoutSettings(pipeline=2, schedule="gpipe"), replace(SMALL, vocabulary_size=4096))
    assert largest_memory(run) == memory(run, 1) != memory(run, 0)


def test_what_is_not_predicted_is_none_and_not_a_number():
    for changes in ({"compile": True}, {"float8": True}):
        held = memory(run_of(**changes), 0)
        assert held.activations is None and held.total == static(held) > 0
    bert = count_weights(PRESETS["bert-tiny"].with_vocabulary(512).with_positions(32))
    held = memory(run_of(LayoutSettings(shard=2, sharding="zero1"), model=bert), 0)
    count = parameters(bert)
    assert held.parameters == held.gradients == 4 * count
    assert held.optimizer == 8 * -(-count // 2) and held.activations is None


def test_a_gpus_kernels_keep_neither_scores_nor_masks_and_no_normalised_copy():
    long = {"sequence_length": 512, "document_mask": True, "model": replace(SMALL, dropout=0.1)}
    cpu, gpu = (memory(run_of(**long), 0, device).activations for device in ("cpu", "cuda"))
    scores = 4 * 2 * 4 * 512 * 512  # [B, heads, T, T] in fp32
    assert cpu - gpu > 4 * 3 * scores > gpu
    # rows of products that a GPU adds none to
    run = run_of(model=replace(SMALL, vocabulary_size=256))
    cpu, gpu = (memory(run, 0, device).activations for device in ("cpu", "cuda"))
    assert cpu - gpu == (2 * 4 + 1) * 4 * 2 * 32 * 16
