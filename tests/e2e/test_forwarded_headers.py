"""Request headers as parameters of Python models, with Triton's clients: one process, front ends, embedded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import headrace
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.support.python_models import add_python_model
from tests.support.serving import Server, serving
from tests.support.triton_clients import connect, infer, inputs_of
from tests.support.waiting import until

CODE = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.runs = 0

    def execute(self, requests):
        self.runs += 1
        texts = [json.dumps([self.runs, json.loads(request.parameters())]) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", np.array([text], object))]) for text in texts]
"""
RELAY = """
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.relay(request) for request in requests]

    def relay(self, request):
        call = pb_utils.InferenceRequest(model_name="cached", requested_output_names=["SEEN"],
            inputs=request.inputs(), parameters=json.loads(request.parameters()))
        return pb_utils.InferenceResponse(call.exec().output_tensors())
"""
CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
STREAMED = CODE.replace(
    '        return [pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", np.array([text], object))]) for text in texts]',
    """        for request, text in zip(requests, texts):
            response = pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", np.array([text], object))])
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)""",
)
ENSEMBLE = """
platform: "ensemble"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] } ]
ensemble_scheduling { step [ { model_name: "seen" model_version: -1
  input_map { key: "X" value: "X" } output_map { key: "SEEN" value: "SEEN" } } ] }
"""
X = {"X": np.ones(1, np.float32)}
SECRET = "s3same-value"
HEADERS = {"X-Tenant-Id": SECRET, "X-Other": "o", "Authorization": "Basic abc", "Cookie": "c=1", "Proxy-Who": "p"}
OPTIONS = ("--http-header-forward-pattern", "X-Tenant-.*", "--grpc-header-forward-pattern", "x-(tenant|trace)-.*")


def write(repository: Path) -> Path:
    add_python_model(repository, "seen", CODE, CONFIG)
    add_python_model(repository, "cached", CODE, CONFIG + "response_cache { enable: true }\n")
    add_python_model(repository, "relay", RELAY, CONFIG)
    add_python_model(repository, "streamed", STREAMED, CONFIG + "model_transaction_policy { decoupled: true }\n")
    (repository / "pipeline" / "1").mkdir(parents=True)
    (repository / "pipeline" / "config.pbtxt").write_text(ENSEMBLE)
    return repository


