"""Download of a remote source to `results/downloads/<corpus>/`: files checked by hash, and a
manifest.

Files come from web addresses, from a bucket (`s3://…`) through fsspec, or from a Hugging Face
dataset at a pinned commit through the hub's own client (cache, login, retries). The configuration
declares a hash after `#sha256=`. Without one, the first download records the hash in `hashes.json`
and later downloads must match it. The manifest is written last, so it lists complete files only.
"""

import gzip
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from glob import has_magic
from io import BufferedReader
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import requests
import urllib3
import zstandard

from tokenscale.base.bucket import REQUEST_FAILED, access_error, open_system
from tokenscale.base.errors import UserError, few, find_nearest, first_line, redact_credentials
from tokenscale.base.facts import unknown_fact
from tokenscale.base.files import (
    REPLACE,
    check_relative_path,
    lock_folder,
    move_inside,
    naming,
    open_inside,
    read_json,
    sha256_text,
    write_json,
    write_sealed,
)
from tokenscale.base.files import open_file as open_regular
from tokenscale.base.progress import Progress
from tokenscale.data.corpus.read import COMPRESSION, RawFile, unpack
from tokenscale.settings.data import FILE_LISTS, CorpusSettings, SourceSettings

VERSION = 1
RECORD = "hashes.json"
MANIFEST = "manifest.json"
#: while many files arrive, their hashes are recorded this often
RECORD_S = 10.0
#: attempts in a row without progress, and the bytes that count as progress
TRIES = 6
PROGRESS_BYTES = 1 << 20
#: longest pause that a server may demand (Retry-After)
LONGEST_PAUSE_S = 600.0
TIMEOUT_S = (10.0, 60.0)  # to connect, and between two reads
CHUNK_BYTES = 1 << 20
BUCKET_CHUNK_BYTES = 1 << 22
#: ending of a name → bytes that such a file begins and ends with
FORMS = {
    ".parquet": (b"PAR1", b"PAR1"),
    ".gz": (b"\x1f\x8b", b""),
    ".zst": (b"\x28\xb5\x2f\xfd", b""),
}
#: how pages of servers, their errors, and places of files that Git keeps elsewhere begin
MESSAGE = re.compile(rb"\s*(?:<!doctype html|<html|<\?xml|version https://git-lfs)", re.IGNORECASE)
#: a server's message is shorter
SHORT_BYTES = 4096
#: fact of a file whose server states no length: what ends early may look whole
NO_LENGTH = unknown_fact("the server states none")
#: bytes at the end of a file in which its last line is looked for
LONGEST_LINE = 1 << 20
#: maximum length of a local file name; with prefix and suffix it fits the file system's limit of
#: 255
LONGEST_NAME_BYTES = 200
#: status codes to retry: the server or a proxy is busy
BUSY = {408, 425, 429, 500, 502, 503, 504}


def fetch_corpus(settings: CorpusSettings, directory: Path) -> dict[str, Any]:
    """Download the files of a corpus source into `directory` and return the manifest.

    Existing files with the right hash are kept. Raises UserError if a file cannot be downloaded or
    its hash differs from the declared or recorded one. A file with a wrong hash is deleted.
    """
    directory = Path(directory)
    source = settings.source
    if source.kind not in DOWNLOADS:
        next_step = "tokenscale corpus --help makes the corpus"
        raise UserError(
            "this corpus' source needs no download.",
            key="source.kind",
            found=source.kind,
            next=next_step,
        )
    resolve, fetch = DOWNLOADS[source.kind]
    manifest: dict[str, Any] = {"schema_version": VERSION, "kind": source.kind}
    manifest |= (
        {"repository": source.repository, "revision": source.revision}
        if source.kind == "hub"
        else {}
    )
    with lock_folder(directory, what=f"the download of {settings.name}"):
        record = directory / RECORD
        recorded_at = monotonic()
        used_names = {RECORD, MANIFEST}
        hashes: dict[str, str] = (
            read_json(record, what="record of hashes") if record.exists() else {}
        )
        lengths = _read_unknown_lengths(directory / MANIFEST)
        try:
            for key in FILE_LISTS:
                declared = dict(file.partition("#sha256=")[::2] for file in getattr(source, key))
                for name, local in resolve(source, tuple(declared), list(hashes)).items():
                    while local in used_names:  # two lists have a file of the same name
                        local = f"{key}-{local}"
                    used_names.add(_check_local_name(local, name))
                    fetched = _fetch_file(
                        fetch,
                        source,
                        name=name,
                        directory=directory,
                        local=local,
                        declared=declared.get(name),
                        recorded=hashes.get(name),
                    )
                    hashes[name] = fetched.sha256
                    if fetched.unstated:
                        lengths[name] = NO_LENGTH
                    entry = {
                        "name": local,
                        "from": name,
                        "bytes": fetched.size,
                        "sha256": fetched.sha256,
                        **({"length": lengths[name]} if name in lengths else {}),
                    }
                    manifest.setdefault(key, []).append(entry)
                    if monotonic() - recorded_at > RECORD_S:
                        write_json(record, value=hashes)
                        recorded_at = monotonic()
        finally:
            if hashes:
                write_json(record, value=hashes)
        write_sealed(directory / MANIFEST, record=manifest)
    return manifest


