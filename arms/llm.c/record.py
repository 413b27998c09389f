"""Parity recording of llm.c: its functions, called from a torch model whose parameters are the
memory of the C program.

The file that the timed run compiles is compiled as a library, without its main. The calls of a step
are those of its loop. Each layer's tensors are parameters of a module, which has what the C program
computed as its output.
"""

import ctypes

import numpy as np
import torch

WEIGHTS = [
    "wte",
    "wpe",
    "ln1w",
    "ln1b",
    "qkvw",
    "qkvb",
    "attprojw",
    "attprojb",
    "ln2w",
    "ln2b",
    "fcw",
    "fcb",
    "fcprojw",
    "fcprojb",
    "lnfw",
    "lnfb",
]
ACTIVATIONS = [
    "encoded",
    "ln1",
    "ln1_mean",
    "ln1_rstd",
    "qkv",
    "atty",
    "preatt",
    "att",
    "attproj",
    "residual2",
    "ln2",
    "ln2_mean",
    "ln2_rstd",
    "fch",
    "fch_gelu",
    "fcproj",
    "residual3",
    "lnf",
    "lnf_mean",
    "lnf_rstd",
    "logits",
    "probs",
    "losses",
]
POINTER = ctypes.POINTER(ctypes.c_float)
SIZE = ctypes.c_size_t
#: modules of a layer, and the activations that are their inputs and outputs; residual3 is that of
#: the layer before
LAYER = {
    "ln1": ("residual3", "ln1"),
    "qkv": ("ln1", "qkv"),
    "attproj": ("atty", "attproj"),
    "ln2": ("residual2", "ln2"),
    "fc": ("ln2", "fch"),
    "fcproj": ("fch_gelu", "fcproj"),
}


class GPT2(ctypes.Structure):
    """The struct of this name in train_gpt2.c."""

    _fields_ = [
        ("config", ctypes.c_int * 6),
        ("params", POINTER * len(WEIGHTS)),
        ("param_sizes", SIZE * len(WEIGHTS)),
        ("params_memory", POINTER),
        ("num_parameters", SIZE),
        ("grads", POINTER * len(WEIGHTS)),
        ("grads_memory", POINTER),
        ("m_memory", POINTER),
        ("v_memory", POINTER),
        ("acts", POINTER * len(ACTIVATIONS)),
        ("act_sizes", SIZE * len(ACTIVATIONS)),
        ("acts_memory", POINTER),
        ("num_activations", SIZE),
        ("grads_acts", POINTER * len(ACTIVATIONS)),
        ("grads_acts_memory", POINTER),
        ("batch_size", ctypes.c_int),
        ("seq_len", ctypes.c_int),
        ("inputs", ctypes.c_void_p),
        ("targets", ctypes.c_void_p),
        ("mean_loss", ctypes.c_float),
    ]


class Layer(torch.nn.Module):
    """Weight and bias of one layer in the memory of the C program. Its output is `computed`,
    whatever the input is.
    """

    def __init__(self, weight, bias=None):
        super().__init__()
        self.weight = (
            weight if isinstance(weight, torch.nn.Parameter) else torch.nn.Parameter(weight)
        )
        self.bias = None if bias is None else torch.nn.Parameter(bias)
        self.computed = None

    def forward(self, inputs):
        """Return what the C program computed."""
        return self.computed


class Loss(torch.autograd.Function):
    """Forward and backward pass of the C program."""

    @staticmethod
    def forward(context, model, tokens, labels, *parameters):
        """Return the mean loss."""
        context.model = model
        arrays = [
            np.ascontiguousarray(values.numpy(), np.int32).ctypes.data_as(ctypes.c_void_p)
            for values in (tokens, labels)
        ]
        model.library.gpt2_forward(ctypes.byref(model.state), *arrays, *map(SIZE, tokens.shape))
        return torch.tensor(model.state.mean_loss)

    @staticmethod
    def backward(context, _):
        """Return the gradients of the parameters."""
        model = context.model
        model.library.gpt2_zero_grad(ctypes.byref(model.state))
        model.library.gpt2_backward(ctypes.byref(model.state))
        return (
            None,
            None,
            None,
            *(view.clone() for view in model.view_weights(model.state.grads).values()),
        )


