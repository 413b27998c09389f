"""torchtitan: its Trainer with its Llama 3 model, on the contract's batches and weights.

Batches come in through torchtitan's data loader, weights through its checkpoint manager, which
reads Hugging Face files. On a CPU, a stub takes the place of the device module that torchtitan
expects of an accelerator.
"""

import os
import sys
import types
import unittest.mock

import numpy as np
import torch
from contract import Contract
from torchtitan.tools import utils

contract = Contract()
shape = contract.shape
optimizer = contract.optimizer
schedule = contract.schedule
width = shape["dimension"]
heads = shape["heads"]
peak = optimizer["learning_rate"]

# --- device: torchtitan expects an accelerator
if contract.device == "cpu":
    memory = types.SimpleNamespace(
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    utils.device_type = "cpu"
    utils.device_module = types.SimpleNamespace(
        **dict.fromkeys(
            ("set_device", "empty_cache", "reset_peak_memory_stats", "synchronize"),
            lambda *values: None,
        ),
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_name=lambda device: "cpu",
        get_device_properties=lambda device: memory,
        memory_stats=lambda device: {"active_bytes.all.peak": 0, "reserved_bytes.all.peak": 0},
    )  # and Triton, in which kernels for mixtures of experts are written
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = unittest.mock.MagicMock()
if not hasattr(torch.distributed, "set_timeout"):  # in torch 2.13 it is private
    torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout

from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, ScaledDotProductAttention  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import CheckpointManager, CompileConfig, Trainer, TrainingConfig  # noqa: E402

# --- what torchtitan cannot do; learning rates are those of its own scheduler
constant = schedule["shape"] == "constant"
steps = contract.facts["run"]["budget"]["steps"]
scheduler = LRSchedulersContainer.Config(
    warmup_steps=schedule["warmup_steps"],
    # it reaches the floor one step after the last
    total_steps=steps if constant else max(steps - 1, 1),
    decay_ratio=0.0 if constant else None,
    decay_type="linear" if constant else schedule["shape"],
    min_lr_factor=schedule["floor"],
)
built = scheduler.build(
    optimizers=[torch.optim.SGD([torch.zeros(1)], lr=peak)], training_steps=steps
)
recording = contract.facts["recording"] is not None
rates = [peak * built.schedulers[0].lr_lambdas[0](step) for step in range(contract.steps)]
llama = {
    "norm": "rms",
    "activation": "swiglu",
    "positions": "rotary",
    "biases": False,
    "attention_biases": None,
}
llama |= {
    "query_key_norm": False,
    "rope_scaling": "none",
    "dropout": 0.0,
    "transformers": None,
    "head_dim": None,
}
contract.require(
    {
        "models other than Llama's": any(shape[name] != value for name, value in llama.items()),
        "micro-batches of unequal size": contract.rows % contract.micro_batch != 0,
        "several ranks": contract.world_size > 1,
        "this schedule, for which its rates differ": not np.allclose(
            rates, contract.learning_rates, 1e-9, 0
        ),
        "recordings in bf16": recording and contract.precision == "bf16",
    }
)

# --- model: torchtitan's Llama 3 in the contract's shape
specification = llama3.model_registry("debugmodel")
model = specification.model
specification.flavor = shape["name"]
model.dim = width
model.vocab_size = contract.vocabulary_size
model.enable_weight_tying = shape["tied_embeddings"]
model.tok_embeddings.num_embeddings = model.lm_head.out_features = contract.vocabulary_size
model.tok_embeddings.embedding_dim = model.norm.normalized_shape = model.lm_head.in_features = width
rope = ComplexRoPE.Config(
    dim=width // heads, max_seq_len=contract.sequence_length, theta=shape["rope_theta"]
)
model.layers = llama3._build_llama3_layers(
    n_layers=shape["layers"],
    dim=width,
    n_heads=heads,
    n_kv_heads=shape["key_value_heads"],
    hidden_dim=shape["hidden"],
    rope=rope,
    attn_backend="flex",
)
model.norm.eps = shape["norm_epsilon"]
for layer in model.layers:
    layer.attention_norm.eps = layer.ffn_norm.eps = shape["norm_epsilon"]
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
if recording:  # the recorder reads whole parameters, which FSDP hides
    specification.parallelize_fn = lambda model, **options: model


# --- data and log
def load(*, dp_rank, dp_world_size, local_batch_size, **others):
    """Return torchtitan's data loader over the contract's sequences, in the order of the steps."""
    rows = torch.from_numpy(
        contract.tokens.reshape(-1, contract.sequence_length + 1).astype("int64")
    )
    pairs = [({"input": row[:-1]}, row[1:]) for row in rows]
    return ParallelAwareDataloader(pairs, dp_rank, dp_world_size, batch_size=local_batch_size)


class WatchedTrainer(Trainer):
    """torchtitan's Trainer, with the contract's hooks."""

    def batch_generator(self, data_iterable):
        """Watch model and optimizer, once the weights are loaded."""
        contract.watch(self.model_parts[0], self.optimizers.optimizers[0])
        return super().batch_generator(data_iterable)

    def forward_backward_step(self, **values):
        """Take the loss of a micro-batch, which is divided by the labels of the step."""
        loss = super().forward_backward_step(**values)
        contract.loss(loss)
        return loss


# --- torchtitan's own loop
os.environ |= {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
values = {"betas": (optimizer["beta1"], optimizer["beta2"]), "eps": optimizer["epsilon"]}
adamw, norms = (
    default_adamw(peak, **values, weight_decay=decay) for decay in (optimizer["weight_decay"], 0.0)
)
norms.param_groups[0].pattern = r"norm\.weight$"
adamw.param_groups = norms.param_groups + adamw.param_groups  # the first match counts
adamw.implementation = "fused" if optimizer["fused"] else "foreach"
init_logger()
trainer = WatchedTrainer(
    Trainer.Config(
        model_spec=specification,
        hf_assets_path=str(contract.weights_folder),
        dump_folder=str(contract.folder),
        tokenizer=types.SimpleNamespace(build=lambda tokenizer_path: None),
        dataloader=types.SimpleNamespace(build=load),
        loss=CrossEntropyLoss.Config(),
        optimizer=adamw,
        lr_scheduler=scheduler,
        training=TrainingConfig(
            local_batch_size=contract.micro_batch,
            global_batch_size=contract.rows,
            seq_len=contract.sequence_length,
            steps=contract.steps,
            max_norm=np.inf if optimizer["clip_norm"] is None else optimizer["clip_norm"],
            mixed_precision_param="float32" if contract.precision == "fp32" else "bfloat16",
            disable_cuda_graphs=True,  # hooks do not run in them
        ),
        checkpoint=CheckpointManager.Config(
            enable=True, load_only=True, initial_load_in_hf=True, keep_latest_k=0
        ),
        activation_checkpoint=None,
        compile=CompileConfig(enable=contract.compile),
    )
)
trainer.train()
trainer.close()
contract.close()
