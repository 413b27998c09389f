"""Attention inside documents: a packed row is its documents one by one, by every kernel that can
run here.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenscale.base.errors import UserError
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.run import SDPA_BACKENDS
from tokenscale.train.models.attention import BACKENDS, KERNELS, Bounds, attend, choose_kernel
from tokenscale.train.models.decoder import Decoder, initialise
from tokenscale.train.models.objective import Objective

CUDA = torch.device("cuda")


def rows_of(length):
    row = st.lists(st.integers(1, length), min_size=1, max_size=length)
    return st.lists(row.map(lambda cuts: cut(cuts, length)), min_size=1, max_size=3)


#: rows of one length, each as the lengths of its documents
ROWS = st.integers(1, 12).flatmap(rows_of)


def cut(lengths, total):
    row = []
    for length in lengths:
        if sum(row) + length <= total:
            row.append(length)
    return row + ([total - sum(row)] if sum(row) < total else [])


def ids_of(rows):
    return torch.tensor(
        [[n for n, length in enumerate(row) for _ in range(length)] for row in rows],
        dtype=torch.int32,
    )


def heads(rows, length, count, seed, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(
        (rows, count, length, 8 if dtype == torch.float64 else 64), generator=generator, dtype=dtype
    )
    return made.to(device).requires_grad_()


@given(ROWS, st.booleans(), st.sampled_from([(4, 4), (4, 2), (2, 1)]))
@settings(max_examples=60, deadline=None)
def test_a_packed_row_is_its_documents_one_by_one(rows, causal, counts):
    length = sum(rows[0])
    query, key, value = (
        heads(len(rows), length, n, seed)
        for seed, n in enumerate((counts[0], counts[1], counts[1]))
    )
    weight = torch.randn(
        query.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )
    packed = attend(query, key, value, bounds=Bounds(ids_of(rows)), causal=causal)
    gradients = torch.autograd.grad((packed * weight).sum(), (query, key, value))
    alone = torch.empty_like(packed)
    for r, row in enumerate(rows):
        begin = 0
        for size in row:
            part = (slice(r, r + 1), slice(None), slice(begin, begin + size))
            alone[part] = attend(query[part], key[part], value[part], causal=causal)
            begin += size
    expected = torch.autograd.grad((alone * weight).sum(), (query, key, value))
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-12)
    for found, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


@given(ROWS)
@settings(max_examples=60)
def test_lengths_and_positions_are_those_of_the_documents(rows):
    bounds = Bounds(ids_of(rows))
    cut_at, longest = bounds.lengths()
    assert cut_at.dtype == torch.int32
    assert cut_at.diff().tolist() == [length for row in rows for length in row] and cut_at[0] == 0
    assert longest == max(max(row) for row in rows)
    assert bounds.positions().tolist() == [
        [k for length in row for k in range(length)] for row in rows
    ]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_packed_row_through_a_decoder_is_its_documents_one_by_one(positions, causal):
    shape = ModelSettings(vocabulary_size=50, positions=positions, layers=2)
    model = Decoder(shape, 24, causal=causal)
    initialise(model, 0)
    model.double()
    rows = [[5, 1, 11, 7], [24], [3, 20, 1]]
    tokens = torch.randint(50, (3, 24), generator=torch.Generator().manual_seed(0))
    labels = torch.randint(50, (3, 24), generator=torch.Generator().manual_seed(1))
    objective = Objective(model)
    packed = objective(tokens, labels, Bounds(ids_of(rows)))
    gradients = torch.autograd.grad(packed, list(model.parameters()))
    alone = sum(
        objective(t[None], n[None])
        for row, row_tokens, row_labels in zip(rows, tokens, labels, strict=True)
        for t, n in zip(row_tokens.split(row), row_labels.split(row), strict=True)
    )
    expected = torch.autograd.grad(alone, list(model.parameters()))
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=0)
    for found, right in zip(gradients, expected, strict=True):
        # norms, turns and the loss are in fp32
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bounds", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_has_sdpa_only(bounds, dtype):
    assert tuple(BACKENDS) == SDPA_BACKENDS
    cpu = torch.device("cpu")
    options = {"device": cpu, "bounds": bounds, "dtype": dtype, "dropout": 0.0}
    assert choose_kernel("auto", **options) == choose_kernel("sdpa", **options) == "sdpa"
    for kernel in sorted({*KERNELS} - {"sdpa"}):
        with pytest.raises(UserError, match=f"attention by {kernel} cannot run here") as caught:
            choose_kernel(kernel, **options)
        assert caught.value.facts.keys() == {"reason", "found", "next"}


@pytest.fixture
def gpu(monkeypatch):
    """The rules for a GPU of Ampere, by themselves: flash-attn is not installed, unless a test says
    so.
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    here = {"torch.nn.attention.varlen"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in here else None)
    return here


