"""HTTP and gRPC at once: every client gets the response to its own request, and requests of both protocols share batches."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from tritonclient.utils import InferenceServerException

from tests.e2e.conftest import Reference
from tests.support.serving import Server

CLIENTS = 64
REQUESTS = 8


@dataclass(frozen=True)
class Protocol:
    """Triton's clients of one protocol."""

    blocking: Any
    concurrent: Any
    refusal: str
    options: dict[str, int]  # of the client for asyncio

    def address(self, server: Server) -> str:
        return server.grpc_address if self.blocking is triton else server.address

    def tensor(self, array: np.ndarray) -> Any:
        return self.blocking.InferInput("X", list(array.shape), "FP32").set_data_from_numpy(array)


GRPC = Protocol(triton, triton_aio, "StatusCode.INVALID_ARGUMENT", {})
HTTP = Protocol(triton_http, triton_http_aio, "400", {"conn_limit": CLIENTS})
PROTOCOLS = [pytest.param(HTTP, id="http"), pytest.param(GRPC, id="grpc")]


def field(result: Any, name: str) -> Any:
    """Of an answer, which is a dictionary over HTTP and a message over gRPC."""
    response = result.get_response()
    return response[name] if isinstance(response, dict) else getattr(response, name)


def sizes(server: Server, model: str) -> dict[int, int]:
    _, _, body = server.request("GET", f"/v2/models/{model}/stats")
    (stats,) = json.loads(body)["model_stats"]
    return {size["batch_size"]: size["compute_infer"]["count"] for size in stats["batch_stats"]}


def test_64_clients_over_both_protocols(grpc_server: Server, reference: Reference) -> None:
    """Distinct random inputs; every answer is held against ONNX Runtime."""
    before = sizes(grpc_server, "batched")

    async def one(client: Any, protocol: Protocol, number: int) -> int:
        rng, sent = np.random.default_rng(number), 0
        for turn in range(REQUESTS):
            x = rng.standard_normal((int(rng.integers(1, 4)), 16), np.float32)
            request_id = f"{number}.{turn}"
            result = await client.infer("batched", [protocol.tensor(x)], request_id=request_id)
            assert field(result, "id") == request_id
            assert np.allclose(result.as_numpy("Y"), reference.affine(x), atol=1e-5)
            sent += len(x)
        return sent

    async def send_all() -> int:
        grpcs = [triton_aio.InferenceServerClient(grpc_server.grpc_address) for _ in range(4)]
        http = triton_http_aio.InferenceServerClient(grpc_server.address, conn_limit=CLIENTS)
        try:
            return sum(
                await asyncio.gather(
                    *(one(grpcs[n % 4], GRPC, n) if n % 2 else one(http, HTTP, n) for n in range(CLIENTS))
                )
            )
        finally:
            await asyncio.gather(http.close(), *(client.close() for client in grpcs))

    sent = asyncio.run(send_all())
    grown = {rows: count - before.get(rows, 0) for rows, count in sizes(grpc_server, "batched").items()}
    assert sum(rows * count for rows, count in grown.items()) == sent
    assert sent / sum(grown.values()) > 4  # two rows a request on average: not one by one


def test_one_batch_of_both_protocols(grpc_server: Server, reference: Reference) -> None:
    """Two requests within the 2 s for which a batch of two waits: they are one execution."""
    x = np.random.default_rng(0).standard_normal((2, 16), np.float32)
    before = sizes(grpc_server, "patient")

    def infer(protocol: Protocol, row: np.ndarray) -> Any:
        with protocol.blocking.InferenceServerClient(protocol.address(grpc_server)) as client:
            return client.infer("patient", [protocol.tensor(row)]).as_numpy("Y")

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(infer, GRPC, x[:1]), pool.submit(infer, HTTP, x[1:])]
        for answer, row in zip(answers, (x[:1], x[1:]), strict=True):
            assert np.allclose(answer.result(20), reference.affine(row), atol=1e-5)
    after = sizes(grpc_server, "patient")
    assert {rows: count - before.get(rows, 0) for rows, count in after.items()} == {2: 1}


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_good_and_bad_requests_at_once(grpc_server: Server, protocol: Protocol) -> None:
    """In one batch, the requests that the model refuses fail alone."""

    async def one(client: Any, number: int) -> None:
        index = np.array([[number % 5]], np.int64)
        request_input = protocol.blocking.InferInput("X", [1, 1], "INT64").set_data_from_numpy(index)
        if number % 5 == 4:  # outside of the table
            with pytest.raises(InferenceServerException, match="refused the values") as caught:
                await client.infer("table_lookup", [request_input])
            assert caught.value.status() == protocol.refusal
        else:
            assert (await client.infer("table_lookup", [request_input])).as_numpy("Y").tolist() == [[10 * (number % 5)]]

    async with protocol.concurrent.InferenceServerClient(protocol.address(grpc_server), **protocol.options) as client:
        await asyncio.gather(*(one(client, number) for number in range(200)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_clients_on_threads(grpc_server: Server, reference: Reference, protocol: Protocol) -> None:
    def one_client(number: int) -> None:
        rng = np.random.default_rng(1_000 + number)
        with protocol.blocking.InferenceServerClient(protocol.address(grpc_server)) as client:
            for _ in range(5):
                x = rng.standard_normal((int(rng.integers(1, 5)), 16), np.float32)
                version = str(rng.choice([1, 3, 20]))
                result = client.infer("versioned", [protocol.tensor(x)], model_version=version)
                assert field(result, "model_version") == version
                assert np.allclose(result.as_numpy("Y"), reference.affine(x, seed=int(version)), atol=1e-5)

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(one_client, range(32)))


async def test_sizes_of_all_kinds_at_once(grpc_server: Server) -> None:
    """Small answers overtake large ones on one connection; bytes of responses are not mixed up."""

    async def one(client: triton_aio.InferenceServerClient, number: int) -> None:
        rng = np.random.default_rng(number)
        x = rng.standard_normal((1, int(rng.choice([1, 100, 20_000, 300_000]))), np.float32)
        answer = (await client.infer("identity_fp32", [GRPC.tensor(x)])).as_numpy("Y")
        assert answer.tobytes() == x.tobytes()

    async with triton_aio.InferenceServerClient(grpc_server.grpc_address) as client:
        await asyncio.gather(*(one(client, number) for number in range(100)))
