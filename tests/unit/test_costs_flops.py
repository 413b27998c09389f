"""Weights and FLOPs against modules that are really built, counts by hand, and FLOPs that runs
state.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tokenscale.costs.flops import (
    Convention,
    flops_per_token,
    hardware_flops_per_token,
    parameters,
    weights,
)
from tokenscale.costs.peaks import PEAKS, peak_flops
from tokenscale.referee.stated_flops import counted, flops_of_mfu
from tokenscale.settings.presets import PRESETS
from tokenscale.train.models.build import build
from tokenscale.train.models.library import count_weights

FULL = Convention.FULL
CAUSAL = Convention.CAUSAL


def with_counts(shape):
    """The shape; a model of transformers with the numbers of its weights."""
    return shape if shape.transformers is None else count_weights(shape)


def resolved(name, **changes):
    return with_counts(replace(PRESETS[name].with_vocabulary(512).with_positions(128), **changes))


def built(shape, objective="causal"):
    with torch.device("meta"):
        return build(shape, 128, objective=objective, kernel="sdpa")


@pytest.mark.parametrize("name", PRESETS)
def test_every_presets_weights_are_those_of_the_module(name):
    shape = resolved(name)
    model = built(shape, "masked" if shape.transformers else "causal")
    count = weights(shape)
    assert parameters(shape) == count.total == sum(p.numel() for p in model.parameters())
    linear = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    assert count.matrices == sum(w.numel() for w in linear.values())
    assert count.blocks == sum(p.numel() for p in model.blocks.parameters())
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    assert count.looked_up == sum(w.numel() for i, w in tables.items() if i not in linear)


def test_every_option_of_a_shape_counts():
    for changes in [
        {"norm": "layer"},
        {"norm": "layer", "biases": True},
        {"biases": True},
        {"activation": "gelu"},
        {"activation": "gelu", "biases": True},
        {"positions": "learned", "maximum_positions": 200},
        {"tied_embeddings": True, "positions": "learned", "maximum_positions": 128},
        {"head_dim": 32, "query_key_norm": True},
        {"attention_biases": "all"},
        {"attention_biases": "inputs", "head_dim": 8},
    ]:
        shape = resolved("llama-tiny", **changes)
        assert parameters(shape) == sum(p.numel() for p in built(shape).parameters()), changes


#: of the studies' logs, and of what `transformers` counts in the published models (BERT without its
#: pooler)
PUBLISHED = {
    "llama-8b-nemo": 8_053_329_920,
    "llama-1.4b-nemo": 1_409_353_728,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen3-0.6b": 596_049_920,
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "distilbert-base": 66_985_530,
    "bert-base": 109_514_298,
}


def test_published_shapes_have_their_published_sizes():
    found = {name: parameters(with_counts(PRESETS[name])) for name in PUBLISHED}
    assert found == PUBLISHED


@pytest.mark.parametrize(
    "name, length, full, causal",
    # by hand with the vocabulary padded to 50,304: 6 (12 L d^2 + V d) + 12 L d T, and half of the
    # last
    [
        ("gpt2-124m", 1024, 855e6, 798e6),
        ("gpt2-124m", 2048, 968e6, 855e6),
        ("gpt2-355m", 1024, 2.423e9, 2.272e9),
        ("gpt2-355m", 2048, 2.725e9, 2.423e9),
        # of the studies; 51.54 and 9.26 GFLOP were logged where a wrapper hid the embedding
        ("llama-8b-nemo", 2048, 48.32e9, None),
        ("llama-1.4b-nemo", 2048, 7.65e9, None),
    ],
)
def test_flops_are_those_counted_by_hand_and_of_the_source_studies(name, length, full, causal):
    """To 0.1 %: norms and biases, which the count by hand leaves out, are that much of the
    weights.
    """
    shape = replace(PRESETS[name], **({"vocabulary_size": 50_304} if causal else {}))
    assert flops_per_token(shape, length, FULL) == pytest.approx(full, rel=1e-3)
    assert flops_per_token(shape, length, CAUSAL) < full
    assert causal is None or flops_per_token(shape, length, CAUSAL) == pytest.approx(
        causal, rel=1e-3
    )


def test_nothing_is_left_out_of_masked_attention_and_recomputation_adds_a_forward_pass_of_the_blocks():
    shape = resolved("bert-tiny")
    full = flops_per_token(shape, 64, FULL)
    assert (
        flops_per_token(shape, 64, CAUSAL, "masked")
        == flops_per_token(shape, 64, FULL, "masked")
        == full
    )
    shape = PRESETS["llama-micro"].with_vocabulary(64)
    length = 16
    forward = 2 * sum(p.numel() for p in built(shape).blocks.parameters()) + 4 * 2 * 32 * length
    trained = flops_per_token(shape, length, FULL)
    for mode, more in (("block", forward), ("none", 0), ("selective", 0)):
        assert hardware_flops_per_token(shape, length, FULL, mode) == trained + more


LIKE = [
    "cpu",
    "",
    "NVIDIA H20",
    "NVIDIA GH200",
    "NVIDIA RTX 4090",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
]


def test_a_device_has_the_peak_of_its_exact_name_and_one_that_only_looks_alike_has_none():
    by_hand = {
        "NVIDIA GH200 120GB": 989.4e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
    }
    assert {name: peak_flops(name) for name in by_hand} == by_hand
    assert peak_flops("Tesla V100-SXM2-32GB") is None, "no bf16 units"
    assert not [
        n
        for n in LIKE
        for f in ("bf16", "fp16", "tf32", "fp32", "fp8")
        if peak_flops(n, f) is not None
    ]
    names = [name for peak in PEAKS for name in peak.names]
    assert len(names) == len(set(names)) and all(peak.source for peak in PEAKS)
    for peak in PEAKS:  # by every maker's table half the width has twice the rate
        assert peak.fp8 is None or peak.fp8 == pytest.approx(2 * peak.bf16, rel=0.02)
        assert peak.tf32 is None or peak.tf32 == pytest.approx(peak.bf16 / 2, rel=0.03)


LARGE = PRESETS["llama-8b-nemo"]
SMALL = PRESETS["llama-1.4b-nemo"]
PEAK = 989e12
#: (GPUs, global tokens/s, reported MFU, corrected MFU) of the source study's runs of the 1.41B
#: model, sequences of 2048
STUDY = [
    (4, 161_853.91, 0.3789, 0.3130),
    (8, 308_941.12, 0.3616, 0.2987),
    (16, 600_019.40, 0.3512, 0.2901),
    (16, 610_935.46, 0.3576, 0.2954),
]


@pytest.mark.parametrize(("gpus", "tokens_per_s", "reported", "corrected"), STUDY)
def test_the_mfu_that_a_wrapper_inflated_is_named(gpus, tokens_per_s, reported, corrected):
    found = counted(flops_of_mfu(reported, tokens_per_s, 1.0, PEAK, gpus), SMALL, 2048)
    assert found.fault and found.ratio == pytest.approx(1.2105, rel=1e-3)
    assert (
        "1.21 × the formula's: the input embedding was counted (a wrapper such as DDP hides it)"
        in found.words
    )
    assert reported / found.ratio == pytest.approx(corrected, abs=1e-4)
    found = counted(flops_of_mfu(corrected, tokens_per_s, 1.0, PEAK, gpus), SMALL, 2048)
    assert not found.fault and found.words == "FLOPs per token as the formula has it"


def test_other_conventions_are_named_and_no_fault():
    causal = counted(flops_per_token(SMALL, 2048, Convention.CAUSAL), SMALL, 2048)
    again = counted(hardware_flops_per_token(SMALL, 2048, Convention.FULL, "block"), SMALL, 2048)
    assert not causal.fault and "causal mask" in causal.words
    assert not again.fault and "HFU" in again.words and again.ratio > 1.2
    # whose embeddings are counted
    large = counted(51.54e9, LARGE, 2048)
    tied = PRESETS["gpt2-124m"]
    assert large.fault and "1.07 ×" in large.words and "embedding" in large.words
    assert counted(flops_per_token(tied, 1024, Convention.FULL), tied, 1024).words.endswith(
        "as the formula has it"
    )


@pytest.mark.parametrize(
    ("factor", "words"), [(1 / 3, "forward pass"), (0.5, "counted as one"), (1.8, "no known way")]
)
def test_other_faults_are_named_or_called_unknown_and_no_number_is_no_statement(factor, words):
    found = counted(factor * flops_per_token(SMALL, 2048, Convention.FULL), SMALL, 2048)
    assert found.fault and words in found.words
    for stated in (0.0, float("nan")):
        with pytest.raises(ValueError, match="above zero"):
            counted(stated, SMALL, 2048)


def test_of_two_readings_that_lie_together_the_nearer_one_is_named():
    """In short rows attention is a third of a percent of it, so that what was left out of it shows
    little.
    """
    table = 6 * weights(SMALL).looked_up
    full = flops_per_token(SMALL, 128, Convention.FULL)
    causal = flops_per_token(SMALL, 128, Convention.CAUSAL)
    without = 2 * causal - full
    assert abs(without / causal - 1) < 0.005
    assert counted(without, SMALL, 128).words.endswith("attention was left out")
    assert counted(table + without, SMALL, 128).words.endswith("hides it), attention was left out")
    assert counted(table + full, SMALL, 128).words.endswith("hides it)")
    assert counted(causal, SMALL, 128).words.endswith("as the formula has it"), (
        "which accuses nobody"
    )
