"""A web server on the loopback interface that misbehaves as it is told to, and speaks enough of the
hub's language.
"""

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Web:
    """Paths and what they hold; `cut`, `silent` and `canned` are used up one request at a time."""

    files: dict[str, bytes] = field(default_factory=dict)
    #: path → bytes after which the next connections break
    cut: dict[str, list[int]] = field(default_factory=dict)
    #: path → bytes after which the next connections say nothing for `silent_s`, and then break
    silent: dict[str, list[int]] = field(default_factory=dict)
    silent_s: float = 0.0
    #: path → (status code, headers, content) of the next answers
    canned: dict[str, list[tuple[int, dict[str, str], bytes]]] = field(default_factory=dict)
    content_types: dict[str, str] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    etags: bool = True
    #: (method, path, Range) of every request
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    address: str = ""

    def add_dataset(self, repository: str, commit: str, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            self.files[f"/datasets/{repository}/resolve/{commit}/{name}"] = content
        listing = {
            "id": repository,
            "sha": commit,
            "siblings": [{"rfilename": name} for name in files],
            "tags": [],
        }
        listing |= dict.fromkeys(("private", "disabled", "gated"), False) | {
            "downloads": 0,
            "likes": 0,
        }
        tree = [
            {"type": "file", "path": n, "size": len(c), "oid": "0" * 40} for n, c in files.items()
        ]
        for path, value in ((f"revision/{commit}", listing), (f"tree/{commit}", tree)):
            self.files[f"/api/datasets/{repository}/{path}"] = json.dumps(value).encode()
            self.content_types[f"/api/datasets/{repository}/{path}"] = "application/json"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    web: Web

    def do_HEAD(self):
        self._serve(body=False)

    def do_GET(self):
        self._serve(body=True)

    def _serve(self, body: bool) -> None:
        web = self.web
        path = self.path.split("?")[0]
        web.requests.append((self.command, path, self.headers.get("Range")))
        if path in web.redirects:
            return self._empty(302, Location=web.redirects[path])
        if web.canned.get(path):
            status, headers, content = web.canned[path].pop(0)
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(content))} | headers).items():
                if value is not None:
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = True
            return None
        if path not in web.files:
            return self._empty(
                404, **({"X-Error-Code": "EntryNotFound"} if "/resolve/" in path else {})
            )
        content = web.files[path]
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        start = self._start(content, tag)
        if start is not None and start >= len(content):
            return self._empty(416)
        self.send_response(200 if start is None else 206)
        rest = content[start or 0 :]
        self.send_header("Content-Length", str(len(rest)))
        self.send_header("Content-Type", web.content_types.get(path, "application/octet-stream"))
        if start is not None:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if web.etags:
            self.send_header("ETag", tag)
        parts = path.split("/")
        if "resolve" in parts:
            self.send_header("X-Repo-Commit", parts[parts.index("resolve") + 1])
        self.end_headers()
        if not body:
            return None
        ends = web.silent.get(path) or web.cut.get(path)
        if not ends:
            self.wfile.write(rest)
            return None
        self.wfile.write(rest[: ends.pop(0)])
        if ends is web.silent.get(path):
            self.wfile.flush()
            time.sleep(web.silent_s)
        self.close_connection = True
        self.connection.close()
        return None

    def _start(self, content: bytes, tag: str) -> int | None:
        asked = self.headers.get("Range")
        if not asked or not self.web.ranges or self.headers.get("If-Range", tag) != tag:
            return None
        return int(asked.removeprefix("bytes=").split("-")[0])

    def _empty(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """A client that went away, after a connection was cut on purpose."""


class Server:
    """`with Server() as web:` serves `web.files` below `web.address`."""

    def __enter__(self) -> Web:
        web = Web()
        self._server = _Quiet(("127.0.0.1", 0), type("Handler", (_Handler,), {"web": web}))
        web.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return web

    def __exit__(self, *exception) -> None:
        self._server.shutdown()
        self._server.server_close()
