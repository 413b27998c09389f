"""The loss in chunks: the plain one's value and gradients, without its logits."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tokenscale.settings.model import ModelSettings, aligned_rows
from tokenscale.train.fake_world import LiveBytes
from tokenscale.train.models.build import build, initialise
from tokenscale.train.models.losses import (
    IGNORED,
    _loss_and_gradient,
    correct_labels,
    cross_entropy_sum,
    linear_cross_entropy_sum,
    linear_scores,
)
from tokenscale.train.models.objective import Objective

pytestmark = pytest.mark.slow(43)


def made(
    positions=60, width=32, vocabulary=97, *, bias=True, dtype=torch.float32, ignored=0.3, seed=0
):
    """(hidden [2, positions / 2, width], head, labels), logits of some spread."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn((2, positions // 2, width), generator=generator)
    head = nn.Linear(width, vocabulary, bias=bias)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
    labels = torch.randint(vocabulary, (2, positions // 2), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = IGNORED
    return hidden.to(dtype).requires_grad_(), head.to(dtype), labels


def gradients(loss, hidden, head, factor=1.0):
    return [loss.detach(), *torch.autograd.grad(loss * factor, [hidden, *head.parameters()])]


@given(
    st.integers(1, 20).map(lambda n: 2 * n),
    st.integers(1, 50),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([1.0, -0.125, 4096.0]),
)
@settings(max_examples=60, deadline=None)
def test_chunks_give_the_plain_losss_value_and_gradients(positions, chunk, bias, ignored, factor):
    """In fp32, to its rounding, whatever the loss is multiplied by before its backward pass."""
    hidden, head, labels = made(positions, bias=bias, ignored=ignored)
    found = gradients(linear_cross_entropy_sum(hidden, head, labels, chunk), hidden, head, factor)
    right = gradients(cross_entropy_sum(head(hidden), labels), hidden, head, factor)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6 * abs(factor))


def test_logits_of_any_size_overflow_nothing():
    hidden, head, labels = made(scale := 60)
    with torch.no_grad():
        hidden *= 1e4 * scale
    found = gradients(linear_cross_entropy_sum(hidden, head, labels, 7), hidden, head)
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found[0], cross_entropy_sum(head(hidden), labels), rtol=1e-6, atol=0)


def errors(loss_of, precision, factor=1.0, vocabulary=4096):
    """Relative errors (norm of the difference by norm) of the loss and its gradients in a number
    format, against fp64.

    `precision`: fp32; bf16 or fp16 by autocast over fp32 weights; bf16-true, all in bf16.
    """
    true = torch.bfloat16 if precision == "bf16-true" else torch.float32
    hidden, head, labels = made(512, 64, vocabulary, dtype=true)
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_head = nn.Linear(64, vocabulary).double()
    exact_head.load_state_dict(
        {name: weight.double() for name, weight in head.state_dict().items()}
    )
    logits = exact_head(exact_hidden).flatten(0, 1)
    exact = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    right = gradients(exact, exact_hidden, exact_head, factor)
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = loss_of(hidden, head, labels)
    found = gradients(loss, hidden, head, factor)
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-true"])
@pytest.mark.parametrize("vocabulary", [512, 4096])
def test_chunks_err_no_more_than_the_plain_loss_does(precision, vocabulary):
    """With the scale that a training step puts on its loss. In 16 bits both round logits; what
    remains is as good.
    """
    factor = 65536 / 358 if precision == "fp16" else 1 / 358
    plain = errors(lambda h, w, n: cross_entropy_sum(w(h), n), precision, factor, vocabulary)
    chunked = errors(
        lambda h, w, n: linear_cross_entropy_sum(h, w, n, 100), precision, factor, vocabulary
    )
    floor = 1e-6 if precision == "fp32" else 1e-5
    assert all(b <= max(1.5 * a, floor) for a, b in zip(plain, chunked, strict=True))


@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_the_factor_of_a_loss_is_not_rounded_to_16_bits(precision):
    """1 / 358 lies between two numbers of bf16 that are 0.4 % apart: all gradients would be off by
    up to 0.2 %.
    """
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    hidden, head, labels = made(512, 64, dtype=dtype)
    for factor in (1 / 358, 1 / 611, 0.7777):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = linear_cross_entropy_sum(hidden, head, labels, 100)
        once = torch.autograd.grad(loss, [hidden, head.weight], retain_graph=True)
        scaled = torch.autograd.grad(loss * factor, [hidden, head.weight])
        for a, b in zip(scaled, once, strict=True):
            ratio = (a.double() * b.double()).sum() / b.double().square().sum() / factor
            assert abs(ratio.item() - 1) < 2e-4


