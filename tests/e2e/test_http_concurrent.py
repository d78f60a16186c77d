"""Many clients at once: every client gets the response to its own request, and batches form."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.e2e.conftest import Reference
from tests.support.models import add_model, affine
from tests.support.serving import Server, serving

CLIENTS = 48
REQUESTS = 12


def tensor(array: np.ndarray, name: str = "X", binary: bool = True) -> triton.InferInput:
    return triton.InferInput(name, list(array.shape), "FP32").set_data_from_numpy(array, binary_data=binary)


def test_every_asyncio_client_gets_its_own_rows_and_batches_form(server: Server, reference: Reference) -> None:
    async def one_client(number: int) -> int:
        rng = np.random.default_rng(number)
        rows_sent = 0
        async with triton_aio.InferenceServerClient(server.address, conn_limit=1) as client:
            for _ in range(REQUESTS):
                # Some fill a batch alone, some are larger than one.
                rows = int(rng.choice([1, 1, 1, 2, 3, 8, 11]))
                x = rng.standard_normal((rows, 16), np.float32)
                result = await client.infer("batched", [tensor(x, binary=bool(rng.integers(2)))])
                answer = result.as_numpy("Y")
                assert answer.shape == (rows, 4)
                assert np.allclose(answer, reference.affine(x), atol=1e-5)
                rows_sent += rows
        return rows_sent

    async def all_clients() -> tuple[int, dict]:
        sent = sum(await asyncio.gather(*(one_client(number) for number in range(CLIENTS))))
        async with triton_aio.InferenceServerClient(server.address) as client:
            return sent, await client.get_inference_statistics("batched")

    sent, statistics = asyncio.run(all_clients())
    (stats,) = statistics["model_stats"]
    assert stats["inference_count"] == sent
    assert stats["inference_stats"]["success"]["count"] == CLIENTS * REQUESTS
    assert stats["inference_stats"]["fail"]["count"] == 0
    sizes = {size["batch_size"]: size["compute_infer"]["count"] for size in stats["batch_stats"]}
    assert sum(rows * count for rows, count in sizes.items()) == sent
    assert sum(sizes.values()) == stats["execution_count"]
    assert max(sizes) == 8
    # Not one by one: a request has 3.9 rows on average, so batches of that size were no batching at all.
    assert sent / stats["execution_count"] > 5


async def test_requests_of_different_shapes_at_once(server: Server) -> None:
    async def one(client: triton_aio.InferenceServerClient, number: int) -> None:
        rng = np.random.default_rng(number)
        x = rng.integers(-9, 9, (int(rng.integers(1, 7)), int(rng.integers(1, 6)))).astype(np.float32)
        result = await client.infer("row_sums", [tensor(x)], request_id=str(number))
        assert result.get_response()["id"] == str(number)
        assert result.as_numpy("DOUBLE").tolist() == (2 * x).tolist()
        assert result.as_numpy("SUM").tolist() == x.sum(axis=1, keepdims=True).tolist()

    async with triton_aio.InferenceServerClient(server.address, conn_limit=40) as client:
        await asyncio.gather(*(one(client, number) for number in range(400)))


async def test_the_whole_asyncio_client(server: Server) -> None:
    async with triton_aio.InferenceServerClient(server.address) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("affine")
        assert not await client.is_model_ready("broken_file")
        assert (await client.get_server_metadata())["name"] == "headrace"
        assert (await client.get_model_metadata("versioned", "3"))["versions"] == ["1", "3", "20"]
        assert (await client.get_model_config("scores"))["max_batch_size"] == 4
        assert {"name": "affine", "version": "1", "state": "READY", "reason": ""} in (
            await client.get_model_repository_index()
        )
        x = np.arange(1_000, dtype=np.float32).reshape(1, -1)
        for packed in (None, "gzip", "deflate"):
            result = await client.infer(
                "row_sums",
                [tensor(x)],
                outputs=[triton.InferRequestedOutput("DOUBLE")],
                request_compression_algorithm=packed,
                response_compression_algorithm=packed,
            )
            assert result.as_numpy("DOUBLE").tolist() == (2 * x).tolist()
        with pytest.raises(InferenceServerException, match="'nothing' is not found") as caught:
            await client.infer("nothing", [tensor(x)])
        assert caught.value.status() == "404"


def test_on_the_cpu_batches_have_the_rows_that_the_configuration_bounds_there(tmp_path: Path) -> None:
    config = "max_batch_size: 64 dynamic_batching {} "
    bound = 'parameters { key: "headrace.cpu_max_batch_size" value: { string_value: "2" } }'
    add_model(tmp_path / "models", "bounded", affine(), config=config + bound)
    add_model(tmp_path / "models", "whole", affine(), config=config)
    x = np.random.default_rng(1).standard_normal((7, 16), np.float32)
    with serving(tmp_path / "models", tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        answers = [client.infer(name, [tensor(x)]).as_numpy("Y") for name in ("bounded", "whole")]
        status = json.loads(server.request("GET", "/v2/status")[2])
        figures = {model["name"]: model["serving"] for model in status["models"]}
    np.testing.assert_allclose(answers[0], answers[1], rtol=1e-6)
    assert figures["bounded"]["sizes"] == {"1": 1, "2": 3}
    assert figures["whole"]["sizes"] == {"7": 1}
    assert (figures["bounded"]["max_batch_size"], figures["whole"]["max_batch_size"]) == (2, 64)
