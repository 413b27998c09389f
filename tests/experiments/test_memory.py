from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.distributed.parity import GPT2_PARTS, LAYOUTS, SHAPE, each, on_ranks, run_of, trainer_of
from tokenscale.costs.memory import memory
from tokenscale.data.batches.batch import Batch
from tokenscale.data.order.permutation import rank_slots
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.run import OptimizerSettings
from tokenscale.train.models.objective import MicroBatch
from tokenscale.train.phase_timer import HostTimer
from tokenscale.train.profiling import Probe

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20), pytest.mark.distributed]
PARTS = ("parameters", "gradients", "optimizer", "activations")
GPT2 = replace(GPT2_PARTS, maximum_positions=30)
DROPPED = replace(SHAPE, dropout=0.1)
FOUR = {"zero2": LayoutSettings(shard=4, sharding="zero2"), "1f1b": LayoutSettings(pipeline=4)}
BF16 = {"precision": "bf16"}
KEPT = {"activation_checkpointing": "selective"}
NORMS = replace(SHAPE, query_key_norm=True)
CASES = {
    # one rank: every number format, and whatever else changes what is saved
    **{
        precision: run_of(precision=precision)
        for precision in ("fp32", "bf16", "fp16", "bf16-true")
    },
    "grouped queries": run_of(model=replace(SHAPE, key_value_heads=2)),
    "biases": run_of(model=replace(SHAPE, biases=True)),
    "heads of their own width": run_of(
        model=replace(SHAPE, head_dim=12, attention_biases="inputs")
    ),
    "norms of queries and keys": run_of(model=NORMS),
    "norms of queries and keys, bf16": run_of(model=NORMS, **BF16),
    "norms of queries and keys, products kept, bf16-true": run_of(
        model=NORMS, **KEPT, precision="bf16-true"
    ),
    "loss in chunks": run_of(loss_chunk=5),
    "loss in chunks, bf16": run_of(loss_chunk=5, **BF16),
    "blocks again, bf16": run_of(activation_checkpointing="block", **BF16),
    "products kept": run_of(**KEPT),
    "products kept, dropout, bf16": run_of(model=DROPPED, **KEPT, **BF16),
    "dropout": run_of(model=DROPPED, micro_batch=3),
    "document mask, bf16": run_of(document_mask=True, **BF16),
    "GPT-2's parts": run_of(model=GPT2),
    "GPT-2's parts, dropout, document mask": run_of(
        model=replace(GPT2, dropout=0.1), document_mask=True
    ),
    "GPT-2's parts, bf16-true": run_of(model=GPT2, precision="bf16-true"),
    "bf16-true, moments in fp32": run_of(
        precision="bf16-true", optimizer=OptimizerSettings(moments="fp32")
    ),
    # two ranks
    "data, bf16": run_of(LayoutSettings(data=2), **BF16),
    "zero1": run_of(LAYOUTS["zero1@2"]),
    "zero2, bf16": run_of(LAYOUTS["zero2@2"], **BF16),
    "zero3": run_of(LAYOUTS["zero3@2"]),
    "zero3, embedding and head in their own groups": run_of(
        LayoutSettings(shard=2, embedding_group=True, head_group=True)
    ),
    "zero2, gathered in bf16": run_of(replace(LAYOUTS["zero2@2"], gather="bf16"), **BF16),
    "zero3, gathered in bf16, GPT-2's parts, chunks": run_of(
        replace(LAYOUTS["zero3@2"], gather="bf16"),
        **BF16,
        model=replace(GPT2, tied_embeddings=False),
        loss_chunk=5,
    ),
    "zero3, blocks again": run_of(LAYOUTS["zero3@2"], activation_checkpointing="block", model=GPT2),
    "tensor": run_of(LAYOUTS["tp@2"]),
    "tensor, GPT-2's parts, dropout, document mask, bf16": run_of(
        LAYOUTS["tp@2"], model=replace(GPT2, dropout=0.1), document_mask=True, **BF16
    ),
    "tensor, GPT-2's parts without biases, products kept, bf16": run_of(
        LAYOUTS["tp@2"], model=replace(GPT2, biases=False), **KEPT, **BF16
    ),
    "tensor, norms of queries and keys, wide heads": run_of(
        LAYOUTS["tp@2"],
        model=replace(SHAPE, query_key_norm=True, head_dim=12, attention_biases="all"),
    ),
    "gpipe, bf16": run_of(LAYOUTS["gpipe@2"], **BF16),
    "1f1b of a tied embedding, bf16": run_of(LAYOUTS["1f1b@2"], model=GPT2, **BF16),
    "interleaved": run_of(LAYOUTS["interleaved@2"]),
    "zero-bubble, bf16": run_of(LAYOUTS["zero-bubble@2"], **BF16),
    # four ranks
    "zero2 of fewer rows than ranks": run_of(
        FOUR["zero2"], model=replace(GPT2, vocabulary_size=9, hidden=9)
    ),
    "zero3 to two": run_of(LayoutSettings(shard=4, reshard_to=2)),
    "zero3 to two, uneven rows, gathered in bf16": run_of(
        LayoutSettings(shard=4, reshard_to=2, gather="bf16"),
        **BF16,
        model=replace(SHAPE, vocabulary_size=9, hidden=9),
    ),
    "hsdp, bf16-true": run_of(LAYOUTS["hsdp-zero3@2x2"], precision="bf16-true"),
    "a head a rank, loss in chunks, document mask": run_of(
        LAYOUTS["tp@4"], loss_chunk=5, document_mask=True
    ),
    "1f1b of four": run_of(FOUR["1f1b"]),
    "1f1b and tensor, dropout, products kept": run_of(
        LAYOUTS["1f1b-tp@2x2"], model=DROPPED, **KEPT, **BF16
    ),
    "interleaved and zero2": run_of(LAYOUTS["interleaved-zero2@2x2"]),
}


def measure(world, run):
    place = run.layout.coordinate(world.rank)
    layout = run.layout
    rows = len(rank_slots(run.global_batch, place.data_rank, layout.data_parallel_size))
    tokens = np.random.default_rng(rows).integers(
        0, run.model.vocabulary_size, (rows, run.sequence_length)
    )
    ids = np.broadcast_to(np.arange(run.sequence_length, dtype=np.int32) // 10, tokens.shape)
    batch = replace(
        Batch.from_arrays(tokens, tokens, 0),
        document_ids_bt=ids.copy() if run.document_mask else None,
    )
    trainer = trainer_of(run, world)
    if layout.shard > 1:  # as validation does, which leaves weights gathered
        with torch.no_grad():
            trainer.parallel.loss(MicroBatch(*map(torch.from_numpy, (tokens, tokens))))
    probe = Probe(trainer.model, world.device, run, trainer.shards.held_gradients)
    trainer.step(
        batch, torch.tensor(float(run.global_batch * run.sequence_length)), 1e-3, HostTimer(), probe
    )
    return {part: probe.bytes[f"{part}_bytes"] for part in PARTS}


@pytest.fixture(scope="module")
def found():
    """Case → what each of its ranks measured. Ranks are started once for all cases of a world
    size.
    """
    return on_ranks(each, CASES, measure)


@pytest.mark.parametrize("case", CASES)
def test_every_rank_holds_what_is_predicted(found, case):
    """To the byte: small shapes leave no room for a term that is forgotten."""
    for rank, expected in enumerate(found[case]):
        held = memory(CASES[case], rank)
        assert {part: getattr(held, part) for part in PARTS} == expected, f"rank {rank}"
