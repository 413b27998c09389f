import math

import pytest
import torch

from tokenscale.costs.flops import Convention, flops_per_token, matmul_parameters, parameters
from tokenscale.costs.peaks import peak_flops
from tokenscale.models.decoder import Decoder, initialise
from tokenscale.models.losses import cross_entropy_sum
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import OptimizerSettings, ScheduleSettings
from tokenscale.training.optimizer import adamw, clip
from tokenscale.training.schedule import learning_rate

MICRO = PRESETS["llama-micro"].with_vocabulary(64)


def decoder(seed=0) -> Decoder:
    model = Decoder(MICRO, 16)
    initialise(model, seed)
    return model


@pytest.mark.parametrize("name", ["llama-micro", "llama-tiny", "llama-small"])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_from_the_settings_alone(name, tied):
    import dataclasses

    shape = dataclasses.replace(PRESETS[name].with_vocabulary(512), tied_embeddings=tied)
    model = Decoder(shape, 8)
    assert parameters(shape) == sum(p.numel() for p in model.parameters())
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert matmul_parameters(shape) == sum(m.weight.numel() for m in linear)


def test_flops_of_the_source_studies():
    """48.32 and 7.65 GFLOP a token at 2048; 51.54 and 9.26 were logged where a wrapper hid the embedding."""
    for name, full in (("llama-8b-nemo", 48.32), ("llama-1.4b-nemo", 7.65)):
        assert round(flops_per_token(PRESETS[name], 2048, Convention.FULL) / 1e9, 2) == full
        assert flops_per_token(PRESETS[name], 2048, Convention.CAUSAL) < full * 1e9
    assert parameters(PRESETS["llama-8b-nemo"]) == 8_053_329_920
    assert parameters(PRESETS["llama-1.4b-nemo"]) == 1_409_353_728


def test_an_unknown_device_has_no_peak():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA GH200 120GB") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    for name in ("cpu", "NVIDIA H20", "NVIDIA RTX 4090", "AMD EPYC", ""):
        assert peak_flops(name) is None


def test_the_future_does_not_change_the_past():
    model, tokens = decoder(), torch.randint(0, 64, (2, 16))
    changed = tokens.clone()
    changed[:, 10:] = 1
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10])
    assert not torch.allclose(model(tokens)[:, 10:], model(changed)[:, 10:])


def test_attention_equals_its_definition():
    """Grouped queries, rotary positions and the causal mask against a plain triple loop over heads."""
    from tokenscale.models.decoder import rotate

    model, x = decoder(), torch.randn(1, 6, 32)
    attention, rotation = model.blocks[0].attention, model.rotation(0, 6, x.device)
    q = attention.query(x).view(1, 6, 2, 16).transpose(1, 2)
    k = attention.key(x).view(1, 6, 1, 16).transpose(1, 2)
    v = attention.value(x).view(1, 6, 1, 16).transpose(1, 2)
    q, k = rotate(q, *rotation), rotate(k, *rotation)
    heads = []
    for h in range(2):
        scores = (q[0, h] @ k[0, 0].T / math.sqrt(16)).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[0, 0])
    expected = attention.output(torch.cat(heads, -1))
    torch.testing.assert_close(attention(x, rotation)[0], expected)


def test_rotary_positions_depend_on_distance_only():
    from tokenscale.models.decoder import rotate

    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    cosine, sine = decoder().rotation(0, 16, q.device)

    def score(i, j):
        return (rotate(q, cosine[i], sine[i]) * rotate(k, cosine[j], sine[j])).sum()

    torch.testing.assert_close(score(3, 1), score(9, 7))
    assert not torch.isclose(score(3, 1), score(9, 5))


def test_the_first_loss_is_that_of_guessing():
    tokens = torch.randint(0, 64, (4, 16))
    loss = cross_entropy_sum(decoder()(tokens), tokens) / tokens.numel()
    assert abs(loss.item() - math.log(64)) < 0.1


def test_weights_follow_from_the_seed():
    a, b, c = decoder(1), decoder(1), decoder(2)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embedding.weight, c.embedding.weight)


def test_ignored_labels_add_nothing():
    logits, labels = torch.randn(1, 4, 8), torch.tensor([[1, 2, -100, -100]])
    torch.testing.assert_close(cross_entropy_sum(logits, labels), cross_entropy_sum(logits[:, :2], labels[:, :2]))
    assert cross_entropy_sum(logits, torch.full((1, 4), -100)) == 0


def test_clipping_clips():
    """The source studies' clipping never did: the gradients' norm stayed as it was."""
    model = decoder()
    (cross_entropy_sum(model(torch.ones(2, 16, dtype=torch.long)), torch.ones(2, 16, dtype=torch.long)) * 50).backward()
    before, after = clip(model, 1.0)
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
    assert before > 10 and abs(after - 1) < 1e-4
    torch.testing.assert_close(norm, torch.tensor(1.0), atol=1e-4, rtol=0)


def test_small_gradients_are_left_alone():
    model = decoder()
    (
        cross_entropy_sum(model(torch.ones(2, 16, dtype=torch.long)), torch.ones(2, 16, dtype=torch.long)) * 1e-4
    ).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    before, after = clip(model, 1.0)
    assert before == after < 1
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))


def test_only_matrices_decay():
    groups = adamw(decoder(), OptimizerSettings(weight_decay=0.3)).param_groups
    assert {p.dim() for p in groups[0]["params"]} == {2} and groups[0]["weight_decay"] == 0.3
    assert {p.dim() for p in groups[1]["params"]} == {1} and groups[1]["weight_decay"] == 0


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_the_first_step_uses_the_warm_up(shape):
    """A study's schedule ran step 0 at the peak and step 1 at zero."""
    schedule = ScheduleSettings(shape=shape, warmup_steps=10, floor=0.1)
    rates = [learning_rate(k, 100, 2.0, schedule) for k in range(100)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == pytest.approx(2.0) == max(rates)
    assert all(b >= a for a, b in zip(rates[:9], rates[1:10], strict=True))
    assert rates[-1] == pytest.approx(2.0 if shape == "constant" else 0.2)
    assert all(b <= a for a, b in zip(rates[9:], rates[10:], strict=False))


def test_cosine_is_halfway_in_the_middle():
    schedule = ScheduleSettings(shape="cosine", warmup_steps=1, floor=0.0)
    assert learning_rate(50, 101, 1.0, schedule) == pytest.approx(0.5)


def test_a_schedule_without_warm_up_starts_at_the_peak():
    assert learning_rate(0, 10, 1.0, ScheduleSettings(warmup_steps=0)) == 1.0
    assert learning_rate(0, 1, 1.0, ScheduleSettings(warmup_steps=0)) == 1.0
