"""Errors for users: what is wrong, where, what was expected, what to do next."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path, PurePath

#: names of environment variables whose values may be secrets
SECRET_NAME = re.compile(
    "TOKEN|KEY|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|JWT|SESSION", re.IGNORECASE
)
_PASSWORD = re.compile(r"//[^/?#@\s]*(?:@[^/?#@\s]*)*@")
#: query parameters that sign an address (S3, Google, Azure and others) and grant access
_SIGNATURE = re.compile(
    r"([?&](?:x-(?:amz|goog)-(?:signature|credential|security-token)|sig|signature|(?:access_?|auth_?|api_?)?(?:token|key)"
    r"|secret|password)=)[^&#\s'\"]+",
    re.IGNORECASE,
)
#: PATH of the user's shell, where Snakemake's is another
USER_PATH = "TOKENSCALE_USER_PATH"
#: a program of the environment where a command begins: in a line, in backticks, behind a colon, two
#: blanks, "or"
_COMMAND = re.compile(
    r"(^|`|: |  |, or |, and |, then )(snakemake|tokenscale|torchrun|python|pip)(?= )", re.MULTILINE
)


def as_typed(text: str) -> str:
    """Put the environment's folder before the commands in a text, unless the user's shell finds
    them by name.

    >>> as_typed("the label tokenscale: a sentence about tokenscale")
    'the label tokenscale: a sentence about tokenscale'
    """
    folder = Path(sys.executable).parent

    def locate(found: re.Match[str]) -> str:
        program = folder / found[2]
        if (
            shutil.which(found[2], path=os.environ.get(USER_PATH)) == str(program)
            or not program.exists()
        ):
            return found[0]
        shown = program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program
        return found[1] + shlex.quote(str(shown))

    return _COMMAND.sub(locate, text)


def as_runnable(following: str) -> str:
    """Return a next step that calls Snakemake for a file as it runs here: rules make files of
    `results`, by their paths from the project's folder.

    >>> as_runnable("snakemake -f ../other/results/x.json"), as_runnable("snakemake -f x.json")
    ('cd ../other\\nsnakemake -f results/x.json', 'correct the path x.json: Snakemake makes files of results/ only')
    """
    found = re.fullmatch(r"snakemake (-f )?(\S*[/.]\S*)", following)
    if found is None:
        return following
    parts = Path(os.path.relpath(found[2])).parts
    if "results" not in parts:
        return f"correct the path {found[2]}: Snakemake makes files of results/ only"
    at = parts.index("results")
    command = f"snakemake {found[1] or ''}{Path(*parts[at:])}"
    return f"cd {shlex.quote(str(Path(*parts[:at])))}\n{command}" if at else command


class UserError(Exception):
    """Error that a user can fix. Shown without a stack trace, exit code 2.

    `what` is one sentence. Facts are label → text: where it was found, what was expected, and as
    `next`, which comes last, a command or an action.
    """

    def __init__(self, what: str, **facts: object):
        self.what = _escape(what)
        self.facts = {
            label: _escape(str(text)) for label, text in facts.items() if text is not None
        }
        super().__init__(self._format(self.facts))

    def render(self) -> str:
        """Return the printed message: the sentence, then one indented, aligned line per fact;
        commands as typed.
        """
        following = {"next": as_typed(self.facts["next"])} if "next" in self.facts else {}
        return self._format(self.facts | following)

    def _format(self, facts: Mapping[str, str]) -> str:
        width = max((len(label) for label in facts), default=0)
        lines = [f"tokenscale: {self.what}"]
        for label, text in facts.items():
            first, *rest = text.splitlines() or [""]
            lines.append(f"  {label:<{width}}  {first}")
            lines += [f"  {'':<{width}}  {line}" for line in rest]
        return "\n".join(lines)


def _escape(text: str) -> str:
    """Make foreign text, such as a file name, safe for a terminal: escape control characters,
    remove credentials.
    """
    text = redact_credentials(text)
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def redact_credentials(text: str) -> str:
    """Remove user names, passwords and signatures from all web addresses in a text.

    >>> redact_credentials("no answer from http://me:secret@proxy:3128/?sig=9f3c")
    'no answer from http://…@proxy:3128/?sig=…'
    """
    return _SIGNATURE.sub(r"\1…", _PASSWORD.sub("//…@", text))


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type, without credentials."""
    return redact_credentials((str(error).strip().splitlines() or [type(error).__name__])[0])[:200]


def few(words: Sequence[object], shown: int = 3) -> str:
    """Join the first words of a list.

    >>> few(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    return ", ".join(map(str, words[:shown])) + (
        f" and {len(words) - shown:,} more" if len(words) > shown else ""
    )


def find_nearest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    found = get_close_matches(str(word), [str(w) for w in words], n=1, cutoff=cutoff)
    return found[0] if found else None


def unknown(kind: str, word: str, words: Iterable[str], **facts: object) -> UserError:
    """Return the error for a value that is not in a list, with the allowed values and the nearest
    spelling.
    """
    words = sorted(str(w) for w in words)
    # a file in the place of the name that it gives
    near = find_nearest(word, words) or find_nearest(PurePath(word).stem, words, cutoff=1)
    hint = f"did you mean {near!r}?" if near else "choose one of the allowed values"
    return UserError(
        f"unknown {kind} {word!r}.", **facts, allowed=", ".join(words) or "(none)", next=hint
    )
