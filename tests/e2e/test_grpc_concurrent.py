"""HTTP and gRPC at once: every client gets the response to its own request, and requests of both protocols share batches."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio

from tests.e2e.conftest import Reference
from tests.support.serving import Server

CLIENTS = 64
REQUESTS = 8


@dataclass(frozen=True)
class Protocol:
    """Triton's clients of one protocol."""

    blocking: Any

    def address(self, server: Server) -> str:
        return server.grpc_address if self.blocking is triton else server.address

    def tensor(self, array: np.ndarray) -> Any:
        return self.blocking.InferInput("X", list(array.shape), "FP32").set_data_from_numpy(array)


GRPC, HTTP = Protocol(triton), Protocol(triton_http)


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
            # Some fill a batch alone, some are larger than one.
            x = rng.standard_normal((int(rng.choice([1, 1, 1, 2, 3, 8, 11])), 16), np.float32)
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
    assert max(grown) == 8
    # Not one by one: a request has 3.9 rows on average, so batches of that size were no batching at all.
    assert sent / sum(grown.values()) > 5


def test_one_batch_of_both_protocols(grpc_server: Server, reference: Reference) -> None:
    """Two requests within the minute for which a batch of two waits: they are one execution."""
    x = np.random.default_rng(0).standard_normal((2, 16), np.float32)
    before = sizes(grpc_server, "patient")

    def infer(protocol: Protocol, row: np.ndarray) -> Any:
        with protocol.blocking.InferenceServerClient(protocol.address(grpc_server)) as client:
            return client.infer("patient", [protocol.tensor(row)]).as_numpy("Y")

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(infer, GRPC, x[:1]), pool.submit(infer, HTTP, x[1:])]
        for answer, row in zip(answers, (x[:1], x[1:]), strict=True):
            assert np.allclose(answer.result(100), reference.affine(row), atol=1e-5)
    after = sizes(grpc_server, "patient")
    assert {rows: count - before.get(rows, 0) for rows, count in after.items()} == {2: 1}
