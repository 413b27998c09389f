"""Atomic writes, locks, canonical JSON, hashes."""

import errno
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedRandom, BufferedWriter
from pathlib import Path
from typing import IO, Any

from tokenscale.base.errors import UserError

#: rights that new files do not get; can only be read by setting it
UMASK = os.umask(0o077)
os.umask(UMASK)
#: seconds between two looks at a lock, and to wait for a queue that does not answer about the job
#: that left one
POLL_S = 1.0
PATIENCE_S = 120.0
#: seconds after which a temporary file of another boot is a dead process's
DAY_S = 86_400.0
#: how names of temporary files begin
TEMPORARY = ".tokenscale-"
_REMOVE = "remove it, or name another path"
#: what to do about an error of the system that no other message explains
LOOK_AT_DISK = (
    "look at the disk and the limits (dmesg, df -h ., ulimit -a), then repeat the command"
)
#: pyarrow's message when the system cannot close a file, whatever its number
UNCLOSED = "error closing file"
#: a compressed file of others may unpack to this many bytes, and this many times its size: real
#: ones shrink to a tenth
UNPACKED = 64 << 20
RATIO = 500
#: flags of `open_file` for a file whose content is replaced
REPLACE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@contextmanager
def atomic(path: str | Path, durable: bool = True) -> Iterator[Path]:
    """Yield a new file next to `path`; it is synced and renamed on success, and removed on failure.

    Readers see the old or the complete new file and, if `durable`, also after a power cut. The name
    of the temporary file tells which process writes it, so that files of killed processes are
    recognised without locks, which may not reach other nodes.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(path.parent)
    # refuses links: a new name
    descriptor, name = tempfile.mkstemp(
        suffix=f".{path.name}.tmp", prefix=name_temporary(), dir=path.parent
    )
    _close(descriptor, path)
    temporary = Path(name)
    try:
        with naming(path):
            yield temporary
            if stat.S_IMODE(temporary.stat().st_mode) == 0o600:
                temporary.chmod(0o666 & ~UMASK)
            if durable:
                sync(temporary)
            os.replace(temporary, path)
            if durable:
                sync(path.parent)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            temporary.unlink()
        raise


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name the file in an error of the system that names none: of a descriptor, it knows the number
    alone.
    """
    try:
        yield
    except OSError as error:
        if str(error) == UNCLOSED:
            raise OSError(errno.EIO, UNCLOSED, str(path)) from error
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@cache  # a folder of many files is listed once
def _remove_left_over(folder: Path) -> None:
    """Remove temporary files of killed processes: of processes that are gone, as far as they would
    be seen from here, and files of other boots, nodes and containers that are a day old.
    """
    place = _name_place()
    for left in folder.glob(f"{TEMPORARY}*.tmp"):
        with suppress(OSError):
            process = re.match(r"\d+(?=-)", left.name.removeprefix(place))
            if process is not None:
                gone = not _is_running(int(process[0]))
            else:
                gone = time.time() - left.lstat().st_mtime > DAY_S
            if gone:
                left.unlink()


def name_temporary() -> str:
    """Return how names of this process's temporary files begin."""
    return f"{_name_place()}{os.getpid()}-"


def _name_place() -> str:
    """Return how names of temporary files begin whose processes are seen from here: those of one
    boot and one process namespace.
    """
    namespace = ""
    with suppress(OSError):  # only Linux has them
        namespace = os.readlink("/proc/self/ns/pid")
    place = f"{get_boot_id() or platform.node()} {namespace}"
    return f"{TEMPORARY}{sha256_text(place)[:8]}-"


def _is_running(process: int) -> bool:
    """Return whether a process runs: it is there, and no zombie that nobody has waited for."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    state = "R"
    with suppress(OSError):
        state = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][:1]
    return state != "Z"


def sync(path: str | Path) -> None:
    """Write a file's content, or a folder's list of names, to the disk, so that a power cut does
    not undo it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        _close(descriptor, path)


