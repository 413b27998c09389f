"""Generate text that continues a prompt, with a causal checkpoint."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_file
from tokenscale.data.stores.text import encode_prompts
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.settings import flags
from tokenscale.settings.benchmarks import SamplingSettings
from tokenscale.train.checkpoint_models import continue_prompt, open_causal
from tokenscale.train.evaluation.generation import Sampling

SAMPLING_FLAGS = flags.build_flags(SamplingSettings)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint_arguments(parser)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "--prompt", metavar="TEXT", help='such as "Once upon a time,"; "" starts a document'
    )
    prompts.add_argument(
        "--prompts-file", type=Path, metavar="FILE", help="file with one prompt per line"
    )
    text = "maximum number of new tokens; EOS ends earlier"
    parser.add_argument("--max-new-tokens", type=int, default=50, metavar="N", help=text)
    flags.add_flags(parser, flags=SAMPLING_FLAGS)


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that read a checkpoint."""
    text = "such as …/checkpoints/final, or a model of transformers"
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FOLDER", help=text)
    parser.add_argument(
        "--device", choices=("auto", "cpu"), default="auto", help="auto: a GPU if there is one"
    )
    text = "the training's tokenizer, for a checkpoint without one"
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help=text)


def run(arguments: argparse.Namespace) -> None:
    """Generate text and print it as it comes."""
    prompts = read_prompts(arguments.prompts_file) if arguments.prompts_file else [arguments.prompt]
    "".join(prompts).encode()  # raises for an argument that is not UTF-8
    sampling = Sampling(
        **asdict(SamplingSettings(**flags.parse_flags(arguments, flags=SAMPLING_FLAGS)))
    )
    options = {name: getattr(arguments, name) for name in ("max_new_tokens", "device", "tokenizer")}
    show = partial(print, end="", flush=True)
    generate_texts(arguments.checkpoint, prompts, sampling=sampling, on_text=show, **options)


def read_prompts(path: Path) -> list[str]:
    """Return the lines of a file. Raise UserError if it is unreadable or empty."""
    try:
        prompts = read_file(path).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "the prompts cannot be read.", file=path, reason=error, next="name a file of text"
        ) from None
    if not prompts:
        raise UserError(
            "the file holds no prompt.", file=path, expected="one prompt per line", next="write one"
        )
    return prompts


@contextmanager
def naming_option() -> Iterator[None]:
    """Add to a refusal of `TextDoor` how a checkpoint gets a tokenizer that accepts the loss."""
    try:
        yield
    except UserError as error:
        if "accepted_loss" in error.facts["next"]:
            error.facts["next"] += "\nand name its folder: --tokenizer results/tokenizers/NAME"
        raise


def generate_texts(
    checkpoint: Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    device: str = "auto",
    tokenizer: Path | None = None,
    on_text: Callable[[str], None] | None = None,
) -> list[str]:
    """Return the model's continuation of each prompt; prompt n draws with seed + n.

    `on_text` receives the texts piece by piece as they are generated, each after its prompt. Raise
    UserError for a masked model, for a prompt that fills all positions, and for a prompt of which
    the tokenizer loses more than `accepted_loss`.
    """
    opened = open_causal(checkpoint, tokenizer=tokenizer, device=device)
    if max_new_tokens < 1:
        what = "--max-new-tokens must be at least 1."
        next_step = "--max-new-tokens 50, for example"
        raise UserError(what, max_new_tokens=max_new_tokens, next=next_step)
    engine = load_tokenizer(opened.tokenizer)
    with naming_option():
        encoded = encode_prompts(engine, prompts, name="the prompts")
    on_text = on_text or (lambda text: None)
    texts = []
    for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
        drawn = replace(sampling, seed=sampling.seed + number)
        texts.append(
            continue_prompt(
                prompt,
                prompt_ids=ids.tolist(),
                opened=opened,
                engine=engine,
                max_new_tokens=max_new_tokens,
                sampling=drawn,
                on_text=on_text,
            )[0]
        )
    return texts
