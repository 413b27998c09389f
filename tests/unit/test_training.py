import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tokenscale.costs.schedule import learning_rate, steps_of
from tokenscale.data.batches.batch import Batch
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import BudgetSettings, OptimizerSettings, RunSettings, ScheduleSettings
from tokenscale.train.models.decoder import Decoder, initialise
from tokenscale.train.models.losses import cross_entropy_sum
from tokenscale.train.optimizer import LossScale, adamw, total_norm, update
from tokenscale.train.parallel.sharding import BucketListener
from tokenscale.train.parallel.world import World
from tokenscale.train.phase_timer import HostTimer
from tokenscale.train.profiling import Probe
from tokenscale.train.trainer import Trainer

#: the epsilon keeps Adam from magnifying rounding where a gradient is nearly zero
SETTINGS = OptimizerSettings(learning_rate=1e-2, epsilon=1e-4)
MICRO = PRESETS["llama-micro"].with_vocabulary(64)


def decoder(seed=0) -> Decoder:
    model = Decoder(MICRO, 16)
    initialise(model, seed)
    return model


def stepped(factor: float, limit: float | None, loss_scale: float, fused: bool, steps: int = 3):
    """(norms before, norms after, norms of the gradients as they were used, weights) of some
    steps.
    """
    model = decoder()
    tokens = torch.ones(2, 16, dtype=torch.long)
    optimizer = adamw(model.parameters(), replace(SETTINGS, fused=fused))
    found = []
    for _ in range(steps):
        (cross_entropy_sum(model(tokens), tokens) * factor * loss_scale).backward()
        norm = total_norm([p.grad for p in model.parameters()]) / loss_scale
        before, after, bad = update(optimizer, norm, limit, torch.tensor(loss_scale))
        used = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        found.append((before.item(), after.item(), used.item()))
        assert bad == 0
        optimizer.zero_grad()
    return found, list(model.parameters())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("limit", [None, 1e6, 1.0, 1e-3])