ASKED = {"device": CUDA, "bounds": True, "dtype": torch.bfloat16, "dropout": 0.0}


def test_a_gpu_has_the_fastest_that_can(gpu):
    def auto(**changes):
        return choose_kernel("auto", **(ASKED | changes))

    assert auto() == auto(dtype=torch.float16) == "varlen"
    assert auto(dtype=torch.float32) == "flex"
    assert auto(dropout=0.1) == auto(dtype=torch.float32, dropout=0.1) == "sdpa"
    assert auto(bounds=False) == auto(bounds=False, dtype=torch.float32) == "sdpa"
    gpu.clear()
    assert auto() == "flex"  # torch 2.9
    gpu.add("flash_attn")
    assert auto() == auto(dropout=0.1) == "flash" and auto(dtype=torch.float32) == "flex"


WHOLE_ROWS = {"bounds": False}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_back_end_of_sdpa_is_the_one_that_is_named(compiled):
    """A CPU has FlashAttention of torch's own, and no cuDNN, to which it must not fall back."""
    inputs = [heads(2, 32, 4, seed, torch.bfloat16) for seed in range(3)]

    def attend_by(kernel):
        run = lambda query, key, value: attend(query, key, value, kernel=kernel)  # noqa: E731
        return torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run

    torch.testing.assert_close(attend_by("sdpa-flash")(*inputs), attend(*inputs))
    with pytest.raises(RuntimeError, match="backend|kernel"):
        attend_by("sdpa-cudnn")(*inputs)


def test_what_a_gpu_cannot_is_said(gpu):
    for kernel, changes, reason in [
        *((kernel, {"bounds": False}, "document_mask") for kernel in ("flex", "varlen")),
        *((kernel, {"dtype": torch.float32}, "16 bits") for kernel in ("varlen", "flash")),
        *((kernel, {}, "no bounds of documents") for kernel in BACKENDS),
        *((kernel, WHOLE_ROWS | {"dtype": torch.float32}, "16 bits") for kernel in BACKENDS),
        ("sdpa-fa3", WHOLE_ROWS, "compute capability 9.0"),
        ("flex", {"dropout": 0.1}, "dropout"),
        ("flash", {}, "not installed"),
    ]:
        with pytest.raises(UserError, match=reason):
            choose_kernel(kernel, **(ASKED | changes))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("counts", [(4, 4), (8, 2)])
@pytest.mark.parametrize("kernel", [*BACKENDS, "flex", "varlen", "flash"])
def test_kernels_of_a_gpu_agree_with_sdpa(kernel, counts, causal):
    inside = kernel not in BACKENDS
    try:
        choose_kernel(kernel, device=CUDA, bounds=inside, dtype=torch.bfloat16, dropout=0.0)
    except UserError as error:
        pytest.skip(str(error))
    rows = [[100, 1, 27, 128], [256], [3] * 85 + [1]]
    sizes = (counts[0], counts[1], counts[1])
    inputs = [heads(3, 256, n, seed, torch.bfloat16, CUDA) for seed, n in enumerate(sizes)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    weight = torch.randn(inputs[0].shape, device=CUDA)
    bounds = Bounds(ids_of(rows), CUDA) if inside else None
    found = attend(*inputs, bounds=bounds, causal=causal, kernel=kernel)
    right = attend(*exact, bounds=bounds, causal=causal)
    torch.testing.assert_close(found.double(), right, rtol=0.02, atol=0.02)
    gradients = torch.autograd.grad((found * weight).sum(), inputs)
    expected = torch.autograd.grad((right * weight).sum(), exact)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0.05, atol=0.05)
