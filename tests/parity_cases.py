"""Planted one-line differences and harmless refactorings for `tokenscale parity`, and the trainings
they are planted in.

`python -m tests.parity_cases` runs all of them and prints the table of
`evidence/parity-*/README.md`.
"""

# ruff: noqa: E501

import os
import random
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import torch

from tokenscale.base.errors import UserError
from tokenscale.cli.parity import read_recording
from tokenscale.parity import recorder
from tokenscale.parity.certificate import certify
from tokenscale.parity.comparison import EQUAL, ROUNDING, compare
from tokenscale.parity.recording import Recording, RecordingError
from tokenscale.settings.presets import PRESETS
from tokenscale.train.models import decoder
from tokenscale.train.models.convert_hf import to_hf
from tokenscale_golden.verdict import UNKNOWN

ROWS = 4
LENGTH = 16
VOCABULARY = 96
STEPS = 8
SHAPES = {
    "llama": replace(
        PRESETS["llama-tiny"], layers=4, dimension=32, hidden=96, vocabulary_size=VOCABULARY
    ),
    "gpt": replace(
        PRESETS["gpt2-tiny"], layers=4, dimension=32, hidden=128, vocabulary_size=VOCABULARY
    ).with_positions(17),
}
#: the loop of a user; faults replace one line of it
LOOP = """
import math
import torch
import torch.nn.functional as F

WARMUP, PEAK, MICRO_BATCHES, CLIP = 3, 3e-3, 2, 0.5


def learning_rate(step, steps):
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    return PEAK * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP + 1) / (steps - WARMUP))))


class PlainAdamW(torch.optim.Optimizer):
    def __init__(self, groups, lr, betas, eps):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, first=torch.zeros_like(p), second=torch.zeros_like(p))
                state["step"] += 1
                gradient = p.grad
                (one, two), count = group["betas"], state["step"]
                state["first"].mul_(one).add_(gradient, alpha=1 - one)
                state["second"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
                first = state["first"] / (1 - one**count)
                root = (state["second"] / (1 - two**count)).sqrt() + group["eps"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(first / root, alpha=-group["lr"])


def train(record, model, batches):
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8)
    recorder = record(model, optimizer)
    for step, (tokens, labels) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(batches))
        for rows in torch.arange(len(tokens)).chunk(MICRO_BATCHES):
            logits = model(tokens[rows])
            logits = getattr(logits, "logits", logits)
            loss = F.cross_entropy(logits.flatten(0, 1), labels[rows].flatten()) / MICRO_BATCHES
            recorder.loss(loss)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()
"""
#: as our trainer updates: the fused kernel clips
LOOP_OURS = (
    LOOP.replace(
        "optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8)",
        "optimizer = adamw(model.parameters(), SETTINGS)",
    )
    .replace(
        (
            "        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)\n        "
            "optimizer.step()\n"
        ),
        "        norm = total_norm([p.grad for p in model.parameters() if p.grad is not None])\n"
        "        update(optimizer, norm, CLIP, torch.ones(()))\n",
    )
    .replace(
        "import math\n",
        "import math\n"
        "from tokenscale.settings.run import OptimizerSettings\n"
        "from tokenscale.train.optimizer import adamw, total_norm, update\n"
        "SETTINGS = OptimizerSettings(weight_decay=0.1, beta2=0.95, epsilon=1e-8)\n",
        1,
    )
)


@dataclass(frozen=True)
class Case:
    """One change of a training. `expected` is a pattern of the cause's text; None where no cause is
    named.

    `where` is what is edited: the `loop`, the model's source (`model`), or the `weights` and
    settings of the built model (a statement with `model`, `torch` and `nn`). `reference` is another
    model that is compared with, if not its own.
    """

    name: str
    model: str
    where: str
    old: str
    new: str
    expected: str | None = None
    reference: str | None = None


