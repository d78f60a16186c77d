"""Requests with a known head on our HTTP protocol, against the same requests through the parser: bytes, leases, reservations."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import uvicorn
from headrace.core.errors import Overloaded
from headrace.core.limits import ClientLimits, Limits
from headrace.wire.http.codec import ModelCodec
from headrace.wire.http.connection import HeadraceHttpProtocol
from headrace.wire.http.infer_endpoint import InferEndpoint
from headrace.wire.http.repeated_request import RepeatedRequest
from headrace.wire.http.socket_reader import READ_BYTES, WIDE_READ_BYTES
from headrace.wire.http.timeouts import ConnectionTimeouts, Stage
from uvicorn.server import ServerState

from tests.support.virtual_time import in_virtual_time
from tests.unit.wire.http.test_codec_shared_memory import FakeRegion, FakeRegions
from tests.unit.wire.http.test_infer_endpoint import Handle, services
from tests.unit.wire.http.test_infer_endpoint import request as json_body


def binary_request(rows: int = 1) -> tuple[bytes, tuple[bytes, bytes]]:
    tensor = {"name": "X", "datatype": "FP32", "shape": [rows, 2], "parameters": {"binary_data_size": 8 * rows}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return header + np.full(2 * rows, 0.5, "<f4").tobytes(), (
        b"inference-header-content-length",
        b"%d" % len(header),
    )


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False
        self.ended = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    def writelines(self, parts: list[bytes]) -> None:
        self.written += map(bytes, parts)

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True
        self.ended.set()

    abort = write_eof = close

    def can_write_eof(self) -> bool:
        return True

    def set_protocol(self, protocol: object) -> None:
        pass

    pause_reading = resume_reading = lambda self: None


class Case:
    """A connection to a server with one model."""

    def __init__(self, handle: Handle | None = None, **limits: int) -> None:
        self.handle = handle or Handle()
        self.limits = ClientLimits(Limits(**limits))
        endpoint = self.endpoint = InferEndpoint(services(self.handle), self.limits)

        async def application(scope: Any, receive: Any, send: Any) -> None:
            await endpoint(scope, receive, send, scope["path"].split("/")[3], "")

        config = uvicorn.Config(application, access_log=False, server_header=False, date_header=False, lifespan="off")
        config.load()
        self.state = ServerState()
        self.protocol = HeadraceHttpProtocol(
            config=config,
            server_state=self.state,
            app_state={},
            client_limits=self.limits,
            timeouts=ConnectionTimeouts(self.limits),
        )
        self.transport = Transport()
        self.protocol.connection_made(self.transport)  # type: ignore[arg-type]

    @property
    def is_repeated(self) -> bool:
        return isinstance(self.protocol.cycle, RepeatedRequest)

    async def exchange(self, data: bytes, read_bytes: int = 0) -> bytes:
        """Everything that is written for some bytes; with `read_bytes` the socket has at most so many at once."""
        if read_bytes:
            reader, rest = self.protocol._reader, memoryview(data)
            while rest:
                buffer = reader.get_buffer(-1)
                size = min(len(buffer), len(rest), read_bytes)
                buffer[:size] = rest[:size]
                rest = rest[size:]
                reader.buffer_updated(size)
                await asyncio.sleep(0)
        else:
            self.protocol.data_received(data)
        await turns()
        written = b"".join(self.transport.written)
        self.transport.written.clear()
        return written

    def check_clean(self) -> None:
        """Nothing of an ended request is kept."""
        assert (self.handle.leases, self.limits.bodies.reserved_bytes, len(self.state.tasks)) == (0, 0, 0)
        assert self.protocol.completion is None


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def http(body: bytes, *lines: str, model: str = "twice") -> bytes:
    head = [f"POST /v2/models/{model}/infer HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *lines]
    return "\r\n".join([*head, "", ""]).encode() + body


JSON = http(json_body())


def binary(*lines: str, rows: int = 1) -> bytes:
    body, (name, value) = binary_request(rows)
    return http(body, f"{name.decode()}: {value.decode()}", *lines)


@pytest.mark.parametrize(
    "data",
    [
        JSON,
        binary(),
        http(json_body(500), "Accept-Encoding: gzip"),
        binary("Accept-Encoding: gzip"),
        binary("headrace-timing: 0", "endpoint-load-metrics-format: json"),
    ],
    ids=["json", "binary", "compressed", "not worth compressing", "load report"],
)
async def test_a_repeated_request_gets_the_same_bytes(data: bytes) -> None:
    case = Case()
    first = await case.exchange(data)
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert not case.is_repeated
    for _ in range(3):
        assert await case.exchange(data) == first
        assert case.is_repeated
        case.check_clean()
    assert case.state.total_requests == 4


async def test_small_inputs_in_shared_memory_need_no_parser_once_their_size_is_known() -> None:
    case, region = Case(), FakeRegion(8)
    service: Any = case.endpoint.service
    regions: Any = FakeRegions(r=region)
    service.has_shared_memory, service._regions = True, regions
    service._new_codec = lambda spec: ModelCodec(spec, regions)
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 8}

    def request(**more: str) -> bytes:
        tensor = {"name": "X", "datatype": "FP32", "shape": [1, 2], "parameters": place}
        return http(json.dumps({"inputs": [tensor], **more}).encode())

    region.memory[:] = np.array([1, 2], "<f4").tobytes()
    first = await case.exchange(request())
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert not case.is_repeated
    region.memory[:] = np.array([3, 4], "<f4").tobytes()
    second = await case.exchange(request())
    assert case.is_repeated
    assert first.replace(b"2.0,4.0", b"6.0,8.0") == second
    for _ in range(2):
        assert (await case.exchange(request(id="one"))).startswith(b"HTTP/1.1 200 OK\r\n")
        assert not case.is_repeated, "requests with an id do not repeat"
    case.check_clean()


@pytest.mark.parametrize("error", [Overloaded("full", 2.0), ValueError("a bug")], ids=["overloaded", "unexpected"])
async def test_errors_have_the_same_bytes_but_their_reference(error: Exception) -> None:
    case = Case()
    await case.exchange(JSON)
    case.handle.error = error
    parsed = await case.exchange(http(json_body(), "X: 1"))
    assert not case.is_repeated
    repeated = await case.exchange(JSON)
    assert case.is_repeated
    assert repeated.partition(b"(")[0] == parsed.partition(b"(")[0]
    assert len(repeated) == len(parsed)
    assert len(case.handle.failures) == 2
    case.check_clean()


async def test_a_refusal_before_the_queue_has_the_same_bytes() -> None:
    case = Case()
    await case.exchange(JSON)
    case.handle.refuses = Overloaded("no")
    parsed = await case.exchange(http(json_body(), "X: 1"))
    assert await case.exchange(JSON) == parsed
    assert case.is_repeated
    bad = JSON.replace(b"FP32", b"FP16")
    case.handle.refuses = None
    assert b"400 Bad Request" in await case.exchange(bad)
    assert case.is_repeated
    case.check_clean()


@pytest.mark.parametrize("cut", [5, len(JSON) - 3])
async def test_a_cached_head_sent_in_pieces_is_parsed(cut: int) -> None:
    case = Case()
    first = await case.exchange(JSON)
    assert await case.exchange(JSON[:cut]) == b""
    assert await case.exchange(JSON[cut:]) == first
    assert not case.is_repeated
    assert await case.exchange(JSON) == first
    assert case.is_repeated
    case.check_clean()


async def test_requests_in_a_row_are_answered_in_order() -> None:
    case = Case(Handle(silent=True))
    case.handle.silent = False
    first = await case.exchange(JSON)
    assert await case.exchange(JSON + JSON) == first + first
    case.handle.silent = True
    assert await case.exchange(JSON) == b""
    assert case.is_repeated
    case.handle.silent = False
    assert await case.exchange(JSON) == b"", "the one before it is not answered yet"
    case.handle.completions[-1].settle(Overloaded("full"))
    await turns()
    written = b"".join(case.transport.written)
    assert written.startswith(b"HTTP/1.1 503 ")
    assert written.endswith(first)
    case.check_clean()


async def test_a_client_that_disconnects_is_dropped() -> None:
    case = Case()
    await case.exchange(JSON)
    case.handle.silent = True
    await case.exchange(JSON)
    assert case.limits.bodies.reserved_bytes > 0
    case.protocol.connection_lost(None)
    await turns()
    assert [error.reason for error in case.handle.failures] == ["cancelled"]
    assert not case.transport.written
    case.check_clean()


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_client_that_reads_slowly_is_waited_for(leaves: bool) -> None:
    case = Case()
    first = await case.exchange(JSON)
    case.protocol.pause_writing()
    assert await case.exchange(JSON) == b""
    assert await case.exchange(JSON) == b""
    if leaves:
        case.protocol.connection_lost(None)
    else:
        case.protocol.resume_writing()
    await turns()
    assert b"".join(case.transport.written) == (b"" if leaves else first + first)
    case.check_clean()


@pytest.mark.parametrize("paused", [False, True])
async def test_the_end_of_the_server_ends_a_request_with_an_error(paused: bool) -> None:
    case = Case()
    await case.exchange(JSON)
    if paused:
        case.protocol.pause_writing()
    else:
        case.handle.silent = True
    await case.exchange(JSON)
    assert len(case.state.tasks) == 1, "a shutdown waits for it"
    case.protocol.shutdown()
    for task in list(case.state.tasks):
        task.cancel(msg="over")
    await turns()
    written = b"".join(case.transport.written)
    assert (b"HTTP/1.1 503 " in written and b"connection: close\r\n" in written) is not paused
    assert case.transport.closed
    case.protocol.connection_lost(None)
    await turns()
    case.check_clean()


async def test_a_body_beyond_the_budget_of_all_bodies_is_refused() -> None:
    case = Case(max_body_bytes=200, max_total_body_bytes=200)
    await case.exchange(JSON)
    case.limits.bodies.reserved_bytes = 199
    written = await case.exchange(JSON)
    assert written.startswith(b"HTTP/1.1 503 ")
    assert case.limits.hits["max_total_body_bytes"] == 1
    assert case.limits.bodies.reserved_bytes == 199


@pytest.mark.parametrize(
    "line",
    [
        "Connection: close",
        "Connection: upgrade\r\nUpgrade: h2c",
        "Expect: 100-continue",
        "traceparent: 00-" + "1" * 32 + "-" + "2" * 16 + "-01",
        "X-Long: " + "x" * 5000,
    ],
)
async def test_heads_that_are_always_parsed(line: str) -> None:
    case = Case()
    await case.exchange(http(json_body(), line))
    assert not case.endpoint.heads(())


@in_virtual_time
async def test_a_connection_closes_after_the_keep_alive_timeout() -> None:
    case, kept_s = Case(), 5
    case.protocol.timeout_keep_alive = kept_s
    for _ in range(3):
        await case.exchange(JSON)
        responded_s = case.protocol.loop.time()
        await asyncio.sleep(0.6 * kept_s)
    assert case.is_repeated
    await case.transport.ended.wait()
    assert case.protocol.loop.time() - responded_s == pytest.approx(kept_s)


async def test_the_number_of_cached_heads_is_bounded() -> None:
    case = Case()
    for number in range(600):
        await case.exchange(http(json_body(), f"X: {number}"))
    assert 0 < len(case.endpoint.heads(())) <= 256


async def test_heads_of_failed_requests_are_not_cached() -> None:
    case = Case()
    await case.exchange(http(json_body(), model="other"))
    assert not case.endpoint.heads(())
    case.check_clean()


async def test_a_new_connection_repeats_the_heads_of_others() -> None:
    first, second = Case(), Case()
    second.protocol._repeated_heads = first.protocol._repeated_heads
    response = await first.exchange(JSON)
    assert await second.exchange(JSON) == response
    assert second.is_repeated, "its first request"
    assert await second.exchange(http(json_body(), "X: 1")) == response
    assert not second.is_repeated, "an unknown head"


async def test_a_rejected_request_is_repeated_without_the_parser() -> None:
    case = Case()
    case.handle.overloaded = Overloaded("too much", 2.0)
    first = await case.exchange(JSON)
    assert first.startswith(b"HTTP/1.1 503")
    assert not case.is_repeated
    assert await case.exchange(JSON) == first
    assert case.is_repeated
    assert not case.handle.requests, "nothing was decoded"
    assert [type(error) for error in case.handle.failures] == [Overloaded, Overloaded]
    case.check_clean()


async def test_a_request_is_rejected_before_its_body_arrives() -> None:
    case = Case()
    whole = await case.exchange(JSON)
    case.handle.overloaded = Overloaded("too much", 2.0)
    cut = len(JSON) - 30
    early = await case.exchange(JSON[:cut])
    assert early.startswith(b"HTTP/1.1 503")
    case.handle.overloaded = None
    assert await case.exchange(JSON[cut:]) == b"", "the rest of the body is dropped"
    assert await case.exchange(JSON) == whole, "the connection goes on"
    case.check_clean()


async def test_bodies_of_a_few_reads_are_read_at_once() -> None:
    case = Case()
    large = http(b"{" + b" " * 20_000 + json_body()[1:])
    reader = case.protocol._reader
    assert len(reader.get_buffer(-1)) == READ_BYTES
    response = await case.exchange(large)
    assert response.startswith(b"HTTP/1.1 200")
    assert len(reader.get_buffer(-1)) == WIDE_READ_BYTES
    buffer = reader.get_buffer(-1)
    buffer[: len(large)] = large
    reader.buffer_updated(len(large))
    await turns()
    assert b"".join(case.transport.written) == response
    assert case.is_repeated


# --- Large bodies ------------------------------------------------------------------------------------------------------

LARGE = binary(rows=10_000)
READ = 16_000


@pytest.mark.parametrize("read_bytes", [600, READ, 1 << 20])
async def test_a_repeated_request_with_a_large_body_gets_the_same_bytes(read_bytes: int) -> None:
    case = Case()
    first = await case.exchange(LARGE, READ)
    assert first.startswith(b"HTTP/1.1 200 ")
    assert not case.is_repeated
    assert await case.exchange(LARGE, read_bytes) == first
    assert case.is_repeated
    assert await case.exchange(JSON + JSON, READ) != b"", "the parser reads on behind it"
    assert await case.exchange(LARGE + LARGE, READ) == first + first
    case.check_clean()
    for request in case.handle.requests:
        assert request.inputs["X"].flags.aligned


async def test_texts_and_large_json_are_parsed_on_a_thread() -> None:
    case = Case()
    large = http(json_body()[:-1] + b" " * 70_000 + b"}")
    first = await case.exchange(large, READ)
    assert first.startswith(b"HTTP/1.1 200 ")
    assert await case.exchange(large, READ) == first
    assert not case.is_repeated


async def test_a_client_that_disconnects_within_a_large_body_is_dropped() -> None:
    case = Case()
    await case.exchange(LARGE, READ)
    assert await case.exchange(LARGE[:50_000], READ) == b""
    assert case.is_repeated
    assert (case.handle.leases, len(case.state.tasks)) == (1, 1)
    assert case.limits.bodies.reserved_bytes > 0
    case.protocol._reader.connection_lost(None)
    assert [error.reason for error in case.handle.failures] == ["cancelled"]
    assert not case.transport.written
    case.check_clean()


async def test_a_large_body_is_rejected_before_it_arrives() -> None:
    case = Case()
    whole = await case.exchange(LARGE, READ)
    case.handle.overloaded = Overloaded("too much", 2.0)
    early = await case.exchange(LARGE[:READ], READ)
    assert early.startswith(b"HTTP/1.1 503 ")
    assert case.is_repeated
    case.handle.overloaded = None
    assert await case.exchange(LARGE[READ:], READ) == b"", "the rest of the body is dropped"
    assert await case.exchange(LARGE, READ) == whole, "the connection goes on"
    case.check_clean()


async def test_the_end_of_the_server_ends_a_large_body_with_an_error() -> None:
    case = Case()
    await case.exchange(LARGE, READ)
    await case.exchange(LARGE[:50_000], READ)
    case.protocol.shutdown()
    for task in list(case.state.tasks):
        task.cancel(msg="over")
    assert b"".join(case.transport.written).startswith(b"HTTP/1.1 503 ")
    assert case.transport.closed
    case.protocol._reader.connection_lost(None)
    case.check_clean()


@pytest.mark.parametrize("taken", [70_000, 30_000])
async def test_a_large_body_beyond_the_budget_of_all_bodies_is_refused(taken: int) -> None:
    """Before it arrives, or when others have taken the rest meanwhile."""
    case = Case(max_body_bytes=100_000, max_total_body_bytes=100_000)
    await case.exchange(LARGE, READ)
    if taken > 50_000:
        case.limits.bodies.reserved_bytes = taken
        written = await case.exchange(LARGE[:READ], READ)
    else:
        assert await case.exchange(LARGE[:READ], READ) == b""
        case.limits.bodies.reserved_bytes += taken
        written = await case.exchange(LARGE[READ:], READ)
    assert case.is_repeated
    assert written.startswith(b"HTTP/1.1 503 ")
    assert case.limits.hits["max_total_body_bytes"] == 1
    assert (case.limits.bodies.reserved_bytes, case.handle.leases, len(case.state.tasks)) == (taken, 0, 0)


async def test_a_large_body_that_does_not_arrive_is_refused() -> None:
    case = Case()
    await case.exchange(LARGE, READ)
    await case.exchange(LARGE[:50_000], READ)
    assert case.protocol.stage is Stage.BODY
    case.protocol.time_out("too slow")
    assert b"".join(case.transport.written).startswith(b"HTTP/1.1 408 ")
    case.check_clean()
