"""Servers that stores are tested against: S3 (moto), a proxy with faults in front of it, and a small Hub."""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.serving import HOST

KEY_ID, SECRET = "AKIAHEADRACETEST", "a-secret-of-this-test"


@contextmanager
def serve_http(handler: type[BaseHTTPRequestHandler], host: str = HOST) -> Iterator[int]:
    """Serve on a free port until the context ends; yields the port."""
    server = ThreadingHTTPServer((host, 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class StoreHandler(BaseHTTPRequestHandler):
    """Answers with one call, without a log."""

    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Be silent."""

    def send(self, status: int, content: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def answering(answer: Callable[[StoreHandler], None]) -> type[StoreHandler]:
    """A handler that answers every request with one function."""
    return type("Handler", (StoreHandler,), dict.fromkeys(("do_GET", "do_HEAD", "do_CONNECT"), answer))


@contextmanager
def s3_server() -> Iterator[int]:
    """Run moto's S3 in this process; yields its port."""
    from moto.server import ThreadedMotoServer

    for name in ("werkzeug", "botocore", "boto3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    server = ThreadedMotoServer(HOST, 0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


def s3_client(port: int) -> Any:
    """A client of a server on this machine."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=f"http://{HOST}:{port}",
        region_name="us-east-1",
        aws_access_key_id=KEY_ID,
        aws_secret_access_key=SECRET,
        config=Config(proxies={}),
    )


def s3_environment(port: int) -> dict[str, str]:
    """Variables with which a program uses a server on this machine."""
    return {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{HOST}:{port}",
        "NO_PROXY": HOST,
    }


class FaultyProxy:
    """Passes requests on to a server of this machine, with faults.

    Attributes:
        requests: method and path of every request, in order.
        before: called with method and path before a request is passed on.
        slow_downs: number of next requests that get 503 SlowDown.
        cuts: number of next reads of objects whose connection is closed after half of the body.
        byte_counts: bytes of the body of each answered GET, by path.
    """

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._lock = threading.Lock()
        self.requests: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda _method, _path: None
        self.slow_downs = 0
        self.cuts = 0
        self.byte_counts: dict[str, int] = {}

    @contextmanager
    def serve(self) -> Iterator[int]:
        """Serve until the context ends; yields the port."""
        with serve_http(answering(lambda handler: self.answer(handler))) as port:
            yield port

    def reads(self, part: str = "") -> list[str]:
        """Paths of objects that were read, of those with `part` in them."""
        return [path for method, path in self.requests if method == "GET" and "?" not in path and part in path]

    def answer(self, handler: StoreHandler) -> None:
        method, path = handler.command, unquote(handler.path)
        with self._lock:
            self.requests.append((method, path))
            is_slow, is_cut = self.slow_downs > 0, self.cuts > 0 and "?" not in path
            self.slow_downs -= is_slow
            self.cuts -= is_cut and not is_slow
        self.before(method, path)
        if is_slow:
            body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
            handler.send(503, body, {"Content-Type": "application/xml"})
            return
        upstream = http.client.HTTPConnection(HOST, self._upstream, timeout=30)
        headers = {name: value for name, value in handler.headers.items() if name.lower() != "connection"}
        upstream.request(method, handler.path, headers=headers)
        response = upstream.getresponse()
        content = response.read()
        upstream.close()
        kept = {
            name: value for name, value in response.getheaders() if name.lower() not in ("connection", "server", "date")
        }
        if is_cut and response.status in (200, 206):
            content = content[: len(content) // 2]
            handler.close_connection = True
        with self._lock:
            self.byte_counts[path] = self.byte_counts.get(path, 0) + len(content)
        handler.send(response.status, content, {"Content-Length": str(len(content)), **kept})


class HubServer:
    """A Hub with one repository: commits of files, read as huggingface_hub reads them.

    Attributes:
        files: content by path, of the next commit.
        lfs: paths whose files have a SHA-256.
        token: that requests must have; "" for none.
        cuts: number of next reads of files whose connection is closed after half of the body.
        slow_downs: number of next requests that get 503.
        corrupt: paths of files that arrive with other bytes.
        before_file: called once before the next file is read.
        reads: path of every file that was read.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._commits: dict[str, dict[str, bytes]] = {}
        self._head = ""
        self.lfs: set[str] = set()
        self.token = ""
        self.cuts = 0
        self.slow_downs = 0
        self.corrupt: set[str] = set()
        self.before_file: Callable[[], object] | None = None
        self.reads: list[str] = []

    def commit(self, files: Mapping[str, bytes]) -> str:
        """Make these files the branch `main`; returns the commit."""
        text = json.dumps({path: hashlib.sha1(content).hexdigest() for path, content in sorted(files.items())})
        self._head = hashlib.sha1(text.encode()).hexdigest()
        self._commits[self._head] = dict(files)
        return self._head

    @contextmanager
    def serve(self) -> Iterator[int]:
        """Serve until the context ends; yields the port."""
        with serve_http(answering(lambda handler: self.answer(handler))) as port:
            yield port

    def answer(self, handler: StoreHandler) -> None:
        if self.slow_downs:
            self.slow_downs -= 1
            handler.send(503, b"{}", {"Retry-After": "0"})
            return
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            handler.send(401, b'{"error":"Repository not found"}', {"X-Error-Code": "RepoNotFound"})
            return
        path = unquote(urlsplit(handler.path).path)
        if match := re.fullmatch(rf"/api/models/{self._name}/revision/(.+)", path):
            self._send_commit(handler, match[1])
        elif match := re.fullmatch(rf"/api/models/{self._name}/tree/([0-9a-f]+)/?(.*)", path):
            self._send_tree(handler, match[1], match[2])
        elif match := re.fullmatch(rf"/{self._name}/resolve/([0-9a-f]+)/(.+)", path):
            self._send_file(handler, match[1], match[2])
        else:
            handler.send(404, b'{"error":"Repository not found"}', {"X-Error-Code": "RepoNotFound"})

    def _send_commit(self, handler: StoreHandler, revision: str) -> None:
        commit = self._head if revision == "main" else revision
        if commit not in self._commits:
            handler.send(404, b'{"error":"Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"})
            return
        content = json.dumps({"id": self._name, "sha": commit, "siblings": [], "tags": [], "private": False})
        handler.send(200, content.encode(), {"Content-Type": "application/json"})

    def _send_tree(self, handler: StoreHandler, commit: str, folder: str) -> None:
        rows = []
        for path, content in self._commits[commit].items():
            if folder and not path.startswith(f"{folder}/"):
                continue
            row: dict[str, object] = {"type": "file", "oid": _git_digest(content), "size": len(content), "path": path}
            if path in self.lfs:
                row["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            rows.append(row)
        if not rows:
            handler.send(404, b'{"error":"Entry not found"}', {"X-Error-Code": "EntryNotFound"})
            return
        handler.send(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})

    def _send_file(self, handler: StoreHandler, commit: str, path: str) -> None:
        before_file, self.before_file = self.before_file, None
        if before_file is not None:
            before_file()
        content = self._commits[commit].get(path)
        if content is None:
            handler.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        digest = hashlib.sha256(content).hexdigest() if path in self.lfs else _git_digest(content)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if handler.command == "GET":
            self.reads.append(path)
        if path in self.corrupt:
            content = bytes(byte ^ 1 for byte in content)
        status, start = 200, 0
        if match := re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", "")):
            status, start = 206, int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        rest = content[start:]
        headers["Content-Length"] = str(len(rest))
        if handler.command == "GET" and self.cuts:
            self.cuts -= 1
            rest = rest[: len(rest) // 2]
            handler.close_connection = True
        handler.send(status, rest, headers)


def _git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