M = "model"
L = "loop"
B = "built"
UNCHANGED = Case("reference", "", L, "", "")
OURS_GPT = "ours-gpt"
OURS_LLAMA = "ours-llama"
GPT2 = "gpt2"
LLAMA = "llama"
ADAMW = "optimizer = torch.optim.AdamW(groups"
MATRIX_PRODUCTS = """
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = (query * self.head_dimension**-0.5) @ key.transpose(-1, -2)
        y = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf).softmax(-1) @ value
"""
PERMUTED = """
for block in model.blocks:
    order = torch.arange(128).flip(0)
    block.feed_forward.up.weight.data = block.feed_forward.up.weight.data[order].contiguous()
    block.feed_forward.down.weight.data = block.feed_forward.down.weight.data[:, order].contiguous()
"""
PLAIN = "optimizer = PlainAdamW(groups"

FAULTS = [
    # models: ours
    Case(
        "exact GELU in place of tanh",
        OURS_GPT,
        M,
        'approximate="tanh"',
        'approximate="none"',
        "activation.*tanh.*erf",
    ),
    Case(
        "LayerNorm epsilon 1e-6",
        OURS_GPT,
        M,
        "model.norm_epsilon, bias",
        "1e-6, bias",
        "norm epsilon.*1e-05.*1e-06",
    ),
    Case(
        "positions off by one",
        OURS_GPT,
        M,
        "torch.arange(start, start +",
        "torch.arange(start + 1, start + 1 +",
        "positions",
    ),
    Case(
        "no causal mask",
        OURS_GPT,
        M,
        "causal = self.causal and length > 1",
        "causal = False",
        "mask.*causal.*none",
    ),
    Case(
        "weights untied",
        OURS_GPT,
        B,
        "",
        "model.head.weight = nn.Parameter(model.head.weight.clone())",
        "weight tying",
    ),
    Case(
        "no bias in a layer",
        OURS_GPT,
        B,
        "",
        "model.blocks[1].feed_forward.down.register_parameter('bias', None)",
        "bias: blocks.1",
    ),
    Case(
        "residual branch halved",
        OURS_GPT,
        M,
        "x + self._dropped(self.feed_forward(",
        "x + 0.5 * self._dropped(self.feed_forward(",
        "weight of the output of \\S+down in the sum",
    ),
    Case(
        "norm left out",
        OURS_GPT,
        M,
        "self.attention(self.attention_norm(x)",
        "self.attention(x",
        "does not call the modules of blocks.0.attention_norm",
    ),
    Case(
        "residual stream detached",
        OURS_GPT,
        M,
        "x + self._dropped(self.feed_forward(",
        "x.detach() + self._dropped(self.feed_forward(",
        "backward pass",
    ),
    Case(
        "dropout on",
        OURS_GPT,
        M,
        "self.dropout = model.dropout\n        self.attention_norm",
        "self.dropout = 0.1\n        self.attention_norm",
        "dropout of the output of",
    ),
    Case(
        "RMSNorm epsilon 1e-6",
        OURS_LLAMA,
        M,
        "self.epsilon = epsilon",
        "self.epsilon = 1e-6",
        "norm epsilon.*1e-05.*1e-06",
    ),
    Case(
        "rope base 10,000",
        OURS_LLAMA,
        M,
        "frequencies = model.rope_theta **",
        "frequencies = 10000.0 **",
        "rope base.*500000.*10000",
    ),
    Case(
        "rope pairs of neighbours",
        OURS_LLAMA,
        M,
        "x.float().unflatten(-1, (2, -1)).unbind(-2)",
        "x.float().unflatten(-1, (-1, 2)).unbind(-1)",
        "attention",
    ),
    Case("GELU in place of SiLU", OURS_LLAMA, M, "F.silu(", "F.gelu(", "activation.*SiLU.*erf"),
    Case(
        "gate and up exchanged",
        OURS_LLAMA,
        M,
        "F.silu(self.gate(x)) * self.up(x)",
        "F.silu(self.up(x)) * self.gate(x)",
        "gated.*first.*second",
    ),
    Case(
        "norm without its weight",
        OURS_LLAMA,
        M,
        "self.weight.float(), self.epsilon",
        "None, self.epsilon",
        "parameters without a gradient.*norm",
    ),
    # models: transformers
    Case(
        "activation_function gelu",
        GPT2,
        B,
        "",
        "for b in model.transformer.h: b.mlp.act = nn.GELU()",
        "activation.*tanh.*erf",
    ),
    Case(
        "attention scores not scaled",
        GPT2,
        M,
        "self.scaling = self.head_dim**-0.5",
        "self.scaling = 1.0",
        "scale of the scores",
    ),
    Case(
        "final LayerNorm epsilon 1e-3",
        GPT2,
        B,
        "",
        "model.transformer.ln_f.eps = 1e-3",
        "norm epsilon of transformer.ln_f",
    ),
    Case(
        "attention dropout",
        GPT2,
        M,
        "dropout=self.attn_dropout.p if self.training else 0.0",
        "dropout=0.1",
        "module transformer\\.h\\.0\\.attn",
    ),
    Case(
        "SwiGLU without gate activation",
        LLAMA,
        M,
        "self.act_fn(self.gate_proj(x))",
        "self.gate_proj(x)",
        "activation.*SiLU.*none",
    ),
    Case(
        "rope base 10,000 (transformers)",
        LLAMA,
        M,
        'base = config.rope_parameters["rope_theta"]',
        "base = 10000.0",
        "rope base.*500000.*10000",
    ),
    Case(
        "RMSNorm epsilon 1e-8",
        LLAMA,
        M,
        "self.variance_epsilon = eps",
        "self.variance_epsilon = 1e-8",
        "norm epsilon.*1e-05.*1e-08",
    ),
    Case(
        "mask one position late",
        LLAMA,
        M,
        "            attention_mask,\n            dropout=0.0",
        (
            "            torch.ones(input_shape[1], input_shape[1]).tril(1).bool()[None, "
            "None],\n    "
            "        dropout=0.0"
        ),
        "mask.*early|mask.*late",
    ),
    # loss and batches
    Case(
        "labels shifted twice",
        GPT2,
        L,
        "labels[rows].flatten()",
        "labels[rows].roll(-1, 1).flatten()",
        "label shift|labels",
    ),
    Case(
        "labels not shifted",
        LLAMA,
        L,
        "labels[rows].flatten()",
        "tokens[rows].flatten()",
        "label shift|labels",
    ),
    Case(
        "ignored labels count",
        GPT2,
        L,
        "labels[rows].flatten()",
        "labels[rows].clamp(min=0).flatten()",
        "ignored labels",
    ),
    Case(
        "loss summed",
        LLAMA,
        L,
        "labels[rows].flatten())",
        'labels[rows].flatten(), reduction="sum")',
        "reduction.*mean.*sum",
    ),
    Case(
        "label smoothing",
        OURS_GPT,
        L,
        "labels[rows].flatten())",
        "labels[rows].flatten(), label_smoothing=0.1)",
        "label_smoothing",
    ),
    Case(
        "logits halved",
        OURS_LLAMA,
        L,
        'getattr(logits, "logits", logits)',
        'getattr(logits, "logits", logits) / 2',
        "factor of the logits.*0.5",
    ),
    Case(
        "z-loss added",
        GPT2,
        L,
        "/ MICRO_BATCHES\n",
        (
            "/ MICRO_BATCHES\n            loss = loss + 1e-4 * logits.logsumexp(-1)[labels[rows] "
            ">= "
            "0].square().mean() / MICRO_BATCHES\n"
        ),
        "z-loss",
    ),
    Case(
        "accumulation not scaled",
        OURS_GPT,
        L,
        ".flatten()) / MICRO_BATCHES",
        ".flatten())",
        "gradient accumulation",
    ),
    Case(
        "micro-batch dropped",
        LLAMA,
        L,
        ".chunk(MICRO_BATCHES):",
        ".chunk(MICRO_BATCHES)[:-1]:",
        "drops sequences",
    ),
    Case(
        "gradient of the last micro-batch only",
        GPT2,
        L,
        "            loss.backward()",
        "            optimizer.zero_grad(); loss.backward()",
        "dropped micro-batch",
    ),
    # optimizer
    Case(
        "clipping off",
        GPT2,
        L,
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)\n",
        "",
        "gradient clipping.*off in B",
    ),
    Case(
        "clipping off (our trainer)",
        OURS_LLAMA,
        L,
        "norm, CLIP,",
        "norm, None,",
        "gradient clipping.*off in B",
    ),
    Case(
        "clipping by value",
        LLAMA,
        L,
        "torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)",
        "torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)",
        "gradient clipping",
    ),
    Case(
        "decay on norms and biases",
        GPT2,
        L,
        '"params": others, "weight_decay": 0.0',
        '"params": others, "weight_decay": 0.1',
        "weight decay of (norms|biases) and",
    ),
    Case(
        "no decay on embeddings",
        LLAMA,
        L,
        (
            "decayed = [p for p in model.parameters() if p.dim() >= 2]\n    others = [p for p in "
            "model.parameters() if p.dim() < 2]"
        ),
        (
            "decayed = [p for n, p in model.named_parameters() if p.dim() >= 2 and 'embed' not in "
            "n]\n    others = [p for n, p in model.named_parameters() if p.dim() < 2 or 'embed' "
            "in n]"
        ),
        "weight decay of embeddings",
    ),
    Case(
        "weight decay 0.01 (our trainer)",
        OURS_GPT,
        L,
        "weight_decay=0.1, beta2",
        "weight_decay=0.01, beta2",
        "weight decay of.*0.1 in A, 0.01",
    ),
    Case("beta2 0.999 (our trainer)", OURS_LLAMA, L, "beta2=0.95", "beta2=0.999", "betas"),
    Case(
        "Adam in place of AdamW",
        GPT2,
        L,
        ADAMW,
        "optimizer = torch.optim.Adam(groups",
        "decoupled weight decay",
    ),
    Case("epsilon 1e-6", LLAMA, L, "eps=1e-8", "eps=1e-6", "epsilon of the optimizer"),
    Case(
        "warm-up longer",
        GPT2,
        L,
        "WARMUP, PEAK, MICRO_BATCHES, CLIP = 3,",
        "WARMUP, PEAK, MICRO_BATCHES, CLIP = 4,",
        "warm-up",
    ),
    Case(
        "learning rate one step late",
        OURS_GPT,
        L,
        "learning_rate(step, len",
        "learning_rate(max(step - 1, 0), len",
        "one step late",
    ),
    Case(
        "learning rate one step early",
        LLAMA,
        L,
        "learning_rate(step, len",
        "learning_rate(step + 1, len",
        "one step early",
    ),
    Case(
        "decay to another floor",
        OURS_LLAMA,
        L,
        "0.1 + 0.45",
        "0.0 + 0.5",
        "decay of the learning rate",
    ),
    Case(
        "bias correction off",
        LLAMA,
        L,
        ADAMW,
        PLAIN + '~first = state["first"] / (1 - one**count)~first = state["first"]',
        "bias correction",
    ),
    Case(
        "epsilon inside the root",
        GPT2,
        L,
        ADAMW,
        PLAIN
        + (
            '~(state["second"] / (1 - two**count)).sqrt() + group["eps"]~(state["second"] / (1 - '
            'two**count) + group["eps"]).sqrt()'
        ),
        "epsilon of",
    ),
    Case(
        "decay not times the learning rate",
        LLAMA,
        L,
        ADAMW,
        PLAIN + '~1 - group["lr"] * group["weight_decay"]~1 - group["weight_decay"]',
        "decay times learning rate",
    ),
    Case(
        "embeddings not updated",
        OURS_LLAMA,
        B,
        "",
        "model.embedding.weight.requires_grad_(False)",
        "without a gradient.*embedding",
    ),
]

