"""A plain training loop over a model of transformers, as thousands are written; the lines of the
log are marked.
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tokenscale.runs.records.external import ExternalRun  # log

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
shape = {"vocabulary_size": 97, "dimension": 32, "layers": 2, "heads": 2}  # log
# log
facts = {
    "approach": "transformers loop",
    "steps": 6,
    "global_batch": 4,
    "sequence_length": 32,
    "shape": shape,
}
with ExternalRun(sys.argv[1], **facts) as run:  # log
    for _ in range(6):
        with run.waiting():  # log
            rows = torch.randint(0, 97, (4, 32))
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        useful = rows[:, 1:].numel()  # log: the first token of a row is no label
        # log
        run.step(
            loss_sum=loss.item() * useful,
            useful_tokens=useful,
            total_tokens=rows.numel(),
            rows=len(rows),
        )
