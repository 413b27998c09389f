"""Error messages for failures of the operating system: a full disk, missing permissions, full memory."""

import errno
import os
from pathlib import Path

from tokenscale.base.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
LOCKED = (errno.EROFS, errno.EACCES, errno.EPERM)
#: a file where a folder is needed, and the like
MISPLACED = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
#: type names and messages of libraries' out-of-memory errors; Arrow's and NumPy's are MemoryErrors
NO_MEMORY = ("OutOfMemoryError", "OutOfMemoryException", "DefaultCPUAllocator: ")


def translate_error(error: Exception) -> UserError | None:
    """Return the user's error for such a failure; None for every other exception.

    Libraries that write files themselves raise their own exception types, with the system's message in them.
    """
    number = _read_errno(error)
    if number is None:
        number = next((n for n in (*FULL, *LOCKED) if os.strerror(n) in str(error)), None)
    path = getattr(error, "filename", None)
    facts = {"path": path, "reason": str(error).splitlines()[0] if str(error) else os.strerror(number or 0)}
    if number in FULL and _lacks_inodes(path):
        return UserError(
            "the file system can hold no more files.",
            **facts,
            next="delete files (`df -i .` counts them), then repeat the command: finished parts are kept",
        )
    if number in FULL:
        return UserError(
            "the disk is full.",
            **facts,
            next="free space (`df -h .`), then repeat the command: finished parts are kept",
        )
    if number in LOCKED:
        how = "the file system is read-only." if number == errno.EROFS else "permission denied for this file or folder."
        return UserError(how, **facts, next="make it writable for this user, or use another folder")
    if number in MISPLACED and path is not None:
        return UserError("this path cannot be used.", **facts, next="name another file or folder")
    return _translate_memory_error(error)


def _lacks_inodes(path: str | None) -> bool:
    """Whether the file system of a path, or of the working folder, has room for bytes but for no further file."""
    folder = Path(path or ".").absolute()
    found = os.statvfs(next(parent for parent in (folder, *folder.parents) if parent.exists()))
    return found.f_files > 0 and found.f_favail == 0 and found.f_bavail > 0


def _translate_memory_error(error: Exception) -> UserError | None:
    message = f"{type(error).__name__}: {error}"
    reason = message.strip().splitlines()[0]
    if "CUDA out of memory" in message or "HIP out of memory" in message:
        return UserError(
            "a GPU's memory was full.",
            reason=reason,
            next="use a smaller micro_batch, activation_checkpointing, or a layout that shards the model",
        )
    if (
        isinstance(error, MemoryError)
        or any(word in message for word in NO_MEMORY)
        or _read_errno(error) == errno.ENOMEM
    ):
        return UserError(
            "main memory was full, or this job's share of it.",
            reason=reason,
            next="allow more memory (memory_mb in machine.toml for trainings, mem_mb in the profile), "
            "run fewer jobs at a time, or use a smaller micro_batch",
        )
    return None


def _read_errno(error: Exception) -> int | None:
    return error.errno if isinstance(error, OSError) else None
