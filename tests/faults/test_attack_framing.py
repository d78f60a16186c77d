"""Attacks on the framing of HTTP/1.1 and on the order of its requests: S1, S2, S21 and S26."""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.attacks import Attacked, head, http_body, watched
from tests.support.processes import processor_s
from tests.support.serving import HOST
from tests.support.waiting import at_rest, until

INFER_PATH = "/v2/models/affine/infer"
GET = b"GET /v2/models/affine HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")


def infer_request(body: bytes, *headers: str, model: str = "affine") -> bytes:
    return head(f"/v2/models/{model}/infer", f"Content-Length: {len(body)}", *headers) + body


def statuses(content: bytes) -> list[int]:
    """Statuses of the responses in `content`, interim ones left out."""
    lines = [part.split(b"\r\n")[0] for part in content.split(b"HTTP/1.1 ")[1:]]
    return [status for status in (int(line[:3]) for line in lines) if status >= 200]


def exchange(server: Attacked, *parts: bytes, pause_s: float = 0.05) -> bytes:
    """Send parts in segments of their own, half-close, and read until the server closes."""
    with socket.create_connection((HOST, server.server.port), timeout=20) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for part in parts:
                sock.sendall(part)
                time.sleep(pause_s)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        return read_all(sock)


def read_all(sock: socket.socket) -> bytes:
    received = b""
    try:
        while part := sock.recv(1 << 20):
            received += part
    except ConnectionResetError:
        pass
    return received


# --- S1, S2: requests for an upgrade -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "upgrade", [UPGRADE, ("Connection: upgrade", "Upgrade: websocket"), ("Connection: Upgrade", "Upgrade: x")]
)
@pytest.mark.parametrize("segments", ["one", "two", "many"])
def test_the_body_of_a_request_for_an_upgrade_is_a_body(
    attacked: Attacked, upgrade: tuple[str, ...], segments: str
) -> None:
    """The body contains a request that unloads nothing, but would be answered."""
    smuggled = b"DELETE /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
    good, bad = http_body(), smuggled + bytes(200)
    with watched(attacked, "S1 upgrade with a body") as watch:
        for _ in range(3):  # a repeated head must not be served otherwise
            for body, status in ((good, 200), (bad, 400)):
                start = infer_request(b"", *upgrade).replace(b"Content-Length: 0", b"Content-Length: %d" % len(body))
                parts = {
                    "one": [start + body],
                    "two": [start, body],
                    "many": [start, *(body[i : i + 50] for i in range(0, len(body), 50))],
                }
                answer = exchange(attacked, *parts[segments], pause_s=0.01)
                assert statuses(answer) == [status], answer
                assert b"smuggled" not in answer.replace(bad, b"")
    watch.check()
    attacked.still_serves()


def test_chunked_and_large_bodies_of_requests_for_an_upgrade(attacked: Attacked) -> None:
    body = http_body()
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    for parts in (
        [head(INFER_PATH, "Transfer-Encoding: chunked", *UPGRADE), chunks],
        [head(INFER_PATH, "Transfer-Encoding: chunked", *UPGRADE) + chunks],
    ):
        assert statuses(exchange(attacked, *parts)) == [200]
    columns = 100_000
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, columns], "parameters": {"binary_data_size": 4 * columns}}
    header = http_body(tensor)
    size = f"Inference-Header-Content-Length: {len(header)}"
    large = infer_request(header + bytes(4 * columns), size, *UPGRADE, model="row_sums")
    assert statuses(exchange(attacked, large + GET)) == [200, 200]
    assert statuses(exchange(attacked, large[:300], large[300:], GET)) == [200, 200]


def test_pipelined_requests_for_an_upgrade_are_each_answered(attacked: Attacked) -> None:
    one = infer_request(http_body(), *UPGRADE)
    assert statuses(exchange(attacked, one * 5 + GET + one)) == [200] * 7


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_with_an_upgrade_to_http_2(attacked: Attacked, tmp_path: Path) -> None:
    for size in (10, 2_000_000):  # with the larger one, curl waits for 100 Continue
        (tmp_path / "body").write_bytes(http_body(id="x" * size))
        command = [
            "curl",
            "-sS",
            "--http2",
            "-o",
            "/dev/null",
            "-w",
            "%{http_code} %{http_version}",
            "--data-binary",
            f"@{tmp_path}/body",
        ]
        ran = subprocess.run(
            [*command, f"{attacked.server.url}{INFER_PATH}"], capture_output=True, text=True, timeout=30
        )
        assert ran.stdout == "200 1.1", ran.stderr


