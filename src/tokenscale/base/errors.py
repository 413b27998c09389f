"""Errors for users: what is wrong, where, what was expected, what to do next."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

#: names of environment variables whose values may be secrets
SECRET_NAME = re.compile("TOKEN|KEY|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|JWT|SESSION", re.IGNORECASE)
_PASSWORD = re.compile(r"//[^/?#@\s]*(?:@[^/?#@\s]*)*@")
#: query parameters that sign an address (S3, Google, Azure and others) and grant access
_SIGNATURE = re.compile(
    r"([?&](?:x-(?:amz|goog)-(?:signature|credential|security-token)|sig|signature|(?:access_?|auth_?|api_?)?(?:token|key)"
    r"|secret|password)=)[^&#\s'\"]+",
    re.IGNORECASE,
)


class UserError(Exception):
    """Error that a user can fix. Shown without a stack trace, exit code 2.

    `what` is one sentence. Facts are label → text: where it was found, what was expected, and as `next`, which comes
    last, a command or an action.
    """

    def __init__(self, what: str, **facts: object):
        self.what = _escape(what)
        self.facts = {label: _escape(str(text)) for label, text in facts.items() if text is not None}
        super().__init__(self.render())

    def render(self) -> str:
        """Return the printed message: the sentence, then one indented, aligned line per fact."""
        width = max((len(label) for label in self.facts), default=0)
        lines = [f"tokenscale: {self.what}"]
        for label, text in self.facts.items():
            first, *rest = text.splitlines() or [""]
            lines.append(f"  {label:<{width}}  {first}")
            lines += [f"  {'':<{width}}  {line}" for line in rest]
        return "\n".join(lines)


def _escape(text: str) -> str:
    """Make foreign text, such as a file name, safe for a terminal: escape control characters, remove credentials."""
    text = redact_credentials(text)
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


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
    return ", ".join(map(str, words[:shown])) + (f" and {len(words) - shown:,} more" if len(words) > shown else "")


def find_nearest(word: str, words: Iterable[str]) -> str | None:
    found = get_close_matches(str(word), [str(w) for w in words], n=1, cutoff=0.6)
    return found[0] if found else None


def unknown(kind: str, word: str, words: Iterable[str], **facts: object) -> UserError:
    """Return the error for a value that is not in a list, with the allowed values and the nearest spelling."""
    words = sorted(str(w) for w in words)
    near = find_nearest(word, words)
    hint = f"did you mean {near!r}?" if near else "choose one of the allowed values"
    return UserError(f"unknown {kind} {word!r}.", **facts, allowed=", ".join(words) or "(none)", next=hint)
