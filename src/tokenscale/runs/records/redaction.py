"""Remove secrets from records: by their form, by the name before them (`api_key: …`), or because
they look random.

Hexadecimal digests, which records need, are kept unless a name marks them as secret.
"""

import re
from collections.abc import Sequence

from tokenscale.base.errors import redact_credentials

REDACTED = "…"
#: what follows a prefix that a service gives its keys
_KEYS = re.compile(
    r"\b(?:"
    r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}"  # AWS
    r"|(?:hf|api_org)_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|wandb_v\d_[A-Za-z0-9_]{20,}"
    r"|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|gl(?:pat|dt|rt)-[\w-]{16,}"
    r"|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}"  # Slack
    # OpenAI, Anthropic, Stripe
    r"|(?:sk|pk|rk)[-_](?:live_|test_|proj-|ant-|or-)?[A-Za-z0-9][\w-]{15,}"
    r"|AIza[\w-]{30,}|ya29\.[\w.-]{20,}|GOCSPX-[\w-]{20,}"  # Google
    r"|(?<=wandb login )\w{32,}"
    r"|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{16,}|dckr_pat_[\w-]{16,}|dop_v1_[a-f0-9]{20,}|dapi[a-f0-9]{32}"
    r"|SG\.[\w-]{16,}\.[\w-]{16,}|shpat_[a-fA-F0-9]{20,}|hvs\.[\w-]{20,}|AGE-SECRET-KEY-\w{20,}"
    r")"
)
#: tried once a word, from the first place where it may begin
_WEB_TOKEN = re.compile(r"(?<![\w-])(?>(?P<before>[\w-]*?)\beyJ)[\w-]{8,}+\.[\w-]{8,}+\.[\w-]*+")
#: also in a diff, whose lines begin with a sign, and in JSON, where it is one line
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?P<rest>[^\n\"']*"
    r"(?:\n[-+ ]?[ \t]*(?:[A-Za-z0-9+/=]+|[\w-]+: [^\n]*|)(?=\r?\n|$))*)"
)
_WEBHOOK = re.compile(
    r"(https://(?:hooks\.slack\.com/\w+/|discord(?:app)?\.com/api/webhooks/))[\w/-]+"
)
_HEADER = re.compile(
    r"(\b(?:authorization\"?\s*+[:=](?:\s*+\"?(?:bearer|basic|token)\s++|\s*+\"\s++|\s++)"
    r"|(?:bearer|basic)\s++))[\w.~+/=-]{8,}",
    re.IGNORECASE,
)
#: last words of a name whose value is secret
_NAME = (
    r"(?:pass(?:word|wd|phrase|code)?|pwd|secret|credentials?|jwt|cookie"
    r"|(?:api|access|secret|private|account|auth|encryption|signing|session|license|storage)[_.-]?(?:key|token)(?:[_.-]?id)?"
    r"|(?<!per[_-])token|apikey)"
)
_FLAG = re.compile(rf"(?:^|[_.-]){_NAME}$", re.IGNORECASE)
#: a value in quotes, or one that reaches to the next blank
_ASSIGNED = re.compile(
    rf"(?P<name>(?<![A-Za-z0-9])(?:[A-Za-z0-9]+[_.-])?{_NAME})(?P<between>[\"']?[ "
    r"\t]*(?::=|[:=]|=>)[ \t]*|[ \t]+)"
    r"(?P<value>\"[^\"\n]{4,}\"|'[^'\n]{4,}'|[^\s\"'()\[\]{},;$<>]{6,})",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(r"^[\"']?(?:[$<{…*]|x{3,}[\"']?$|.*\$\{|[^{]*+\{.*\})", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z0-9+/_-]{20,}={0,2}")
#: words that are digests or identifiers: hexadecimal, or an algorithm's name before one
_DIGEST = re.compile(r"^(?:[0-9a-f]+|[0-9A-F]+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})$")


def redact(text: str) -> str:
    """Return the text with `…` in place of secrets.

    >>> redact("--password=hunter22 --data https://me:pw@host/x GIT_TOKEN=ghp_abcdefghijklmnopqrst0123456789")
    '--password=… --data https://…@host/x GIT_TOKEN=…'
    >>> redact("packed-llama-tiny-ddp-w2-4f2a91c3d0 of 1df2e0b61b1b5e9c9a8f7d6e5c4b3a2918070605")
    'packed-llama-tiny-ddp-w2-4f2a91c3d0 of 1df2e0b61b1b5e9c9a8f7d6e5c4b3a2918070605'
    """
    text = _PRIVATE_KEY.sub(_redact_private_key, text)
    text = redact_credentials(_WEBHOOK.sub(rf"\1{REDACTED}", text))
    text = _WEB_TOKEN.sub(rf"\g<before>{REDACTED}", text)
    text = _KEYS.sub(REDACTED, _HEADER.sub(rf"\1{REDACTED}", text))
    text = _ASSIGNED.sub(_redact_value, text)
    return _WORD.sub(lambda found: REDACTED if _looks_random(found[0]) else found[0], text)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without secrets.

    >>> redact_arguments(["train", "--wandb-api-key", "0123456789abcdef", "--password=x", "--tokenizer", "bpe"])
    ['train', '--wandb-api-key', '…', '--password=…', '--tokenizer', 'bpe']
    """
    found = []
    secret = False
    for argument in arguments:
        name, sign, _ = argument.partition("=")
        named = argument.startswith("-") and _FLAG.search(name) is not None
        if secret and not argument.startswith("--"):
            found.append(REDACTED)
        elif named and sign:
            found.append(f"{name}={REDACTED}")
        else:
            found.append(redact(argument))
        secret = named and not sign
    return found


def redact_variable(value: str) -> str:
    """Return an environment variable's value, or `…` if it may hold a secret: unlike a diff it
    needs no digests.
    """
    return REDACTED if redact(value) != value or re.search(r"[0-9a-fA-F]{32}", value) else value


def _redact_private_key(found: re.Match[str]) -> str:
    """Redact the lines of a key. As many remain, with their signs, so that a diff stays one."""
    first, *lines = found["rest"].split("\n")
    begin = found[0].removesuffix(found["rest"]) + (REDACTED if first else "")
    return "\n".join(
        [begin, *((line[:1] if line[:1] in "+- " else "") + REDACTED for line in lines)]
    )


def _redact_value(found: re.Match[str]) -> str:
    """Redact a value after a secret's name, unless it is code: an unquoted identifier, a quoted
    sentence or name.
    """
    quote = found["value"][0]
    plain = found["value"].strip("\"'")
    if _PLACEHOLDER.match(found["value"]) or not found["between"].strip(" \"'\t"):
        return found[0]
    if quote in "\"'":
        kept = " " in plain or re.fullmatch("[A-Z_]+", plain)
        return found[0] if kept else f"{found['name']}{found['between']}{quote}{REDACTED}{quote}"
    mixed = re.search(r"[A-Za-z]", plain) and re.search(r"[0-9!@#%^&*+/=~?|\\-]", plain)
    return f"{found['name']}{found['between']}{REDACTED}" if mixed else found[0]


def _looks_random(word: str) -> bool:
    """Whether a word is long and mixes lower case, upper case and digits that change often."""
    word = word.strip("=-_/")
    classes = [_class_of(character) for character in word if character.isalnum()]
    if len(word) < 20 or len(set(classes)) < 3 or classes.count("digit") < 2 or _DIGEST.match(word):
        return False
    changes = sum(a != b for a, b in zip(classes, classes[1:], strict=False)) / (len(classes) - 1)
    # 0.62 is expected of random words; words joined in camel case are below 0.45
    return changes >= 0.45 and len(word) - len(classes) <= len(word) // 8


def _class_of(character: str) -> str:
    if character.islower():
        return "lower"
    return "upper" if character.isupper() else "digit"