REFACTORINGS = [
    Case("same script again", GPT2, L, "", ""),
    Case("other implementation of AdamW", LLAMA, L, ADAMW, PLAIN),
    Case("AdamW for each parameter by itself", GPT2, L, "eps=1e-8)", "eps=1e-8, foreach=False)"),
    Case("fused AdamW", LLAMA, L, "eps=1e-8)", "eps=1e-8, fused=True)"),
    Case(
        "one group per parameter",
        GPT2,
        L,
        "    optimizer = torch",
        (
            '    groups = [{**g, "params": [p]} for g in groups for p in g["params"]]\n    '
            "optimizer "
            "= torch"
        ),
    ),
    Case(
        "clipping by hand",
        LLAMA,
        L,
        "torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)",
        (
            "scale = min(1.0, CLIP / (float(sum(p.grad.double().square().sum() for p in "
            "model.parameters()).sqrt()) + 1e-6))\n        for p in model.parameters(): "
            "p.grad.mul_(scale)"
        ),
    ),
    Case(
        "accumulation scaled in the gradient",
        OURS_GPT,
        L,
        ".backward()",
        ".mul(MICRO_BATCHES).backward(torch.tensor(1 / MICRO_BATCHES))",
    ),
    Case(
        "rows in another order",
        GPT2,
        L,
        "torch.arange(len(tokens)).chunk",
        "torch.arange(len(tokens)).view(2, 2).flip(1).flatten().chunk",
    ),
    Case(
        "micro-batches in another order",
        OURS_LLAMA,
        L,
        ".chunk(MICRO_BATCHES):",
        ".chunk(MICRO_BATCHES)[::-1]:",
    ),
    Case(
        "cross-entropy by log_softmax",
        LLAMA,
        L,
        "F.cross_entropy(logits.flatten(0, 1), labels[rows].flatten())",
        "F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels[rows].flatten())",
    ),
    Case(
        "attention by matrix products",
        OURS_LLAMA,
        M,
        """y = attend(
            query,
            key,
            value=value,
            bounds=bounds,
            causal=causal,
            kernel=self.kernel,
            dropout=dropout,
        )""",
        MATRIX_PRODUCTS,
    ),
    Case("eager attention", GPT2, B, "", "model.config._attn_implementation = 'eager'"),
    Case("eager attention (Llama)", LLAMA, B, "", "model.config._attn_implementation = 'eager'"),
    Case(
        "GELU by its formula",
        OURS_GPT,
        M,
        'F.gelu(self.up(x), approximate="tanh")',
        (
            "(lambda u: 0.5 * u * (1 + torch.tanh((2 / math.pi) ** 0.5 * (u + 0.044715 * "
            "u**3))))(self.up(x))"
        ),
    ),
    Case(
        "RMSNorm by its formula",
        OURS_LLAMA,
        M,
        "F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.epsilon).to(x.dtype)",
        "self.weight * (x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.epsilon))",
    ),
    Case(
        "sum in another order",
        OURS_GPT,
        M,
        "return x + self._dropped(self.feed_forward(self.feed_forward_norm(x)))",
        "return self._dropped(self.feed_forward(self.feed_forward_norm(x))) + x",
    ),
    Case(
        "contiguous heads",
        OURS_LLAMA,
        M,
        "y.view(rows, length, -1, self.head_dimension).transpose(1, 2)",
        "y.view(rows, length, -1, self.head_dimension).transpose(1, 2).contiguous()",
    ),
    Case(
        "rope from position 1 on",
        OURS_LLAMA,
        M,
        "torch.arange(length, dtype=torch.float64)",
        "1 + torch.arange(length, dtype=torch.float64)",
    ),
    Case(
        "linear layers by matrix products",
        OURS_GPT,
        M,
        "return self.down(F.gelu(self.up(x)",
        "return (lambda u: u @ self.down.weight.T + self.down.bias)(F.gelu(self.up(x)",
    ),
    Case("hidden units in another order", OURS_GPT, B, "", PERMUTED),
    Case("renamed, fused and transposed (GPT-2)", GPT2, L, "", "", None, OURS_GPT),
    Case("renamed modules (Llama)", LLAMA, L, "", "", None, OURS_LLAMA),
    Case("our trainer's update", OURS_LLAMA, L, "", "", None, LLAMA),
]

