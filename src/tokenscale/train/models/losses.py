"""Losses as sums. They are normalised where the useful tokens of all ranks are known."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokenscale.settings.model import aligned_rows
from tokenscale.train.collectives import Vocabulary
from tokenscale.train.compilation import compile_function

#: A label that does not count: padding, or the start of a document.
IGNORED = -100
#: What gradients of fp16 logits are multiplied by before they are rounded: a probability of
#: 1/131,072 is below fp16's normal numbers, and 2**10 times the largest gradient, 1, is far from
#: its end.
FP16_SCALE = 1024.0


def cross_entropy_sum(logits_btv: Tensor, labels_bt: Tensor) -> Tensor:
    """Sum over the useful labels of -log p(label), in nats, computed in fp32. A scalar; 0 when no
    label counts.
    """
    return F.cross_entropy(
        logits_btv.float().flatten(0, 1), labels_bt.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def head_cross_entropy_sum(
    hidden_btd: Tensor, weight: Tensor, bias: Tensor | None, labels_bt: Tensor
) -> Tensor:
    """`cross_entropy_sum` of the output head's logits: product and loss in one function, compiled
    as one graph.
    """
    return cross_entropy_sum(F.linear(hidden_btd, *align_rows(weight, bias)), labels_bt)


def align_rows(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the output head's weight [V, d] and bias [V], with rows added up to `aligned_rows`.

    The logits of added rows are -inf: they are in no softmax and have no gradient. Parameters keep
    V rows.
    """
    added = aligned_rows(len(weight), device=weight.device.type) - len(weight)
    if not added:
        return weight, bias
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    return F.pad(weight, (0, 0, 0, added)), F.pad(bias, (0, added), value=float("-inf"))


def linear_cross_entropy_sum(
    hidden_btd: Tensor,
    head: torch.nn.Linear,
    labels_bt: Tensor,
    chunk: int,
    *,
    compiled: bool = False,
    share: Vocabulary | None = None,
) -> Tensor:
    """`cross_entropy_sum(head(hidden), labels)`, with the logits of `chunk` positions at a time (0:
    all).

    Gradients of a chunk are worked out in forward, while its logits are there, so that nothing is
    computed twice; what lies between forward and backward is one gradient the size of `hidden` and
    one the size of the head's weight. The weight's is summed over chunks in fp32. Products are in
    autocast's format where it is on, all else in fp32. No host sync: positions that do not count
    are computed and weigh nothing. `compiled`: a chunk's logits, loss and gradients are one graph.

    With a `share`, `head` has that part of the vocabulary's rows: the loss is that of all of it,
    and the gradient by `hidden` what this part adds to it.
    """
    device = hidden_btd.device.type
    dtype = (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_btd.dtype
    )
    learning = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(
        hidden_btd.flatten(0, 1),
        head.weight,
        head.bias,
        labels_bt.flatten(),
        chunk,
        dtype,
        learning,
        compiled,
        share,
    )