def _read_unknown_lengths(manifest: Path) -> dict[str, str]:
    """Return remote name → what an earlier download recorded of a length that no server stated."""
    known = read_json(manifest, what="manifest of the download") if manifest.exists() else {}
    entries = [file for key in FILE_LISTS for file in known.get(key, ())]
    return {file["from"]: file["length"] for file in entries if "length" in file}


def _check_local_name(local: str, name: str) -> str:
    """Return the local file name. Raises UserError if it would leave the download folder: names may
    be untrusted.
    """
    with _refusing_names(local, name):
        os.fsencode(local)
        return check_relative_path(local)


@contextmanager
def _refusing_names(local: str, name: str) -> Iterator[None]:
    try:
        yield
    except ValueError:
        what = "a file of the source would be written outside of its folder."
        next_step = "name the file by another path"
        raise UserError(what, file=repr(name), found=repr(local), next=next_step) from None


class Fetched(NamedTuple):
    """Hash and size of a downloaded file; `unstated` if nothing states how long it must be."""

    sha256: str
    size: int
    unstated: bool = False


def _fetch_file(
    fetch: Callable[..., bool],
    source: SourceSettings,
    name: str,
    directory: Path,
    local: str,
    declared: str | None,
    recorded: str | None,
) -> Fetched:
    """Download the file `local` of a folder unless it is there. Raises UserError if it is not the
    declared one or, where none is declared, not the recorded one.
    """
    expected = declared or recorded
    shown = local.rpartition("/")[2]
    if expected and (found := _find_file(directory, local, expected)) is not None:
        print(f"{shown}: already here", flush=True)
        return found
    # directly in the folder: none of the folders of its name can be replaced by a link meanwhile
    part = directory / f"{shown}.part"
    stated = fetch(source, name, part, bool(expected))
    try:
        with open(open_regular(part, follow=False), "rb") as file, naming(part):
            check_form(name, file)
            if not expected:
                check_first_answer(name, RawFile(part, file))
            found = _measure(file)
            if expected and found.sha256 != expected:
                raise _other_file_error(
                    found,
                    name=name,
                    target=directory / local,
                    declared=declared,
                    expected=expected,
                )
            os.fsync(file.fileno())
        with _refusing_names(local, name):
            move_inside(directory, part.name, local)
    except UserError:
        part.unlink()
        raise
    unstated = not (stated or declared)
    print(f"{shown}: {found.size:,} bytes, sha256 {found.sha256}", flush=True)
    if unstated:
        print(f"{shown}: its length is {NO_LENGTH}", flush=True)
    return found._replace(unstated=unstated)


def _find_file(directory: Path, local: str, expected: str) -> Fetched | None:
    """Return the facts of an earlier download's file; None if it is missing, another file, a link
    or behind a link.
    """
    try:
        with open(open_inside(directory, local), "rb") as file, naming(directory / local):
            found = _measure(file)
    except (FileNotFoundError, UserError, ValueError):
        return None
    return found if found.sha256 == expected else None


def _measure(file: BufferedReader) -> Fetched:
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Fetched(digest, size=os.fstat(file.fileno()).st_size)


def _other_file_error(
    found: Fetched, name: str, target: Path, declared: str | None, expected: str
) -> UserError:
    what = (
        "a downloaded file is not the one that was "
        f"{'declared' if declared else 'downloaded first'}."
    )
    changed = (
        f"the source has changed; to accept it, remove its line from {RECORD} in the folder "
        "of the download"
    )
    return UserError(
        what,
        address=name,
        file=target,
        expected=f"sha256 {expected}",
        found=f"{found.sha256}  ({found.size:,} bytes)",
        next="check the declared hash and the address" if declared else changed,
    )


