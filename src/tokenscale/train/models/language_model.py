"""The interface that every model offers to the trainer."""

from torch import Tensor, nn

from tokenscale.settings.model import ModelSettings
from tokenscale.train.models.attention import Bounds


class LanguageModel(nn.Module):
    """Token ids [B, T] → logits [B, T, V]: the project's own decoder, or a model of the library `transformers`."""

    #: the shape, with nothing left open
    settings: ModelSettings
    sequence_length: int
    #: equal blocks, one after another
    blocks: nn.ModuleList
    #: the output head
    head: nn.Linear

    def hidden(self, tokens_bt: Tensor, bounds: Bounds | None = None) -> Tensor:
        """[B, T] → [B, T, d], the input of the output head."""
        raise NotImplementedError

    def forward(self, tokens_bt: Tensor, bounds: Bounds | None = None) -> Tensor:
        """[B, T] → [B, T, V]."""
        return self.head(self.hidden(tokens_bt, bounds))