class Model(torch.nn.Module):
    """The C model. Parameters are views of its memory, without the rows that pad the vocabulary."""

    def __init__(self, library, checkpoint):
        super().__init__()
        self.library = library
        self.state = GPT2()
        library.gpt2_build_from_checkpoint(ctypes.byref(self.state), str(checkpoint).encode())
        self.positions, self.vocabulary, self.padded, self.layers, self.heads, self.width = (
            self.state.config
        )
        views = self.view_weights(self.state.params)
        self.wte = Layer(views["wte"])
        self.wpe = Layer(views["wpe"])
        self.h = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {kind: Layer(views[f"{kind}w.{n}"], views[f"{kind}b.{n}"]) for kind in LAYER}
            )
            for n in range(self.layers)
        )
        self.lnf = Layer(views["lnfw"], views["lnfb"])
        self.head = Layer(self.wte.weight)

    def view_weights(self, pointers):
        """Return a view of each layer's weights or gradients, in the order of the parameters."""
        C = self.width
        L = self.layers
        shapes = {"wte": (self.padded, C), "wpe": (self.positions, C), "lnfw": (C,), "lnfb": (C,)}
        outputs = {"qkv": (3 * C, C), "attproj": (C, C), "fc": (4 * C, C), "fcproj": (C, 4 * C)}
        for kind in LAYER:
            shapes[f"{kind}w"] = (L, *outputs.get(kind, (C,)))
            shapes[f"{kind}b"] = shapes[f"{kind}w"][:2]
        views = {name: view(pointers[WEIGHTS.index(name)], shape) for name, shape in shapes.items()}
        found = {"wte": views["wte"][: self.vocabulary], "wpe": views["wpe"]}
        for layer in range(L):
            for kind in LAYER:
                found |= {
                    f"{kind}{letter}.{layer}": views[f"{kind}{letter}"][layer] for letter in "wb"
                }
        return found | {"lnfw": views["lnfw"], "lnfb": views["lnfb"]}

    def forward(self, tokens, labels):
        """Return the mean loss. Call each module with its input, so that the recorder traces it."""
        loss = Loss.apply(self, tokens, labels, *self.parameters())
        B, T, C = *tokens.shape, self.width
        sizes = {"qkv": 3 * C, "fch": 4 * C, "fch_gelu": 4 * C, "logits": self.padded}

        def act(name, layers=()):
            return view(
                self.state.acts[ACTIVATIONS.index(name)], (*layers, B, T, sizes.get(name, C))
            )

        self.wte(tokens)  # their sum alone is kept by the C program
        self.wpe(torch.arange(T))
        for layer, modules in enumerate(self.h):
            for kind, (source, target) in LAYER.items():
                before = act(source, (self.layers,))[layer - (source == "residual3")]
                modules[kind].computed = act(target, (self.layers,))[layer]
                modules[kind](act("encoded") if source == "residual3" and layer == 0 else before)
        self.lnf.computed, self.head.computed = act("lnf"), act("logits")[..., : self.vocabulary]
        self.lnf(act("residual3", (self.layers,))[-1])
        self.head(self.lnf.computed)
        return loss


class Update(torch.optim.AdamW):
    """The update of the C program. It has AdamW's settings for the recording."""

    def __init__(self, model, **settings):
        super().__init__(model.parameters(), **settings)
        self.model = model
        self.number = 0

    def step(self, closure=None):
        """Update the weights in the C program."""
        self.number += 1
        group = self.param_groups[0]
        numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        self.model.library.gpt2_update(
            ctypes.byref(self.model.state), *map(ctypes.c_float, numbers), self.number
        )


def view(pointer, shape):
    """Return a tensor on the memory of the C program."""
    return torch.from_numpy(np.ctypeslib.as_array(pointer, shape))


def record(contract, library):
    """Train in the C library, with the contract's hooks."""
    settings = contract.optimizer
    model = Model(ctypes.CDLL(str(library)), contract.folder / "weights.bin")
    optimizer = Update(
        model,
        lr=contract.learning_rates[0],
        betas=(settings["beta1"], settings["beta2"]),
        eps=settings["epsilon"],
        weight_decay=settings["weight_decay"],
    )
    contract.watch(model, optimizer)
    for step in range(contract.steps):
        tokens = torch.from_numpy(contract.tokens[step].astype(np.int64))
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        contract.loss(loss)
        optimizer.step()
        optimizer.zero_grad()