# not looked at while hypotheses were written: they need not be named
HELD_OUT = [
    Case(
        "RMSNorm weight plus one",
        OURS_LLAMA,
        M,
        "self.weight.float(), self.epsilon",
        "1 + self.weight.float(), self.epsilon",
        "weight of the norm",
    ),
    Case(
        "sliding window of 6",
        LLAMA,
        M,
        "            attention_mask,\n            dropout=0.0",
        (
            "            torch.ones(input_shape[1], input_shape[1]).tril().triu(-5).bool()[None, "
            "None],\n            dropout=0.0"
        ),
        "window of 6",
    ),
    Case(
        "embeddings times the root of the width",
        OURS_GPT,
        M,
        "x = self.embedding(tokens_bt)",
        "x = self.embedding(tokens_bt) * 32**0.5",
        "embedding",
    ),
    Case(
        "queries times 0.9",
        OURS_LLAMA,
        M,
        "split(self.query(x))",
        "split(self.query(x)) * 0.9",
        r"blocks\.0\.attention",
    ),
    Case(
        "rope base 12,345",
        OURS_LLAMA,
        M,
        "frequencies = model.rope_theta **",
        "frequencies = 12345.0 **",
        r"rope base of blocks\.0\.attention.* 500000 in A, 123[45]\d in B",
    ),
    Case(
        "warm-up from zero",
        GPT2,
        L,
        "PEAK * (step + 1) / WARMUP",
        "PEAK * step / WARMUP",
        "warm-up|one step late",
    ),
    Case(
        "beta1 0.8 in the code of the optimizer",
        LLAMA,
        L,
        ADAMW,
        PLAIN
        + (
            '~(one, two), count = group["betas"], state["step"]~(one, two), count = (0.8, 0.95), '
            'state["step"]'
        ),
        "beta1 of all parameters: as declared in A, 0.8 in B",
    ),
    Case(
        "gradients times 1.01 behind clipping",
        GPT2,
        L,
        "        optimizer.step()",
        "        for p in model.parameters(): p.grad.mul_(1.01)\n        optimizer.step()",
        "clipping",
    ),
    Case("final norm left out", OURS_GPT, M, "return self.norm(x)", "return x", "head"),
    Case(
        "loss over all positions",
        LLAMA,
        L,
        "labels[rows].flatten())",
        'labels[rows].flatten(), reduction="sum") / labels[rows].numel()',
        "reduction",
    ),
    Case(
        "gradients never cleared",
        GPT2,
        L,
        "        optimizer.zero_grad()\n",
        "",
        "cleared|earlier step",
    ),
    Case(
        "square weight not transposed",
        GPT2,
        B,
        "",
        (
            "for b in model.transformer.h: b.attn.c_proj.weight.data = "
            "b.attn.c_proj.weight.data.T.contiguous()"
        ),
        "transposed",
    ),
    Case(
        "one layer without decay",
        LLAMA,
        L,
        (
            "decayed = [p for p in model.parameters() if p.dim() >= 2]\n    others = [p for p in "
            "model.parameters() if p.dim() < 2]"
        ),
        (
            "decayed = [p for n, p in model.named_parameters() if p.dim() >= 2 and 'layers.2.mlp' "
            "not in n]\n    others = [p for n, p in model.named_parameters() if p.dim() < 2 or "
            "'layers.2.mlp' in n]"
        ),
        r"weight decay of model\.layers\.2\.mlp",
    ),
]

