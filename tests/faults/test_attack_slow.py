"""Attacks by time and number: slow clients, and too many of them (line 18 of the table in docs/security.md)."""

from __future__ import annotations

import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from headrace.wire.http2 import frames
from tritonclient.grpc import service_pb2

from tests.support.attacks import (
    SERVICE,
    Attacked,
    attack,
    busy_request,
    grpc_request,
    head,
    http_body,
    is_closed,
    is_idle,
)
from tests.support.http2_peer import HELLO, RawPeer, data, grpc_head, message, request
from tests.support.serving import HOST
from tests.support.waiting import until

pytestmark = pytest.mark.slow

pb: Any = service_pb2
INFER = SERVICE + "ModelInfer"
INFER_PATH = "/v2/models/affine/infer"
STEPS_PER_S = 20_000  # of `busy`, at the most

# --- 18: slow clients ----------------------------------------------------------------------------------------------------

HEADER_S, BODY_S, STALL_S = 1.0, 1.5, 1.5
SOON_S = 6.0  # by when each of them has taken effect, on a machine that does other things too


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server with little time and few places."""
    options = {
        "header-timeout-s": HEADER_S,
        "body-timeout-s": BODY_S,
        "stall-timeout-s": STALL_S,
        "keep-alive-timeout-s": 60,
        "max-connections": 40,
        "max-streams": 8,
        "max-header-bytes": 16384,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with attack(tmp_path_factory.mktemp("impatient"), *words) as server:
        yield server


def drip(connect: Callable[[], socket.socket], parts: Iterator[bytes]) -> float:
    """Connect, and send part after part until the server closes; return the seconds since before the connection."""
    start_s = time.monotonic()
    sock = connect()
    sock.settimeout(0.1)
    while time.monotonic() - start_s < SOON_S:
        try:
            sock.sendall(next(parts))
            if not sock.recv(65536):
                break
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            break
    sock.close()
    return time.monotonic() - start_s


def http_socket(server: Attacked) -> socket.socket:
    return socket.create_connection((HOST, server.server.port), timeout=10)


@pytest.mark.parametrize(
    ("start", "crumb"),
    [(b"POST /", b"x"), (b"POST /v2 HTTP/1.1\r\n", b"X: y\r\n"), (b"POST /v2 HTTP/1.1\r\nX: ", b"y"), (b"", b"\r\n")],
    ids=["a path", "headers", "a value", "empty lines"],
)
def test_headers_in_crumbs(impatient: Attacked, start: bytes, crumb: bytes) -> None:
    with impatient.reaches("header_timeout_s"):
        took_s = drip(partial(http_socket, impatient), itertools.chain([start + crumb], itertools.repeat(crumb)))
        assert HEADER_S * 0.9 <= took_s < SOON_S
    impatient.still_serves()


def test_connections_that_send_nothing_are_closed(impatient: Attacked) -> None:
    with impatient.reaches("header_timeout_s"):
        assert is_closed(http_socket(impatient), SOON_S)


def test_too_slow_requests_are_answered_with_an_error(impatient: Attacked) -> None:
    with impatient.connect() as wire:
        wire.pour([b"POST /v2 HTTP/1.1\r\nHost: localhost\r\n"])
        status, text = wire.answer()
        assert (status, "did not arrive in time" in text) == (408, True)
        assert wire.closed()


def test_empty_lines_between_requests_do_not_extend_the_timeout_forever(impatient: Attacked) -> None:
    """It ends the time that a connection may idle; something must begin anew."""
    body = http_body()
    with impatient.reaches("header_timeout_s"), impatient.connect() as wire:
        wire.pour([head(INFER_PATH, f"Content-Length: {len(body)}") + body])
        assert wire.answer() == (200, "")
        wire.pour([b"\r\n"])
        wire.socket.settimeout(SOON_S)
        assert wire.closed()


@pytest.mark.parametrize("path", [INFER_PATH, "/v2/models/nothing/infer", "/v2/logging"])
@pytest.mark.parametrize("header", ["Content-Length: 1000000", "Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_bodies_in_crumbs(impatient: Attacked, path: str, header: str) -> None:
    crumb = b"1\r\nx\r\n" if "chunked" in header else b"x"
    with impatient.reaches("body_timeout_s"):
        took_s = drip(partial(http_socket, impatient), itertools.chain([head(path, header)], itertools.repeat(crumb)))
        assert BODY_S * 0.9 <= took_s < SOON_S
    impatient.still_serves()


def test_a_body_delayed_by_the_previous_response_does_not_time_out(impatient: Attacked) -> None:
    """Two requests at once, and the first computes for longer than a body may take: the client is not to blame."""
    steps = 0
    for steps in (STEPS_PER_S, 4 * STEPS_PER_S):
        start_s = time.monotonic()
        assert impatient.call(busy_request(steps)) == ("OK", "")
        if time.monotonic() - start_s > 2 * BODY_S:
            break
    tensor = {"name": "STEPS", "datatype": "INT64", "shape": [1], "data": [steps]}
    first, second = json.dumps({"inputs": [tensor]}).encode(), http_body(id="x" * 200_000)
    with impatient.connect() as wire:
        wire.socket.settimeout(60)
        wire.pour([head("/v2/models/busy/infer", f"Content-Length: {len(first)}") + first])
        sender = threading.Thread(
            target=wire.pour, args=([head(INFER_PATH, f"Content-Length: {len(second)}") + second],)
        )
        sender.start()
        assert wire.answer() == (200, "")
        assert wire.answer() == (200, "")
        sender.join()


def many_columns(columns: int) -> tuple[bytes, bytes]:
    """A request for `row_sums` whose answer has 4 bytes a column."""
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, columns], "parameters": {"binary_data_size": 4 * columns}}
    header = http_body(tensor, parameters={"binary_data_output": True})
    lengths = (f"Content-Length: {len(header) + 4 * columns}", f"Inference-Header-Content-Length: {len(header)}")
    return head("/v2/models/row_sums/infer", *lengths), header + bytes(4 * columns)


def test_unread_responses_are_bounded_and_dropped(impatient: Attacked) -> None:
    """Twenty clients request 8 MB each, ten times, and read nothing: the held bytes are bounded, and then dropped."""
    start, body = many_columns(2 << 20)
    impatient.still_serves()
    with ExitStack() as stack, impatient.flat_memory(20 * 40 << 20):
        limits = ("stall_timeout_s", "body_timeout_s", "header_timeout_s")
        before = [impatient.reached(limit) for limit in limits]
        sockets = []
        for _ in range(20):
            sock = stack.enter_context(http_socket(impatient))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(0.5)
            sockets.append(sock)
        with ThreadPoolExecutor(20) as pool:
            list(pool.map(lambda sock: flood(sock, start + body), sockets))
        until(lambda: sum(impatient.samples("headrace_connections", protocol="http")) <= 1)
        ends = [impatient.reached(limit) - count for limit, count in zip(limits, before, strict=True)]
        # A client may be ended for a request that its own time-out cut short, and on a busy machine before it sends any.
        assert sum(ends) >= 20
        assert ends[0] > 0
    until(lambda: is_idle(impatient, "row_sums"))
    impatient.still_serves()


def flood(sock: socket.socket, content: bytes) -> None:
    """The same request again and again, until the server stops reading or closes."""
    try:
        for _ in range(10):
            sock.sendall(content)
    except (TimeoutError, BrokenPipeError, ConnectionResetError):
        pass


def test_a_slow_reader_gets_all_of_it(impatient: Attacked) -> None:
    """A client that reads a little now and then is no attacker."""
    start, body = many_columns(2 << 20)
    with http_socket(impatient) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.sendall(start + body)
        size, end_s = 0, time.monotonic() + 2.5 * STALL_S
        while time.monotonic() < end_s and size < 8 << 20:
            size += len(sock.recv(65536))
            time.sleep(0.03)  # far slower than the server writes; fast enough to drain the system's buffers
        while size < 8 << 20:
            more = sock.recv(1 << 20)
            assert more, "the server gave up on a client that reads"
            size += len(more)


# gRPC's slow clients.


def test_a_missing_preface(impatient: Attacked) -> None:
    for start in (b"", HELLO[:10], HELLO[:24]):
        sock = socket.create_connection((HOST, impatient.server.grpc_port))
        with impatient.reaches("header_timeout_s", "grpc"):
            sock.sendall(start)
            assert is_closed(sock, SOON_S)


def test_a_header_block_in_crumbs(impatient: Attacked) -> None:
    block = request(1, fields=grpc_head(INFER, (b"x", b"y" * 5_000)))
    parts = (block[index : index + 1] for index in range(40, len(block)))
    with impatient.reaches("header_timeout_s", "grpc"):
        connect = partial(socket.create_connection, (HOST, impatient.server.grpc_port))
        took_s = drip(connect, itertools.chain([HELLO + block[:40]], parts))
        assert HEADER_S * 0.8 <= took_s < SOON_S
    impatient.still_serves()


def test_a_message_in_crumbs(impatient: Attacked) -> None:
    with impatient.reaches("body_timeout_s", "grpc"), RawPeer(impatient.server.grpc_port) as peer:
        peer.send(request(1, end=False, fields=grpc_head(INFER)), data(1, struct.pack(">BI", 0, 1000)))
        stop = threading.Event()

        def crumbs() -> None:
            while not stop.wait(0.1):
                peer.send(data(1, b"x"))

        sender = threading.Thread(target=crumbs)
        sender.start()
        try:
            assert peer.trailers(1)["grpc-status"] == "4"  # DEADLINE_EXCEEDED
        finally:
            stop.set()
            sender.join()
    impatient.still_serves()


def test_answers_that_no_grpc_client_reads(impatient: Attacked) -> None:
    """Eight streams of large answers, and no window for any: bounded, and given up."""
    start, body = many_columns(1 << 20)
    del start
    created = pb.ModelInferRequest(model_name="row_sums", raw_input_contents=[body[-(4 << 20) :]])
    created.inputs.add(name="X", datatype="FP32", shape=[1, 1 << 20])
    content = message(created.SerializeToString())
    impatient.still_serves()
    with ExitStack() as stack, impatient.flat_memory(300 << 20):
        peer = stack.enter_context(RawPeer(impatient.server.grpc_port))
        before = impatient.reached("stall_timeout_s", "grpc")
        for stream in range(1, 17, 2):
            peer.send(request(stream, end=False, fields=grpc_head(INFER)), data(stream, content[:5]))
            peer.pour(stream, content[5:])
            peer.send(data(stream, b"", end=True))
        until(lambda: impatient.reached("stall_timeout_s", "grpc") - before >= 4)
        impatient.still_serves()
    until(lambda: is_idle(impatient, "row_sums"))


# Connections and streams.


def test_grpc_connections_beyond_the_limit(impatient: Attacked) -> None:
    with ExitStack() as stack:
        for _ in range(40):
            peer = stack.enter_context(RawPeer(impatient.server.grpc_port))
            assert peer.until(frames.SETTINGS)
        sock = stack.enter_context(socket.create_connection((HOST, impatient.server.grpc_port), timeout=10))
        assert is_closed(sock, SOON_S)
        assert impatient.infer(http_body()) == (200, ""), "HTTP has places of its own"
    until(lambda: impatient.call(grpc_request())[0] == "OK")


def test_streams_beyond_the_limit(impatient: Attacked) -> None:
    """SETTINGS carry the limit; streams beyond it are refused, and the others are answered."""
    with RawPeer(impatient.server.grpc_port) as peer:
        settings = dict(frames.read_settings(peer.until(frames.SETTINGS).payload))
        assert settings[frames.Setting.MAX_CONCURRENT_STREAMS] == 8
        before = impatient.reached("max_streams", "grpc")
        fields = grpc_head(SERVICE + "ModelStreamInfer")
        for stream in range(1, 201, 2):
            peer.send(request(stream, end=False, fields=fields))
        refused = [peer.until(frames.RST_STREAM) for _ in range(92)]
        assert {frame.code for frame in refused} == {frames.ErrorCode.REFUSED_STREAM}
        assert impatient.reached("max_streams", "grpc") - before == 92
    impatient.still_serves()