def test_small_probabilities_are_not_lost_in_fp16():
    """A vocabulary of 131,072, all as likely: each gradient is below fp16's normal numbers."""
    vocabulary = 131_072
    hidden, head, labels = made(8, 16, vocabulary, bias=False, ignored=0)
    with torch.no_grad():
        head.weight *= 1e-3
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_cross_entropy_sum(hidden, head, labels, 4)
    weight = torch.autograd.grad(loss, head.weight)[0]
    exact = torch.autograd.grad(cross_entropy_sum(head(hidden), labels), head.weight)[0]
    rest = torch.ones(vocabulary, dtype=torch.bool)
    rest[labels.flatten()] = False
    assert ((weight - exact)[rest].norm() / exact[rest].norm()) < 1e-3


def objective_of(tied=False):
    model = build(
        ModelSettings(vocabulary_size=61, tied_embeddings=tied),
        16,
        objective="causal",
        kernel="sdpa",
    )
    initialise(model, 0)
    tokens = torch.randint(61, (3, 16), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = IGNORED
    return model, tokens, labels


@pytest.fixture
def traced(monkeypatch):
    """Traced and made functional as by torch.compile, then run as it is: to make code of it takes
    half a minute.
    """
    for module in ("losses", "objective"):
        function = partial(torch.compile, backend="aot_eager")
        monkeypatch.setattr(f"tokenscale.train.models.{module}.compile_function", function)


@pytest.mark.parametrize(
    ("tied", "options"),
    [(tied, {"loss_chunk": 5}) for tied in (True, False)]
    # the last chunk is shorter
    + [(False, {"loss_chunk": chunk, "compiled": True}) for chunk in (0, 20)],
)
def test_an_objective_in_chunks_or_compiled_is_the_plain_one(traced, tied, options):
    model, tokens, labels = objective_of(tied)
    weights = list(model.parameters())
    plain = Objective(model)(tokens, labels)
    other = Objective(model, **options)(tokens, labels)
    torch.testing.assert_close(other, plain, rtol=1e-6, atol=0)
    for a, b in zip(
        torch.autograd.grad(other, weights), torch.autograd.grad(plain, weights), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("chunk", [0, 20])
@pytest.mark.parametrize(
    ("dtype", "bias"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)]
)
def test_rows_added_for_a_gpu_change_neither_loss_nor_gradients(
    traced, monkeypatch, dtype, bias, chunk, compiled
):
    hidden, head, labels = made(bias=bias, dtype=dtype)
    objective = Objective(nn.ModuleDict({"head": head}), loss_chunk=chunk, compiled=compiled)
    right = gradients(objective.loss(hidden, labels), hidden, head)
    widths = []
    aligned = "tokenscale.train.models.losses.aligned_rows"
    monkeypatch.setattr(
        aligned, lambda rows, device: widths.append(rows) or aligned_rows(rows, "cuda")
    )
    torch.compiler.reset()
    found = gradients(objective.loss(hidden, labels), hidden, head)
    assert widths and set(widths) == {97}
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=rounding, atol=rounding / 10)


def test_a_label_of_another_share_is_not_among_the_added_rows(monkeypatch):
    monkeypatch.setattr(
        "tokenscale.train.models.losses.aligned_rows",
        lambda rows, device: aligned_rows(rows, "cuda"),
    )
    hidden, head, labels = made(ignored=0.0)
    alone = SimpleNamespace(first=0, maximum=lambda values: values, sum=lambda values: values)
    # all in another rank's share
    loss = linear_cross_entropy_sum(hidden, head, labels + 97, 7, share=alone)
    torch.testing.assert_close(
        loss, (head(hidden) - head(hidden).amax(-1, keepdim=True)).logsumexp(-1).sum()
    )
    assert aligned_rows(50_257, "cuda") == 50_304 and aligned_rows(131_072, "cuda") == 131_072
    assert aligned_rows(50_257, "cpu") == 50_257