#: name of a number → (model, what is edited, old, new with {value} of it, least and most that is
#: drawn, how its cause begins)
NUMBERS = {
    "rope base": (
        *(OURS_LLAMA, M, "frequencies = model.rope_theta **", "frequencies = {value} **"),
        *(1e2, 1e7, r"rope base of blocks\.0\.attention"),
    ),
    "norm epsilon": (
        *(OURS_LLAMA, M, "self.epsilon = epsilon", "self.epsilon = {value}"),
        *(1e-6, 1e-2, "norm epsilon of blocks"),
    ),
    "scale of the scores": (
        *(GPT2, M, "self.scaling = self.head_dim**-0.5", "self.scaling = {value}"),
        *(0.05, 5.0, "scale of the scores"),
    ),
    "soft cap": (
        *(OURS_LLAMA, L, 'getattr(logits, "logits", logits)'),
        '{value} * torch.tanh(getattr(logits, "logits", logits) / {value})',
        *(2.0, 50.0, "soft cap of the logits"),
    ),
    "factor of the logits": (
        *(GPT2, L, 'getattr(logits, "logits", logits)'),
        'getattr(logits, "logits", logits) * {value}',
        *(0.1, 10.0, "factor of the logits"),
    ),
    "weight of a z-loss": (
        *(LLAMA, L, "/ MICRO_BATCHES\n"),
        (
            "/ MICRO_BATCHES\n            loss = loss + {value} * logits.logsumexp(-1)"
            "[labels[rows] >= 0].square().mean() / MICRO_BATCHES\n"
        ),
        *(1e-5, 1e-2, "z-loss"),
    ),
    "beta1": (
        *(
            LLAMA,
            L,
            ADAMW,
            PLAIN + '~(one, two), count = group["betas"]~one, two, count = {value}, 0.95',
        ),
        *(0.5, 0.99, "beta1 of"),
    ),
    "beta2": (
        *(
            GPT2,
            L,
            ADAMW,
            PLAIN + '~(one, two), count = group["betas"]~one, two, count = 0.9, {value}',
        ),
        *(0.5, 0.999, "beta2 of"),
    ),
    "epsilon of the optimizer": (
        *(LLAMA, L, ADAMW, PLAIN + '~+ group["eps"]~+ {value}'),
        *(1e-6, 1e-2, "size of epsilon"),
    ),
    "learning rate": (
        *(GPT2, L, ADAMW),
        PLAIN
        + (
            "~        for group in self.param_groups:~        for group in self.param_groups:"
            '\n            group = group | {"lr": group["lr"] * {value}}'
        ),
        *(0.5, 2.0, "learning rate"),
    ),
}


