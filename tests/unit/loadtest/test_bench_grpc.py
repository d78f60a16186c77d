"""The load clients for gRPC against real servers, and what makes the bench disbelieve them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import numpy as np
import pytest

from loadtest.bench import grpc_calls, h2load, streaming
from loadtest.bench.grpc_calls import Target
from loadtest.bench.h2load import CallLoad
from loadtest.bench.inprocess import WrongAnswer
from loadtest.bench.session import Bench
from loadtest.bench.streaming import StreamLoad
from loadtest.bench.wrk import LoadFailed
from loadtest.grpc_protocol import ECHO_COUNT, MODEL_INFER, MODEL_STREAM_INFER, call, infer_message
from loadtest.servers import Running, running

MESSAGE = infer_message("tiny", {"input": np.zeros((1, 16), dtype=np.float32)})
ANSWER_BYTES = 120
needs_h2load = pytest.mark.skipif(not h2load.is_installed(), reason=h2load.HOW_TO_INSTALL)


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(grpc_calls.echo_command(ANSWER_BYTES, (0,)), tmp_path_factory.mktemp("echo")) as server:
        yield server


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return cast(Bench, SimpleNamespace(scratch=tmp_path))


@contextmanager
def stream_server(*answers: bytes, status: grpc.StatusCode = grpc.StatusCode.OK) -> Iterator[int]:
    """A server whose ModelStreamInfer gives these answers for each message, then ends with a status."""

    def infer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in requests:
            yield from answers
            if status is not grpc.StatusCode.OK:
                context.abort(status, "no more")

    _, service, name = MODEL_STREAM_INFER.split("/")
    handler = grpc.method_handlers_generic_handler(service, {name: grpc.stream_stream_rpc_method_handler(infer)})
    server = grpc.server(ThreadPoolExecutor(4), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@pytest.mark.slow
@needs_h2load
def test_unary_calls_are_counted_on_both_sides(echo: Running, bench: Bench) -> None:
    target = grpc_calls.echo_target(echo, MESSAGE)
    before = target.succeeded()
    sample = grpc_calls.measure(bench, target, CallLoad(MODEL_INFER, MESSAGE, connections=4, in_flight=16, calls=2000))
    assert (sample.calls, sample.succeeded) == (2000, 2000)
    assert sample.data_bytes == 2000 * (5 + ANSWER_BYTES)
    assert 0 < sample.p50_us <= sample.p99_us
    assert sample.client_busy > 0
    assert target.succeeded() - before == 2001  # The call that looked at the answer first is one too.


@needs_h2load
def test_calls_with_another_status_than_ok_fail_the_run(echo: Running, bench: Bench) -> None:
    load = CallLoad("/inference.GRPCInferenceService/NoSuchMethod", MESSAGE, connections=1, in_flight=4, calls=100)
    with pytest.raises(LoadFailed, match="answered with an error"):
        grpc_calls.measure(bench, grpc_calls.echo_target(echo, MESSAGE), load)


@pytest.mark.slow
def test_streams_are_counted_on_both_sides(echo: Running, bench: Bench) -> None:
    target = grpc_calls.echo_target(echo, MESSAGE, stream=True)
    before = target.succeeded()
    sample = grpc_calls.measure_stream(bench, target, StreamLoad(MESSAGE, connections=2, in_flight=8, seconds=1))
    assert sample.answers > 100
    assert target.succeeded() - before == sample.answers + 1
    assert 1.0 <= sample.duration_s < 30.0


def test_requests_in_flight_are_bounded(echo: Running) -> None:
    connection = streaming.Connection(echo.port, MESSAGE, ANSWER_BYTES, in_flight=8)
    most = 0
    while connection.answered < 500:
        connection.refill()
        most = max(most, connection.sent - connection.answered)
        connection.receive()
    assert most == 8
    connection.socket.close()


def test_answers_of_another_size_fail_a_stream() -> None:
    with stream_server(b"o" * 50) as port, pytest.raises(LoadFailed, match="answered with an error"):
        streaming.stream([streaming.Connection(port, MESSAGE, 45, in_flight=4)], seconds=0.1)


def test_a_stream_that_ends_early_fails() -> None:
    with (
        stream_server(b"o" * 50, status=grpc.StatusCode.RESOURCE_EXHAUSTED) as port,
        pytest.raises(LoadFailed, match="ended a stream: 8 no more"),
    ):
        streaming.stream([streaming.Connection(port, MESSAGE, 50, in_flight=4)], seconds=0.1)


def test_a_window_that_is_used_up_is_waited_for() -> None:
    """Messages of 15,000 bytes: five do not fit into the 65,535 bytes that a server takes before it says more."""
    with stream_server(b"o" * 50) as port:
        connection = streaming.Connection(port, bytes(15_000), 50, in_flight=16)
        sample = streaming.stream([connection], seconds=0.2)
    assert sample.answers == connection.sent > 10


def test_a_message_larger_than_a_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="16384"):
        streaming.Connection(1, bytes(16_384), 50, in_flight=16)


def test_counts_that_differ_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_calls, "COUNT_TIMEOUT_S", 0.1)
    counts = iter([5, *[14] * 100])
    target = Target("a server", 0, lambda: 0, lambda: next(counts))
    with (
        pytest.raises(LoadFailed, match="counted 9 successes, the load client 10"),
        grpc_calls.counted(target) as expect,
    ):
        expect(10)


def test_a_count_may_arrive_late() -> None:
    counts = iter([5, 14, 15])
    with grpc_calls.counted(Target("a server", 0, lambda: 0, lambda: next(counts))) as expect:
        expect(10)


def test_a_call_that_fails_is_a_wrong_answer(echo: Running) -> None:
    def check() -> int:
        return len(call(echo.port, "/inference.GRPCInferenceService/NoSuchMethod", MESSAGE))

    with pytest.raises(WrongAnswer, match="UNIMPLEMENTED"):
        grpc_calls.answer_size(Target("a server", echo.port, check, lambda: 0))
    assert int(call(echo.port, ECHO_COUNT, b"")) >= 0
