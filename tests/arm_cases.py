"""Planted one-line differences and harmless refactorings in the installed code of other trainers,
for their certificates.

`python -m tests.arm_cases` runs all of them and prints the tables of
`evidence/parity-arms-*/README.md`. It needs the environments of three arms: `snakemake --cores 1
results/arms/{nanoGPT,litgpt,transformers}/environment.json`.
"""

# ruff: noqa: E501

import json
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity_cases import UNCHANGED, Case, References, print_table, run
from tokenscale.arms.prepared import ARMS, python_of, source_of
from tokenscale.arms.train import read_steps, run_adapter, write_contract
from tokenscale.base.files import read_json
from tokenscale.data.batches.batch import Batch
from tokenscale.parity.certificate import certify
from tokenscale.parity.comparison import compare
from tokenscale.parity.recorder import FLOOR_VARIABLE
from tokenscale.parity.recording import Recording
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import (
    BudgetSettings,
    OptimizerSettings,
    RunSettings,
    ScheduleSettings,
    ValidationSettings,
)
from tokenscale_golden import verdict as golden
from tokenscale_golden.reading import Curve

ROWS = 4
MICRO_BATCH = 2
LENGTH = 16
VOCABULARY = 96
STEPS = 8
LLAMA = replace(PRESETS["llama-tiny"], layers=4, dimension=32, hidden=96)
GPT = replace(PRESETS["gpt2-tiny"], layers=4, dimension=32, hidden=128)
#: with the same warm-up nanoGPT, litgpt and the Trainer have other rates, so that their adapters
#: refuse it
CONSTANT = ScheduleSettings(shape="constant", warmup_steps=0)
COSINE = ScheduleSettings(shape="cosine", warmup_steps=0)
#: the kernel `fused` is left to a refactoring, so that faults can be planted in the Python code of
#: AdamW
OPTIMIZER = OptimizerSettings(learning_rate=3e-3, weight_decay=0.1, clip_norm=0.25, fused=False)
#: references: arm, model and schedule
SETTINGS = {
    "nanoGPT": ("nanoGPT", GPT, COSINE),
    "litgpt": ("litgpt", LLAMA, CONSTANT),
    "transformers, Llama": ("transformers", LLAMA, CONSTANT),
    "transformers, GPT-2": ("transformers", GPT, CONSTANT),
}
#: what an arm's process imports in place of an installed module; `loaded` shows that it did
SITECUSTOMIZE = """
import importlib.util
import pathlib
import sys


class Edited:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            pathlib.Path({loaded!r}).touch()
            return importlib.util.spec_from_file_location(name, {path!r})


sys.meta_path.insert(0, Edited)
"""


#: file of a case: the arm's adapter, a file of its repository (`model.py`), or an installed module
#: (`litgpt.model`)
ADAPTER = "adapter.py"
NANO, LIT, HF_LLAMA, HF_GPT = SETTINGS