def draw_number(name: str, seed: int) -> tuple[Case, float]:
    """Return a case with a number of three digits that no file names, and the number."""
    *_, least, most, _ = NUMBERS[name]
    pick = random.Random(f"{name} {seed}")
    value = float(f"{least * (most / least) ** pick.random():.3g}")
    return number_case(name, value), value


def number_case(name: str, value: float) -> Case:
    """Return the case that plants a number."""
    model, where, old, new, _, _, begins = NUMBERS[name]
    return Case(f"{name} {value:g}", model, where, old, new.replace("{value}", repr(value)), begins)


def edit(text: str, case: Case, where: str) -> str:
    """Return a source with a case's edit, which must apply. Parts of `new` behind ~ are a second
    edit.
    """
    if case.where != where or not case.old:
        return text
    new, *second = case.new.split("~")
    for old, replacement in [(case.old, new), *([tuple(second)] if second else [])]:
        assert old in text, f"{case.name}: {old!r} is not in the {where}"
        text = text.replace(old, replacement)
    return text


def build(name: str, case: Case, seed: int = 0) -> torch.nn.Module:
    """Return a model of a case, with the weights that all models of its family have."""
    shape = SHAPES["gpt" if "gpt" in name else "llama"]
    start = decoder.Decoder(shape, LENGTH)
    decoder.initialise(start, seed)
    weights = {n: w.detach().clone() for n, w in start.named_parameters()}
    if name.startswith("ours"):
        model = load(decoder, case).Decoder(shape, LENGTH)
        model.load_state_dict(weights, strict=False)
    else:
        from transformers import CONFIG_MAPPING
        from transformers.models.gpt2 import modeling_gpt2
        from transformers.models.llama import modeling_llama

        config, renamed = to_hf(start.settings, weights, LENGTH)
        module = load(modeling_gpt2 if name == GPT2 else modeling_llama, case)
        made = CONFIG_MAPPING[config["model_type"]](**config, attn_implementation="sdpa")
        made.resid_pdrop = made.embd_pdrop = made.attn_pdrop = 0.0
        model = (module.GPT2LMHeadModel if name == GPT2 else module.LlamaForCausalLM)(made)
        model.load_state_dict(renamed, strict=False)
    if case.where == B:
        exec(case.new, {"model": model, "torch": torch, "nn": torch.nn})
    return model.train()


