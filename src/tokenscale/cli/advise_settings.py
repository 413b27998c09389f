"""What `advise` is asked."""

from dataclasses import dataclass

from tokenscale.settings import flags
from tokenscale.settings.options import option


@dataclass(frozen=True)
class AdviceSettings:
    """What a person says about the training."""

    tokenizer: str = option(
        "tekken",
        "a folder, a name below results/tokenizers, tekken, or NAME@COMMIT of the Hugging Face hub",
        metavar="NAME",
    )
    sequence_length: int = option(2048, "positions a row", ge=8)
    tokens_per_second: float | None = option(
        None, "what one rank trains on in a second, padding counted, when it never waits for data", gt=0
    )
    epochs: float = option(1.0, "passes over the data", gt=0)
    documents: int = option(5000, "how many to look at", ge=2, le=100_000)
    text_column: str = option("text", "Parquet and JSON lines: column or key of the text", metavar="NAME")
    separator: str | None = option(
        None, r"what stands between the documents of a text file, such as '<|endoftext|>' or '\n' (default: it is one)"
    )
    json: str | None = option(None, "write the same facts to this file", metavar="FILE")


FLAGS = flags.leaves(AdviceSettings)