def test_connect_and_http_2_are_refused(attacked: Attacked) -> None:
    for start in (
        b"CONNECT other.example:443 HTTP/1.1\r\nHost: other.example\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):
        answer = exchange(attacked, start + GET)
        assert statuses(answer) in ([501], [400], [421]), answer
    attacked.still_serves()


# --- Other shapes of smuggling -------------------------------------------------------------------------------------------

AMBIGUOUS = [
    "Content-Length: 5\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nContent-Length: 5",
    "Content-Length: 5\r\nContent-Length: 5",
    "Content-Length: 5\r\nContent-Length: 6",
    "Content-Length: 5, 5",
    "Content-Length: +5",
    "Content-Length: -5",
    "Content-Length: 0x5",
    "Content-Length: 1e3",
    "Content-Length: 5 5",
    "Content-Length: ",
    "Content-Length: 18446744073709551621",
    "Content-Length : 5",
    "Content-Length: 5\nX: y",
    "X: y\nContent-Length: 5",
    "X: y\rContent-Length: 5",
    "X: y\r\n z\r\nContent-Length: 5",
    " Content-Length: 5",
    "Transfer-Encoding: chunked, identity",
    "Transfer-Encoding: identity",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: xchunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding:\x0bchunked",
    "Transfer-Encoding : chunked",
    "Transfer-Encoding\r\n: chunked",
    "Transfer-Encoding: \x00chunked",
]


@pytest.mark.parametrize("extra", [(), UPGRADE, ("Expect: 100-continue",)], ids=["plain", "upgrade", "expect"])
@pytest.mark.parametrize("ambiguous", AMBIGUOUS)
def test_ambiguous_lengths_are_refused(attacked: Attacked, ambiguous: str, extra: tuple[str, ...]) -> None:
    """One error, and the connection is closed: nothing behind it is a request."""
    content = head(INFER_PATH, *extra, ambiguous) + b"5\r\nhello\r\n0\r\n\r\n" + GET
    for parts in ([content], [content[:-60], content[-60:]]):
        with socket.create_connection((HOST, attacked.server.port), timeout=20) as sock:
            for part in parts:
                try:
                    sock.sendall(part)
                except OSError:
                    break
                time.sleep(0.02)
            answer = read_all(sock)
        assert statuses(answer) in ([400], [501]), answer
        assert answer.lower().count(b"connection: close") == 1


@pytest.mark.parametrize("warm", [False, True], ids=["parsed", "repeated"])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_bytes_after_the_last_request_are_dropped(attacked: Attacked, warm: bool, version: str) -> None:
    body = http_body()
    last = infer_request(body, "Connection: close").replace(b"HTTP/1.1", b"HTTP/" + version.encode())
    before = infer_request(body) if warm else b""
    for tail in (GET, b"garbage\r\n\r\n" * 1000, last):
        with attacked.connect() as wire:
            if warm:
                for _ in range(3):
                    wire.pour([before])
                    assert wire.answer() == (200, "")
            wire.pour([last + tail])
            answer = read_all(wire.socket)
        assert statuses(answer) == [200], answer


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_interim_and_empty_responses_keep_the_order(attacked: Attacked, method: str) -> None:
    body = http_body()
    expecting = head(INFER_PATH, f"Content-Length: {len(body)}", "Expect: 100-continue")
    answer = exchange(attacked, GET.replace(b"GET", method.encode()) + expecting, body, GET)
    assert answer.count(b"HTTP/1.1 100 Continue") == 1
    assert statuses(answer) == [200] * 3


# --- S21: clients that half-close ----------------------------------------------------------------------------------------


def half_closing(server: Attacked, content: bytes) -> list[int]:
    with socket.create_connection((HOST, server.server.port), timeout=30) as sock:
        sock.sendall(content)
        sock.shutdown(socket.SHUT_WR)
        return statuses(read_all(sock))


def busy_body(steps: int) -> bytes:
    return http_body({"name": "STEPS", "datatype": "INT64", "shape": [1], "data": [steps]})


def test_a_client_that_half_closes_is_answered(attacked: Attacked) -> None:
    body, columns = http_body(), 200_000
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, columns], "parameters": {"binary_data_size": 4 * columns}}
    header = http_body(tensor)
    size = f"Inference-Header-Content-Length: {len(header)}"
    requests = {
        "small": (infer_request(body), 1),
        "large": (infer_request(header + bytes(4 * columns), size, model="row_sums"), 1),
        "chunked": (head(INFER_PATH, "Transfer-Encoding: chunked") + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), 1),
        "pipelined": (infer_request(body) * 3 + GET * 2, 5),
        "many pipelined": (infer_request(body) * 300, 300),
        "slow": (infer_request(busy_body(2_000), model="busy") + infer_request(body), 2),
        "control": (GET, 1),
        "upgrade": (infer_request(body, *UPGRADE), 1),
        "incomplete behind complete": (infer_request(body) + infer_request(body)[:-5], 1),
        "part of a head behind complete": (infer_request(body) + GET[:-5], 1),
    }
    with watched(attacked, "S21 half-closed clients") as watch:
        for name, (content, answers) in requests.items():
            for _ in range(20 if answers < 9 else 2):
                assert half_closing(attacked, content) == [200] * answers, name
        for incomplete in (GET[:-3], infer_request(body)[:-3], b"", infer_request(header + bytes(4 * columns))[:-9]):
            assert half_closing(attacked, incomplete) == []
    watch.check()
    attacked.still_serves()