def load(module: types.ModuleType, case: Case) -> types.ModuleType:
    if case.where != M:
        return module
    copy = types.ModuleType(module.__name__ + "_planted")
    copy.__package__ = module.__package__
    copy.__file__ = module.__file__
    sys.modules[copy.__name__] = copy
    text = Path(module.__file__).read_text(encoding="utf-8")
    exec(compile(edit(text, case, M), module.__file__, "exec"), copy.__dict__)
    return copy


@cache
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return tokens [B, T] and labels of each step; every row ends with ignored labels, as many in
    each.
    """
    found = []
    for step in range(STEPS):
        tokens = torch.randint(
            1, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step)
        )
        labels = tokens[:, 1:].clone()
        labels[:, -2:] = -100
        found.append((tokens[:, :-1], labels))
    return found


class References:
    """Recordings of what is not changed, with two floors each, made once; and certificates of cases
    against them.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._found = {}

    def record(self, name: str, folder: Path, case: Case = UNCHANGED, floor: int = 0) -> None:
        """Train a model with the change of a case, and record it in `folder`."""
        loop = {}
        threads = torch.get_num_threads()
        torch.manual_seed(0)
        exec(edit(LOOP_OURS if name.startswith("ours") else LOOP, case, L), loop)
        with patch.dict(os.environ, {recorder.FLOOR_VARIABLE: str(floor)} if floor else {}):
            loop["train"](partial(recorder.ParityRecorder, folder), build(name, case), batches())
        torch.set_num_threads(threads)

    def get(self, name: str) -> Recording:
        if name not in self._found:
            folder = self.folder / re.sub(r"\W+", "-", name)
            for floor in range(3):
                self.record(name, folder, floor=floor)
            self._found[name] = read_recording(folder)
        return self._found[name]

    def recorded(self, case: Case) -> tuple[Recording, Recording]:
        """The recording that a case is compared with, and its own."""
        folder = self.folder / "case"
        shutil.rmtree(folder, ignore_errors=True)
        self.record(case.model, folder, case)
        return self.get(case.reference or case.model), read_recording(folder)

    def certificate_of(self, case: Case) -> dict:
        return certify(compare(*self.recorded(case)))


