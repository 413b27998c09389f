"""AdamW with decay on matrices only and clipping by the global norm, and the number formats of a
training.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw as adamw_function

from tokenscale.base.errors import UserError
from tokenscale.settings.run import OptimizerSettings
from tokenscale.train.models.objective import LanguageModel

#: values whose squares a CPU adds up one after the other; the sums of these then are few
ADDED_AT_ONCE = 2**14


def adamw(weights: Iterable[Tensor], settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019), fused; matrices decay, vectors (norms and biases) do not.

    `weights` are parameters or this rank's rows of them.
    """
    weights = list(weights)
    groups = [
        {"params": [p for p in weights if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in weights if p.dim() < 2], "weight_decay": 0.0},
    ]
    kind = Fp32MomentsAdamW if settings.moments == "fp32" else torch.optim.AdamW
    return kind(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=settings.fused,
        foreach=None if settings.fused else True,
    )


class Fp32MomentsAdamW(torch.optim.AdamW):
    """AdamW with moments and arithmetic in fp32 over weights in 16 bits, which are rounded once an
    update.

    In bf16 a second moment does not decay where 1 - beta2 is below 2**-9. One weight's copy in fp32
    exists at a time.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        scaling = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        for group in self.param_groups:
            options = {
                name: group[name]
                for name in ("lr", "weight_decay", "eps", "maximize", "fused", "foreach")
            }
            options |= (
                dict(zip(("beta1", "beta2"), group["betas"], strict=True))
                | {"amsgrad": False}
                | scaling
            )
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = torch.zeros(
                        (), device=weight.device if group["fused"] else "cpu"
                    )
                    state |= {
                        name: torch.zeros_like(weight, dtype=torch.float32)
                        for name in ("exp_avg", "exp_avg_sq")
                    }
                exact = weight.float()
                first = [state["exp_avg"]]
                second = [state["exp_avg_sq"]]
                adamw_function(
                    [exact], [weight.grad.float()], first, second, [], [state["step"]], **options
                )
                weight.copy_(exact)


def update(
    optimizer: torch.optim.AdamW, norm: Tensor, limit: float | None, loss_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One optimizer step with the gradients scaled to a global L2 norm of at most `limit`, and by 1
    / `loss_scale`.

    `norm` is theirs, divided by the loss scale already.

    The fused kernel divides each gradient by one number as it reads it, so that clipping costs no
    pass of its own. The coefficient is that of torch.nn.utils.clip_grad_norm_: limit / (norm +
    1e-6), where that is below one. A gradient that is not finite changes no weight and no moment.
    Returns (norm before, norm after, 1 where it was not finite), as scalars on the device: nothing
    here waits for it. A study's clipping used up a generator of parameters in computing the norm,
    and scaled nothing.
    """
    divisor = torch.ones_like(norm) if limit is None else ((norm + 1e-6) / limit).clamp(min=1.0)
    bad = (~torch.isfinite(norm)).float()
    if not optimizer.defaults["fused"]:
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        torch._foreach_div_(gradients, divisor * loss_scale)
        if not bad:  # waits for the device: what the fused kernel spares
            optimizer.step()
        return norm, norm / divisor, bad
    # attributes that torch.optim.AdamW reads for the fused kernel, as torch.amp.GradScaler sets
    # them
    optimizer.grad_scale = divisor * loss_scale  # type: ignore[attr-defined]
    optimizer.found_inf = bad  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    return norm, norm / divisor, bad


def total_norm(
    gradients: list[Tensor],
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Global L2 norm in fp32, also of gradients in 16 bits: a norm rounded to bf16 is known to two
    digits only. On a CPU, torch adds the squares of a tensor one after the other: of 10 million
    values 4e-4 are lost, so that layouts with smaller shards would clip by other norms.

    With a group: of the gradients of all its ranks together, the same number on each. A collective
    then; a rank may have none (`device` is where its zero lies).
    """
    if not gradients:
        norm = torch.zeros((), device=device)
    else:
        pieces = [piece for gradient in gradients for piece in _split_on_cpu(gradient)]
        norms = torch._foreach_norm(pieces, 2, dtype=torch.float32)
        norm = torch.linalg.vector_norm(torch.stack(norms))
    if group is None:
        return norm
    squared = norm.double().square()  # fp32 would overflow where the norm itself does not
    dist.all_reduce(squared, group=group)
    return squared.sqrt().float()


def _split_on_cpu(gradient: Tensor) -> tuple[Tensor, ...]:
    if gradient.device.type != "cpu":
        return (gradient,)
    return gradient.reshape(-1).split(ADDED_AT_ONCE)


#: precision → the type that autocast computes products in
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_of(precision: str, device: torch.device) -> Callable[[], AbstractContextManager]:
    """Return a function that makes an autocast context: 16 bits over fp32 weights, or none."""
    if precision not in AUTOCAST:
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=AUTOCAST[precision])


def cast_weights(model: LanguageModel, precision: str) -> None:
    """`bf16-true`: every parameter in bf16. Buffers (rotary tables) stay as they are: they are no
    weights.
    """
    if precision == "bf16-true":
        for weight in model.parameters():
            weight.data = weight.data.to(torch.bfloat16)


class LossScale:
    """Scaling of fp16 losses (Micikevicius et al. 2018), by torch.amp.GradScaler's rule: halved by
    a gradient that is not finite, whose step is left out; doubled after `interval` good ones.

    Lives on the device, so that no step waits for it. Of other precisions the scale is one, for
    ever.
    """

    def __init__(
        self,
        precision: str,
        device: torch.device,
        *,
        initial: float = 2.0**16,
        interval: int = 2000,
    ):
        self.active = precision == "fp16"
        self.scale = torch.tensor(initial if self.active else 1.0, device=device)
        self._good = torch.zeros((), device=device)
        self._interval = interval

    def update(self, found_inf: Tensor) -> None:
        """Update the scale after a step; `found_inf` is 1 where the gradient was not finite, else
        0.
        """
        if not self.active:
            return
        good = (self._good + 1) * (1 - found_inf)
        grown = good >= self._interval
        self.scale = torch.where(
            found_inf > 0, self.scale * 0.5, torch.where(grown, self.scale * 2, self.scale)
        )
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
    """Make the products of the blocks' linear layers float8 (torchao, dynamic scaling). Raises
    UserError where it is not supported.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        found = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        raise UserError(
            "float8 needs a GPU of compute capability 8.9 or later.",
            found=found,
            next="leave float8 out, or use bf16",
        )
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError as error:
        raise UserError(
            "float8 needs the package torchao.",
            reason=error,
            next='pip install "tokenscale[float8]"',
        ) from None
    for block in model.blocks:
        convert_to_float8_training(
            block,
            module_filter_fn=lambda layer, name: (
                layer.in_features % 16 == layer.out_features % 16 == 0
            ),
        )
