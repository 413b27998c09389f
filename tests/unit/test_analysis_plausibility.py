"""FLOPs per token that runs state, and what they count."""

import pytest

from tokenscale.analysis.stated_flops import counted, flops_of_mfu
from tokenscale.costs.flops import Convention, flops_per_token, hardware_flops_per_token, weights
from tokenscale.settings.presets import PRESETS

LARGE, SMALL = PRESETS["llama-8b-nemo"], PRESETS["llama-1.4b-nemo"]
PEAK = 989e12
#: (GPUs, global tokens/s, reported MFU, corrected MFU) of the source study's runs of the 1.41B model, sequences of 2048
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
    assert "1.21 × the formula's: the input embedding was counted (a wrapper such as DDP hides it)" in found.words
    assert reported / found.ratio == pytest.approx(corrected, abs=1e-4)
    found = counted(flops_of_mfu(corrected, tokens_per_s, 1.0, PEAK, gpus), SMALL, 2048)
    assert not found.fault and found.words == "FLOPs per token as the formula has it"


def test_other_conventions_are_named_and_no_fault():
    causal = counted(flops_per_token(SMALL, 2048, Convention.CAUSAL), SMALL, 2048)
    again = counted(hardware_flops_per_token(SMALL, 2048, Convention.FULL, "block"), SMALL, 2048)
    assert not causal.fault and "causal mask" in causal.words
    assert not again.fault and "HFU" in again.words and again.ratio > 1.2
    large, tied = counted(51.54e9, LARGE, 2048), PRESETS["gpt2-124m"]  # whose embeddings are counted
    assert large.fault and "1.07 ×" in large.words and "embedding" in large.words
    assert counted(flops_per_token(tied, 1024, Convention.FULL), tied, 1024).words.endswith("as the formula has it")


@pytest.mark.parametrize(("factor", "words"), [(1 / 3, "forward pass"), (0.5, "counted as one"), (1.8, "no known way")])
def test_other_faults_are_named_or_called_unknown(factor, words):
    found = counted(factor * flops_per_token(SMALL, 2048, Convention.FULL), SMALL, 2048)
    assert found.fault and words in found.words


def test_of_two_readings_that_lie_together_the_nearer_one_is_named():
    """In short rows attention is a third of a percent of it, so that what was left out of it shows little."""
    table, full = 6 * weights(SMALL).looked_up, flops_per_token(SMALL, 128, Convention.FULL)
    causal = flops_per_token(SMALL, 128, Convention.CAUSAL)
    without = 2 * causal - full
    assert abs(without / causal - 1) < 0.005
    assert counted(without, SMALL, 128).words.endswith("attention was left out")
    assert counted(table + without, SMALL, 128).words.endswith("hides it), attention was left out")
    assert counted(table + full, SMALL, 128).words.endswith("hides it)")
    assert counted(causal, SMALL, 128).words.endswith("as the formula has it"), "which accuses nobody"


@pytest.mark.parametrize("stated", [0.0, float("nan")])
def test_no_number_is_no_statement(stated):
    with pytest.raises(ValueError, match="above zero"):
        counted(stated, SMALL, 2048)
