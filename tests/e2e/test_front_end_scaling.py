"""`--front-ends auto`: the engine process serves alone, front ends start and end by the load, connections move between them."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc.aio as triton

from tests.support import models
from tests.support.certificates import Certificates
from tests.support.processes import children, words
from tests.support.scaled_server import COMMAND, LEAVE_S, MOST, WANTED
from tests.support.serving import Server, serving
from tests.support.waiting import until, until_async

HEAD = b"POST /v2/models/row_sums/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


class Scaled:
    """A server, and the number of its front ends."""

    def __init__(self, server: Server, file: Path) -> None:
        self.server, self._file = server, file

    async def set(self, wanted: int) -> None:
        """Set the number, and wait until so many run."""
        self.want(wanted)
        await until_async(lambda: self.running() == wanted)

    def want(self, wanted: int) -> None:
        """Set the number; see `Scaling`."""
        temporary = self._file.with_suffix(".new")
        temporary.write_text(str(wanted))
        temporary.rename(self._file)

    def moved(self) -> int:
        """Return the number of connections that any process has given up."""
        name = b"headrace_process_connections_moved_total{"
        lines = self.server.request("GET", "/metrics")[2].splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))

    def connections(self, process: str) -> int:
        """Return the number of connections of a process, as metrics name it."""
        name = f'headrace_process_connections{{process="{process}"}}'.encode()
        lines = self.server.request("GET", "/metrics")[2].splitlines()
        return next(int(float(line.split()[-1])) for line in lines if line.startswith(name))

    def running(self) -> int:
        """Return the number of front ends that run."""
        pid = self.server.process.pid
        return sum(any("front end" in word for word in words(child)) for child in children(pid))


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scaled]:
    with scaled_server(tmp_path_factory.mktemp("scaled")) as server:
        yield server


@contextmanager
def scaled_server(folder: Path, *options: str, **environment: str) -> Iterator[Scaled]:
    """A server with the model `row_sums`."""
    files = {
        "config.yaml": "max_queue_wait_microseconds: 0\n"
    }  # the queue of 1,000 callers takes a busy machine a second
    models.add_model(folder / "repository", "row_sums", models.row_sums(), files=files)
    file = folder / "wanted"
    file.write_text("0")
    options = ("--front-ends", "auto", *options)
    environment[WANTED] = str(file)
    with serving(folder / "repository", folder, *options, env=environment, command=COMMAND) as server:
        yield Scaled(server, file)


async def http_client(
    port: int, numbers: Iterator[int], is_over: Callable[[], bool], tls: ssl.SSLContext | None = None
) -> int:
    """Send requests with different values on one connection, and check the answers; return their number.

    Over TLS the server may end the connection after an answer that says so; the client opens another.
    """
    answers, writer = 0, None
    while not is_over():
        if writer is None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        value = next(numbers) % 1_000_003
        tensor = {"name": "X", "datatype": "FP32", "shape": [1, 3], "data": [value, 0, 1]}
        body = json.dumps({"inputs": [tensor]}).encode()
        writer.write(HEAD % len(body) + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        (size,) = (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
        answer = json.loads(await reader.readexactly(size))
        assert answer["outputs"][1]["data"] == [value + 1], (value, answer)
        answers += 1
        if b"connection: close" in head:
            assert tls is not None, "a connection without TLS moves"
            await close(writer)
            writer = None
    if writer is not None:
        await close(writer)
    return answers


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()


async def grpc_client(port: int, numbers: Iterator[int], is_over: Callable[[], bool], size: int = 3) -> int:
    """Make calls with different values on one channel, and check the answers; return their number."""
    answers, values = 0, np.zeros((1, size), np.float32)
    values[0, -1] = 1
    own = [("grpc.use_local_subchannel_pool", 1)]  # else clients of one address share a connection
    async with triton.InferenceServerClient(f"127.0.0.1:{port}", channel_args=own) as client:
        while not is_over():
            value = next(numbers) % 1_000_003
            values[0, 0] = value
            x = triton.InferInput("X", [1, size], "FP32")
            x.set_data_from_numpy(values)
            answer = await client.infer("row_sums", [x])
            assert answer.as_numpy("SUM").tolist() == [[value + 1]], value
            answers += 1
    return answers


async def moves(
    scaled: Scaled,
    client: Callable[..., Awaitable[int]],
    port: int,
    connections: int,
    is_settled: Callable[[int], bool] = lambda _: True,
) -> list[int]:
    """Move the connections of clients to and fro, all of them under load; return the number of answers of each.

    Args:
        scaled: the server.
        client: sends requests on a connection.
        port: where.
        connections: number of clients.
        is_settled: returns whether all connections are where they belong with a number of front ends.
    """
    numbers, is_over = count(), asyncio.Event()
    clients = [asyncio.ensure_future(client(port, numbers, is_over.is_set)) for _ in range(connections)]

    def is_used(before: int) -> bool:
        return next(numbers) > before + 2 * connections or any(each.done() for each in clients)

    try:
        for wanted in (0, 2, 0, MOST, 0):
            await scaled.set(wanted)
            await until_async(partial(is_used, next(numbers)))
            await until_async(partial(asyncio.to_thread, is_settled, wanted))
    finally:
        is_over.set()
    return await asyncio.gather(*clients)


@pytest.mark.parametrize("connections", [64, pytest.param(1000, marks=pytest.mark.slow)])
def test_connections_move_under_load(scaled: Scaled, connections: int) -> None:
    before = scaled.moved()

    def is_settled(front_ends: int) -> bool:
        here = scaled.connections("engine")
        return here <= 1 if front_ends else here >= connections

    answers = asyncio.run(moves(scaled, http_client, scaled.server.port, connections, is_settled))
    assert min(answers) >= 1
    assert scaled.moved() - before >= 4 * connections, "each time"


@pytest.mark.parametrize(
    ("client", "port", "connections"), [(http_client, "port", 30), (grpc_client, "grpc_port", 9)], ids=["http", "grpc"]
)
def test_further_front_ends_get_their_share(
    scaled: Scaled, client: Callable[..., Awaitable[int]], port: str, connections: int
) -> None:
    """Connections that exist move to front ends that start later."""

    async def check() -> None:
        numbers, is_over = count(), asyncio.Event()
        address = getattr(scaled.server, port)
        clients = [asyncio.ensure_future(client(address, numbers, is_over.is_set)) for _ in range(connections)]
        names = [f"front_end_{number}" for number in range(1, MOST + 1)]

        def have(least: int, *front_ends: str) -> bool:
            return min([scaled.connections(name) for name in front_ends]) >= least

        try:
            await scaled.set(1)
            await until_async(partial(asyncio.to_thread, have, connections, names[0]))
            await scaled.set(MOST)
            await until_async(partial(asyncio.to_thread, have, connections // (2 * MOST), *names))
            assert not any(each.done() for each in clients)
        finally:
            is_over.set()
            await asyncio.gather(*clients)
            await scaled.set(0)

    asyncio.run(check())


@pytest.mark.parametrize("size", [3, 200_000], ids=["short", "large"])
def test_clients_of_grpc_connect_anew_without_an_error(scaled: Scaled, size: int) -> None:
    """gRPC's C core repeats a call that was not served by itself, but none that is larger than 256 KiB."""
    answers = asyncio.run(moves(scaled, partial(grpc_client, size=size), scaled.server.grpc_port, 8))
    assert min(answers) >= 1


