"""Number formats of training: autocast, bf16 weights, loss scaling for fp16, float8 products."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from tokenscale.base.errors import UserError
from tokenscale.train.models.objective import LanguageModel

#: precision → the type that autocast computes products in
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_of(precision: str, device: torch.device) -> Callable[[], AbstractContextManager]:
    """Return a function that makes an autocast context: 16 bits over fp32 weights, or none."""
    if precision not in AUTOCAST:
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=AUTOCAST[precision])


def cast_weights(model: LanguageModel, precision: str) -> None:
    """`bf16-true`: every parameter in bf16. Buffers (rotary tables) stay as they are: they are no weights."""
    if precision == "bf16-true":
        for weight in model.parameters():
            weight.data = weight.data.to(torch.bfloat16)


class LossScale:
    """Scaling of fp16 losses (Micikevicius et al. 2018), by torch.amp.GradScaler's rule: halved by a gradient that is
    not finite, whose step is left out; doubled after `interval` good ones.

    Lives on the device, so that no step waits for it. Of other precisions the scale is one, for ever.
    """

    def __init__(self, precision: str, device: torch.device, *, initial: float = 2.0**16, interval: int = 2000):
        self.active = precision == "fp16"
        self.scale = torch.tensor(initial if self.active else 1.0, device=device)
        self._good = torch.zeros((), device=device)
        self._interval = interval

    def update(self, found_inf: Tensor) -> None:
        """Update the scale after a step; `found_inf` is 1 where the gradient was not finite, else 0."""
        if not self.active:
            return
        good = (self._good + 1) * (1 - found_inf)
        grown = good >= self._interval
        self.scale = torch.where(found_inf > 0, self.scale * 0.5, torch.where(grown, self.scale * 2, self.scale))
        self._good = torch.where(grown, torch.zeros_like(good), good)

    def state(self) -> dict[str, float]:
        """Return the state as plain numbers."""
        return {"scale": self.scale.item(), "good": self._good.item()} if self.active else {}

    def load(self, state: dict[str, float]) -> None:
        """Restore what `state` returned."""
        if state:
            self.scale.fill_(state["scale"])
            self._good.fill_(state["good"])


def float8(model: LanguageModel, device: torch.device) -> None:
    """Make the products of the blocks' linear layers float8 (torchao, dynamic scaling). Raises UserError where it is
    not supported.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        found = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        raise UserError(
            "float8 needs a GPU of compute capability 8.9 or later.", found=found, next="leave float8 out, or use bf16"
        )
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError as error:
        raise UserError(
            "float8 needs the package torchao.", reason=error, next='pip install "tokenscale[float8]"'
        ) from None
    for block in model.blocks:
        convert_to_float8_training(
            block, module_filter_fn=lambda layer, name: layer.in_features % 16 == layer.out_features % 16 == 0
        )
