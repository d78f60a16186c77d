"""Protocols of an embedded server: the ASGI application below any path, gRPC on a port, and what callers may not do."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import headrace
import httpx
import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from loadtest.protocol import binary_request, decode_answer, json_request
from tests.support.models import add_model, affine
from tests.support.waiting import until


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    add_model(folder, "affine", affine(), config="max_batch_size: 8\ndynamic_batching {}\n")
    return folder


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 16)).astype(np.float32)


def expected(repository: Path, inputs: np.ndarray) -> Any:
    path = repository / "affine" / "1" / "model.onnx"
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"X": inputs})[0]


def embedded(repository: Path) -> headrace.Server:
    return headrace.Server(repository, state_dir="", profile_s=0.01)


def http_client(application: Any, root_path: str = "") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(application, root_path=root_path)
    return httpx.AsyncClient(transport=transport, base_url="http://headrace", timeout=60)


@pytest.mark.parametrize("encode", [binary_request, json_request])
async def test_the_application_answers_as_the_runtime_does(repository: Path, encode: Callable[..., Any]) -> None:
    async with embedded(repository) as server, http_client(server.asgi_application()) as client:
        for count in (1, 3, 8):
            request = encode("affine", {"X": rows(count)})
            response = await client.post(request.path, content=request.body, headers=dict(request.headers))
            assert response.status_code == 200, response.text
            outputs = decode_answer(_names(response.headers), response.content)
            np.testing.assert_allclose(outputs["Y"], expected(repository, rows(count)), rtol=1e-5)


def _names(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


async def test_requests_that_come_together_share_batches(repository: Path) -> None:
    async with embedded(repository) as server, http_client(server.asgi_application()) as client:
        request = binary_request("affine", {"X": rows(1)})
        posts = (client.post(request.path, content=request.body, headers=dict(request.headers)) for _ in range(64))
        assert {response.status_code for response in await asyncio.gather(*posts)} == {200}
        (stats,) = (await client.get("/v2/models/affine/stats")).json()["model_stats"]
        assert stats["inference_count"] == 64
        assert stats["execution_count"] < 64


async def test_callers_read_but_change_nothing(repository: Path) -> None:
    async with embedded(repository) as server, http_client(server.asgi_application()) as client:
        for path in ("/v2", "/v2/health/ready", "/v2/models/affine", "/metrics", "/openapi.json"):
            assert (await client.get(path)).status_code == 200, path
        unload = await client.post("/v2/repository/models/affine/unload", json={})
        assert unload.status_code == 403
        assert "an embedded server lets no caller change" in unload.json()["error"]
        assert (await client.post("/v2/logging", json={"log_info": False})).status_code == 403
        assert server.models() == ["affine"]


@pytest.mark.parametrize("with_raw_path", [True, False])
async def test_the_application_works_below_the_path_of_a_framework(repository: Path, with_raw_path: bool) -> None:
    async with embedded(repository) as server:
        application = server.asgi_application()

        async def mounted(scope: dict[str, Any], receive: Any, send: Any) -> None:
            if not with_raw_path:
                del scope["raw_path"]
            await application(scope, receive, send)

        async with http_client(mounted, root_path="/vision") as client:
            request = json_request("affine", {"X": rows(2)})
            response = await client.post("/vision" + request.path, content=request.body)
            assert response.status_code == 200, response.text
            assert (await client.get("/vision/v2/models/affine")).json()["name"] == "affine"
            assert (await client.get("/vision/v2/models/absent")).status_code == 404


def test_other_scopes_are_ignored(repository: Path) -> None:
    async def run() -> None:
        async with embedded(repository) as server:
            await server.asgi_application()({"type": "lifespan"}, _never, _never)

    async def _never(*_arguments: Any) -> Any:
        raise AssertionError("the application reads or sends a message")

    asyncio.run(run())


def test_grpc_answers_until_the_server_ends(repository: Path) -> None:
    def infer(port: int) -> tuple[Any, str]:
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            tensor = triton_grpc.InferInput("X", [3, 16], "FP32").set_data_from_numpy(rows(3))
            output = client.infer("affine", [tensor]).as_numpy("Y")
            with pytest.raises(InferenceServerException, match="embedded server") as refused:
                client.unload_model("affine")
            return output, str(refused.value.status())

    async def run() -> int:
        async with embedded(repository) as server:
            port = await server.listen_grpc()
            output, status = await asyncio.to_thread(infer, port)
            np.testing.assert_allclose(output, expected(repository, rows(3)), rtol=1e-5)
            assert "PERMISSION_DENIED" in status
            assert await server.listen_grpc() != port
            with pytest.raises(OSError, match=str(port)):
                await server.listen_grpc("127.0.0.1", port)
        return port

    port = asyncio.run(run())
    with (
        triton_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client,
        pytest.raises(InferenceServerException, match="UNAVAILABLE"),
    ):
        client.is_server_live()


async def test_the_load_rises_with_work_and_falls_without(repository: Path) -> None:
    async with embedded(repository) as server:
        affine_model = server.model("affine")
        assert server.load() == (0.0, 0)
        while not server.load().utilization:
            await asyncio.gather(*(affine_model.infer_async({"X": rows(8)}) for _ in range(50)))
        handle = affine_model._lease()
        assert server.load().in_flight == 1
        handle.release()
        await asyncio.to_thread(until, lambda: server.load() == (0.0, 0))


async def test_load_reports_and_metrics_have_the_load_of_the_embedded_server(repository: Path) -> None:
    async with embedded(repository) as server, http_client(server.asgi_application()) as client:
        request = binary_request("affine", {"X": rows(8)})
        headers = {**request.headers, "endpoint-load-metrics-format": "json"}
        utilization = 0.0
        report: dict[str, float] = {}
        # Each has the load of two seconds, and a pause of the machine may be longer.
        while not (utilization and report["rps_fractional"] and report["application_utilization"]):
            response = await client.post(request.path, content=request.body, headers=headers)
            report = json.loads(response.headers["endpoint-load-metrics"].removeprefix("JSON "))
            page = (await client.get("/metrics")).text
            (value,) = re.findall(r"^headrace_server_utilization_ratio (\S+)$", page, re.MULTILINE)
            utilization = float(value)


async def test_requests_without_a_version_follow_the_traffic_of_the_model(tmp_path: Path) -> None:
    files = {"config.yaml": "max_batch_size: 8\ntraffic: {versions: {'1': 50%, '2': 50%}}\n"}
    for version in (1, 2):
        add_model(tmp_path, "shared", affine(), version=version, files=files)
    async with embedded(tmp_path) as server, http_client(server.asgi_application()) as client:
        request = json_request("shared", {"X": rows(1)})
        posts = [await client.post(request.path, content=request.body) for _ in range(64)]
        assert {post.json()["model_version"] for post in posts} == {"1", "2"}
        versioned = request.path.replace("/infer", "/versions/2/infer")
        post = await client.post(versioned, content=request.body)
        assert post.json()["model_version"] == "2"
        page = (await client.get("/metrics")).text
        assert re.search(r'^headrace_traffic\w*\{.*model="shared"', page, re.MULTILINE)


def test_protocols_need_the_event_loop_of_the_server(repository: Path) -> None:
    with embedded(repository) as server, pytest.raises(RuntimeError, match="use `async with headrace"):
        server.asgi_application()
    with pytest.raises(RuntimeError, match="not running"):
        server.asgi_application()
    with pytest.raises(RuntimeError, match="not running"):
        server.load()