def _close(descriptor: int, path: str | Path) -> None:
    with naming(path):
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Write all files of a folder, and the names in it and in its subfolders, to the disk."""
    for directory, _, names in os.walk(folder):
        for name in names:
            sync(Path(directory, name))
        sync(directory)


def remove_manifest(path: Path) -> None:
    """Remove a manifest before the files change that it names, so that no power cut leaves it with
    files of others.
    """
    if path.exists():
        path.unlink()
        sync(path.parent)


def remove_tree(folder: Path) -> None:
    """Remove a folder as far as the system lets it: what is left of it does no harm."""
    with suppress(OSError):  # rmtree raises that of a descriptor which cannot be closed
        shutil.rmtree(folder, ignore_errors=True)


def move_files(building: Path, directory: Path, names: list[str]) -> None:
    """Move finished files, whose content is then on the disk, into `directory`. Their names are on
    the disk once `atomic` has written the next file there: the build record, which comes before the
    manifest.
    """
    for name in names:
        sync(building / name)
    for name in names:
        os.replace(building / name, directory / name)


def open_file(
    path: str | Path,
    flags: int = os.O_RDONLY,
    *,
    follow: bool = True,
    folder: int | None = None,
) -> int:
    """Open a regular file and return its descriptor. Does not wait for the writer of a FIFO.

    Names that others can predict are opened with `follow` False: a link there may lead to a file of
    the user's. `folder`: descriptor of the file's folder, if it is open. Raises UserError for a
    FIFO, a device, a folder or such a link.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    name = path if folder is None else Path(path).name
    try:
        with naming_anew(path):
            descriptor = os.open(name, flags, 0o666, dir_fd=folder)
    except OSError as error:
        is_other = error.errno in (errno.EISDIR, errno.ENXIO, errno.ENODEV)
        if (is_other and not os.path.isfile(path)) or (error.errno == errno.ELOOP and not follow):
            found = "a link" if error.errno == errno.ELOOP else "a folder, a pipe or a device"
            raise UserError(
                "this is not a regular file.", path=path, found=found, next=_REMOVE
            ) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(
            "this is not a regular file.",
            path=path,
            found="a folder, a pipe or a device",
            next=_REMOVE,
        )
    return descriptor


def read_file(path: str | Path) -> bytes:
    """Return the content of a regular file. Raises UserError as `open_file` does, and OSError."""
    with naming(path), open(open_file(path), "rb") as file:
        return file.read()


@contextmanager
def replace_file(path: Path) -> Iterator[BufferedWriter]:
    """Yield a file whose content is replaced as it is written. Every error names it."""
    with naming(path), open(open_file(path, flags=REPLACE, follow=False), "wb") as file:
        yield file


@contextmanager
def lock_folder(
    directory: Path,
    what: str,
    *,
    wait: bool = False,
    job: str | None = None,
    may_write: Callable[[str], bool | None] = lambda job: False,
) -> Iterator[int]:
    """Lock a folder while the block runs; the operating system releases the lock when the process
    dies.

    Yields the lock's descriptor; processes that inherit it keep the lock. If another process has
    the lock: UserError that names it, or with `wait`, wait until it is free. The lock file remains
    and names this process and its `job`. A lock that another job left behind is taken once
    `may_write` denies that the job may still write; None: unknown, which blocks a job (for at most
    `PATIENCE_S`) and nobody else.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ".lock"
    descriptor = open_file(path, flags=os.O_RDWR | os.O_CREAT | os.O_APPEND, follow=False)
    file = open(descriptor, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115  # below
    try:
        with naming(path):
            if os.fstat(descriptor).st_nlink > 1:
                what = "the lock of this folder is a hard link to another file."
                raise UserError(what, lock=path, next=f"rm {path}")
            _wait_for_lock(file, path, what=what, wait=wait, job=job, may_write=may_write)
            file.truncate(0)
            file.write(f"{name_process()}{f', job {job}' if job else ''}\n")
            file.flush()
            os.fsync(descriptor)
        yield descriptor
        # an orderly end leaves no owner; after a failure its ranks may still be there
        with suppress(OSError):
            file.truncate(0)
    finally:
        with suppress(OSError):  # its line is on the disk, and the block's error is the first
            file.close()


def _wait_for_lock(
    file: IO[str],
    path: Path,
    what: str,
    wait: bool,
    job: str | None,
    may_write: Callable[[str], bool | None],
) -> None:
    """Return once the lock is this process's; see `lock_folder`."""
    reported = False
    since = time.monotonic()
    while True:
        try:
            free = acquire(file)
        except OSError as error:  # Lustre mounted without -o flock, for one
            following = "use a file system with locks (`tokenscale doctor` tries them)"
            raise UserError(
                f"{what} cannot be locked here.", lock=path, reason=error.strerror, next=following
            ) from None
        file.seek(0)
        owner = file.read().strip() or "unknown"
        left = re.search(r"job (\S+)", owner) if free else None
        writes = may_write(left[1]) if left and left[1] != job else not free
        if writes is False or (writes is None and job is None):
            return
        since = time.monotonic() if writes else since
        state = "may still be" if left else "is being"
        if not wait or time.monotonic() - since > PATIENCE_S:
            found = "the queue does not answer" if writes is None else None
            following = "wait for that process, or end it"
            if left:
                following = f"wait for it, or scancel {left[1]}"
            what = f"{what} {state} written by another {'job' if left else 'process'}."
            raise UserError(what, lock=path, owner=owner, found=found, next=following)
        if not reported:
            writer = f"job {left[1]}" if left else owner
            print(f"tokenscale: {what} {state} written by {writer}; waiting for it", flush=True)
            reported = True
        time.sleep(POLL_S)


