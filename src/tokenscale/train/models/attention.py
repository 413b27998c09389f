"""Attention by one of several kernels, inside documents where a row holds several.

| kernel | from | runs on | takes |
|---|---|---|---|
| `sdpa` | torch, which chooses its back end | everything | anything; bounds as a mask [B, 1, T, T] |
| `sdpa-flash` | torch, FlashAttention 2 | CUDA | 16 bits, no bounds |
| `sdpa-fa3` | torch >= 2.11 and the package flash_attn_interface | CUDA, from Hopper on | 16 bits, no bounds |
| `sdpa-cudnn` | torch, cuDNN | CUDA | 16 bits, no bounds |
| `flex` | torch (FlexAttention) | CUDA | bounds, no dropout |
| `varlen` | torch >= 2.10 (`torch.nn.attention.varlen`) | CUDA | bounds, 16 bits, no dropout |
| `flash` | the package flash-attn | CUDA | 16 bits |

All of them give the same values, to the rounding of their number format.
"""

import functools
import importlib.util
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention

from tokenscale.base.errors import UserError
from tokenscale.train.compilation import compile_function

#: kernels that are one of sdpa's back ends → its name
BACKENDS = {
    "sdpa-flash": "FLASH_ATTENTION",
    "sdpa-fa3": "FLASH_ATTENTION",
    "sdpa-cudnn": "CUDNN_ATTENTION",
}
#: kernels of 16 bits → the first compute capability of a GPU that has them
OF_16_BITS = {
    "sdpa-flash": (8, 0),
    "sdpa-fa3": (9, 0),
    "sdpa-cudnn": (8, 0),
    "varlen": (8, 0),
    "flash": (8, 0),
}
KERNELS = ("sdpa", *BACKENDS, "flex", "varlen", "flash")
#: kernels of packages → (package, how people call it)
PACKAGES = {"flash": ("flash_attn", "flash-attn"), "sdpa-fa3": ("flash_attn_interface",) * 2}
#: those that need the documents' bounds; without them there is nothing for them to do that sdpa
#: does not
OF_BOUNDS = ("flex", "varlen")


class Bounds:
    """Which document each token of a micro-batch belongs to; attention stays inside it.

    `document_ids` [B, T] integers: tokens of a row see each other where they are equal. Along a row
    they never return to an earlier value. Best given on the CPU: lengths of documents are then
    found without waiting for the `device`. Each kernel's own form of it is made once, at the latest
    when it is first asked for.
    """

    def __init__(self, document_ids: Tensor, device: torch.device | str | None = None):
        if (
            device is not None
            and torch.device(device).type == "cuda"
            and document_ids.device.type == "cpu"
        ):
            document_ids = document_ids.pin_memory()  # the copy then waits for nothing
        self._host = document_ids
        self.document_ids = (
            document_ids.to(device, non_blocking=True) if device is not None else document_ids
        )
        self._made: dict[object, Any] = {}

    def prepare(self, kernel: str, causal: bool) -> None:
        """Build what this kernel needs now, outside of compiled blocks."""
        if kernel == "sdpa":
            self.mask(causal)
        elif kernel == "flex":
            self.block_mask(causal)
        else:
            self.lengths()

    def positions(self) -> Tensor:
        """Return the position of each token in its document, from 0; int64 [B, T]."""
        if "positions" not in self._made:
            ids = self.document_ids
            places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
            begins = torch.cat(
                (torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != ids[:, :-1]), dim=1
            )
            self._made["positions"] = places - torch.where(begins, places, 0).cummax(dim=1).values
        return self._made["positions"]

    def mask(self, causal: bool) -> Tensor:
        """Return the mask, True where a query (third axis) sees a key (last axis): bool [B, 1, T,
        T].
        """
        if ("mask", causal) not in self._made:
            ids = self.document_ids
            same = ids[:, None, :, None] == ids[:, None, None, :]
            self._made["mask", causal] = same.tril() if causal else same
        return self._made["mask", causal]

    def block_mask(self, causal: bool) -> Any:
        """Return the mask as FlexAttention's BlockMask, which lists the blocks that are not
        empty.
        """
        if ("blocks", causal) not in self._made:
            ids = self.document_ids
            # uncompiled it holds a number for every pair of positions of a row
            build = (
                compile_function(build_block_mask, dynamic=False)
                if ids.is_cuda
                else build_block_mask
            )
            self._made["blocks", causal] = build(ids, causal)
        return self._made["blocks", causal]

    def lengths(self) -> tuple[Tensor, int]:
        """Return (cumulative document lengths of the rows laid end to end, int32 [documents + 1] on
        the device; tokens of the longest document).
        """
        if "lengths" not in self._made:
            ids = self._host
            begins = torch.ones_like(ids, dtype=torch.bool)
            begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
            cut = torch.cat(
                (
                    begins.flatten().nonzero().flatten(),
                    torch.tensor([ids.numel()], device=ids.device),
                )
            )
            longest = int(cut.diff().max())
            self._made["lengths"] = (
                cut.to(torch.int32).to(self.document_ids.device, non_blocking=True),
                longest,
            )
        return self._made["lengths"]


