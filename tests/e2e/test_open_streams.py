"""Streams of decoupled models that stay open: keep-alive PINGs, half-closed clients, death of the engine."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from tests.e2e.test_decoupled_streams import (
    SERVERS,
    TICKER,
    TICKER_CONFIG,
    brief,
    open_stream,
    pb,
    read_until,
    request,
)
from tests.support.grpc_requests import STREAM
from tests.support.processes import children, words
from tests.support.python_models import add_python_model
from tests.support.serving import Server, serving
from tests.support.waiting import until

# grpcio's client sends no PING sooner than after 10 s, and without the last option no more than two without data.
PINGS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """One process, and a server with front ends."""
    with ExitStack() as stack:
        running = []
        for options in SERVERS.values():
            folder = tmp_path_factory.mktemp("open")
            add_python_model(folder / "repository", "ticker", TICKER, TICKER_CONFIG)
            words = ("--stream-heartbeat-s", "0.2", *options)
            running.append(stack.enter_context(serving(folder / "repository", folder, *words)))
        yield running


@pytest.mark.slow
def test_a_silent_stream_survives_with_pings(servers: list[Server]) -> None:
    """36 s without a message: three PINGs are answered, and none is refused as too frequent."""
    with ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(each.grpc_address, options=PINGS)) for each in servers]
        sent = request("a", 2, delay_ms=36_000).SerializeToString()
        for call in [channel.stream_stream(STREAM)(iter([sent]), timeout=90) for channel in channels]:
            answers = [brief(pb.ModelStreamInferResponse.FromString(answer)) for answer in call]
            assert answers == [("a", 0, False), ("a", 1, True)]


@pytest.mark.parametrize("number", range(len(SERVERS)), ids=list(SERVERS))
def test_a_client_that_has_half_closed_gets_all_responses_and_ok(servers: list[Server], number: int) -> None:
    with grpc.insecure_channel(servers[number].grpc_address) as channel:
        sent = [request(name, 20, delay_ms=10).SerializeToString() for name in ("a", "b", "c")]
        call = channel.stream_stream(STREAM)(iter(sent), timeout=60)
        answers = [brief(pb.ModelStreamInferResponse.FromString(answer)) for answer in call]
        assert call.code() is grpc.StatusCode.OK
    for name in ("a", "b", "c"):
        assert [(index, final) for each, index, final in answers if each == name] == [(n, n == 19) for n in range(20)]


def _engine(server: Server) -> int:
    named = {words(pid)[0]: pid for pid in children(server.process.pid) if words(pid)}
    return next(pid for name, pid in named.items() if name == "headrace: engine")


@pytest.mark.skipif(sys.platform != "linux", reason="front ends need Linux")
def test_the_death_of_the_engine_is_an_error_in_every_stream(tmp_path: Path) -> None:
    add_python_model(tmp_path / "repository", "ticker", TICKER, TICKER_CONFIG)
    with serving(tmp_path / "repository", tmp_path, "--front-ends", "2") as server:
        with (
            open_stream(server, {"COUNT": 9, "delay_ms": 60_000}) as events,
            grpc.insecure_channel(server.grpc_address) as channel,
        ):
            read_until(events, b'"NUMBER":0')
            sent = request("a", 9, delay_ms=60_000).SerializeToString()
            call = channel.stream_stream(STREAM)(iter([sent]), timeout=60)
            next(call)
            os.kill(_engine(server), signal.SIGKILL)
            # The error is the last event, and the body has its end.
            last = read_until(events, b"\r\n0\r\n\r\n")
            assert b"data: {" in last
            assert "error" in json.loads(last[last.rindex(b"data: ") + 6 :].split(b"\n")[0])
            # A request's error does not end the stream of the front end.
            (answer,) = [brief(pb.ModelStreamInferResponse.FromString(each)) for each in call]
            assert answer[2]
            assert "the engine process of the server has ended" in str(answer[1])
            assert call.code() is grpc.StatusCode.OK
        until(lambda: server.request("GET", "/v2/models/ticker/ready")[0] == 200)