#: file systems whose files, but maybe not their locks, other machines share
_SHARED = re.compile(
    r"nfs|lustre|gpfs|beegfs|cifs|smb|ceph|gluster|fuse|9p|afs|ocfs|gfs|pvfs|orangefs|wekafs|daos|dvs"
)


def is_shared(path: Path) -> bool:
    """Return whether a path is on a file system that other machines may mount. True where that is
    not known.
    """
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return True
    here = path.resolve()
    found = ("", "unknown fuse")
    for mount, _, rest in ((line.split()[4], *line.partition(" - ")[1:]) for line in lines):
        mount = mount.encode().decode("unicode_escape")  # a space is \\040
        if here.is_relative_to(mount) and len(mount) >= len(found[0]):
            found = (mount, rest.split()[0])
    return _SHARED.search(found[1]) is not None


@cache
def get_boot_id() -> str | None:
    """Return the boot id of this machine, equal in all its containers; clocks and locks of one boot
    are comparable.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    except OSError:
        return None


def name_process() -> str:
    """Return how locks name this process: `process 42 on nid000001, boot 1b9e0c44`."""
    return f"process {os.getpid()} on {platform.node()}" + (
        f", boot {boot[:8]}" if (boot := get_boot_id()) else ""
    )


def acquire(file: IO[Any]) -> bool:
    """Lock an open file and return whether no other process has it. Raises OSError on a file system
    without locks.
    """
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


class HashedFile:
    """File whose SHA-256 is computed in a thread while it is written; `sha256` is available after
    the block.
    """

    def __init__(self, path: str | Path):
        self.sha256 = ""
        self._path = path
        self._digest = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1, "sha256")
        self._pending: Future[None] | None = None

    def __enter__(self) -> "HashedFile":
        self._file = open(open_file(self._path, flags=REPLACE, follow=False), "wb")
        return self

    def write(self, data: Any) -> None:
        """Append a contiguous buffer, which must not change afterwards."""
        if self._pending is not None:
            self._pending.result()  # one pending buffer at most, which bounds memory
        self._pending = self._pool.submit(self._digest.update, data)
        with naming(self._path):
            self._file.write(data)

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()
        with naming(self._path):
            self._file.close()
        self.sha256 = self._digest.hexdigest()


def write_text(path: str | Path, text: str) -> None:
    with atomic(path) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def utc_now() -> str:
    """Return the current UTC time, such as `2026-11-22T20:31:02Z`. For build records, never for
    manifests.
    """
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def write_json(path: str | Path, value: object) -> None:
    """Write JSON with sorted keys and indentation, atomically; equal values give equal bytes."""
    write_text(path, text=pretty_json(value))


def write_sealed(path: str | Path, record: dict[str, Any], key: str = "seal") -> None:
    """Write a record that others trust as JSON, with the digest of its own content as `key`."""
    body = {k: v for k, v in record.items() if k != key}
    write_json(path, value=body | {key: sha256_text(canonical_json(body))})


def is_sealed(record: object, key: str = "seal") -> bool:
    """Return whether a record has the digest of its own content, as `write_sealed` writes it."""
    if not isinstance(record, dict):
        return False
    return record.get(key) == sha256_text(
        canonical_json({k: v for k, v in record.items() if k != key})
    )


def read_record(
    path: str | Path,
    what: str,
    next: str | None = None,
    *,
    unsealed: bool = False,
    key: str = "seal",
) -> dict[str, Any]:
    """Read a record of `write_sealed`, without its seal. Raises UserError if it is missing, broken
    or changed.

    `unsealed`: or one without a seal, as archives of earlier versions hold.
    """
    record = read_json(path, what, next=next)
    if not is_sealed(record, key) and not (
        unsealed and isinstance(record, dict) and key not in record
    ):
        expected = f"`{key}`, the SHA-256 of its content"
        raise UserError(
            f"the {what} has changed since it was written.", path=path, expected=expected, next=next
        )
    return {name: value for name, value in record.items() if name != key}


def pretty_json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def read_manifest_file(
    path: str | Path, what: str, newest: int, next: str, oldest: int = 0, *, sealed: bool = False
) -> dict[str, Any]:
    """Read a manifest and check its schema version, and its seal or its hash in `build.json`.

    Raises UserError for a missing, broken, changed, too new or too old manifest. `next` is the
    command to rebuild it.
    """
    manifest = read_json(path, what=f"manifest of the {what}", next=next)
    version = manifest.get("schema_version", 0) if isinstance(manifest, dict) else None
    if type(version) is not int:
        raise UserError(f"the file is not a manifest of a {what}.", manifest=path, next=next)
    if not oldest <= version <= newest:
        writer, expected = (
            ("a newer", f"at most {newest}")
            if version > newest
            else ("an older", f"at least {oldest}")
        )
        facts = {"manifest": path, "found": f"schema_version {version}", "expected": expected}
        following = ("upgrade tokenscale, or rebuild: " if version > newest else "rebuild: ") + next
        raise UserError(f"the {what} was written by {writer} tokenscale.", **facts, next=following)
    if sealed:
        return read_record(path, what=f"manifest of the {what}", next=next)
    build = Path(path).with_name("build.json")
    try:
        stated = read_json(build)["manifest_sha256"]
    # not copied, or of a store, whose manifest has its own hash
    except (UserError, LookupError, TypeError):
        return manifest
    if stated != (found := sha256_text(canonical_json(manifest))):
        facts = {
            "manifest": path,
            "expected": f"sha256 {stated}  ({build.name})",
            "found": f"sha256 {found}",
        }
        raise UserError(f"the manifest of the {what} has changed.", **facts, next=next)
    return manifest


@contextmanager
def report_malformed(path: str | Path, what: str, next: str) -> Iterator[None]:
    """Turn errors while reading a file's content (missing keys, wrong types) into a UserError that
    names the file.
    """
    try:
        yield
    except UserError as error:
        facts = {"file": path, **error.facts}
        raise UserError(error.what, **facts) from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"the {what} does not have the expected content.", file=path, reason=reason, next=next
        ) from None


def check_types(found: dict[str, Any], fields: dict[str, Any]) -> None:
    """Check the types of a JSON object's values. Raises KeyError and TypeError for
    `report_malformed` to catch.
    """
    for name, kind in fields.items():
        value = found[name]
        if not isinstance(value, dict if isinstance(kind, dict) else kind) or isinstance(
            value, bool
        ):
            raise TypeError(f"{name} is {type(value).__name__}")
        if isinstance(kind, dict):
            check_types(value, fields=kind)


def check_file_name(name: object) -> str:
    """Return the name if it is a plain file name. Raises ValueError for `../x`, `/x` and the
    like.
    """
    if (
        not isinstance(name, str)
        or "\0" in name
        or Path(name).name != name
        or name in ("", "..", ".")
    ):
        raise ValueError(f"{name!r} is not a plain file name")
    return name


def check_relative_path(name: object) -> str:
    """Return the name if it is a path of plain file names, such as `parts/00001/x`. Raises
    ValueError otherwise.
    """
    return "/".join(map(check_file_name, name.split("/") if isinstance(name, str) else [name]))


def open_inside(root: Path, name: object) -> int:
    """Open a regular file to read, by a name that came from data, below a folder that the caller
    names; return its descriptor. `create_inside` writes.

    Each folder is opened below the one before it, and no link is followed. Raises ValueError for a
    name that is no path of plain file names, and for one that leads through a link;
    FileNotFoundError; and UserError if the file is a link, a folder, a FIFO or a device.
    """
    *folders, last = check_relative_path(name).split("/")
    folder = _open_folder(root, folders, make=False)
    path = root.joinpath(*folders, last)
    try:
        return open_file(path, follow=False, folder=folder)
    finally:
        _close(folder, path)


@contextmanager
def create_inside(root: Path, name: object, durable: bool = True) -> Iterator[BufferedRandom]:
    """Yield a new file, which gets a name that came from data, below a folder that the caller
    names, once the block ends.

    Each folder is opened below the one before it, and no link is followed: whoever replaces a
    folder by a link meanwhile cannot lead the file elsewhere. Missing folders are made.

    Raises ValueError for a name that is no path of plain file names, and for one that leads through
    a link.
    """
    root.mkdir(parents=True, exist_ok=True)
    folders, path = _split_new_name(root, name)
    temporary = f"{name_temporary()}{os.urandom(4).hex()}.{path.name}.tmp"
    with naming(path):
        folder = _open_folder(root, folders, make=True)
    try:
        _remove_left_over(path.parent)
        with naming_anew(path):
            descriptor = os.open(
                temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder
            )
        try:
            with naming(path), open(descriptor, "w+b") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(descriptor)
            with naming_anew(path):
                os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):  # the first error is the one to report
                os.unlink(temporary, dir_fd=folder)
            raise
        if durable:
            with naming(path):
                os.fsync(folder)
    finally:
        _close(folder, path)


def _split_new_name(root: Path, name: object) -> tuple[list[str], Path]:
    """Return the folders of a name that came from data, and its path below the root. Raises
    ValueError for a name that is no path of plain file names, and for a path that is too long.
    """
    *folders, last = check_relative_path(name).split("/")
    path = root.joinpath(*folders, last)
    if (length := len(os.fsencode(path))) >= os.pathconf(root, "PC_PATH_MAX"):
        raise ValueError(f"the path has {length:,} bytes, which no other program opens")
    return folders, path


def move_inside(root: Path, file: str, name: object) -> None:
    """Give a file of a folder a name that came from data, below that folder.

    No link is followed; missing folders are made. Raises ValueError as `create_inside` does.
    """
    folders, path = _split_new_name(root, name)
    with naming(path):
        folder = _open_folder(root, folders, make=True)
    try:
        with naming_anew(path):
            os.rename(root / file, path.name, dst_dir_fd=folder)
            os.fsync(folder)
    finally:
        _close(folder, path)


def remove_inside(root: Path, name: object) -> None:
    """Remove a file by a name that came from data, if it is there, and the folders of the name that
    are then empty.

    No link is followed. Raises ValueError as `open_inside` does.
    """
    parts = check_relative_path(name).split("/")
    for depth in reversed(range(len(parts))):
        remove = os.unlink if depth == len(parts) - 1 else os.rmdir
        try:
            folder = _open_folder(root, parts[:depth], make=False)
            try:
                remove(parts[depth], dir_fd=folder)
            finally:
                _close(folder, root)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            return


def _open_folder(root: Path, parts: list[str], *, make: bool) -> int:
    """Open a folder below a root, part by part, and return its descriptor. `make`: with the folders
    that are missing. Raises ValueError for a link.
    """
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    path = root
    for part in parts:
        path = path / part
        try:
            if make:
                with naming_anew(path), suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            with naming_anew(path):
                deeper = os.open(
                    part,
                    os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
                    dir_fd=folder,
                )
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise ValueError(f"{path} is a link, or no folder") from None
            raise
        finally:
            _close(folder, path)
        folder = deeper
    return folder


@contextmanager
def naming_anew(path: str | Path) -> Iterator[None]:
    """Name the whole path in an error of the system that names one part of it."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        if error.filename2 is not None:  # of a rename: a part's name, too
            error.filename2 = None
        raise