class OfThreads:
    """A share of a vocabulary whose others are those of threads: `maximum` and `sum` over all."""

    def __init__(self, first: int, meet: threading.Barrier, values: dict[int, torch.Tensor]):
        self.first = first
        self._meet = meet
        self._values = values

    def _reduce(self, values: torch.Tensor, reduce) -> torch.Tensor:
        self._values[self.first] = values
        self._meet.wait(60)
        found = reduce(torch.stack([self._values[key] for key in sorted(self._values)]))
        self._meet.wait(60)
        return values.copy_(found)

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        return self._reduce(values, lambda all_of_them: all_of_them.amax(dim=0))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return self._reduce(values, lambda all_of_them: all_of_them.sum(dim=0))


@pytest.mark.parametrize("seed", range(5))
def test_shares_of_a_vocabulary_have_the_loss_and_gradient_of_all_of_it(seed):
    """Labels are at the first and last entry of each share, between them, and left out."""
    random = np.random.default_rng(seed)
    cuts = [0, *sorted(random.choice(np.arange(2, 39, 2), 2, replace=False).tolist()), 40]
    firsts = cuts[:-1]
    ends = [cut - 1 for cut in cuts[1:]]
    labels = torch.tensor([*firsts, *ends, -100, *random.integers(0, 40, 9).tolist()])
    logits = 3 * torch.from_numpy(random.standard_normal((len(labels), 40))).float()
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, labels, reduction="sum")
    expected.backward()
    meet = threading.Barrier(len(firsts))
    values: dict[int, torch.Tensor] = {}

    def share_of(first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = logits[:, first : end + 1].clone()
        of = OfThreads(first, meet, values)
        try:
            return _loss_and_gradient(mine, labels, share=of, entries=end + 1 - first)
        except BaseException:
            meet.abort()  # else the others wait for this share
            raise

    with ThreadPoolExecutor(len(firsts)) as threads:
        found = list(threads.map(share_of, firsts, ends))
    assert [loss.item() for loss, _ in found] == pytest.approx([expected.item()] * 3, rel=1e-6)
    gradient = torch.cat([gradient for _, gradient in found], dim=1)
    torch.testing.assert_close(gradient, whole.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk", [0, 7, 60, 100])
def test_scores_are_the_loss_and_what_the_largest_logit_gets_right(chunk):
    hidden, head, labels = made()
    logits = head(hidden)
    labels[0, ::3] = logits[0, ::3].argmax(dim=-1)
    loss_sum, correct = linear_scores(hidden, head, labels, chunk)
    torch.testing.assert_close(
        loss_sum, cross_entropy_sum(logits, labels).detach(), rtol=1e-6, atol=0
    )
    counted = [
        (p, n)
        for p, n in zip(logits.flatten(0, 1), labels.flatten().tolist(), strict=True)
        if n != IGNORED
    ]
    assert correct.item() == sum(p.argmax().item() == n for p, n in counted) >= 10
    _, none = linear_scores(hidden, head, torch.full_like(labels, IGNORED), chunk)
    assert none.item() == 0
    assert correct_labels(hidden, head, labels, chunk) == correct
    model = nn.ModuleDict({"head": head})
    model.hidden = lambda hidden_btd, bounds: hidden_btd
    objective = Objective(model, loss_chunk=chunk)
    loss = objective(hidden, labels)
    objective.correct = torch.zeros((), dtype=torch.int64)
    assert torch.equal(objective(hidden, labels), loss) and objective.correct == correct
    assert objective(hidden, labels) == loss and objective.correct == 2 * correct


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_peak_memory_does_not_hold_the_logits(precision):
    positions = 512
    vocabulary = 4096
    chunk = 16
    hidden, head, labels = made(positions, 32, vocabulary, bias=False)
    logits = positions * vocabulary * 4

    def peak_of(loss_of):
        with LiveBytes() as live, torch.autocast("cpu", enabled=precision == "bf16"):
            torch.autograd.grad(loss_of(), [hidden, head.weight])
        return live.peak

    assert peak_of(lambda: cross_entropy_sum(head(hidden), labels)) > 1.5 * logits
    assert peak_of(lambda: linear_cross_entropy_sum(hidden, head, labels, chunk)) < 0.4 * logits
    hidden, head, labels = made(positions, 512, vocabulary, bias=False)
    with torch.no_grad(), LiveBytes() as live:
        linear_cross_entropy_sum(hidden, head, labels, chunk)
    assert live.peak < 1.5 * head.weight.nbytes, "without gradients none is computed"
