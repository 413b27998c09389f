"""One rank's view of a model that a layout has split, for generating text."""

import torch
import torch.distributed as dist
from torch import Tensor

from tokenscale.train.models.language_model import KVCache, LanguageModel
from tokenscale.train.parallel.parallelize import ParallelModel


class TextModel(LanguageModel):
    """A model whose weights stay where the layout has put them, so that one which fits no device generates text, too.

    Ranks of a pipeline or a tensor group read the same rows, and each gets the logits of the whole model, so that all
    choose the same tokens. Ranks that read different rows generate different texts. Every forward pass is a collective
    of the ranks of a replica: all of them must run equally many (`any_unfinished`).
    """

    def __init__(self, parallel: ParallelModel, device: torch.device):
        super().__init__()
        self.model = parallel.objective.model
        self.settings = self.model.settings
        self._parallel, self._device = parallel, device

    def new_cache(self, rows: int, length: int, device: torch.device) -> KVCache | None:
        return self.model.new_cache(rows, length, device)

    def next_logits(self, tokens_bt: Tensor, cache: KVCache | None = None) -> Tensor:
        """[B, T] → [B, V], the logits of the token behind each row, the same on every rank of a replica's group."""
        parallel = self._parallel
        with parallel.whole_positions():
            if parallel.pipeline is not None:
                return parallel.pipeline.next_logits(tokens_bt, cache)
            return parallel.objective.next_logits(tokens_bt, cache)

    def any_unfinished(self, unfinished: bool) -> bool:
        """Return whether any rank that shares this rank's forward passes is unfinished. A collective of these ranks."""
        group = self._parallel.lockstep
        if group is None:
            return unfinished
        flag = torch.tensor(int(unfinished), device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        return bool(flag.item())
