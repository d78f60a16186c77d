"""Triton's asyncio client, and batches of the rows that the configuration bounds on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.support.models import add_model, affine
from tests.support.serving import Server, serving


def tensor(array: np.ndarray, name: str = "X", binary: bool = True) -> triton.InferInput:
    return triton.InferInput(name, list(array.shape), "FP32").set_data_from_numpy(array, binary_data=binary)


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