def tls_of(folder: Path) -> tuple[ssl.SSLContext, tuple[str, ...]]:
    """The context of a client, and the options of its server."""
    pair = Certificates(folder).server
    options = ("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key))
    return ssl.create_default_context(cafile=str(folder / "ca.pem")), options


def test_connections_with_tls_end_after_an_answer_that_says_so(tmp_path: Path) -> None:
    tls, options = tls_of(tmp_path)
    with scaled_server(tmp_path, *options) as scaled:
        answers = asyncio.run(moves(scaled, partial(http_client, tls=tls), scaled.server.port, 8))
        assert min(answers) >= 1


def test_a_front_end_stays_for_a_handshake_that_has_begun(tmp_path: Path) -> None:
    tls, options = tls_of(tmp_path)
    with scaled_server(tmp_path, *options, **{LEAVE_S: "60"}) as scaled:

        def is_served_by_a_front_end() -> bool:
            with closing(http.client.HTTPSConnection("127.0.0.1", scaled.server.port, context=tls)) as connection:
                connection.request("GET", "/metrics")
                page = connection.getresponse().read()
            return re.search(rb'headrace_process_connections\{process="front_end_."\} 1', page) is not None

        scaled.want(2)
        until(lambda: scaled.running() == 2)
        until(is_served_by_a_front_end)
        with socket.create_connection(("127.0.0.1", scaled.server.port), timeout=30) as sock:
            scaled.want(0)
            until(lambda: scaled.running() < 2)  # the one without connections has left
            with closing(http.client.HTTPSConnection("127.0.0.1", scaled.server.port)) as connection:
                connection.sock = tls.wrap_socket(sock, server_hostname="127.0.0.1")
                is_last = False
                while not is_last:
                    connection.request("GET", "/v2/health/ready")
                    response = connection.getresponse()
                    assert (response.status, response.read()) == (200, b'{"ready":true}')
                    is_last = response.will_close
        until(lambda: not scaled.running())


def test_bytes_that_wait_in_the_socket_move_too(scaled: Scaled) -> None:
    """Half a request is served where it arrives; the connection moves with the next one."""

    async def check() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", scaled.server.port)
        body = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}).encode()
        request = HEAD % len(body) + body
        for wanted in (2, 0):
            writer.write(request[:40])
            scaled.want(wanted)
            if wanted:
                await until_async(lambda: scaled.running() == 2)
            for _ in range(3):
                writer.write(request[40:])
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                (size,) = (
                    int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
                )
                assert json.loads(await reader.readexactly(size))["outputs"][1]["data"] == [6]
                writer.write(request[:40])
            writer.write(request[40:])
            head = await reader.readuntil(b"\r\n\r\n")
            (size,) = (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(size)
        await close(writer)

    asyncio.run(check())