FAULTS = [
    # nanoGPT: model
    Case(
        "LayerNorm epsilon 1e-6",
        NANO,
        "model.py",
        "self.bias, 1e-5)",
        "self.bias, 1e-6)",
        r"norm epsilon of transformer\.h\.0\.ln_1: 1e-05 in A, 1e-06 in B",
    ),
    Case(
        "tanh approximation of GELU",
        NANO,
        "model.py",
        "nn.GELU()",
        "nn.GELU(approximate='tanh')",
        r"activation of transformer\.h\.0\.mlp.*erf.*tanh",
    ),
    Case(
        "no causal mask",
        NANO,
        "model.py",
        "is_causal=True",
        "is_causal=False",
        r"mask of transformer\.h\.0\.attn.*causal in A, none in B",
    ),
    Case(
        "scores not scaled",
        NANO,
        "model.py",
        "is_causal=True",
        "is_causal=True, scale=1.0",
        r"scale of the scores of transformer\.h\.0\.attn",
    ),
    Case(
        "MLP branch halved",
        NANO,
        "model.py",
        "x + self.mlp(",
        "x + 0.5 * self.mlp(",
        r"weight of the output of \S+mlp\.c_proj in the sum",
    ),
    Case(
        "positions one late",
        NANO,
        "model.py",
        "pos = torch.arange(0, t, dtype=torch.long, device=device)",
        "pos = torch.arange(-1, t - 1, dtype=torch.long, device=device).clamp(min=0)",
        r"positions or ids",
    ),
    Case(
        "norm before attention left out",
        NANO,
        "model.py",
        "self.attn(self.ln_1(x))",
        "self.attn(x)",
        r"does not call the modules of transformer\.h\.0\.ln_1",
    ),
    Case(
        "head not tied",
        NANO,
        "model.py",
        "self.transformer.wte.weight = self.lm_head.weight",
        "pass",
        r"weight tying",
    ),
    Case(
        "logits halved",
        NANO,
        "model.py",
        "logits = self.lm_head(x)",
        "logits = self.lm_head(x) / 2",
        r"factor of the logits.*0\.5",
    ),
    Case("dropout 0.1", NANO, "train.py", "dropout = 0.0 #", "dropout = 0.1 #", r"dropout"),
    # nanoGPT: loss and batches
    Case(
        "loss summed",
        NANO,
        "model.py",
        "ignore_index=-1)",
        "ignore_index=-1, reduction='sum')",
        r"reduction of the cross-entropy: mean in A, sum in B",
    ),
    Case(
        "labels not shifted",
        NANO,
        "train.py",
        "(data[i+1:i+1+block_size])",
        "(data[i:i+block_size])",
        r"label shift",
    ),
    Case(
        "accumulated gradient not divided",
        NANO,
        "train.py",
        "loss = loss / gradient_accumulation_steps",
        "loss = loss",
        r"scale of the gradient: B's is 2 of A's",
    ),
    Case(
        "micro-batch without a backward pass",
        NANO,
        "train.py",
        "scaler.scale(loss).backward()",
        "micro_step and scaler.scale(loss).backward()",
        r"dropped micro-batch",
    ),
    # nanoGPT: optimizer
    Case(
        "clipping off",
        NANO,
        ADAPTER,
        '"grad_clip": optimizer["clip_norm"] or 0.0',
        '"grad_clip": 0.0',
        r"gradient clipping.*off in B",
    ),
    Case(
        "decay on norms and biases",
        NANO,
        "model.py",
        "{'params': nodecay_params, 'weight_decay': 0.0}",
        "{'params': nodecay_params, 'weight_decay': weight_decay}",
        r"weight decay of (norms|biases) and (norms|biases): 0 in A, 0\.1 in B",
    ),
    Case(
        "Adam in place of AdamW",
        NANO,
        "model.py",
        "torch.optim.AdamW(optim_groups",
        "torch.optim.Adam(optim_groups",
        r"decoupled weight decay",
    ),
    Case(
        "optimizer epsilon 1e-6",
        NANO,
        "model.py",
        "betas=betas, **extra_args)",
        "betas=betas, eps=1e-6, **extra_args)",
        r"epsilon of the optimizer of all parameters: 1e-08 in A, 1e-06 in B",
    ),
    Case(
        "beta2 0.999",
        NANO,
        ADAPTER,
        'betas = optimizer["beta1"], optimizer["beta2"]',
        'betas = optimizer["beta1"], 0.999',
        r"betas of all parameters",
    ),
    Case(
        "warm-up of 3 steps",
        NANO,
        ADAPTER,
        '"warmup_iters": 0',
        '"warmup_iters": 3',
        r"learning rate of all parameters.*warm-up",
    ),
    Case(
        "learning rate one step late",
        NANO,
        "train.py",
        "get_lr(iter_num)",
        "get_lr(max(iter_num - 1, 0))",
        r"one step late",
    ),
    Case(
        "decay to zero",
        NANO,
        ADAPTER,
        'peak * schedule["floor"]',
        "0.0",
        r"decay of the learning rate",
    ),
    # litgpt: model
    Case(
        "RMSNorm epsilon 1e-6",
        LIT,
        "litgpt.model",
        "norm_x + self.eps",
        "norm_x + 1e-6",
        r"norm epsilon of transformer\.h\.0\.norm_1: 1e-05 in A, 1e-06 in B",
    ),
    Case(
        "norm weight plus one",
        LIT,
        "litgpt.model",
        "weight = (1 + self.weight) if self.add_unit_offset else self.weight",
        "weight = 1 + self.weight",
        r"weight of the norm of transformer\.h\.0\.norm_1: applied in A, plus one in B",
    ),
    Case(
        "rope base 10,000",
        LIT,
        ADAPTER,
        'rope_base=shape["rope_theta"]',
        "rope_base=10000",
        r"rope base of transformer\.h\.0\.attn.*500000 in A, 10000 in B",
    ),
    Case(
        "rope pairs of neighbours",
        LIT,
        ADAPTER,
        "parallel_residual=False,",
        "parallel_residual=False, rope_interleave=True,",
        r"rope pairs of transformer\.h\.0\.attn",
    ),
    Case(
        "GELU in place of SiLU",
        LIT,
        "litgpt.model",
        "F.silu(x_fc_1) * x_fc_2",
        "F.gelu(x_fc_1) * x_fc_2",
        r"activation of transformer\.h\.0\.mlp.*SiLU.*erf",
    ),
    Case(
        "gate and up exchanged",
        LIT,
        "litgpt.model",
        "F.silu(x_fc_1) * x_fc_2",
        "F.silu(x_fc_2) * x_fc_1",
        r"gated of transformer\.h\.0\.mlp",
    ),
    Case(
        "window of 6",
        LIT,
        ADAPTER,
        "parallel_residual=False,",
        "parallel_residual=False, sliding_window_size=6, sliding_window_indices=[1] * 4,",
        r"mask of transformer\.h\.0\.attn.*window of 6",
    ),
    Case(
        "scores not scaled",
        LIT,
        "litgpt.model",
        "scale = 1.0 / math.sqrt(self.config.attention_scores_scalar or self.config.head_size)",
        "scale = 1.0",
        r"scale of the scores of transformer\.h\.0\.attn",
    ),
    Case(
        "parallel residual",
        LIT,
        ADAPTER,
        "parallel_residual=False,",
        "parallel_residual=True,",
        r"weight of the output of transformer\.h\.0\.attn\.proj in the sum",
    ),
    Case(
        "embeddings scaled",
        LIT,
        ADAPTER,
        "parallel_residual=False,",
        "parallel_residual=False, scale_embeddings=True,",
        r"weight of the output of transformer\.wte",
    ),
    Case(
        "logits capped at 5",
        LIT,
        ADAPTER,
        "parallel_residual=False,",
        "parallel_residual=False, final_logit_softcapping=5.0,",
        r"soft cap of the logits.*5",
    ),
    Case(
        "bfloat16",
        LIT,
        ADAPTER,
        '"32-true" if contract.precision == "fp32" else "bf16-mixed"',
        '"bf16-mixed"',
        r"bfloat16",
    ),
    # litgpt: loss and batches
    Case(
        "labels not shifted",
        LIT,
        "litgpt.pretrain",
        "train_data[:, 1 : (model.max_seq_length + 1)]",
        "train_data[:, 0 : model.max_seq_length]",
        r"label shift",
    ),
    Case(
        "label smoothing",
        LIT,
        "litgpt.utils",
        'reduction="none")\n        for',
        'reduction="none", label_smoothing=0.1)\n        for',
        r"label_smoothing",
    ),
    Case(
        "loss of a step not divided",
        LIT,
        "litgpt.pretrain",
        "fabric.backward(loss / train.gradient_accumulation_iters(devices, num_nodes))",
        "fabric.backward(loss)",
        r"gradient accumulation",
    ),
    Case(
        "gradients cleared in each micro-batch",
        LIT,
        "litgpt.pretrain",
        "fabric.backward(loss /",
        "optimizer.zero_grad(), fabric.backward(loss /",
        r"dropped micro-batch",
    ),
    # litgpt: optimizer
    Case(
        "clipping off",
        LIT,
        ADAPTER,
        'max_norm=math.inf if optimizer["clip_norm"] is None else optimizer["clip_norm"]',
        "max_norm=math.inf",
        r"gradient clipping.*off in B",
    ),
    Case(
        "clipping by value",
        LIT,
        "litgpt.pretrain",
        "fabric.clip_gradients(model, optimizer, max_norm=train.max_norm)",
        "fabric.clip_gradients(model, optimizer, clip_val=0.01)",
        r"gradient clipping",
    ),
    Case(
        "no decay on norms",
        LIT,
        "litgpt.pretrain",
        "instantiate_torch_optimizer(optimizer, model.parameters(), **extra_kwargs)",
        (
            'instantiate_torch_optimizer(optimizer, [{"params": [p for p in model.parameters() if '
            'p.dim() > 1]}, {"params": [p for p in model.parameters() if p.dim() < 2], '
            '"weight_decay": 0.0}], **extra_kwargs)'
        ),
        r"weight decay of norms: 0\.1 in A, 0 in B",
    ),
    Case(
        "beta2 0.999",
        LIT,
        ADAPTER,
        '(optimizer["beta1"], optimizer["beta2"])',
        '(optimizer["beta1"], 0.999)',
        r"betas of all parameters",
    ),
    Case(
        "optimizer epsilon 1e-6",
        LIT,
        ADAPTER,
        '"eps": optimizer["epsilon"]',
        '"eps": 1e-6',
        r"epsilon of the optimizer of all parameters: 1e-08 in A, 1e-06 in B",
    ),
    Case(
        "warm-up of 3 steps",
        LIT,
        ADAPTER,
        'lr_warmup_steps=schedule["warmup_steps"]',
        "lr_warmup_steps=3",
        r"learning rate of all parameters.*warm-up",
    ),
    # transformers: models
    Case(
        "RMSNorm epsilon 1e-6",
        HF_LLAMA,
        "transformers.models.llama.modeling_llama",
        "variance + self.variance_epsilon",
        "variance + 1e-6",
        r"norm epsilon of model\.layers\.0\.input_layernorm: 1e-05 in A, 1e-06 in B",
    ),
    Case(
        "rope base 10,000",
        HF_LLAMA,
        "transformers.models.llama.modeling_llama",
        'base = config.rope_parameters["rope_theta"]',
        "base = 10000.0",
        r"rope base of model\.layers\.0\.self_attn.*500000 in A, 10000 in B",
    ),
    Case(
        "GELU in place of SiLU",
        HF_LLAMA,
        "transformers.models.llama.modeling_llama",
        "self.act_fn(self.gate_proj(x))",
        "nn.functional.gelu(self.gate_proj(x))",
        r"activation of model\.layers\.0\.mlp.*SiLU.*erf",
    ),
    Case(
        "no causal mask",
        HF_LLAMA,
        "transformers.models.llama.modeling_llama",
        "self.is_causal = True",
        "self.is_causal = False",
        r"mask of model\.layers\.0\.self_attn.*causal in A, none in B",
    ),
    Case(
        "MLP branch halved",
        HF_LLAMA,
        "transformers.models.llama.modeling_llama",
        "hidden_states = self.mlp(hidden_states)",
        "hidden_states = 0.5 * self.mlp(hidden_states)",
        r"weight of the output of \S+down_proj in the sum",
    ),
    Case(
        "attention dropout 0.1",
        HF_LLAMA,
        "transformers.models.llama.modeling_llama",
        "else self.attention_dropout",
        "else 0.1",
        r"module model\.layers\.0\.self_attn",
    ),
    Case(
        "final norm left out",
        HF_LLAMA,
        "transformers.models.llama.modeling_llama",
        "hidden_states = self.norm(hidden_states)",
        "hidden_states = hidden_states",
        r"does not call the modules of model\.norm\.weight",
    ),
    Case(
        "exact GELU",
        HF_GPT,
        "transformers.models.gpt2.modeling_gpt2",
        "ACT2FN[config.activation_function]",
        'ACT2FN["gelu"]',
        r"activation of transformer\.h\.0\.mlp.*tanh.*erf",
    ),
    Case(
        "scores divided by the layer's number",
        HF_GPT,
        "transformers.models.gpt2.modeling_gpt2",
        "if self.scale_attn_by_inverse_layer_idx:",
        "if True:",
        r"module transformer\.h\.1\.attn",
    ),
    Case(
        "positions one late",
        HF_GPT,
        "transformers.models.gpt2.modeling_gpt2",
        "self.wpe(position_ids)",
        "self.wpe((position_ids - 1).clamp(min=0))",
        r"positions or ids",
    ),
    Case(
        "dropout of the residual branch",
        HF_GPT,
        "transformers.models.gpt2.modeling_gpt2",
        "self.resid_dropout = nn.Dropout(config.resid_pdrop)",
        "self.resid_dropout = nn.Dropout(0.1)",
        r"dropout of the output of transformer\.h\.0\.attn\.c_proj",
    ),
    Case(
        "bfloat16", HF_GPT, ADAPTER, 'bf16=contract.precision == "bf16"', "bf16=True", r"bfloat16"
    ),
    # transformers: loss and batches
    Case(
        "labels shifted twice",
        HF_LLAMA,
        "transformers.loss.loss_utils",
        "if shift_labels is None:",
        "if True:",
        r"label shift|labels",
    ),
    Case(
        "mean of each micro-batch",
        HF_LLAMA,
        "transformers.loss.loss_utils",
        'reduction = "sum" if num_items_in_batch is not None else "mean"',
        'reduction = "mean"',
        r"reduction of the cross-entropy: sum in A, mean in B",
    ),
    Case(
        "label smoothing",
        HF_GPT,
        "transformers.loss.loss_utils",
        "ignore_index=ignore_index, reduction=reduction)",
        "ignore_index=ignore_index, reduction=reduction, label_smoothing=0.1)",
        r"label_smoothing",
    ),
    Case(
        "labels of one micro-batch counted",
        HF_GPT,
        "transformers.trainer",
        "for labels in labels_for_count)",
        "for labels in labels_for_count[:1])",
        r"gradient accumulation",
    ),
    Case(
        "gradients cleared in each micro-batch",
        HF_LLAMA,
        "transformers.trainer",
        "self.accelerator.backward(loss, **kwargs)",
        "model.zero_grad(), self.accelerator.backward(loss, **kwargs)",
        r"dropped micro-batch",
    ),
    Case(
        "gradients never cleared",
        HF_LLAMA,
        "transformers.trainer",
        "model.zero_grad()\n                    self.state",
        "self.state",
        r"cleared|earlier step",
    ),
    # transformers: optimizer
    Case(
        "clipping off",
        HF_LLAMA,
        ADAPTER,
        'max_grad_norm=optimizer["clip_norm"] or 0.0',
        "max_grad_norm=0.0",
        r"gradient clipping.*off in B",
    ),
    Case(
        "decay on norms",
        HF_LLAMA,
        "transformers.trainer",
        '"weight_decay": 0.0,',
        '"weight_decay": self.args.weight_decay,',
        r"weight decay of norms: 0 in A, 0\.1 in B",
    ),
    Case(
        "decay on the layers' norms",
        HF_LLAMA,
        "transformers.trainer",
        'r"bias", r"layernorm", ',
        'r"bias", ',
        r"weight decay of model\.layers\.0\.input_layernorm\.weight",
    ),
    Case(
        "beta2 by default",
        HF_GPT,
        ADAPTER,
        '    adam_beta2=optimizer["beta2"],\n',
        "",
        r"betas of all parameters.*0\.95.*0\.999",
    ),
    Case(
        "warm-up of 3 steps",
        HF_LLAMA,
        ADAPTER,
        'lr_scheduler_type="constant"',
        'lr_scheduler_type="constant_with_warmup", warmup_steps=3',
        r"learning rate of all parameters.*warm-up",
    ),
    Case(
        "linear decay",
        HF_GPT,
        ADAPTER,
        'lr_scheduler_type="constant"',
        'lr_scheduler_type="linear"',
        r"decay of the learning rate",
    ),
    Case(
        "no bias correction of the first moment",
        HF_LLAMA,
        "torch.optim.adam",
        (
            "step = _get_value(step_t)\n\n            bias_correction1 = 1 - beta1**step\n       "
            "    "
            " bias_correction2 = 1 - beta2**step\n\n            step_size = lr / bias_correction1"
        ),
        (
            "step = _get_value(step_t)\n\n            bias_correction1 = 1\n            "
            "bias_correction2 = 1 - beta2**step\n\n            step_size = lr / bias_correction1"
        ),
        r"bias correction of all parameters",
    ),
    Case(
        "decay not times the learning rate",
        HF_LLAMA,
        "torch.optim.adam",
        "param.mul_(1 - lr * weight_decay)",
        "param.mul_(1 - weight_decay)",
        r"decay times learning rate of embeddings and matrices",
    ),
]

