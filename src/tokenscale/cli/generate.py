"""Text from a checkpoint: what a causal model writes behind a prompt."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.data.tokenizers.base import Tokenizer
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.train.checkpoint_models import CheckpointModel, open_checkpoint
from tokenscale.train.evaluation.generation import Sampling, generate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, and how tokens are chosen."""
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FOLDER", help="…/checkpoints/final, say")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help='for example "Once upon a time,"; "" begins a document')
    prompts.add_argument("--prompts-file", type=Path, metavar="FILE", help="a prompt a line")
    parser.add_argument("--max-new-tokens", type=int, default=50, metavar="N", help="it ends sooner with EOS")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (greedy); 1 draws")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest only; 0: from all")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from the fewest that hold this probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws; the next prompt has the next seed")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="auto: a GPU where there is one")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="that of the training, for a checkpoint that holds none"
    )


def run(arguments: argparse.Namespace) -> None:
    """Generate, and show each piece of text as it comes."""
    from tokenscale.train.evaluation.generation import Sampling

    texts_of(
        arguments.checkpoint,
        prompts_of(arguments.prompts_file) if arguments.prompts_file else [arguments.prompt],
        max_new_tokens=arguments.max_new_tokens,
        sampling=Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed),
        device=arguments.device,
        tokenizer=arguments.tokenizer,
        on_text=lambda text: print(text, end="", flush=True),
    )


#: what the decoder of broken UTF-8 gives: at the end of a text, a character that is not complete yet
BROKEN = "\ufffd"


def prompts_of(path: Path) -> list[str]:
    """The lines of a file. UserError where there are none to read."""
    try:
        prompts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("the prompts cannot be read.", file=path, reason=error, next="name a file of text") from None
    if not prompts:
        raise UserError("the file holds no prompt.", file=path, expected="a prompt a line", next="write one")
    return prompts


def texts_of(
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

    `on_text` receives the texts piece by piece as they are generated, each with its prompt before it.

    Raises UserError for a masked model, and for a prompt that fills all positions.
    """
    opened = open_causal(checkpoint, tokenizer=tokenizer, device=device)
    if max_new_tokens < 1:
        raise UserError("there is nothing to generate.", max_new_tokens=max_new_tokens, next="ask for a token or more")
    engine = load_tokenizer(opened.tokenizer)
    on_text = on_text or (lambda text: None)
    return [
        behind(prompt, opened, engine, max_new_tokens, replace(sampling, seed=sampling.seed + number), on_text=on_text)[
            0
        ]
        for number, prompt in enumerate(prompts)
    ]


def open_causal(checkpoint: Path, *, tokenizer: Path | None = None, device: str = "auto") -> CheckpointModel:
    """A checkpoint that writes text. Raises UserError as `open_checkpoint` does, and for a masked model."""
    opened = open_checkpoint(checkpoint, tokenizer=tokenizer, device=device, document_mask=False)
    if opened.run.objective != "causal":
        raise UserError(
            "a masked model fills gaps; it writes no text.",
            checkpoint=opened.name,
            next="name the checkpoint of a causal run",
        )
    return opened


def behind(
    prompt: str,
    opened: CheckpointModel,
    engine: Tokenizer,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    cached: bool = True,
    on_text: Callable[[str], None] = lambda text: None,
) -> tuple[str, list[int]]:
    """(text, tokens) that a model writes behind one prompt. Raises UserError where the prompt fills all positions."""
    ids = [engine.bos_id, *engine.encode_batch([prompt])[0].tolist()]
    if len(ids) >= opened.positions:
        raise UserError(
            "the prompt leaves no room for a token.",
            prompt=f"{len(ids):,} tokens, BOS included",
            model=f"reads at most {opened.positions:,}",
            next="shorten it",
        )
    new: list[int] = []
    before, shown = len(engine.decode(ids)), 0

    def text_behind() -> str:  # decoded with the prompt: some tokenizers drop the space that a text begins with
        ended = new[-1:] == [engine.eos_id]
        return engine.decode(ids + (new[:-1] if ended else new))[before:]

    def on_token(token: int) -> None:
        nonlocal shown
        new.append(token)
        text = text_behind()
        if not text.endswith(BROKEN):
            on_text(text[shown:])
            shown = len(text)

    on_text(prompt)
    generate(
        opened.model,
        ids,
        max_new_tokens=max_new_tokens,
        positions=opened.positions,
        vocabulary_size=engine.vocabulary_size,
        stop_id=engine.eos_id,
        sampling=sampling,
        device=opened.device,
        cached=cached,
        on_token=on_token,
    )
    text = text_behind()
    on_text(text[shown:] + "\n")
    return text, new
