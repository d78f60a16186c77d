"""A real HTTP server in a thread that answers as it is told and keeps what it was sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@dataclass
class Received:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Answer = tuple[int, dict[str, str], bytes]


@dataclass
class ScriptedServer:
    """Answers "METHOD /path" as `say` or `do` told it, everything else by 404."""

    url: str = ""
    received: list[Received] = field(default_factory=list)
    _answers: dict[str, Callable[[Received], Answer]] = field(default_factory=dict)

    def say(self, route: str, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.do(route, lambda _received: (status, headers or {}, body))

    def do(self, route: str, answer: Callable[[Received], Answer]) -> None:
        self._answers[route] = answer

    def answer(self, received: Received) -> Answer:
        self.received.append(received)
        answer = self._answers.get(f"{received.method} {received.path}")
        return (404, {}, b'{"error":"no such path"}') if answer is None else answer(received)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    script = ScriptedServer()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, extra, answer = script.answer(Received(self.command, self.path, headers, body))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(answer)), **extra}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = handle_any  # noqa: N815 - the names that http.server calls

        def log_message(self, *_arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        script.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield script
        http.shutdown()
        thread.join()
