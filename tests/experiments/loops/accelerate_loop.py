"""A training loop in the words of Accelerate; the lines of the log are marked."""

import sys

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

from tokenscale.runs.records.external import ExternalRun  # log

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(torch.randint(0, 97, (24, 32)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
shape = {"vocabulary_size": 97, "dimension": 32, "layers": 2, "heads": 2}  # log
# log
facts = {
    "approach": "Accelerate loop",
    "steps": 6,
    "global_batch": 4,
    "sequence_length": 32,
    "shape": shape,
}
ranks = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}  # log
with ExternalRun(sys.argv[1], **facts, **ranks) as run:  # log
    for rows in loader:
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        useful = rows[:, 1:].numel()  # log
        # log
        run.step(
            loss_sum=loss.item() * useful,
            useful_tokens=useful,
            total_tokens=rows.numel(),
            rows=len(rows),
        )
