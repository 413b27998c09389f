"""What the operating system refused a verb, in words: a full disk and a missing right are no bugs."""

import errno
import os

from tokenscale.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
LOCKED = (errno.EROFS, errno.EACCES, errno.EPERM)


def error_of(error: Exception) -> UserError | None:
    """The message for a person, where it is such a refusal; None for every other exception.

    Libraries that write files themselves raise types of their own, with the system's words in them.
    """
    number = getattr(error, "errno", None) if isinstance(error, OSError) else None
    if number is None:
        number = next((n for n in (*FULL, *LOCKED) if os.strerror(n) in str(error)), None)
    path = getattr(error, "filename", None)
    facts = {"path": path, "reason": str(error).splitlines()[0] if str(error) else os.strerror(number or 0)}
    if number in FULL:
        return UserError(
            "the disk is full.",
            **facts,
            next="make room (`df -h .`), and give the same command again: what was finished stays",
        )
    if number in LOCKED:
        how = "the file system is read-only." if number == errno.EROFS else "this file or folder may not be used so."
        return UserError(how, **facts, next="make it writable for this user, or take another folder")
    return None