def describe(certificate: dict) -> str:
    """Return the cause, or the largest ratio to the floor."""
    if certificate["cause"]:
        return certificate["cause"]["text"]
    worst = max(
        (row["largest_ratio_to_floor"], stage) for stage, row in certificate["stages"].items()
    )
    return f"at most {worst[0]:.2g} × floor ({worst[1]})"


def judge(case: Case, certificate: dict) -> str:
    """Return `named`, `found`, `missed`, `equal…` or `false alarm`."""
    if certificate["verdict"] in (EQUAL, ROUNDING):
        return "missed" if case.expected else certificate["verdict"]
    if not case.expected:
        return "false alarm"
    return (
        "named"
        if certificate["cause"] and re.search(case.expected, certificate["cause"]["text"])
        else "found"
    )


def run(cases: list[Case], references: References) -> Iterator[tuple[Case, str, str, str]]:
    """Yield each case with its result, its cause and, of other trainers, its kind from losses
    alone.
    """
    for case in cases:
        try:
            found = references.certificate_of(case)
            yield case, judge(case, found), describe(found), found.get("golden", UNKNOWN)
        except (RuntimeError, UserError, RecordingError) as error:
            yield case, "failed", " ".join(str(error).split()), UNKNOWN


def print_table(title: str, columns: list[str], rows: Iterable[tuple]) -> list[tuple]:
    """Print rows of `run` as they come, as many of their values as there are columns."""
    print(f"\n| {' | '.join([title, *columns])} |\n|{'---|' * (1 + len(columns))}")
    found = []
    for case, *values in rows:
        print(f"| {' | '.join([case.name, case.model, *values][: 1 + len(columns)])} |", flush=True)
        found.append((case, *values))
    return found


def main() -> None:
    torch.set_num_threads(1)
    only = sys.argv[1:]
    tables = {"planted difference": FAULTS, "held out": HELD_OUT, "refactoring": REFACTORINGS}
    with tempfile.TemporaryDirectory() as folder:
        references = References(Path(folder))
        for title, cases in tables.items():
            chosen = [
                case
                for case in cases
                if not only or any(word in case.name or word == title for word in only)
            ]
            print_table(
                title,
                ["model", "result", "cause that the certificate names"],
                run(chosen, references),
            )


if __name__ == "__main__":
    main()
