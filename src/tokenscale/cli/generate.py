"""Text from a checkpoint: what a causal model writes behind a prompt."""

import argparse
from pathlib import Path


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
    from tokenscale.cli.generate_command import prompts_of, texts_of
    from tokenscale.train.evaluation.generation import Sampling

    texts_of(
        arguments.checkpoint,
        prompts_of(arguments.prompts_file) if arguments.prompts_file else [arguments.prompt],
        max_new_tokens=arguments.max_new_tokens,
        sampling=Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed),
        device=arguments.device,
        tokenizer=arguments.tokenizer,
        say=lambda text: print(text, end="", flush=True),
    )