# --- the loop that downloads one file


class Answer(NamedTuple):
    """Bytes of a file from `start` on, the size of the whole file, and what identifies its content;
    None if unknown. `framed`: an early end of the connection is noticed.
    """

    pieces: Iterator[bytes]
    start: int
    size: int | None
    version: str | None
    framed: bool = True


class Retry(Exception):
    """Temporary failure of one attempt. With `restart`, the bytes received so far are of no use."""

    def __init__(self, reason: str, pause_s: float | None = None, restart: bool = False):
        super().__init__(reason)
        self.reason = reason
        self.pause_s = pause_s
        self.restart = restart


#: (address, first byte, version that these bytes must have) → the file from there on, or from its
#: beginning
Opener = Callable[[str, int, str | None], Answer]


def download(open_file: Opener, address: str, part: Path, resumable: bool) -> bool:
    """Download a file to `part`; return whether the server stated its length. What was received
    before a failure is kept and continued, also by a later call.

    It is continued only if the content still has the same version (RFC 9110, 13.1.5) or if
    `resumable`, when the caller checks a hash. Raises UserError if the server refuses, and after
    `TRIES` attempts in a row without progress.
    """
    record = part.with_name(part.name + ".json")
    failures = 0
    while True:
        before = _measure_size(part)
        try:
            stated = _receive(
                open_file,
                address,
                part=part,
                record=record,
                resumable=resumable,
            )
            record.unlink(missing_ok=True)
            return stated
        except Retry as retry:
            reason = retry.reason
            pause = retry.pause_s
            if retry.restart:
                part.unlink(missing_ok=True)
                record.unlink(missing_ok=True)
        failures = 1 if _measure_size(part) - before >= PROGRESS_BYTES else failures + 1
        if failures >= TRIES:
            kept = (
                f"{_measure_size(part):,} bytes in {part}; the same command continues there"
                if _measure_size(part)
                else None
            )
            what = "a download fails again and again."
            tried = f"{failures} times in a row"
            next_step = "check the network, the address and, of a bucket, AWS_ENDPOINT_URL"
            raise UserError(
                what, address=address, tried=tried, reason=reason, kept=kept, next=next_step
            )
        kept = f" ({_measure_size(part):,} bytes so far)" if _measure_size(part) else ""
        print(
            (
                f"{redact_credentials(address)}: {reason}{kept}; trying again ({failures} of "
                f"{TRIES - 1})"
            ),
            flush=True,
        )
        sleep(min(60.0, 2.0 ** (failures - 1)) if pause is None else pause)


def check_form(address: str, file: BufferedReader) -> None:
    """Raise UserError for a downloaded file that does not begin and end as its name says: a
    server's message, or a file cut short by a server that states no length.
    """
    name = urlsplit(address).path.lower()
    start, end = next((of for ending, of in FORMS.items() if name.endswith(ending)), (b"", b""))
    head = file.read(200)
    file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE))
    tail = file.read()
    whole = head.startswith(start) and tail.endswith(end)
    if name.endswith((".jsonl", ".ndjson")):
        whole = _ends_as_json_lines(tail)
    if not whole:
        raise _cut_error(address, begins=ascii(head[:60].decode("utf-8", "replace")))


def check_first_answer(address: str, file: RawFile) -> None:
    """Raise UserError for what no hash proves yet, and is nothing, a message of a server, or a
    compressed file that does not unpack to its end.
    """
    with file.open() as opened:
        head = opened.read(SHORT_BYTES)
    page = urlsplit(address).path.lower().endswith((".html", ".htm", ".xml"))
    if not head or (MESSAGE.match(head) and not page) or _is_error(head):
        raise _cut_error(address, begins=ascii(head[:60].decode("utf-8", "replace")))
    kind = COMPRESSION.get(Path(urlsplit(address).path.lower()).suffix)
    try:
        for _ in unpack(file, kind) if kind else ():
            pass
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise _cut_error(address, reason=first_line(error)) from None


def _is_error(head: bytes) -> bool:
    """Return whether a short file is one JSON object as servers send with an error."""
    try:
        found = json.loads(head) if len(head) < SHORT_BYTES else None
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and not {"error", "errors", "message", "detail"}.isdisjoint(
        found
    )


def _cut_error(address: str, **facts: str) -> UserError:
    return UserError(
        "what a server sent is not the whole of such a file.",
        address=address,
        **facts,
        next="check the address, and whether it needs a login, then repeat the command; if this is "
        "the file, write #sha256=HASH behind its address",
    )