def test_a_half_closed_client_that_is_gone_is_noticed(attacked: Attacked) -> None:
    """The waiting requests of clients that have closed their sockets are abandoned within seconds, not computed."""
    before = sum(attacked.samples("headrace_failures_total", model="busy", reason="cancelled"))
    occupied = [attacked.connect() for _ in range(2)]
    content = infer_request(busy_body(200_000), model="busy")  # some 6 s or more
    for wire in occupied:
        wire.pour([content])
    until(lambda: sum(attacked.samples("headrace_in_flight", model="busy")) >= 1)
    for _ in range(30):
        with socket.create_connection((HOST, attacked.server.port)) as sock:
            sock.sendall(infer_request(busy_body(10), model="busy"))
    until(lambda: sum(attacked.samples("headrace_failures_total", model="busy", reason="cancelled")) - before >= 30)
    for wire in occupied:
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wire.socket.close()
    until(lambda: not sum(attacked.samples("headrace_in_flight", model="busy")))
    attacked.still_serves()


@pytest.mark.parametrize("content", [b"\r\n\r\n", b"aaaa"], ids=["ends of heads", "letters"])
def test_a_body_of_ends_of_heads_costs_what_any_body_costs(attacked: Attacked, content: bytes) -> None:
    """Reads with many ends of heads were cut at each of them, also inside a body: 0.6 s of processor time for each MiB."""
    chunk = content * (2 << 20)
    request = head(INFER_PATH, "Transfer-Encoding: chunked") + b"%x\r\n" % len(chunk) + chunk + b"\r\n0\r\n\r\n"
    with watched(attacked, f"S26 body of {content!r}") as watch:
        before_s = processor_s(attacked.server.process.pid)
        assert statuses(exchange(attacked, request)) == [400]
        assert processor_s(attacked.server.process.pid) - before_s < 1.5
    watch.check()


# --- S26: pipelined requests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["infer", "control", "upgrade", "head"])
def test_pipelined_requests_are_not_read_ahead(attacked: Attacked, kind: str) -> None:
    """40,000 requests in a row, whose responses are never read: the connection is not read any more."""
    one = {
        "infer": infer_request(http_body()),
        "control": GET,
        "upgrade": infer_request(http_body(), *UPGRADE),
        "head": GET.replace(b"GET", b"HEAD"),
    }[kind]
    with watched(attacked, f"S26 pipelined requests, {kind}") as watch:
        socks = [socket.create_connection((HOST, attacked.server.port)) for _ in range(4)]
        for sock in socks:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(0.5)
            try:
                for _ in range(40):
                    sock.sendall(one * 1_000)
            except TimeoutError:
                continue
            assert kind in ("control", "head"), "all of it was read: more than the system's buffers hold"
        at_rest(lambda: attacked.memory_bytes() >> 20)
        assert attacked.memory_bytes() - watch.before_bytes < 16 << 20
        for sock in socks:
            sock.close()
    watch.check()
    attacked.still_serves()


def test_pipelined_requests_are_all_answered_once_they_are_read(attacked: Attacked) -> None:
    """Paused and resumed many times: each is answered, in order."""
    count = 2_000
    content = b"".join(infer_request(http_body(id=str(number))) for number in range(count))
    with socket.create_connection((HOST, attacked.server.port), timeout=60) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        received, sent, end_s = b"", 0, time.monotonic() + 60
        while received.count(b"HTTP/1.1 200 OK") < count and time.monotonic() < end_s:
            with contextlib.suppress(BlockingIOError):
                sent += sock.send(content[sent : sent + 65536]) if sent < len(content) else 0
            if sent > 200_000 or sent == len(content):
                time.sleep(0.001)
                with contextlib.suppress(BlockingIOError):
                    received += sock.recv(65536)
    ids = [int(part.split(b'"', 1)[0]) for part in received.split(b'"id":"')[1:]]
    assert ids == list(range(count))
