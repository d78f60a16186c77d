"""Load reports by route, header and parameter, and rejections under load, over real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tests.support.grpc_requests import STEPS_PER_S, STREAM, gate_request, message, steps, tensor
from tests.support.models import add_model, affine, busy
from tests.support.python_models import Gate
from tests.support.rich_status import retry_delay_s, rich_status
from tests.support.serving import Server, serving
from tests.support.waiting import until

pb: Any = service_pb2
INFER = "/inference.GRPCInferenceService/ModelInfer"
X = np.ones((1, 16), np.float32)
LIMITED = """
max_batch_size: 8
rate_limits:
  default: {requests_per_s: 0.01, burst: 2}
  clients: {shop: {requests_per_s: 1000}}
"""
LEVELS = """
max_batch_size: 8
dynamic_batching: {priority_levels: 3, default_priority_level: 2}
"""
# Of the lower level one may wait, of the higher as many as like.
BOUNDED = """
dynamic_batching {
  priority_levels: 2
  default_priority_level: 2
  priority_queue_policy { key: 2 value { max_queue_size: 1 } }
}
"""
SHARED = 'parameters { key: "headrace.fair_sharing" value { string_value: "{}" } }\n'
GATES = {"gate": "", "bounded": BOUNDED, "shared": SHARED}


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Gate]:
    repository = tmp_path_factory.mktemp("load") / "repository"
    return {name: Gate(repository, name, config) for name, config in GATES.items()}


@pytest.fixture(scope="module")
def loaded(gates: dict[str, Gate]) -> Iterator[Server]:
    repository = gates["gate"].repository
    add_model(repository, "busy", busy())
    for name, config in (("limited", LIMITED), ("levels", LEVELS)):
        add_model(repository, name, affine())
        (repository / name / "config.pbtxt").unlink(missing_ok=True)
        (repository / name / "config.yaml").write_text(config)
    with serving(repository, repository.parent) as running:
        yield running


@pytest.fixture
def channel(loaded: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(loaded.grpc_address) as connected:
        yield connected


def load(server: Server, model: str, version: str = "") -> Any:
    status, headers, content = server.request("GET", f"/v2/models/{model}{version}/load")
    assert (status, headers["content-type"]) == (200, "application/json")
    return json.loads(content)


def test_a_model_at_rest(loaded: Server) -> None:
    load_figures = load(loaded, "levels")
    assert (load_figures["name"], load_figures["version"], load_figures["instances"]) == ("levels", "1", 1)
    for name in (
        "queue_depth",
        "queue_rows",
        "in_flight",
        "running_rows",
        "predicted_wait_us",
        "drain_us",
        "late_answers",
    ):
        assert load_figures[name] == 0, name
    assert load_figures["rows_per_s"] > 0  # by the profile measured at load
    assert [level["level"] for level in load_figures["levels"]] == [1, 2, 3]
    assert load(loaded, "levels", "/versions/1") == load_figures
    assert loaded.request("GET", "/v2/models/nothing/load")[0] == 404


def test_a_model_at_work(loaded: Server, gates: dict[str, Gate], channel: grpc.Channel) -> None:
    call = channel.unary_unary(INFER)
    gates["gate"].close()
    running = [call.future(gate_request(model="gate")) for _ in range(4)]
    until(lambda: load(loaded, "gate")["in_flight"] == 4)
    until(lambda: load(loaded, "gate")["queue_depth"] == 3)
    load_figures = load(loaded, "gate")
    assert (load_figures["queue_rows"], load_figures["running_rows"]) == (3, 1)

    def headers() -> Mapping[str, str]:
        format_header = {"endpoint-load-metrics-format": "json"}
        return loaded.request("POST", "/v2/models/gate/infer", b"{", format_header)[1]

    until(lambda: headers()["headrace-queue-depth"] == "3")  # load headers are refreshed every 50 ms
    assert int(headers()["headrace-predicted-wait-us"]) >= 0
    gates["gate"].open()
    for each in running:
        each.result(60)
    assert load(loaded, "gate")["in_flight"] == 0


def test_a_response_has_the_load(loaded: Server) -> None:
    body = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": X[0].tolist()}]}).encode()
    request_headers = {"endpoint-load-metrics-format": "json"}
    status, headers, _ = loaded.request("POST", "/v2/models/levels/infer", body, request_headers)
    assert (status, headers["headrace-queue-depth"], headers["headrace-predicted-wait-us"]) == (200, "0", "0")
    kind, _, report = headers["endpoint-load-metrics"].partition(" ")
    metrics = json.loads(report)["named_metrics"]
    assert (kind, metrics["queue_depth"], metrics["in_flight"]) == ("JSON", 0, 1)
    _, headers, _ = loaded.request("POST", "/v2/models/levels/infer", body, {"endpoint-load-metrics-format": "text"})
    assert headers["endpoint-load-metrics"].startswith("TEXT named_metrics.queue_depth=0, ")
    with triton_grpc.InferenceServerClient(loaded.grpc_address) as client:
        answer = client.infer("levels", [tensor("X", X)], headers=request_headers).get_response()
    assert answer.parameters["headrace_queue_depth"].int64_param == 0
    assert "headrace_predicted_wait_us" in answer.parameters


def test_a_client_over_its_quota_is_refused_and_others_are_not(loaded: Server, channel: grpc.Channel) -> None:
    """Both protocols draw on one bucket."""
    inputs = [triton.InferInput("X", [1, 16], "FP32").set_data_from_numpy(X)]
    with triton.InferenceServerClient(loaded.address) as client:
        greedy, shop = {"X-Headrace-Client": "greedy"}, {"X-Headrace-Client": "shop"}
        client.infer("limited", inputs, headers=greedy)
        channel.unary_unary(INFER)(message("limited", "", X), metadata=(("x-headrace-client", "greedy"),))
        with pytest.raises(InferenceServerException, match="greedy") as caught:
            client.infer("limited", inputs, headers=greedy)
        assert caught.value.status() == "429"
        for _ in range(10):
            client.infer("limited", inputs, headers=shop)
        client.infer("limited", inputs)  # who gives no name has a bucket of his own
    status, headers, _ = loaded.request(
        "POST",
        "/v2/models/limited/infer",
        json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": X[0].tolist()}]}).encode(),
        {"X-Headrace-Client": "greedy"},
    )
    assert status == 429
    assert 90 < int(headers["retry-after"]) <= 100
    assert int(headers["retry-after"]) - 1 < int(headers["retry-after-ms"]) / 1000 <= int(headers["retry-after"])
    with pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(INFER)(message("limited", "", X), metadata=(("x-headrace-client", "greedy"),))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers = dict(refused.value.trailing_metadata())
    code, _, details = rich_status(trailers["grpc-status-details-bin"])
    assert code == 8
    assert 90 < retry_delay_s(details) <= 100
    assert details["google.rpc.QuotaFailure"].violations[0].subject == "client:greedy"
    metadata = (("x-headrace-client", "greedy"),)
    (answer,) = channel.stream_stream(STREAM)(iter([message("limited", "", X)]), metadata=metadata)
    response = pb.ModelStreamInferResponse.FromString(answer)
    assert "greedy" in response.error_message
    status, _, content = loaded.request("GET", "/v2/models/limited/explain")
    (finding,) = [each for each in json.loads(content)["findings"] if each["kind"] == "quota"]
    assert (status, finding["explanation"].endswith("because their client exceeded its quota")) == (200, True)
    assert "greedy" not in str(finding)
    assert 90_000 < response.infer_response.parameters["headrace_retry_after_ms"].int64_param <= 100_000


def test_requests_that_would_be_late_are_refused_at_once(loaded: Server, channel: grpc.Channel) -> None:
    """Once its times are known: behind others who take long a deadline of 20 ms cannot be met, and is not waited for."""
    call = channel.unary_unary(INFER)
    for _ in range(9):
        call(steps("", STEPS_PER_S // 4))
    running = [call.future(steps("", STEPS_PER_S)) for _ in range(4)]
    until(lambda: load(loaded, "busy")["queue_depth"] == 3)
    with pytest.raises(grpc.RpcError) as caught:
        call(steps("", 1), metadata=(("x-request-timeout-ms", "20"),))
    error = caught.value
    # A request that had waited for its deadline would end with DEADLINE_EXCEEDED.
    assert error.code() == grpc.StatusCode.UNAVAILABLE, error.details()
    code, text, details = rich_status(dict(error.trailing_metadata())["grpc-status-details-bin"])
    assert (code, text) == (14, error.details())
    assert retry_delay_s(details) > 0
    inputs = [triton.InferInput("STEPS", [1], "INT64").set_data_from_numpy(np.array([1], np.int64))]
    with triton.InferenceServerClient(loaded.address) as client, pytest.raises(InferenceServerException) as late:
        client.infer("busy", inputs, headers={"X-Request-Timeout-Ms": "20"})
    assert late.value.status() == "503"
    for each in running:
        each.result(60)


def test_priority_levels_have_queue_bounds_and_the_higher_level_runs_first(
    loaded: Server, gates: dict[str, Gate], channel: grpc.Channel
) -> None:
    call = channel.unary_unary(INFER)

    def send(priority: int) -> grpc.Future:
        request = pb.ModelInferRequest.FromString(gate_request(model="bounded"))
        request.parameters["priority"].int64_param = priority
        return call.future(request.SerializeToString())

    done: list[str] = []
    gates["bounded"].close()
    first = send(0)
    until(lambda: load(loaded, "bounded")["running_rows"] == 1)
    waiting = {"low": send(2)}
    until(lambda: load(loaded, "bounded")["queue_depth"] == 1)
    with pytest.raises(grpc.RpcError) as caught:
        send(0).result(20)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    waiting |= {f"high {number}": send(1) for number in range(2)}
    for name, future in waiting.items():
        future.add_done_callback(lambda _, name=name: done.append(name))
    until(lambda: load(loaded, "bounded")["queue_depth"] == 3)
    assert [level["queue_depth"] for level in load(loaded, "bounded")["levels"]] == [2, 1]
    gates["bounded"].open()
    for each in (first, *waiting.values()):
        each.result(60)
    until(lambda: len(done) == 3)
    assert done[-1] == "low"


def test_a_client_does_not_wait_behind_all_that_another_has_queued(
    loaded: Server, gates: dict[str, Gate], channel: grpc.Channel
) -> None:
    call, done = channel.unary_unary(INFER), list[str]()

    def send(client: str) -> grpc.Future:
        future = call.future(gate_request(model="shared"), metadata=(("x-headrace-client", client),))
        future.add_done_callback(lambda _: done.append(client))
        return future

    gates["shared"].close()
    running = [send("flood")]
    until(lambda: load(loaded, "shared")["running_rows"] == 1)
    running += [send("flood") for _ in range(12)]
    until(lambda: load(loaded, "shared")["queue_depth"] == 12)
    running.append(send("calm"))
    until(lambda: load(loaded, "shared")["queue_depth"] == 13)
    gates["shared"].open()
    for each in running:
        each.result(60)
    until(lambda: len(done) == 14)
    assert done.index("calm") <= 4, done
