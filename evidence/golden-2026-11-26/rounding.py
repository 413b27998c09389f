"""Train a transformer of width 256 in ways that only rounding tells apart, and print what
`tokenscale golden` says.

`python evidence/golden-2026-11-26/rounding.py CURVES…`: each way is judged against one thread,
others are floor runs. CURVES are from other releases of torch: `python
evidence/golden-2026-11-26/rounding.py --write CURVES` under each.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from tokenscale_golden.reading import Curve
from tokenscale_golden.verdict import judge

WIDTH = 256
LAYERS = 2
VOCABULARY = 96
LENGTH = 32
ROWS = 4
STEPS = 12
#: threads, order of rows, micro-batches, by Inductor
WAYS = {
    "one thread": (1, [0, 1, 2, 3], 1, False),
    "two threads": (2, [0, 1, 2, 3], 1, False),
    "rows reversed": (1, [3, 2, 1, 0], 1, False),
    "rows in pairs": (1, [1, 0, 3, 2], 1, False),
    "two micro-batches": (1, [0, 1, 2, 3], 2, False),
    "four micro-batches": (1, [0, 1, 2, 3], 4, False),
    "compiled": (1, [0, 1, 2, 3], 1, True),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.before = nn.LayerNorm(WIDTH)
        self.between = nn.LayerNorm(WIDTH)

    def forward(self, x):
        parts = self.query(self.before(x)).chunk(3, -1)
        query, key, value = (part.view(*x.shape[:2], 8, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(precision, threads, order, micro_batches, compiled):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = Model()
    losses = []
    norms = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward = torch.compile(model) if compiled else model
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        total = 0.0
        tokens = (torch.rand(ROWS, LENGTH + 1, generator=generator) ** 2.5 * VOCABULARY).long()[
            order
        ]
        for rows in tokens.chunk(micro_batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                logits = forward(rows[:, :-1]).flatten(0, 1).float()
                loss = F.cross_entropy(logits, rows[:, 1:].flatten()) / micro_batches
            total += float(loss.detach())
            loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


if sys.argv[1:2] == ["--write"]:
    found = {precision: train(precision, *WAYS["one thread"]) for precision in ("bf16", "fp32")}
    Path(sys.argv[2]).write_text(json.dumps({"torch": torch.__version__, **found}))
    raise SystemExit
releases = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
for precision in ("bf16", "fp32"):
    trained = {name: train(precision, *way) for name, way in WAYS.items()}
    trained |= {f"torch {release['torch']}": release[precision] for release in releases}
    old, *curves = (Curve.of(*curve) for curve in trained.values())
    for name, new in zip([*trained][1:], curves, strict=True):
        alone, verdict = (
            judge(old, new, floors, precision == "fp32")
            for floors in ([], [curve for curve in curves if curve is not new])
        )
        times = verdict.reason.rpartition(" times the floor")[0].rpartition(" ")[2]
        print(
            f"| {precision} | {name} | {verdict.largest:.1e} | {alone.kind} | {times} | "
            f"{verdict.kind} |"
        )
