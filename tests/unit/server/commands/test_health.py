"""`headrace health`: what a container's health check goes by."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from headrace.__main__ import main
from headrace.server.commands.connection import ServerAddress
from headrace.server.commands.health import main as health
from headrace.wire.tls import TlsFiles

NOWHERE = ServerAddress(port=1)


class Answers(BaseHTTPRequestHandler):
    """Answers each path by `responses`."""

    responses: ClassVar[dict[str, tuple[int, bytes]]] = {}

    def do_GET(self) -> None:
        status, body = self.responses.get(self.path, (404, b"{}"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Peer(ThreadingHTTPServer):
    """A server that answers by `responses`. The handshakes run one at a time: tests make one at a time."""

    daemon_threads = True

    def __init__(self, tls: TlsFiles | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        if tls is not None:
            self.socket = tls.ssl_context(()).wrap_socket(self.socket, server_side=True)

    def answer(self, **bodies: tuple[int, bytes]) -> None:
        self.answer_paths({f"/v2/health/{name}": response for name, response in bodies.items()})

    def answer_paths(self, responses: dict[str, tuple[int, bytes]]) -> None:
        Answers.responses = responses

    @property
    def here(self) -> ServerAddress:
        return ServerAddress(port=self.server_port)


@pytest.fixture
def peer() -> Iterator[Peer]:
    yield from running_peer(Peer())


def running_peer(server: Peer) -> Iterator[Peer]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_server_that_loads_is_live_but_not_ready(peer: Peer, capsys: pytest.CaptureFixture[str]) -> None:
    peer.answer(ready=(503, b'{"error": "models are being\\n\\u001b[31mloaded"}'), live=(200, b""))
    assert health([], peer.here) == 1
    assert f"{peer.here.url} is not ready: 503 models are being [31mloaded\n" == capsys.readouterr().err
    assert health(["--live"], peer.here) == 0


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'"text"', b"\xff\xfe", b"[" * 100_000])
def test_a_response_of_another_server_is_not_healthy(peer: Peer, body: bytes) -> None:
    peer.answer(ready=(500, body))
    assert health([], peer.here) == 1


def test_no_server_is_not_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert health([], NOWHERE) == 1
    assert "refused" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://[", "//"])
def test_an_unsupported_url_is_an_error(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert health(["--url", url], NOWHERE) == 1
    assert "is not ready" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_not_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as silent:  # listens, and no thread serves
        assert health(["--timeout", "0.05"], ServerAddress(port=silent.server_port)) == 1
    assert "timed out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("10.1.2.3", "http://10.1.2.3:8000"),
        ("localhost", "http://localhost:8000"),
    ],
)
def test_it_connects_to_the_configured_address(host: str, url: str) -> None:
    assert ServerAddress(host).url == url


@pytest.mark.parametrize(
    "words", [["explain", "digits"], ["infer", "digits", __file__], ["bench", "digits"], ["health"]]
)
def test_every_command_finds_the_server_of_the_environment(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_HTTP_PORT", "1")
    monkeypatch.setenv("HEADRACE_GRPC_PORT", "2")
    assert main(words) == 1
    assert f"127.0.0.1:{2 if words[0] == 'infer' else 1}" in "".join(capsys.readouterr().err.split())
    monkeypatch.setenv("HEADRACE_URL", "http://localhost:3")
    assert main(words) == 1
    assert f"localhost:{2 if words[0] == 'infer' else 3}" in "".join(capsys.readouterr().err.split())


def test_the_environment_of_the_server_sets_the_address(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.answer(ready=(200, b""))
    monkeypatch.setenv("HEADRACE_HOST", "0.0.0.0")
    monkeypatch.setenv("HEADRACE_HTTP_PORT", str(peer.server_port))
    assert main(["health"]) == 0
    monkeypatch.setenv("HEADRACE_HTTP_PORT", "eighty")
    assert main(["health"]) == 2


def test_it_imports_nothing_heavy() -> None:
    code = "import sys; from headrace.__main__ import main; main(['health', '--url', 'http://127.0.0.1:1'])"
    code += "; print([name for name in ('numpy', 'PIL', 'onnx', 'fastapi', 'grpc') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