REFACTORINGS = [
    Case(
        "GELU by its formula",
        NANO,
        "model.py",
        "x = self.gelu(x)",
        "x = 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))",
    ),
    Case(
        "LayerNorm by its formula",
        NANO,
        "model.py",
        "return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)",
        (
            "return (input - input.mean(-1, keepdim=True)) * torch.rsqrt(input.var(-1, "
            "unbiased=False, keepdim=True) + 1e-5) * self.weight + self.bias"
        ),
    ),
    Case(
        "attention by matrix products",
        NANO,
        "model.py",
        "self.flash = hasattr(torch.nn.functional, 'scaled_dot_product_attention')",
        "self.flash = False",
    ),
    Case(
        "residual sum in another order",
        NANO,
        "model.py",
        "x = x + self.attn(self.ln_1(x))",
        "x = self.attn(self.ln_1(x)) + x",
    ),
    Case(
        "cross-entropy by log_softmax",
        NANO,
        "model.py",
        "F.cross_entropy(logits.view(-1, logits.size(-1)),",
        "F.nll_loss(F.log_softmax(logits.view(-1, logits.size(-1)), dim=-1),",
    ),
    Case(
        "head in two halves",
        NANO,
        "model.py",
        "logits = self.lm_head(x)",
        "logits = torch.cat([F.linear(x, half) for half in self.lm_head.weight.chunk(2)], dim=-1)",
    ),
    Case(
        "clipping by hand",
        NANO,
        "train.py",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)",
        (
            "torch._foreach_mul_([p.grad for p in model.parameters()], min(1.0, grad_clip / "
            "(sum(p.grad.double().square().sum() for p in model.parameters()).sqrt().item() + "
            "1e-6)))"
        ),
    ),
    Case(
        "fused AdamW",
        NANO,
        "model.py",
        "use_fused = fused_available and device_type == 'cuda'",
        "use_fused = fused_available",
    ),
    Case(
        "gradients set to zero in place",
        NANO,
        "train.py",
        "zero_grad(set_to_none=True)",
        "zero_grad(set_to_none=False)",
    ),
    Case(
        "AdamW over lists",
        NANO,
        "model.py",
        "betas=betas, **extra_args)",
        "betas=betas, foreach=True, **extra_args)",
    ),
    Case(
        "SiLU by its formula",
        LIT,
        "litgpt.model",
        "F.silu(x_fc_1) * x_fc_2",
        "x_fc_1 / (1 + torch.exp(-x_fc_1)) * x_fc_2",
    ),
    Case(
        "product in another order",
        LIT,
        "litgpt.model",
        "F.silu(x_fc_1) * x_fc_2",
        "x_fc_2 * F.silu(x_fc_1)",
    ),
    Case(
        "division by the root in RMSNorm",
        LIT,
        "litgpt.model",
        "x * torch.rsqrt(norm_x + self.eps)",
        "x / torch.sqrt(norm_x + self.eps)",
    ),
    Case(
        "RMSNorm by PyTorch's function",
        LIT,
        "litgpt.model",
        "return (x_normed * weight.float()).to(dtype=dtype)",
        "return F.rms_norm(x, x.shape[-1:], weight.float(), self.eps).to(dtype=dtype)",
    ),
    Case(
        "contiguous keys",
        LIT,
        "litgpt.model",
        "k = k.transpose(1, 2)  #",
        "k = k.transpose(1, 2).contiguous()  #",
    ),
    Case(
        "explicit causal mask",
        LIT,
        "litgpt.model",
        "mask = None  # defaults to causal mask",
        "mask = torch.ones(T, T, dtype=torch.bool).tril()",
    ),
    Case(
        "head in chunks of 8 positions",
        LIT,
        "litgpt.model",
        "        lm_head_chunk_size: int = 0,\n    ) -> torch.Tensor",
        "        lm_head_chunk_size: int = 8,\n    ) -> torch.Tensor",
    ),
    Case(
        "cross-entropy in chunks of 8",
        LIT,
        "litgpt.utils",
        "chunk_size: int = 128",
        "chunk_size: int = 8",
    ),
    Case(
        "fused AdamW",
        LIT,
        "litgpt.pretrain",
        '{"fused": fabric.device.type == "cuda"}',
        '{"fused": True}',
    ),
    Case(
        "learning rate as a tensor",
        LIT,
        "litgpt.pretrain",
        'param_group["lr"] = lr',
        'param_group["lr"] = torch.tensor(lr)',
    ),
    Case(
        "weight on the right in RMSNorm",
        HF_LLAMA,
        "transformers.models.llama.modeling_llama",
        "self.weight * hidden_states.to(input_dtype)",
        "hidden_states.to(input_dtype) * self.weight",
    ),
    Case(
        "division by the root in RMSNorm",
        HF_LLAMA,
        "transformers.models.llama.modeling_llama",
        "hidden_states * torch.rsqrt(variance + self.variance_epsilon)",
        "hidden_states / torch.sqrt(variance + self.variance_epsilon)",
    ),
    Case(
        "up before gate",
        HF_LLAMA,
        "transformers.models.llama.modeling_llama",
        "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
        "self.up_proj(x) * self.act_fn(self.gate_proj(x))",
    ),
    Case(
        "eager attention",
        HF_LLAMA,
        ADAPTER,
        "dtype=torch.float32",
        'dtype=torch.float32, attn_implementation="eager"',
    ),
    Case(
        "rope from position 1 on",
        HF_LLAMA,
        "transformers.models.llama.modeling_llama",
        "position_ids = position_ids.unsqueeze(0)",
        "position_ids = position_ids.unsqueeze(0) + 1",
    ),
    Case(
        "cross-entropy by log_softmax",
        HF_LLAMA,
        "transformers.loss.loss_utils",
        (
            "nn.functional.cross_entropy(source, target, ignore_index=ignore_index, "
            "reduction=reduction)"
        ),
        (
            "nn.functional.nll_loss(source.log_softmax(-1), target, ignore_index=ignore_index, "
            "reduction=reduction)"
        ),
    ),
    Case(
        "fused AdamW",
        HF_LLAMA,
        ADAPTER,
        '"adamw_torch_fused" if optimizer["fused"] else "adamw_torch"',
        '"adamw_torch_fused"',
    ),
    Case(
        "gradient checkpointing",
        HF_LLAMA,
        ADAPTER,
        "disable_tqdm=True",
        "disable_tqdm=True, gradient_checkpointing=True",
    ),
    Case(
        "gradient checkpointing, reentrant",
        HF_LLAMA,
        ADAPTER,
        "disable_tqdm=True",
        (
            "disable_tqdm=True, gradient_checkpointing=True, "
            'gradient_checkpointing_kwargs={"use_reentrant": True}'
        ),
    ),
    Case(
        "Conv1D by matrix product and sum",
        HF_GPT,
        "transformers.pytorch_utils",
        "torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)",
        "x.view(-1, x.size(-1)) @ self.weight + self.bias",
    ),
    Case(
        "GELU by PyTorch's function",
        HF_GPT,
        "transformers.models.gpt2.modeling_gpt2",
        "ACT2FN[config.activation_function]",
        'ACT2FN["gelu_pytorch_tanh"]',
    ),
    Case(
        "residual sum in another order",
        HF_GPT,
        "transformers.models.gpt2.modeling_gpt2",
        "hidden_states = attn_output + residual",
        "hidden_states = residual + attn_output",
    ),
    Case(
        "head in two halves",
        HF_GPT,
        "transformers.models.gpt2.modeling_gpt2",
        "logits = self.lm_head(hidden_states)\n\n        loss",
        (
            "logits = torch.cat([nn.functional.linear(hidden_states, half) for half in "
            "self.lm_head.weight.chunk(2)], dim=-1)\n\n        loss"
        ),
    ),
]
#: planted differences that reach the loss by the update: those of the optimizer, of gradients, and
#: untied weights
OF_UPDATE = (
    "clipping|decay|Adam|optimizer|beta2|warm-up|learning rate|bias "
    "correction|[Gg]radient|backward|not tied"
)


