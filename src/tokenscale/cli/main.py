"""`python -m tokenscale VERB …`: finds the verb's file, shows users' errors without a stack trace."""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence

from tokenscale import __version__
from tokenscale.base.errors import UserError, nearest, unknown

#: verb → what it does. Each is a file in `verbs/`, imported only when asked for.
VERBS = {
    "download": "files of a corpus that lies elsewhere, held by hash",
    "corpus": "raw text → raw Parquet with train and validation splits",
    "tokenizer": "make or fetch a tokenizer, with its manifest",
    "pretokenize": "raw Parquet → one token store",
    "unpack": "an archive → a packed store",
    "convert": "token stores from and to Megatron-LM, nanoGPT and Hugging Face data sets",
    "advise": "what to do with your own text, from a sample: padding, bytes, speed, and the format to choose",
    "train": "a training from flags: on a file, a corpus by name, or random numbers; also under torchrun",
    "launch": "start a run's processes on this machine or in a SLURM job, and seal it",
    "rank": "one rank of a run, as a launcher starts it",
    "evaluate": "a checkpoint's perplexity, bits per byte and accuracy over any text",
    "generate": "text from a checkpoint",
    "export": "a checkpoint → a folder that the library transformers loads",
    "ingest": "logs of runs and benchmarks → typed tables (Parquet)",
    "track": "a run's events → TensorBoard, MLflow or W&B offline, live or afterwards",
    "report": "tables → figures, the HTML report and the folder around it",
    "verify": "is a figure, a page or a report what its data and code draw; are results what was written?",
    "diff": "two reports, cell by cell, and what may explain the difference",
    "claims": "sentences of the ledger: do the data carry them; strict where they are relied on",
    "predict": "step times on more ranks, by a model fitted to few; and its back-test on published points",
    "benchmark": "side-by-side measurements",
    "plan": "what would run, and on what",
    "check": "the configuration and the design of experiments; write JSON schemas",
    "status": "jobs and runs: how far they are, why they wait, what failed; what would rerun",
    "doctor": "what this machine can run, what it cannot, and why",
}


class Parser(argparse.ArgumentParser):
    """Parser that reports mistakes as `UserError` does: one message, the nearest spelling, exit code 2.

    Flags are not abbreviated: an abbreviation would change its meaning when a flag is added.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def parse_known_args(self, args=None, namespace=None):
        """Refuse unknown flags first: argparse would report a required flag as missing instead of misspelt."""
        words = list(sys.argv[1:] if args is None else args)
        self._refuse_unknown_flags(words)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> None:
        """Print argparse's message as a user's error, with the nearest allowed value, and exit with code 2."""
        found = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        near = nearest(found[1], re.findall(r"[\w.-]+", found[2])) if found else None
        hint = f"did you mean {near}?  " if near else ""
        self._refuse(UserError(f"{message.removesuffix('.')}.", next=f"{hint}{self.prog} --help"))

    def _refuse_unknown_flags(self, words: Sequence[str]) -> None:
        flags = self._option_string_actions
        for word in words:
            flag = word.split("=", 1)[0]
            if word == "--" or (self._subparsers and not word.startswith("-")):
                return  # the rest are values, or flags of a sub-command, whose own parser looks at them
            if not word.startswith("-") or word == "-" or " " in word or self._negative_number_matcher.match(word):
                continue  # a value, as argparse sees it
            if flag not in flags and not (flag[1:2] != "-" and flag[:2] in flags):  # -n4 is -n 4
                shown = [name for name, action in flags.items() if action.help != argparse.SUPPRESS]
                near = nearest(flag.replace("_", "-"), shown)
                hint = f"did you mean {near}?" if near else f"{self.prog} --help"
                self._refuse(UserError(f"unknown flag {flag}.", command=self.prog, next=hint))

    def _refuse(self, error: UserError) -> None:
        self.exit(2, f"{error.render()}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run one verb. Returns the exit code: 0, or 2 for a user's error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    listing = "\n".join(f"  {verb:<12} {text}" for verb, text in VERBS.items())
    parser = Parser(
        prog="tokenscale",
        description=__doc__.split(":")[0].replace("`", ""),
        usage="python -m tokenscale VERB [options]   (VERB --help lists a verb's options)",
        epilog=f"verbs:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tokenscale {__version__}")
    parser.add_argument("verb", nargs="?", metavar="VERB")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments[:1])
    if parsed.verb is None:
        parser.print_help()
        return 0
    try:
        if parsed.verb not in VERBS:
            raise unknown("verb", parsed.verb, VERBS)
        module = importlib.import_module(f"tokenscale.cli.{parsed.verb}")
        verb_parser = Parser(prog=f"python -m tokenscale {parsed.verb}", description=module.__doc__)
        module.add_arguments(verb_parser)
        return module.run(verb_parser.parse_args(arguments[1:])) or 0
    except UserError as error:
        if "next" not in error.facts:
            error = UserError(error.what, **error.facts, next=f"python -m tokenscale {parsed.verb} --help")
        print(error.render(), file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output went away (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("tokenscale: interrupted.", file=sys.stderr)
        return 130
    except Exception as error:
        from tokenscale.cli.operating_system_errors import error_of

        if (found := error_of(error)) is None:
            raise
        print(found.render(), file=sys.stderr)
        return 2