def _ends_as_json_lines(tail: bytes) -> bool:
    """Return whether the last line is whole: it ends, or it is JSON. A line that is longer than
    the tail counts as whole.
    """
    line = tail.rpartition(b"\n")[2]
    if len(line) >= LONGEST_LINE or not line:
        return True
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _receive(open_file: Opener, address: str, part: Path, record: Path, resumable: bool) -> bool:
    """Request the missing bytes once and append them; return whether the size is known. Raises
    Retry if bytes are missing.
    """
    known = read_json(record, what="record of a begun download") if record.exists() else {}
    named = sha256_text(address)  # an address may hold a signature
    received = (
        _measure_size(part)
        if (known.get("version") or resumable) and known.get("address", named) == named
        else 0
    )
    answer = open_file(address, received, known.get("version"))
    facts: dict[str, Any] = {"address": named, "size": answer.size, "version": answer.version}
    if answer.start:
        changed = any(
            value is not None and known.get(key) not in (None, value)
            for key, value in facts.items()
        )
        if changed or answer.start != received:
            raise Retry(
                reason="the server sends other bytes than before; starting over",
                pause_s=0.0,
                restart=True,
            )
        facts = {key: known.get(key) if value is None else value for key, value in facts.items()}
    progress = Progress(urlsplit(address).path.rsplit("/", 1)[-1], total_bytes=facts["size"])
    how = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if answer.start else os.O_TRUNC)
    with (
        naming(part),
        open(open_regular(part, flags=how, follow=False), "ab" if answer.start else "wb") as file,
    ):
        # bytes of an earlier version are gone before the new one is recorded
        os.fsync(file.fileno())
        write_json(record, value=facts)
        for piece in answer.pieces:
            file.write(piece)
            progress(0, len(piece))
    progress.close()
    if facts["size"] is not None and (size := _measure_size(part)) != facts["size"]:
        raise Retry(
            f"the connection ended before {facts['size']:,} bytes", restart=size > facts["size"]
        )
    return answer.framed or facts["size"] is not None


def _measure_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _expand_patterns(
    files: tuple[str, ...],
    recorded: list[str],
    find: Callable[[str], tuple[list[str], list[str]]],
    error_of: Callable[[str, Exception], UserError],
) -> list[str]:
    """Return the remote files that match names and patterns. `find` returns the files that match a
    pattern, and names to suggest if none does.

    If the files cannot be listed, patterns are matched against `recorded`, the files of an earlier
    download of this corpus. Raises UserError for a pattern without a match, or if the files cannot
    be listed.
    """
    found: dict[str, None] = {}
    for pattern in files:
        names: list[str] = []
        try:
            matches, names = find(pattern) if has_magic(pattern) else ([pattern], [])
        except Exception as error:  # errors of the clients have no common base but Exception
            matches = [name for name in recorded if fnmatch(name, pattern)]
            if not matches:
                raise error_of(pattern, error) from None
            print(
                f"{pattern}: the files cannot be listed; taking those of the earlier download",
                flush=True,
            )
        if not matches:
            near = find_nearest(pattern, words=names)
            next_step = f"did you mean {near}?" if near else "correct `files` of the source"
            raise UserError(
                "no file of the source fits its pattern.",
                requested=pattern,
                has=few(names, shown=8),
                next=next_step,
            )
        found |= dict.fromkeys(sorted(matches))
    return list(found)


# --- web addresses


def resolve_urls(
    source: SourceSettings, files: tuple[str, ...], recorded: list[str]
) -> dict[str, str]:
    """Return {URL: local file name}: the last part of the URL path, numbered if two are equal.

    URLs are untrusted: `%2F` in the last part creates no folder, and leading dots are removed.

    >>> resolve_urls(SourceSettings(), ("https://h/a/b.txt", "https://h/..%2F..%2Fetc"), [])
    {'https://h/a/b.txt': 'b.txt', 'https://h/..%2F..%2Fetc': 'etc'}
    """
    names = [_local_name(address) for address in files]
    if len(set(names)) < len(names):
        names = [f"{number:05d}-{name}" for number, name in enumerate(names)]
    return dict(zip(files, names, strict=True))


def _local_name(address: str) -> str:
    name = re.split(r"[/\\]", unquote(urlsplit(address).path.rsplit("/", 1)[-1]))[-1]
    name = (
        "".join(c for c in name if c.isprintable())
        .encode("utf-8")[-LONGEST_NAME_BYTES:]
        .decode("utf-8", "ignore")
    )
    return name.lstrip(".") or "file"