class Sequences:
    vocabulary_size = VOCABULARY

    def __init__(self):
        self.step = 0

    def next(self) -> Batch:
        rows = np.random.default_rng(self.step).integers(1, VOCABULARY, (ROWS, LENGTH + 1))
        self.step += 1
        return Batch.from_arrays(rows[:, :-1], rows[:, 1:], self.step)


def run_of(setting: str) -> RunSettings:
    fields = dict(zip(("arm", "model", "schedule"), SETTINGS[setting], strict=True))
    fields |= {
        "sequence_length": LENGTH,
        "packing": "concatenate",
        "labels": "stream",
        "global_batch": ROWS,
    }
    fields |= {
        "micro_batch": MICRO_BATCH,
        "budget": BudgetSettings(steps=STEPS),
        "optimizer": OPTIMIZER,
    }
    return RunSettings(validation=ValidationSettings(rows=0), device="cpu", **fields)


def edit(path: Path, case: Case) -> str:
    """Return the text of a file with a case's edit, which must apply exactly once."""
    text = path.read_text(encoding="utf-8")
    assert text.count(case.old) == 1, (
        f"{case.model}: {case.name}: {case.old!r} is {text.count(case.old)} times in {path}"
    )
    return text.replace(case.old, case.new)


def plant(case: Case, arm: str, record: Path, folder: Path) -> tuple[str, Path | None]:
    """Write an edited copy of one file for the process of `folder`."""
    if case.where == ADAPTER:
        copy = folder / "adapter"
        copy.mkdir()
        (copy / ADAPTER).write_text(edit(ARMS / arm / ADAPTER, case), encoding="utf-8")
        # joined to the folder of arms, an absolute path stays as it is
        return str(copy.resolve()), None
    if case.where.endswith(".py"):
        source = folder / "source"
        shutil.copytree(
            source_of(record), source, ignore=shutil.ignore_patterns(".git", "data", "assets")
        )
        (source / case.where).write_text(
            edit(source_of(record) / case.where, case), encoding="utf-8"
        )
        contract = folder / "contract.json"
        contract.write_text(
            json.dumps(read_json(contract) | {"source": str(source.resolve())}), encoding="utf-8"
        )
        return arm, None
    (packages,) = python_of(record).parents[1].glob("lib/python3*/site-packages")
    original = packages.joinpath(*case.where.split(".")).with_suffix(".py")
    path = folder.resolve() / "edited.py"
    loaded = folder.resolve() / "loaded"
    path.write_text(edit(original, case), encoding="utf-8")
    text = SITECUSTOMIZE.format(module=case.where, path=str(path), loaded=str(loaded))
    (folder / "lib/sitecustomize.py").write_text(text, encoding="utf-8")
    return arm, loaded


