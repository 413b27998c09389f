"""Train a transformer of width 256 in ways that only rounding tells apart, and print what `tokenscale golden` says.

`python evidence/golden-2026-11-26/rounding.py`; each way is judged against one thread, with the others as floor runs.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tokenscale.parity.golden.reading import Curve
from tokenscale.parity.golden.verdict import judge

WIDTH, LAYERS, VOCABULARY, LENGTH, ROWS, STEPS = 256, 2, 96, 32, 4, 12
#: threads, order of rows, micro-batches
WAYS = {
    "one thread": (1, [0, 1, 2, 3], 1),
    "two threads": (2, [0, 1, 2, 3], 1),
    "rows reversed": (1, [3, 2, 1, 0], 1),
    "rows in pairs": (1, [1, 0, 3, 2], 1),
    "two micro-batches": (1, [0, 1, 2, 3], 2),
    "four micro-batches": (1, [0, 1, 2, 3], 4),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        parts = self.query(self.before(x)).chunk(3, -1)
        query, key, value = (part.view(*x.shape[:2], 8, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(precision, threads, order, micro_batches):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, losses, norms = Model(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        generator, total = torch.Generator().manual_seed(step), 0.0
        tokens = (torch.rand(ROWS, LENGTH + 1, generator=generator) ** 2.5 * VOCABULARY).long()[order]
        for rows in tokens.chunk(micro_batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                logits = model(rows[:, :-1]).flatten(0, 1).float()
                loss = F.cross_entropy(logits, rows[:, 1:].flatten()) / micro_batches
            total += float(loss.detach())
            loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return Curve.of(losses, norms)


for precision in ("bf16", "fp32"):
    old, *curves = (train(precision, *way) for way in WAYS.values())
    for name, new in zip([*WAYS][1:], curves, strict=True):
        alone, verdict = judge(old, new), judge(old, new, [curve for curve in curves if curve is not new])
        times = verdict.reason.rpartition(" times the floor")[0].rpartition(" ")[2]
        print(f"| {precision} | {name} | {verdict.largest:.1e} | {alone.kind} | {times} | {verdict.kind} |")