def open_url(address: str, start: int, version: str | None) -> Answer:
    """Open a web address. Raises UserError for what is no file, and Retry for a server that is busy
    or gone.
    """
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers |= {"Range": f"bytes={start}-"} | ({"If-Range": version} if version else {})
    with _translate_web_errors(address):
        response = requests.get(address, headers=headers, stream=True, timeout=TIMEOUT_S)
    _check_response(address, response)
    first = 0
    size = response.headers.get("Content-Length", "")
    if response.status_code == 206:
        sent = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        first, size = (int(sent[1]), sent[2]) if sent else (-1, "")
    framed = any(name in response.headers for name in ("Content-Length", "Transfer-Encoding"))
    tag = response.headers.get("ETag", "W/")
    version = response.headers.get("Last-Modified") if tag.startswith("W/") else tag
    encoding = response.headers.get("Content-Encoding", "identity").lower()
    if encoding == "identity" or (
        encoding.endswith("gzip") and urlsplit(address).path.endswith((".gz", ".tgz"))
    ):
        return Answer(
            pieces=_read_body(address, response),
            start=first,
            size=int(size) if size.isdigit() else None,
            version=version,
            framed=framed,
        )
    if encoding not in ("gzip", "x-gzip", "deflate"):
        next_step = "download the file with another program, and use its path"
        raise UserError(
            "a server sends a file in an unknown encoding.",
            address=address,
            found=encoding,
            next=next_step,
        )
    if first:
        raise Retry(
            reason="the server compresses the file; starting over", pause_s=0.0, restart=True
        )
    return Answer(
        pieces=_read_body(address, response, decode=True),
        start=0,
        size=None,
        version=None,
        framed=framed,
    )


def _read_body(address: str, response: requests.Response, decode: bool = False) -> Iterator[bytes]:
    with _translate_web_errors(address), response:
        # not `iter_content`, which drops the last bytes before a broken connection
        while piece := response.raw.read1(CHUNK_BYTES, decode_content=decode):
            yield piece


@contextmanager
def _translate_web_errors(address: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, requests.TooManyRedirects) as error:  # such as a redirect to `file:`
        what = "a download leads to something that is not a web address."
        next_step = "use the address of the file itself"
        raise UserError(what, address=address, reason=first_line(error), next=next_step) from None
    except urllib3.exceptions.TimeoutError:
        raise Retry("the connection timed out") from None
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise Retry(first_line(error)) from None


def _check_response(address: str, response: requests.Response) -> None:
    content_type = response.headers.get("Content-Type", "")
    if response.status_code in BUSY:
        try:
            pause = urllib3.Retry().get_retry_after(response.raw)
        except urllib3.exceptions.InvalidHeader:
            pause = None
        raise Retry(
            f"the server answers {response.status_code}",
            pause_s=pause and min(LONGEST_PAUSE_S, pause),
        )
    if response.status_code == 416:
        raise Retry(
            reason="the partial file is not shorter than the server's; starting over",
            pause_s=0.0,
            restart=True,
        )
    if not response.ok:
        answer = f"{response.status_code} {response.reason}"
        next_step = "check the address, and whether it needs a login"
        raise UserError(
            "a server does not give a file.", address=address, answer=answer, next=next_step
        )
    if "html" in content_type and not urlsplit(address).path.endswith((".html", ".htm")):
        next_step = "use the address of the file itself (often called `raw` or `resolve`)"
        raise UserError(
            "an address gives a web page, not a file.",
            address=address,
            found=content_type,
            next=next_step,
        )


# --- buckets


def resolve_objects(
    source: SourceSettings, files: tuple[str, ...], recorded: list[str]
) -> dict[str, str]:
    """Return {address: local path}, the path within the bucket. Patterns are matched in the
    bucket.
    """

    # of no files nothing is asked
    system = open_system(files[0], extra="s3") if files else None

    def find(pattern: str) -> tuple[list[str], list[str]]:
        assert system is not None  # there is a pattern
        scheme, path = pattern.split("://", 1)
        if matches := system.glob(path):
            return [f"{scheme}://{name}" for name in matches], []
        folder = re.split(r"[*?[]", path)[0].rpartition("/")[0]
        return [], [f"{scheme}://{name}" for name in system.ls(folder, detail=False)]

    paths = {
        name: name.split("://", 1)[1]
        for name in _expand_patterns(
            files,
            recorded,
            find=find,
            error_of=access_error,
        )
    }
    keys = {address: path.partition("/")[2] for address, path in paths.items()}
    return keys if len(set(keys.values())) == len(keys) else paths  # of several buckets


