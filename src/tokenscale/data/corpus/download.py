"""Download of a remote source to `results/downloads/<corpus>/`: files checked by hash, and a manifest.

The configuration declares a hash after `#sha256=`. Without one, the first download records the hash in `hashes.json`
and later downloads must match it. The manifest is written last, so it lists complete files only.
"""

import importlib
import re
from pathlib import Path
from time import sleep
from typing import Any
from urllib.parse import unquote, urlsplit

import requests
import urllib3

from tokenscale.base.errors import UserError, redact_credentials
from tokenscale.base.files import lock_folder, read_json, sha256_file, sync, write_json
from tokenscale.base.progress import Progress
from tokenscale.settings.data import FILE_LISTS, CorpusSettings, SourceSettings
from tokenscale.settings.registry import DOWNLOADS

VERSION = 1
RECORD, MANIFEST = "hashes.json", "manifest.json"


def fetch_corpus(settings: CorpusSettings, directory: Path) -> dict[str, Any]:
    """Download the files of a corpus source into `directory` and return the manifest.

    Existing files with the right hash are kept. The module of the source defines `resolve(source, files, recorded)`,
    which returns {remote name: local name}, and `fetch(source, name, target, resumable)`. Raises UserError if a file
    cannot be downloaded or its hash differs from the declared or recorded one. A file with a wrong hash is deleted.
    """
    directory = Path(directory)
    source = settings.source
    if source.kind not in DOWNLOADS:
        raise UserError(
            "this corpus' source needs no download.",
            key="source.kind",
            found=source.kind,
            expected=", ".join(DOWNLOADS),
            next="python -m tokenscale corpus --help makes the corpus",
        )
    module = importlib.import_module(DOWNLOADS[source.kind])
    with lock_folder(directory, f"the download of {settings.name}"):
        record_path = directory / RECORD
        record: dict[str, str] = read_json(record_path, "record of hashes") if record_path.exists() else {}
        parts: dict[str, list[dict[str, Any]]] = {}
        used_names = {RECORD, MANIFEST}
        for key in FILE_LISTS:
            declared = dict(_split_hash(name) for name in getattr(source, key))
            listed = []
            for name, local in module.resolve(source, tuple(declared), list(record)).items():
                if local in used_names:  # two lists have a file of the same name
                    local = f"{key}-{local}"
                used_names.add(_check_local_name(local, name))
                target = directory / local
                sha256 = _download_file(module, source, name, target, declared.get(name), record)
                record[name] = sha256
                write_json(record_path, record)
                listed.append({"name": local, "from": name, "bytes": target.stat().st_size, "sha256": sha256})
            parts[key] = listed
        manifest = {
            "schema_version": VERSION,
            "kind": source.kind,
            **({"repository": source.repository, "revision": source.revision} if source.kind == "hub" else {}),
            **{key: listed for key, listed in parts.items() if listed},
        }
        write_json(directory / MANIFEST, manifest)
    return manifest


def _check_local_name(local: str, name: str) -> str:
    """Return the local file name. Raises UserError if it would leave the download folder: names may be untrusted."""
    parts = local.split("/")
    if "\0" in local or any(part in ("", ".", "..") for part in parts):
        raise UserError(
            "a file of the source would be written outside of its folder.",
            file=repr(name),
            found=repr(local),
            expected="a path without `..`, from the folder of the download on",
            next="name the file by another path, or choose another source",
        )
    return local


def _split_hash(name: str) -> tuple[str, str | None]:
    bare, _, sha256 = name.partition("#sha256=")
    return bare, sha256 or None


def _download_file(
    module: Any, source: SourceSettings, name: str, target: Path, declared: str | None, record: dict[str, str]
) -> str:
    """Download the file to `target` unless it is there, and return its hash. Raises UserError for a wrong hash."""
    expected = declared or record.get(name)
    if expected and target.is_file() and sha256_file(target) == expected:
        print(f"{target.name}: already here", flush=True)
        return expected
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".arriving")
    module.fetch(source, name, partial, resumable=expected is not None)
    digest = sha256_file(partial)
    if expected and digest != expected:
        size = partial.stat().st_size
        partial.unlink()
        raise UserError(
            "a downloaded file is not the one that was " + ("declared." if declared else "downloaded first."),
            file=name,
            expected=f"sha256 {expected}  ({'config' if declared else target.parent / RECORD})",
            found=f"sha256 {digest}  ({size:,} bytes, not kept)",
            next="check the declared hash and the address"
            if declared
            else f"the source has changed; to accept it, remove its line from {target.parent / RECORD}",
        )
    sync(partial)
    partial.replace(target)
    sync(target.parent)
    print(f"{target.name}: {target.stat().st_size:,} bytes, sha256 {digest}", flush=True)
    return digest


TRIES = 6
TIMEOUT_S = (10.0, 60.0)  # to connect, and between two reads
CHUNK_BYTES = 1 << 20
#: permanent errors, such as redirects to `file:` and `ftp:`
NO_SUCH_ADDRESS = (
    requests.exceptions.InvalidSchema,
    requests.exceptions.InvalidURL,
    requests.exceptions.MissingSchema,
    requests.exceptions.TooManyRedirects,
)
#: maximum length of a local file name; with prefix and suffix it fits the file system's limit of 255
LONGEST_NAME_BYTES = 200
#: an attempt that received this much resets the count of failures
PROGRESS_BYTES = 1 << 20
#: status codes to retry: the server or a proxy is busy
BUSY = {408, 425, 429, 500, 502, 503, 504}


