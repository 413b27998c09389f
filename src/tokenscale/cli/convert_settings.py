"""What `convert` can be told."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tokenscale.settings import flags
from tokenscale.settings.options import option

Say = Callable[[str], None]
IDS = ("vocabulary_size", "bos_id", "eos_id", "pad_id")
HELP = "python -m tokenscale convert --help"


@dataclass(frozen=True)
class ConvertSettings:
    """What to convert into what, and what files cannot say."""

    to: str = option(
        "",
        "megatron, nanogpt, hf-datasets; or a store by its name: packed, token-list-dtype=int64, "
        "packed-sequence_length=2048",
        metavar="FORMAT",
    )
    from_format: Literal["store", "megatron", "nanogpt", "hf-datasets"] | None = option(
        None, "where the source does not show it"
    )
    sequence_length: int | None = option(None, "of the store to write", ge=1)
    eos: bool | None = option(None, "stores to write: end each document with EOS (default: a store as it is; else no)")
    tokenizer: str | None = option(
        None, "that made the source's ids: its folder, or its name below results/tokenizers", metavar="FOLDER"
    )
    tokenizer_name: str | None = option(None, "where the tokenizer is not here: its name, for the manifest")
    vocabulary_size: int | None = option(None, "where the tokenizer is not here: its ids", ge=1)
    bos_id: int | None = option(None, "the same: the id before each document", ge=0)
    eos_id: int | None = option(None, "the same: the id that ends one, where there is one", ge=0)
    pad_id: int | None = option(None, "the same: of padding (default EOS, else BOS; never compared with)", ge=0)
    document_end: int | None = option(
        None, "the id that ends documents in the foreign file (default EOS): taken off, or added", ge=0, metavar="ID"
    )
    bos: Literal["keep", "drop"] | None = option(
        None, "foreign formats to write: the BOS of each document (default: keep; of nanogpt: drop)"
    )
    dtype: Literal["uint16", "uint32"] | None = option(
        None, "of a nanogpt source (default: by vocabulary, uint16 up to 65,536)"
    )
    column: str | None = option(None, "of a hf-datasets source (default input_ids, else tokens)", metavar="NAME")
    force: bool = option(False, "replace what lies at TARGET, if it is of the same kind")


FLAGS = flags.leaves(ConvertSettings, words={"from_format": ("--from",)})