def read_json(path: str | Path, what: str = "file", next: str | None = None) -> Any:
    """Read a JSON file. Raises UserError if it is missing, cannot be read, is broken, holds NaN or
    infinity, or is no regular file.
    """
    try:
        return parse_json(read_file(path))
    except FileNotFoundError:
        raise UserError(f"the {what} is missing.", path=path, next=next) from None
    except PermissionError as error:
        following = "make it readable for this user, then repeat the command"
        raise _report_unreadable(path, what, error=error, following=following) from None
    except OSError as error:
        raise _report_unreadable(path, what, error=error, following=LOOK_AT_DISK) from None
    except (ValueError, RecursionError) as error:  # including excessive nesting
        raise UserError(
            f"the {what} is not readable JSON.", path=path, reason=error, next=next
        ) from None


def _report_unreadable(path: str | Path, what: str, error: OSError, following: str) -> UserError:
    return UserError(
        f"the {what} cannot be read.", path=path, reason=error.strerror, next=following
    )


def parse_json(text: str | bytes, *, errors: str = "strict") -> Any:
    """Parse JSON as `pretty_json` writes it. Raises ValueError, also for numbers that are not
    finite, for an object that has a key twice, and for text that is not UTF-8 or no Unicode: half
    of a pair of surrogates, of which no hash can be made, unless `errors` encodes it.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    def parse_float(digits: str) -> float:
        number = float(digits)
        if not math.isfinite(number):
            raise ValueError(f"{digits[:20]} is too large a number")
        return number

    def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("an object has a key twice")
        return found

    text = text if isinstance(text, str) else text.decode("utf-8")
    found = json.loads(
        text,
        parse_constant=refuse,
        parse_float=parse_float,
        object_pairs_hook=build_object,
    )
    if re.search(r"\\u[dD][89a-fA-F]", text):
        json.dumps(found, ensure_ascii=False).encode("utf-8", errors)
    return found


def canonical_json(value: object) -> str:
    """Return JSON in one line, equal for equal values: sorted keys, no spaces, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def sha256_file(path: str | Path) -> str:
    with naming(path), open(open_file(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def expand_path(text: str) -> str:
    """Return a path or glob with `~`, `~user`, `$VARIABLE` and `${VARIABLE}` replaced, as a shell
    does.

    The name of an existing file and an address stay as they are. Raises UserError for a variable
    that is not set.
    """
    if "://" in text or os.path.exists(text):
        return text
    expanded = os.path.expandvars(os.path.expanduser(text))
    if unset := re.search(r"\$(?:([A-Za-z_]\w*)|\{(\w+)\})", expanded):
        name = unset[1] or unset[2]
        raise UserError(
            f"the variable {name} of a path is not set.", path=text, next=f"export {name}=FOLDER"
        )
    return expanded


def write_arguments(path: str | Path, words: list[str]) -> str:
    """Write words of a command to a file and return `@FILE`, which `read_arguments` replaces by
    them.

    Linux takes at most 128 KiB in one argument; lists of files and settings have no limit.
    """
    if not Path(path).is_file() or read_json(path) != words:
        write_json(path, value=words)
    return f"@{path}"


def read_arguments(words: list[str]) -> list[str]:
    """Return the words, with those of its file in place of each `@FILE.json`. Raises UserError for
    a missing file.
    """
    found: list[str] = []
    for word in words:
        words_of = (
            read_json(word[1:], what="file of arguments")
            if word[:1] == "@" and word.endswith(".json")
            else [word]
        )
        if not isinstance(words_of, list) or not all(isinstance(one, str) for one in words_of):
            raise UserError(
                "the file of arguments is no list of texts.",
                path=word[1:],
                next="rm it, and call again",
            )
        found += words_of
    return found