def resolve(source: SourceSettings, files: tuple[str, ...], recorded: list[str]) -> dict[str, str]:
    """Return {URL: local file name}: the last part of the URL path, numbered if two are equal.

    URLs are untrusted: `%2F` in the last part creates no folder, and leading dots are removed.

    >>> resolve(SourceSettings(), ("https://h/a/b.txt", "https://h/..%2F..%2Fetc"), [])
    {'https://h/a/b.txt': 'b.txt', 'https://h/..%2F..%2Fetc': 'etc'}
    """
    names = [_local_name(address) for address in files]
    if len(set(names)) < len(names):
        names = [f"{number:05d}-{name}" for number, name in enumerate(names)]
    return dict(zip(files, names, strict=True))


def _local_name(address: str) -> str:
    name = re.split(r"[/\\]", unquote(urlsplit(address).path.rsplit("/", 1)[-1]))[-1]
    name = "".join(c for c in name if c.isprintable()).encode("utf-8")[-LONGEST_NAME_BYTES:].decode("utf-8", "ignore")
    return name.lstrip(".") or "file"


def fetch(
    source: SourceSettings,
    address: str,
    target: Path,
    *,
    resumable: bool = True,
) -> None:
    """Download a URL to `target`. A partial download is kept beside it and resumed, also by a later call.

    A partial download is resumed only if the server confirms that the content is unchanged (ETag or Last-Modified,
    RFC 9110, 13.1.5) or if `resumable`, when the caller checks a hash. Raises UserError if the server refuses, after
    TRIES attempts in a row without progress, and for a web page in place of a file.
    """
    part = target.with_name(target.name + ".part")
    record = target.with_name(target.name + ".part.json")
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _resume_download(address, part, record, resumable)
            break
        except _Retry as retry:
            reason, pause = retry.reason, retry.pause_s
        except NO_SUCH_ADDRESS as error:
            raise UserError(
                "a download leads to something that is not a web address.",
                address=address,
                reason=_first_line(error),
                expected="http:// or https://, also where a server sends it on to",
                next="use the address of the file itself",
            ) from None
        except requests.RequestException as error:
            reason, pause = _first_line(error), None
        after = part.stat().st_size if part.exists() else 0
        failures = 1 if after - before >= PROGRESS_BYTES else failures + 1
        if failures >= TRIES:
            raise UserError(
                "a download fails again and again.",
                address=address,
                tried=f"{failures} times in a row",
                reason=reason,
                kept=f"{after:,} bytes in {part}" if after else None,
                next="check the network and the address; the same command goes on where this one ended",
            )
        print(f"{redact_credentials(address)}: {reason}; trying again ({failures} of {TRIES - 1})", flush=True)
        sleep(pause if pause is not None else min(60.0, 2.0 ** (failures - 1)))
    part.replace(target)
    record.unlink(missing_ok=True)


class _Retry(Exception):
    """Temporary failure of one attempt."""

    def __init__(self, reason: str, pause_s: float | None = None):
        super().__init__(reason)
        self.reason, self.pause_s = reason, pause_s


def _resume_download(address: str, part: Path, record: Path, resumable: bool) -> None:
    """Request the missing bytes once and append them. Raises _Retry if the file is still incomplete."""
    received = part.stat().st_size if part.exists() else 0
    validator = read_json(record, "record of a begun download").get("validator") if record.exists() else None
    if received and not (validator or resumable):
        received = 0
    headers = {"Accept-Encoding": "identity"}
    if received:
        headers["Range"] = f"bytes={received}-"
        if validator:
            headers["If-Range"] = validator
    with requests.get(address, headers=headers, stream=True, timeout=TIMEOUT_S) as response:
        if response.status_code in BUSY:
            retry_after = response.headers.get("Retry-After", "")
            raise _Retry(
                f"the server answers {response.status_code}",
                min(60.0, float(retry_after)) if retry_after.isdigit() else None,
            )
        if response.status_code == 416:  # the partial file is longer than the server's file
            part.unlink(missing_ok=True)
            record.unlink(missing_ok=True)
            raise _Retry("the partial file is longer than the server's; starting over", 0.0)
        if not response.ok:
            raise UserError(
                "a server does not give a file.",
                address=address,
                answer=f"{response.status_code} {response.reason}",
                next="check the address, and whether it needs a login",
            )
        page = "html" in response.headers.get("Content-Type", "")
        if page and not urlsplit(address).path.endswith((".html", ".htm")):
            raise UserError(
                "an address gives a web page, not a file.",
                address=address,
                found=response.headers["Content-Type"],
                next="use the address of the file itself (often called `raw` or `resolve`)",
            )
        continued = response.status_code == 206 and response.headers.get("Content-Range", "").startswith(
            f"bytes {received}-"
        )
        if received and not continued:
            received = 0
        length = response.headers.get("Content-Length", "")
        total = received + int(length) if length.isdigit() else None
        write_json(record, {"address": address, "validator": _get_validator(response.headers)})
        progress = Progress(urlsplit(address).path.rsplit("/", 1)[-1], total_bytes=total)
        with part.open("ab" if received else "wb") as file:
            reason = "ended"
            try:
                # not `iter_content`, which drops the last bytes before a broken connection
                while piece := response.raw.read1(CHUNK_BYTES):
                    file.write(piece)
                    progress(0, len(piece))
            except urllib3.exceptions.HTTPError as error:
                reason = "timed out" if isinstance(error, urllib3.exceptions.TimeoutError) else "broke"
        progress.close()
    size = part.stat().st_size
    if size != total if total is not None else reason != "ended":
        raise _Retry(f"the connection {reason} after {size:,} of {total or 0:,} bytes")


def _get_validator(headers: requests.structures.CaseInsensitiveDict) -> str | None:
    tag = headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")


def _first_line(error: Exception) -> str:
    return redact_credentials((str(error).splitlines() or [type(error).__name__])[0][:200])