def open_object(address: str, start: int, version: str | None) -> Answer:
    """Open an object of a bucket. Raises UserError if it is missing or not allowed, and Retry for
    other errors.
    """
    system = open_system(address, extra="s3")

    def inspect() -> tuple[int, str]:
        with _translate_bucket_errors(address):
            system.invalidate_cache()
            facts = system.info(address)
        return int(facts["size"]), f"{facts.get('ETag')}, {facts.get('LastModified')}"

    def read(first: int) -> Iterator[bytes]:
        while first < size:
            with _translate_bucket_errors(address):
                piece = system.cat_file(
                    address, start=first, end=min(first + BUCKET_CHUNK_BYTES, size)
                )
            if not piece:
                return
            yield piece
            first += len(piece)
        if inspect() != (size, now):
            raise Retry(
                reason="the file changed meanwhile; starting over", pause_s=0.0, restart=True
            )

    size, now = inspect()
    first = start if version == now and start <= size else 0
    return Answer(
        pieces=read(first),
        start=first,
        size=size,
        version=now,
    )


@contextmanager
def _translate_bucket_errors(address: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # errors of the clients have no common base but Exception
        found = access_error(address, error)
        raise (Retry(found.facts["reason"]) if found.what == REQUEST_FAILED else found) from None


# --- the hub


def resolve_hub_files(
    source: SourceSettings, files: tuple[str, ...], recorded: list[str]
) -> dict[str, str]:
    """Return {path in the repository: local file name}, which are equal. Patterns are matched in
    the repository.
    """
    repository = source.repository
    assert repository is not None  # the kind needs it

    @cache
    def list_files() -> list[str]:
        from huggingface_hub import HfApi

        return HfApi().list_repo_files(repository, repo_type="dataset", revision=source.revision)

    def find(pattern: str) -> tuple[list[str], list[str]]:
        return [name for name in list_files() if fnmatch(name, pattern)], sorted(list_files())

    names = _expand_patterns(
        files,
        recorded,
        find=find,
        error_of=lambda pattern, error: _hub_error(source, name=pattern, error=error),
    )
    return {name: name for name in names}


def fetch_hub_file(source: SourceSettings, name: str, part: Path, resumable: bool) -> bool:
    """Link one file to `part` from the hub's cache, after downloading it if needed. True: the
    client checks its length.

    The client honours HF_HOME and HF_HUB_OFFLINE. The file is copied if the cache is on another
    file system. Raises UserError with the client's own reason.
    """
    from huggingface_hub import hf_hub_download

    assert source.repository is not None  # the kind needs it
    try:
        cached = hf_hub_download(
            source.repository, name, repo_type="dataset", revision=source.revision
        )
    except Exception as error:  # the client's errors have no common base but Exception
        raise _hub_error(source, name, error=error) from None
    part.unlink(missing_ok=True)
    blob = Path(cached).resolve()
    try:
        os.link(blob, part)
    except OSError:
        with (
            open(open_regular(blob), "rb") as original,
            open(open_regular(part, flags=REPLACE, follow=False), "wb") as file,
        ):
            shutil.copyfileobj(original, file)
    return True


def _hub_error(source: SourceSettings, name: str, error: Exception) -> UserError:
    next_step = "check names, revision, network and, for gated data, `hf auth login`"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        next_step = (
            "unset HF_HUB_OFFLINE where there is a network, or bring the hub's cache here (HF_HOME)"
        )
    dataset = f"{source.repository} at {source.revision}"
    reason = f"{type(error).__name__}: {first_line(error)}"
    what = "the hub does not give a file of the dataset."
    return UserError(what, dataset=dataset, file=name, reason=reason, next=next_step)


#: kind of source → (`resolve(source, files, recorded)`, which returns {remote name: local name},
#: where `recorded` are the files of an earlier download, and `fetch(source, name, part,
#: resumable)`, which gets one file)
DOWNLOADS: dict[str, tuple[Callable[..., dict[str, str]], Callable[..., bool]]] = {
    "url": (resolve_urls, lambda source, *file: download(open_url, *file)),
    "bucket": (resolve_objects, lambda source, *file: download(open_object, *file)),
    "hub": (resolve_hub_files, fetch_hub_file),
}