class ArmReferences(References):
    """The same of unchanged arms; `records` are those of their environments."""

    def __init__(self, folder: Path, records: dict[str, Path]):
        super().__init__(folder)
        self.records = records

    def record(self, name: str, folder: Path, case: Case = UNCHANGED, floor: int = 0) -> None:
        """Run an arm, with the edit of a case, and record it in `folder`. Raises RuntimeError if it
        fails.
        """
        arm = SETTINGS[name][0]
        work = self.folder / "work"
        loaded = None
        adapter = arm
        record = self.records[arm]
        expected = write_contract(run_of(name), Sequences(), work, record=record, recording=folder)
        if case.old:
            adapter, loaded = plant(case, arm, record, work)
        variables = {"OMP_NUM_THREADS": "1"} | ({FLOOR_VARIABLE: str(floor)} if floor else {})
        reason = run_adapter(adapter, record, work, variables=variables)
        if reason is None and case.expected is None:
            _, reason = read_steps(work, expected)
        if reason is None and loaded and not loaded.exists():
            reason = f"{case.where} was not imported"
        if reason is not None:
            raise RuntimeError(f"{name}: {case.name}: {reason}")

    def certificate_of(self, case: Case) -> dict[str, Any]:
        """Return the certificate of a case against its reference, and the `golden` verdict from
        losses alone.
        """
        reference, recorded = self.recorded(case)
        old, new, *floors = map(curve_of, (reference, recorded, *reference.floors))
        return certify(compare(reference, recorded)) | {
            "golden": golden.judge(old, new, floors, fp32=True).kind
        }