@pytest.fixture(scope="module", params=[("--front-ends", "0"), ("--front-ends", "2")], ids=["one", "front-ends"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("headers")
    options = (*OPTIONS, *request.param, "--profile-s", "0", "--cache-config", "local,size=1048576")
    with serving(write(folder / "repository"), folder, *options) as running:
        yield running


def seen(
    server: Server, protocol: str, model: str, headers: dict[str, str], **options: Any
) -> tuple[int, dict[str, Any]]:
    """Return the number of runs of the model and the parameters that it got."""
    headers = {name.lower() if protocol == "grpc" else name: value for name, value in headers.items()}
    with connect(server, protocol) as client:
        runs, parameters = json.loads(infer(client, model, X, headers=headers, **options).as_numpy("SEEN")[0])
    return runs, parameters


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("model", ["seen", "pipeline", "relay"])
def test_a_model_gets_the_matching_headers_and_no_others(server: Server, protocol: str, model: str) -> None:
    for value in (SECRET, "b"):  # the second head is served by the caches of heads, where they are used
        headers = {**HEADERS, "X-Tenant-Id": value}
        for _ in range(2):
            _, parameters = seen(server, protocol, model, headers, parameters={"own": 1})
            assert parameters == {"x-tenant-id": value, "own": 1}
    assert seen(server, protocol, model, {"X-Other": "o"})[1] == {}
    assert seen(server, protocol, model, {"X-Trace-A": "t"})[1] == ({"x-trace-a": "t"} if protocol == "grpc" else {})


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_parameter_of_the_same_name_is_refused(server: Server, protocol: str) -> None:
    with pytest.raises(InferenceServerException, match="is also a header") as caught:
        seen(server, protocol, "seen", HEADERS, parameters={"x-tenant-id": "mine"})
    assert caught.value.status() == ("400" if protocol == "http" else "StatusCode.INVALID_ARGUMENT")
    assert SECRET not in str(caught.value)


def test_a_stream_forwards_its_metadata(server: Server) -> None:
    results: list[Any] = []
    for model in ("seen", "streamed"):  # front ends pass the second one on whole
        with connect(server, "grpc") as client:
            client.start_stream(lambda result, error: results.append(error or result), headers={"x-tenant-id": SECRET})
            count = len(results)
            client.async_stream_infer(model, inputs_of(triton_grpc, X))
            until(lambda count=count: len(results) > count)
        assert json.loads(results[-1].as_numpy("SEEN")[0])[1] == {"x-tenant-id": SECRET}


@pytest.mark.parametrize("model", ["seen", "streamed"])
def test_generate_forwards_headers(server: Server, model: str) -> None:
    answer = httpx.post(f"{server.url}/v2/models/{model}/generate", json={"X": [1.0]}, headers=HEADERS, timeout=60)
    assert json.loads(answer.json()["SEEN"])[1] == {"x-tenant-id": SECRET}


def test_a_header_that_came_twice_is_refused(server: Server) -> None:
    twice = [("X-Tenant-Id", "a"), ("X-Tenant-Id", "b")]
    answer = httpx.post(f"{server.url}/v2/models/seen/generate", json={"X": [1.0]}, headers=twice, timeout=60)
    assert (answer.status_code, "came twice" in answer.text) == (400, True)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("model", ["cached", "relay"])
def test_no_response_is_cached_by_a_forwarded_value(server: Server, protocol: str, model: str) -> None:
    plain = {protocol: "plain", model: "plain"}
    first = seen(server, protocol, model, {}, parameters=plain)
    assert seen(server, protocol, model, {}, parameters=plain) == first
    headers = {"X-Tenant-Id": SECRET}
    runs, parameters = seen(server, protocol, model, headers)
    assert parameters == {"x-tenant-id": SECRET}
    assert seen(server, protocol, model, headers)[0] > runs


@pytest.mark.parametrize("processes", ["0", "2"])
def test_values_reach_no_log_trace_or_metric(processes: str, tmp_path: Path) -> None:
    add_python_model(tmp_path / "repository", "seen", CODE, CONFIG)
    trace, log = tmp_path / "trace.json", tmp_path / "requests.json"
    files = ("--trace-file", str(trace), "--trace-rate", "1", "--request-log", "all", "--request-log-file", str(log))
    options = (*OPTIONS, *files, "--front-ends", processes, "--profile-s", "0")
    with serving(tmp_path / "repository", tmp_path, *options) as server:
        with connect(server, "http") as client:
            client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})
        for protocol in ("http", "grpc"):
            assert seen(server, protocol, "seen", HEADERS)[1] == {"x-tenant-id": SECRET}
        metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    for text in (metrics, server.text, trace.read_text(), log.read_text()):
        assert "seen" in text
        assert SECRET not in text


def test_no_header_is_forwarded_by_default(tmp_path: Path) -> None:
    add_python_model(tmp_path / "repository", "seen", CODE, CONFIG)
    with serving(tmp_path / "repository", tmp_path, "--profile-s", "0") as server:
        assert [seen(server, protocol, "seen", HEADERS)[1] for protocol in ("http", "grpc")] == [{}, {}]


def test_an_environment_variable_names_a_credential_and_a_slow_pattern_delays_nothing(tmp_path: Path) -> None:
    add_python_model(tmp_path / "repository", "seen", CODE, CONFIG)
    variables = {"HEADRACE_HTTP_HEADER_FORWARD_PATTERN": "authorization|cook.*|proxy-.*|(a|aa|a*)*b"}
    with serving(tmp_path / "repository", tmp_path, "--profile-s", "0", env=variables) as server:
        assert seen(server, "http", "seen", {**HEADERS, "a" * 120: "x"})[1] == {"authorization": "Basic abc"}
        assert seen(server, "grpc", "seen", HEADERS)[1] == {}


def test_an_embedded_server_forwards_headers(tmp_path: Path) -> None:
    add_python_model(tmp_path, "seen", CODE, CONFIG)
    with pytest.raises(ValueError, match="no regular expression"):
        headrace.Server(tmp_path, http_header_forward_pattern="[")

    def over_grpc(port: int) -> Any:
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            return json.loads(infer(client, "seen", X, headers={"x-b": "2"}).as_numpy("SEEN")[0])[1]

    async def run() -> list[Any]:
        patterns = {"http_header_forward_pattern": "x-a", "grpc_header_forward_pattern": "x-b"}
        async with headrace.Server(tmp_path, state_dir="", profile_s=0, **patterns) as server:
            transport = httpx.ASGITransport(server.asgi_application())
            async with httpx.AsyncClient(transport=transport, base_url="http://headrace", timeout=60) as client:
                answer = await client.post("/v2/models/seen/generate", json={"X": [1.0]}, headers={"X-A": "1"})
            port = await server.listen_grpc()
            return [json.loads(answer.json()["SEEN"])[1], await asyncio.to_thread(over_grpc, port)]

    assert asyncio.run(run()) == [{"x-a": "1"}, {"x-b": "2"}]