def test_an_update_is_that_of_torch_clipping_and_adamw(limit, fused):
    """A study's clipping never did: the gradients' norm stayed as it was."""
    model = decoder()
    tokens = torch.ones(2, 16, dtype=torch.long)
    optimizer = adamw(model.parameters(), replace(SETTINGS, fused=fused))
    for _ in range(3):
        (cross_entropy_sum(model(tokens), tokens) * 5).backward()
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), limit or math.inf)
        optimizer.step()
        optimizer.zero_grad()
    for scale in (1.0, 1024.0):
        norms, weights = stepped(5.0, limit, scale, fused)
        for before, after, used in norms:
            assert before > 1 and after == pytest.approx(min(before, limit or math.inf), rel=1e-4)
            assert scale > 1 or used == pytest.approx(after, rel=1e-4)
        for mine, theirs in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("norm", [0.0, 1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("limit", [1e-9, 1e-3, 1.0])
def test_clipping_has_the_coefficient_of_torch_however_small_the_norm(norm, limit):
    theirs, mine = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    theirs.grad, mine.grad = (torch.tensor([norm]) for _ in range(2))
    torch.nn.utils.clip_grad_norm_([theirs], limit)
    update(adamw([mine], SETTINGS), torch.tensor(norm), limit, torch.ones(()))
    torch.testing.assert_close(mine.grad, theirs.grad, atol=0, rtol=1e-5)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    model = decoder()
    tokens = torch.ones(2, 16, dtype=torch.long)
    optimizer = adamw(model.parameters(), OptimizerSettings())
    weights = [p.detach().clone() for p in model.parameters()]
    (cross_entropy_sum(model(tokens), tokens) * bad).backward()
    assert (
        update(optimizer, total_norm([p.grad for p in model.parameters()]), 1.0, torch.ones(()))[2]
        == 1
    )
    assert all(torch.equal(p, q) for p, q in zip(weights, model.parameters(), strict=True))
    assert all(not state["exp_avg"].any() for state in optimizer.state.values())


def test_the_norm_of_16_bit_gradients_is_exact_to_fp32():
    """Rounded to bf16 a norm is known to two digits; clipping by it would be off by as much."""
    gradients = [torch.randn(1000).bfloat16() for _ in range(3)]
    expected = torch.cat([g.float() for g in gradients]).norm()
    torch.testing.assert_close(total_norm(gradients), expected, atol=0, rtol=1e-5)


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_the_norm_of_a_large_gradient_is_exact_to_fp32_in_any_number_of_shards(shards):
    gradient = torch.randn(2000, 2000)
    found = total_norm(list(gradient.T.chunk(shards)))  # not contiguous
    torch.testing.assert_close(found.double(), gradient.double().norm(), atol=0, rtol=5e-7)


def test_the_norm_of_all_ranks_overflows_only_where_it_is_too_large_itself(monkeypatch):
    """Of a rank with gradients, and of one without any; the other rank's norm is 4e30."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda squared, group: squared.add_(16e60))
    device = torch.device("cpu")
    for gradients, expected in (([torch.tensor([3e30])], 5e30), ([], 4e30)):
        found = total_norm(gradients, group=object(), device=device)
        assert found.item() == pytest.approx(expected) and found.dtype == torch.float32


def test_a_loss_scale_follows_the_rule_of_gradscaler():
    """Overflows and good steps in any order: the scale is torch's at every step."""
    mine = LossScale("fp16", torch.device("cpu"), initial=64.0, interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    for bad in [0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1]:
        weight.grad = None
        theirs.scale(weight.sum() * (math.inf if bad else 1.0)).backward()
        theirs.step(optimizer)
        theirs.update()
        mine.update(torch.tensor(float(bad)))
        assert mine.scale.item() == theirs.get_scale()


def trainer_of(**changes) -> Trainer:
    run = RunSettings(model=MICRO, sequence_length=16, optimizer=SETTINGS, **changes)
    return Trainer(run, run.model, World(0, 1, 0, torch.device("cpu")), "sdpa")


@pytest.mark.parametrize("useful", [1, 3])
def test_a_step_takes_the_mean_over_the_useful_tokens(useful):
    trainer = trainer_of(global_batch=2, micro_batch=1)
    tokens = np.ones((2, 16), np.int64)
    labels = np.full((2, 16), -100)
    labels.flat[:useful] = 1
    (
        cross_entropy_sum(trainer.model(torch.tensor(tokens)), torch.tensor(labels)) / useful
    ).backward()
    expected = total_norm([p.grad for p in trainer.model.parameters()]).item()
    trainer.model.zero_grad()
    found = trainer.step(
        Batch.from_arrays(tokens, labels, 0), torch.tensor(float(useful)), 1e-3, HostTimer()
    )
    assert found.norm.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss_chunk", [0, 5])
def test_a_step_without_a_label_has_no_gradient_and_is_finite(loss_chunk):
    trainer = trainer_of(global_batch=2, micro_batch=1, loss_chunk=loss_chunk)
    batch = Batch.from_arrays(np.ones((2, 16), np.int64), np.full((2, 16), -100), 0)
    found = trainer.step(batch, torch.tensor(0.0), 1e-3, HostTimer())
    assert (found.loss_sum, found.norm, found.bad) == (0, 0, 0)


def test_steps_in_passes_of_two_rows_are_those_of_plain_torch():
    """The loss scale, whatever it is, changes nothing."""
    trainer = trainer_of(global_batch=5, micro_batch=2)
    trainer.loss_scale.scale = torch.tensor(1024.0)
    model = copy.deepcopy(trainer.model)
    optimizer = adamw(model.parameters(), SETTINGS)
    draw = np.random.default_rng(0)
    for rate in (1e-2, 2e-2, 1e-2):
        tokens, labels = draw.integers(0, 64, (2, 5, 16))
        loss = cross_entropy_sum(model(torch.tensor(tokens)), torch.tensor(labels))
        (loss / labels.size).backward()
        norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), SETTINGS.clip_norm)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        batch = Batch.from_arrays(tokens, labels, 0)
        found = trainer.step(batch, torch.tensor(float(labels.size)), rate, HostTimer())
        torch.testing.assert_close(found.loss_sum, loss)
        torch.testing.assert_close(found.norm, norm)
    for mine, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("listens", [False, True])
def test_each_part_of_a_step_is_a_lap_of_its_timer(waits, listens):
    """Of a layout that reduces buckets in backward, and of one that reduces gradients after it."""
    trainer = trainer_of(global_batch=2, micro_batch=1)
    trainer.shards.reduces_after_backward = waits
    trainer.parallel.bucket_listener = BucketListener() if listens else None
    timer = HostTimer()
    laps = []
    timer.lap = laps.append
    tokens = np.ones((2, 16), np.int64)
    trainer.step(Batch.from_arrays(tokens, tokens, 0), torch.tensor(32.0), 1e-3, timer)
    expected = ["h2d", "forward", "backward", "h2d", "forward"]
    expected.append("exposed_communication" if listens else "backward")
    if waits:
        expected.append("exposed_communication")
    assert laps == [*expected, "optimizer"]
    if listens:
        trainer.parallel.bucket_listener.on_ready()
        assert laps[-1] == "backward"


def test_activations_are_measured_in_the_first_pass_which_has_the_most_rows():
    measured = []
    for rows in (2, 5):
        trainer = trainer_of(global_batch=rows, micro_batch=2)
        probe = Probe(
            trainer.model, trainer.world.device, trainer.run, trainer.shards.held_gradients
        )
        tokens = np.ones((rows, 16), np.int64)
        batch = Batch.from_arrays(tokens, tokens, 0)
        trainer.step(batch, torch.tensor(float(tokens.size)), 1e-3, HostTimer(), probe)
        measured.append(probe.bytes["activations_bytes"])
    assert measured[0] == measured[1] > 0


def test_gradients_are_measured_after_the_pass_that_has_the_most():
    trainer = trainer_of(global_batch=5, micro_batch=2)
    held = itertools.chain([1, 3, 2], itertools.repeat(1))
    probe = Probe(
        trainer.model, trainer.world.device, trainer.run, lambda: [torch.zeros(next(held))]
    )
    tokens = np.ones((5, 16), np.int64)
    batch = Batch.from_arrays(tokens, tokens, 0)
    trainer.step(batch, torch.tensor(float(tokens.size)), 1e-3, HostTimer(), probe)
    assert probe.bytes["gradients_bytes"] == 3 * 4


def test_only_matrices_decay():
    groups = adamw(decoder().parameters(), OptimizerSettings(weight_decay=0.3)).param_groups
    assert {p.dim() for p in groups[0]["params"]} == {2} and groups[0]["weight_decay"] == 0.3
    assert {p.dim() for p in groups[1]["params"]} == {1} and groups[1]["weight_decay"] == 0


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_the_first_step_uses_the_warm_up(shape):
    schedule = ScheduleSettings(shape=shape, warmup_steps=10, floor=0.1)
    rates = [learning_rate(k, 100, 2.0, schedule) for k in range(100)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == pytest.approx(2.0) == max(rates)
    assert all(b >= a for a, b in zip(rates[:9], rates[1:10], strict=True))
    assert rates[-1] == pytest.approx(2.0 if shape == "constant" else 0.2)
    assert all(b <= a for a, b in zip(rates[9:], rates[10:], strict=False))
    assert [
        learning_rate(0, n, 1.0, ScheduleSettings(shape=shape, warmup_steps=0)) for n in (1, 10)
    ] == [1.0, 1.0]
    middle = learning_rate(50, 101, 1.0, ScheduleSettings(shape=shape, warmup_steps=1, floor=0.0))
    assert middle == pytest.approx(1.0 if shape == "constant" else 0.5)


@pytest.mark.parametrize("warmup_steps", [0, 1, 3])
@pytest.mark.parametrize("after", range(1, 5))
def test_the_last_step_has_the_floor_however_few_follow_the_peak(warmup_steps, after):
    steps = max(warmup_steps, 1) + after
    schedule = ScheduleSettings("linear", warmup_steps, floor=0.1)
    assert learning_rate(steps - 1, steps, 2.0, schedule) == pytest.approx(0.2)


def test_by_the_share_of_a_budget_the_rate_falls_to_the_floor():
    rates = [
        learning_rate(5, None, 2.0, ScheduleSettings("linear", 1, floor=0.1), share)
        for share in (0, 0.5, 1, 1.5)
    ]
    assert rates == pytest.approx([2.0, 1.1, 0.2, 0.2])


@pytest.mark.parametrize(
    "budget, steps",
    [
        ({"epochs": 2}, 5),
        ({"epochs": 0.1}, 1),
        ({"flops": 1e6}, 250),
        ({"flops": 4001}, 2),
        ({"flops": 1}, 1),
    ]
    + [({"steps": 7}, 7), ({"useful_tokens": 9}, None), ({"wall_s": 9}, None)],
)
def test_budgets_of_rows_and_flops_are_rounded_up_to_steps(budget, steps):
    assert (
        steps_of(BudgetSettings(**budget), rows_per_epoch=10, global_batch=4, flops_per_row=1000)
        == steps
    )


@pytest.mark.parametrize("fused", [True, False])
def test_moments_in_fp32_decay_and_are_those_of_fp32_weights(fused):
    """In bf16 a second moment stays where it is: 0.05 * 0.999 rounds to 0.05."""
    settings = OptimizerSettings(
        learning_rate=1e-3, beta2=0.999, weight_decay=0, fused=fused, clip_norm=None
    )
    found = {}
    for name, moments in (("bf16", "weights"), ("mixed", "fp32"), ("fp32", "weights")):
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        weight = torch.nn.Parameter(torch.full((4, 4), 0.5, dtype=dtype))
        optimizer = adamw([weight], replace(settings, moments=moments))
        for step in range(600):
            weight.grad = torch.full_like(weight, 1.0 if step < 10 else 0.0)
            update(optimizer, torch.ones(()), None, torch.ones(()))
        state = optimizer.state[weight]
        second = state["exp_avg_sq"][0, 0].item()
        first = state["exp_avg"]
        found[name] = second, first.dtype, state["step"].item(), weight[0, 0].item()
    exact = found["fp32"][0]
    assert found["mixed"][0] == pytest.approx(exact, rel=1e-4) and found["bf16"][0] > 1.5 * exact
    assert found["mixed"][1:3] == found["fp32"][1:3] and found["mixed"][3] == pytest.approx(
        found["fp32"][3], rel=4e-3
    )
