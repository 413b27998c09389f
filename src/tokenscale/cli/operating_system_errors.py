"""What the operating system refused a verb, in words: a full disk, a missing right, full memory are no bugs."""

import errno
import os

from tokenscale.base.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
LOCKED = (errno.EROFS, errno.EACCES, errno.EPERM)
#: a file where a folder is needed, and the like
MISPLACED = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
#: names of types, and words, by which libraries say that they got no memory; Arrow's and NumPy's are MemoryErrors
NO_MEMORY = ("OutOfMemoryError", "OutOfMemoryException", "DefaultCPUAllocator: ")


def error_of(error: Exception) -> UserError | None:
    """The message for a person, where it is such a refusal; None for every other exception.

    Libraries that write files themselves raise types of their own, with the system's words in them.
    """
    number = _errno(error)
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
    if number in MISPLACED and path is not None:
        return UserError("this path cannot be used so.", **facts, next="name another file or folder")
    return _of_memory(error)


def _of_memory(error: Exception) -> UserError | None:
    message = f"{type(error).__name__}: {error}"
    reason = message.strip().splitlines()[0]
    if "CUDA out of memory" in message or "HIP out of memory" in message:
        return UserError(
            "a GPU's memory was full.",
            reason=reason,
            next="a smaller micro_batch, activation_checkpointing, or a layout that shards the model",
        )
    if isinstance(error, MemoryError) or any(word in message for word in NO_MEMORY) or _errno(error) == errno.ENOMEM:
        return UserError(
            "main memory was full, or this job's share of it.",
            reason=reason,
            next="more memory (memory_mb in machine.toml for trainings, mem_mb in the profile), fewer runs at a time,"
            " or a smaller micro_batch",
        )
    return None


def _errno(error: Exception) -> int | None:
    return error.errno if isinstance(error, OSError) else None