def build_block_mask(document_ids: Tensor, causal: bool) -> Any:
    """Return FlexAttention's BlockMask of document ids [B, T]."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = document_ids[row, query] == document_ids[row, key]
        return same & (query >= key) if causal else same

    rows, length = document_ids.shape
    return create_block_mask(sees, rows, None, length, length, device=document_ids.device)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bounds: Bounds | None = None,
    causal: bool = True,
    kernel: str = "sdpa",
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention (Vaswani et al. 2017, equation 1): query [B, H, T, D], key and value [B,
    Hkv, S, D] with Hkv a divisor of H (grouped queries) → [B, H, T, D].

    `causal`: a query sees no later key. `bounds`: none outside its document; T is then S. `kernel`
    is one that `choose_kernel` gave for the same use.
    """
    if kernel in BACKENDS:
        with attention.sdpa_kernel(attention.SDPBackend.__members__[BACKENDS[kernel]]):
            return attend(query, key, value=value, causal=causal, dropout=dropout)
    grouped = query.shape[1] != key.shape[1]
    if kernel == "sdpa":
        if bounds is None:
            return F.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=causal, enable_gqa=grouped
            )
        mask = bounds.mask(causal)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, enable_gqa=grouped
        )
    if kernel == "flex":
        assert bounds is not None  # as `choose_kernel` has it
        return _flex(
            query,
            key,
            value=value,
            block_mask=bounds.block_mask(causal),
            enable_gqa=grouped,
        )
    if kernel == "flash" and bounds is None:
        from flash_attn import flash_attn_func

        thd = (x.transpose(1, 2) for x in (query, key, value))
        return flash_attn_func(*thd, dropout_p=dropout, causal=causal).transpose(1, 2)

    assert bounds is not None  # as `choose_kernel` has it
    cut, longest = bounds.lengths()
    rows, _, length, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [B * T, heads, D]
    if kernel == "flash":
        from flash_attn import flash_attn_varlen_func

        y = flash_attn_varlen_func(
            q, k, v, cut, cut, longest, longest, dropout_p=dropout, causal=causal
        )
    elif kernel == "varlen":
        y = _varlen(
            q,
            key=k,
            value=v,
            cut=cut,
            longest=longest,
            causal=causal,
        )
    else:
        raise ValueError(f"kernel {kernel!r} is none of {KERNELS}")
    return y.view(rows, length, *y.shape[1:]).transpose(1, 2)


def choose_kernel(
    requested: str, *, device: torch.device, bounds: bool, dtype: torch.dtype, dropout: float
) -> str:
    """Return the kernel of a run: the requested one, or for `auto` the fastest that is possible.

    `bounds`: attention stays inside documents; `dtype`: of queries, keys and values. Raises
    UserError where the one asked for cannot run here.
    """
    if requested != "auto":
        reason = _lacks(
            requested,
            device,
            bounds=bounds,
            dtype=dtype,
            dropout=dropout,
        )
        if reason is not None:
            form = str(dtype).removeprefix("torch.")
            raise UserError(
                f"attention by {requested} cannot run here.",
                reason=reason,
                found=f"{device.type}, {form}, dropout {dropout:g}, torch {torch.__version__}",
                next="leave `attention` out: it is then the fastest kernel that can",
            )
        if requested == "sdpa-fa3":
            attention.activate_flash_attention_impl("FA3")
        return requested
    # without bounds torch's own choice behind sdpa (FlashAttention, cuDNN) needs no mask and is as
    # fast
    order = ("flash", "varlen", "flex", "sdpa") if bounds else ("sdpa",)
    return next(
        kernel
        for kernel in order
        if _lacks(
            kernel,
            device,
            bounds=bounds,
            dtype=dtype,
            dropout=dropout,
        )
        is None
    )


def _lacks(
    kernel: str, device: torch.device, bounds: bool, dtype: torch.dtype, dropout: float
) -> str | None:
    """Return why a kernel cannot be used; None where it can."""
    if kernel == "sdpa":
        return None
    if device.type != "cuda":
        return f"{kernel} has no kernel for this device, or none for its backward pass"
    if kernel in BACKENDS and bounds:
        return f"{kernel} takes no bounds of documents (document_mask)"
    if kernel in OF_BOUNDS and not bounds:
        return (
            f"{kernel} is for attention inside documents (document_mask); over whole rows there "
            "is sdpa"
        )
    if kernel in OF_BOUNDS and dropout:
        return f"{kernel} does not support dropout"
    if kernel in OF_16_BITS and dtype not in (torch.float16, torch.bfloat16):
        return f"{kernel} computes in 16 bits only"
    if kernel in OF_16_BITS and torch.cuda.get_device_capability(device) < OF_16_BITS[kernel]:
        first = ".".join(map(str, OF_16_BITS[kernel]))
        return f"{kernel} needs a GPU of compute capability {first} or later"
    if kernel == "varlen" and importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return "torch has it from version 2.10 on"
    if kernel == "sdpa-fa3" and not hasattr(attention, "activate_flash_attention_impl"):
        return "this release of torch has no other FlashAttention than its own"
    if kernel in PACKAGES and importlib.util.find_spec(PACKAGES[kernel][0]) is None:
        return f"the package {PACKAGES[kernel][1]} is not installed"
    return None


def _flex(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: object, enable_gqa: bool
) -> Tensor:
    """FlexAttention, part of the block's graph, or compiled alone: uncompiled it makes all scores
    in full.
    """
    from torch.nn.attention.flex_attention import flex_attention

    compute: Any = flex_attention
    if not torch.compiler.is_compiling():
        compute = compile_function(flex_attention, dynamic=False)
    y: Any = compute(query, key, value, block_mask=block_mask, enable_gqa=enable_gqa)
    return y


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, cut: Tensor, longest: int, causal: bool
) -> Tensor:
    """torch's own FlashAttention over documents laid end to end, [tokens, heads, D], by each
    version's signature.
    """
    from torch.nn.attention.varlen import varlen_attn

    known = _parameters()
    if "enable_gqa" in known:
        more: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]}
    else:  # before 2.12 each query head needs a key head
        groups = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
        more = {}
    # 2.10
    if "window_size" in known:
        more["window_size"] = (-1, 0 if causal else -1)
    else:
        more["is_causal"] = causal
    y: Any = varlen_attn(query, key, value, cut, cut, longest, longest, **more)
    return y


@functools.cache
def _parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)