@torch.no_grad()
def linear_scores(
    hidden_btd: Tensor, head: torch.nn.Linear, labels_bt: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return (`cross_entropy_sum(head(hidden), labels)`, `correct_labels`) as scalars, `chunk`
    positions at a time (0: all).
    """
    loss_sum = torch.zeros((), device=hidden_btd.device)
    correct = torch.zeros((), dtype=torch.int64, device=hidden_btd.device)
    hidden = hidden_btd.flatten(0, 1)
    labels = labels_bt.flatten()
    for part in _parts(len(labels), chunk):
        logits = head(hidden[part])
        loss_sum += F.cross_entropy(
            logits.float(), labels[part], ignore_index=IGNORED, reduction="sum"
        )
        correct += (logits.argmax(dim=-1) == labels[part]).sum()
    return loss_sum, correct


@torch.no_grad()
def correct_labels(
    hidden_btd: Tensor,
    head: torch.nn.Linear,
    labels_bt: Tensor,
    chunk: int,
    *,
    share: Vocabulary | None = None,
) -> Tensor:
    """Count the useful labels that have the largest logit (of equal ones, the first entry's): a
    scalar, int64.

    Logits of `chunk` positions exist at a time (0: all). With a `share`, `head` has that part of
    the vocabulary's rows.
    """
    correct = torch.zeros((), dtype=torch.int64, device=hidden_btd.device)
    hidden = hidden_btd.flatten(0, 1)
    labels = labels_bt.flatten()
    for part in _parts(len(labels), chunk):
        if share is None:
            predicted = head(hidden[part]).argmax(dim=-1)
        else:
            highest, predicted = F.linear(hidden[part], head.weight, head.bias).float().max(dim=-1)
            here = highest == share.maximum(highest.clone())
            first = torch.where(here, -(predicted + share.first), torch.iinfo(torch.int64).min)
            predicted = -share.maximum(first)
        correct += (predicted == labels[part]).sum()
    return correct


class _LinearCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy_sum`; hidden [N, d], weight [V, d], bias [V] or None, labels
    [N].
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk: int,
        dtype: torch.dtype,
        learning: bool,
        compiled: bool,
        share: Vocabulary | None,
    ) -> Tensor:
        differentiate = compile_function(_differentiate_chunk) if compiled else _differentiate_chunk
        wants_hidden, wants_weight, wants_bias = (
            learning and wants for wants in ctx.needs_input_grad[:3]
        )
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        of_bias = None
        if wants_bias and bias is not None:
            of_bias = torch.zeros_like(bias, dtype=torch.float32)
        scale = FP16_SCALE if dtype == torch.float16 else 1.0
        loss_sum = torch.zeros((), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            cast, offset = align_rows(
                weight.to(dtype), bias=bias.to(dtype) if bias is not None else None
            )
            rows = slice(len(weight))  # without the rows that `align_rows` added
            for part in _parts(len(labels), chunk):
                inputs = hidden[part].to(dtype)
                loss, rounded, by_hidden, by_bias = differentiate(
                    inputs,
                    cast,
                    offset,
                    labels[part],
                    scale,
                    wants_hidden,
                    wants_bias,
                    share,
                    len(weight),
                )
                loss_sum += loss
                if of_bias is not None and by_bias is not None:
                    of_bias += by_bias[rows]
                if of_hidden is not None and by_hidden is not None:
                    of_hidden[part] = by_hidden
                if of_weight is not None and dtype == torch.float32:
                    of_weight.addmm_(rounded.T[rows], inputs)
                elif of_weight is not None:
                    of_weight.add_(rounded.T[rows] @ inputs, alpha=1 / scale)
        ctx.save_for_backward(
            of_hidden,
            of_weight.to(weight.dtype) if of_weight is not None else None,
            of_bias.to(bias.dtype) if of_bias is not None and bias is not None else None,
        )
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        return (
            *(_times(kept, factor) for kept in ctx.saved_tensors),
            None,
            None,
            None,
            None,
            None,
            None,
        )


def _times(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    """Multiply in fp32, whatever the gradient's format: the factor would lose up to 0.4 % in
    bf16.
    """
    if gradient is None or gradient.dtype == factor.dtype:
        return None if gradient is None else gradient * factor
    scaled = torch.empty_like(gradient)
    for part in _parts(len(gradient), chunk=4096):  # without a copy of all of it
        scaled[part] = gradient[part].float() * factor
    return scaled


def _parts(count: int, chunk: int) -> Iterator[slice]:
    chunk = chunk or max(count, 1)
    return (slice(begin, begin + chunk) for begin in range(0, count, chunk))


def _differentiate_chunk(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scale: float,
    wants_hidden: bool,
    wants_bias: bool,
    share: Vocabulary | None,
    entries: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return (the summed loss, its gradient by the logits times `scale` in the format of the
    inputs, and those by the inputs and by the bias).

    The sum over chunks of the gradient by the weight stays outside: added to in place, it needs no
    second one.
    """
    loss, gradient = _loss_and_gradient(
        F.linear(inputs, weight, bias).float(),
        labels,
        share=share,
        entries=entries,
    )
    by_bias = gradient.sum(dim=0) if wants_bias else None
    rounded = (gradient.mul_(scale) if scale != 1 else gradient).to(inputs.dtype)
    by_hidden = None
    if wants_hidden:
        by_hidden = (rounded @ weight).float() / scale if scale != 1 else rounded @ weight
    return loss, rounded, by_hidden, by_bias


def _loss_and_gradient(
    logits: Tensor, labels: Tensor, share: Vocabulary | None, entries: int
) -> tuple[Tensor, Tensor]:
    """Return (the summed loss, its gradient by the logits: softmax - one-hot). The gradient reuses
    the logits' memory.

    logits [n, V] in fp32, labels [n]. The first `entries` of V are those of the head or of a share
    of it; of a share, the sum of exponentials and the label's logit are added up over all shares.
    """
    counts = here = labels != IGNORED
    places = labels
    if share is not None:
        places = labels - share.first
        here = counts & (places >= 0) & (places < entries)
    places = torch.where(here, places, 0)[:, None]
    highest = logits.amax(dim=-1, keepdim=True)
    logits -= highest if share is None else share.maximum(highest)
    picked = logits.gather(1, places)
    total = logits.exp_().sum(dim=-1, keepdim=True)
    if share is not None:
        total, picked = share.sum(torch.stack((total, picked * here[:, None])))
    loss = torch.where(counts, (total.log() - picked)[:, 0], 0).sum()
    weights = counts[:, None].to(logits.dtype)
    logits *= weights / total
    return loss, logits.scatter_add_(
        1, places, -(weights if share is None else weights * here[:, None])
    )
