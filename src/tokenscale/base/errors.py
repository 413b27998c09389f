"""Errors that are for people: what is wrong, where, what was expected, what to do next."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

_PASSWORD = re.compile(r"//[^/?#@\s]*(?:@[^/?#@\s]*)*@")
#: what signs an address, as S3, Google, Azure and others name it: whoever has it may read
_SIGNATURE = re.compile(
    r"([?&](?:x-(?:amz|goog)-(?:signature|credential|security-token)|sig|signature|(?:access_?|auth_?|api_?)?(?:token|key)"
    r"|secret|password)=)[^&#\s'\"]+",
    re.IGNORECASE,
)


class UserError(Exception):
    """A mistake of the user's, or of the machine's, that a person can mend. Shown without a stack trace, exit code 2.

    `what` is one sentence. Each fact is a (label, text) pair: where it was found, what was expected, what to do next.
    Labels are short words; `next` is by custom the last one and holds a command or an action.
    """

    def __init__(self, what: str, **facts: object):
        self.what = _escape(what)
        self.facts = {label: _escape(str(text)) for label, text in facts.items() if text is not None}
        super().__init__(self.render())

    def render(self) -> str:
        """The message as printed: the sentence, then one indented, aligned line per fact."""
        width = max((len(label) for label in self.facts), default=0)
        lines = [f"tokenscale: {self.what}"]
        for label, text in self.facts.items():
            first, *rest = text.splitlines() or [""]
            lines.append(f"  {label:<{width}}  {first}")
            lines += [f"  {'':<{width}}  {line}" for line in rest]
        return "\n".join(lines)


def _escape(text: str) -> str:
    """Text of other hands, such as a file's name, as a terminal may show it: nothing that steers one, no passwords.

    >>> print(_escape("red \\x1b[31m"))
    red \\x1b[31m
    """
    text = redact_credentials(text)
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def redact_credentials(text: str) -> str:
    """The text with the user's name and password, and what signs it, taken out of each web address in it.

    >>> redact_credentials("no answer from http://me:secret@proxy:3128/?sig=9f3c")
    'no answer from http://…@proxy:3128/?sig=…'
    """
    return _SIGNATURE.sub(r"\1…", _PASSWORD.sub("//…@", text))


def find_nearest(word: str, words: Iterable[str]) -> str | None:
    """The word that was probably meant, or None.

    >>> find_nearest("lama-tiny", ["llama-tiny", "gpt2"])
    'llama-tiny'
    """
    found = get_close_matches(str(word), [str(w) for w in words], n=1, cutoff=0.6)
    return found[0] if found else None


def unknown(kind: str, word: str, words: Iterable[str], **facts: object) -> UserError:
    """The error for a name that is not in a list: names the value, the allowed ones and the nearest spelling."""
    words = sorted(str(w) for w in words)
    near = find_nearest(word, words)
    hint = f"did you mean {near!r}?" if near else "choose one of the allowed values"
    return UserError(f"unknown {kind} {word!r}.", **facts, allowed=", ".join(words) or "(none)", next=hint)