def curve_of(recording: Recording) -> Curve:
    return Curve.of(
        *([step[name] for step in recording.steps] for name in ("loss", "gradient_norm"))
    )


def score_golden(case: Case, kind: str) -> str:
    """Return `right`, `cannot tell` or `wrong` for a kind that was found from losses alone."""
    if case.expected is None:
        right = {golden.IDENTICAL, golden.ROUNDING}
    else:
        right = {golden.NORM, golden.UPDATE if re.search(OF_UPDATE, case.name) else golden.MODEL}
    if kind in right:
        return "right"
    return "cannot tell" if kind == golden.UNKNOWN else "wrong"


def find_records() -> dict[str, Path]:
    """Return the records of the arms' environments in this checkout, whether they exist or not."""
    return {
        arm: Path("results/arms") / arm / "environment.json"
        for arm in ("nanoGPT", "litgpt", "transformers")
    }


TABLES = {"planted difference": FAULTS, "refactoring": REFACTORINGS}
#: third column of the tables
CAUSES = {
    "planted difference": "cause that the certificate names",
    "refactoring": "largest difference",
}


def main() -> None:
    """Print the tables of all cases, or of those whose name or reference is an argument."""
    records = find_records()
    only = sys.argv[1:]
    began = time.monotonic()
    if missing := [str(path) for path in records.values() if not path.is_file()]:
        sys.exit(f"environments of arms are missing; next: snakemake --cores 1 {' '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        references = ArmReferences(Path(folder), records)
        counts = Counter()
        for title, cases in TABLES.items():
            chosen = [case for case in cases if not only or case.name in only or case.model in only]
            columns = ["arm", "result", CAUSES[title], "from losses alone"]
            for case, result, _, kind in print_table(title, columns, run(chosen, references)):
                for found in (result, f"losses alone: {score_golden(case, kind)}"):
                    counts[title, SETTINGS[case.model][0], found] += 1
    print("\n| cases | arm | result | number |\n|---|---|---|---|")
    for (title, arm, result), count in counts.items():
        print(f"| {title} | {arm} | {result} | {count} |")
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
