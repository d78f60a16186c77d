"""Spans of a real server at a real receiver: over both protocols and all engines, in the callers' traces, linked by batches."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.support import models
from tests.support.grpc_requests import Collector, tensor
from tests.support.otlp_receiver import Receiver, attributes, over_grpc, receiving
from tests.support.serving import Server, serving
from tests.support.waiting import until

X = np.ones((1, 16), np.float32)
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-00"}
PHASES = ["decode", "queue", "assemble", "compute", "split", "encode"]
MERGING = """
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: 16 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 }
dynamic_batching { preferred_batch_size: 3 max_queue_delay_microseconds: 10000000 }
"""


def repository(folder: Path) -> Path:
    models.add_model(folder / "models", "affine", models.affine())
    models.add_model(folder / "models", "merging", models.affine(), config=MERGING)
    models.add_model(folder / "models", "lookup", models.table_lookup(), config="max_batch_size: 8")
    # The second step refuses what the first one answers for 3.
    steps = [("lookup", {"X": "X"}, {"Y": "tens"}), ("lookup", {"X": "tens"}, {"Y": "Y"})]
    number = {"X": ("TYPE_INT64", (1,))}, {"Y": ("TYPE_INT64", (1,))}
    models.add_pipeline(folder / "models", "twice", models.ensemble_config(steps, *number))
    return folder / "models"


def body(**more: object) -> bytes:
    return json.dumps(
        {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}], **more}
    ).encode()


def infer(server: Server, model: str = "affine", headers: dict[str, str] | None = None, **more: object) -> int:
    return server.request("POST", f"/v2/models/{model}/infer", body(**more), headers)[0]


@contextmanager
def tracing(folder: Path, protocol: str) -> Iterator[tuple[Server, Receiver]]:
    """A server that sends spans, and their receiver over a protocol of OTLP."""
    with receiving(protocol) as receiver:
        options = ("--otlp-endpoint", receiver.endpoint, "--otlp-protocol", protocol, "--trace-rate", "0")
        with serving(repository(folder), folder, *options) as server:
            yield server, receiver
            assert "Traceback" not in server.text


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Receiver]]:
    with tracing(tmp_path_factory.mktemp("traced"), "grpc") as both:
        yield both


def test_spans_arrive_over_the_other_protocol_of_otlp(tmp_path: Path) -> None:
    with tracing(tmp_path, "http") as (server, receiver):
        assert infer(server, headers=SAMPLED) == 200
        (span,) = receiver.wait("infer affine")
        check(span, receiver)


@pytest.fixture
def clean(traced: tuple[Server, Receiver]) -> tuple[Server, Receiver]:
    """With nothing left of the test before."""
    traced[1].spans.clear()
    return traced


def check(span: Any, receiver: Receiver) -> dict[str, Any]:
    """A request's span is in its caller's trace and has all its phases, one behind the other."""
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, CALLER, "vendor=1")
    assert span.kind == span.SPAN_KIND_SERVER
    parts = receiver.children(span)
    assert [part.name for part in parts] == PHASES
    assert {part.trace_id.hex() for part in parts} == {TRACE}
    assert parts[0].start_time_unix_nano == span.start_time_unix_nano
    assert parts[-1].end_time_unix_nano == span.end_time_unix_nano
    for before, after in itertools.pairwise(parts):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    return attributes(span)


def test_a_request_over_http(clean: tuple[Server, Receiver]) -> None:
    server, receiver = clean
    assert infer(server, headers={**SAMPLED, "x-headrace-client": "me"}, id="first") == 200
    (span,) = receiver.wait("infer affine")
    span_attributes = check(span, receiver)
    assert (
        span_attributes["headrace.model"],
        span_attributes["headrace.version"],
        span_attributes["headrace.rows"],
    ) == ("affine", "1", 1)
    assert (span_attributes["headrace.request_id"], span_attributes["headrace.client"]) == ("first", "me")
    assert (span_attributes["http.response.status_code"], span_attributes["headrace.batch.closed"]) == (200, "idle")
    assert receiver.resources[0]["service.name"] == "headrace"
    assert receiver.paths == [] or set(receiver.paths) == {"/v1/traces"}


def test_a_request_over_grpc(clean: tuple[Server, Receiver]) -> None:
    server, receiver = clean
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        client.infer("affine", [tensor("X", X)], headers=SAMPLED, request_id="second")
    (span,) = receiver.wait("infer affine")
    span_attributes = check(span, receiver)
    assert (span_attributes["rpc.system"], span_attributes["rpc.response.status_code"]) == ("grpc", "OK")
    assert span_attributes["headrace.request_id"] == "second"


def test_the_requests_of_a_stream(clean: tuple[Server, Receiver]) -> None:
    server, receiver = clean
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        collect = Collector()
        client.start_stream(collect, headers=SAMPLED)
        for number in range(3):
            client.async_stream_infer("affine", [tensor("X", X)], request_id=f"s{number}")
        assert [error for _, error in collect.take(3)] == [None] * 3
        client.stop_stream()
    spans = receiver.wait("infer affine", 3)
    assert {check(span, receiver)["headrace.request_id"] for span in spans} == {"s0", "s1", "s2"}


def test_a_batch_is_linked_to_all_its_members(clean: tuple[Server, Receiver]) -> None:
    server, receiver = clean
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: infer(server, "merging", SAMPLED), range(3))) == [200] * 3
    members = receiver.wait("infer merging", 3)
    (batch,) = receiver.wait("batch merging")
    assert {link.span_id for link in batch.links} == {span.span_id for span in members}
    assert not batch.parent_span_id
    span_attributes = attributes(batch)
    assert (span_attributes["headrace.batch.rows"], span_attributes["headrace.batch.closed"]) == (3, "preferred")
    for span in members:
        assert [(link.trace_id, link.span_id) for link in span.links] == [(batch.trace_id, batch.span_id)]
        assert attributes(span)["headrace.batch.id"] == span_attributes["headrace.batch.id"]


def test_a_caller_that_does_not_sample_is_followed(clean: tuple[Server, Receiver]) -> None:
    server, receiver = clean
    for headers in (NOT_SAMPLED, {}, {"traceparent": "00-nonsense-01"}, {"traceparent": f"ff-{TRACE}-{CALLER}-01"}):
        assert infer(server, headers=headers) == 200
    assert infer(server, headers=SAMPLED, id="last") == 200
    receiver.wait("infer affine")
    assert [attributes(span)["headrace.request_id"] for span in receiver.named("infer")] == ["last"]


def test_errors_are_traced_with_their_reason(clean: tuple[Server, Receiver]) -> None:
    server, receiver = clean
    assert infer(server, "nothing", SAMPLED) == 404
    status = server.request("POST", "/v2/models/affine/infer", b'{"token": "abc"', SAMPLED)[0]
    assert status == 400
    unknown, broken = sorted(receiver.wait("infer ", 2), key=lambda span: span.name, reverse=True)
    assert (attributes(unknown)["error.type"], attributes(unknown)["http.response.status_code"]) == ("not_found", 404)
    assert unknown.status.code == unknown.status.STATUS_CODE_ERROR
    assert attributes(broken)["error.type"] == "bad_request"
    assert unknown.trace_id.hex() == broken.trace_id.hex() == TRACE


def test_a_pipeline_request_that_fails_has_the_spans_of_its_steps(clean: tuple[Server, Receiver]) -> None:
    server, receiver = clean
    number = {"inputs": [{"name": "X", "datatype": "INT64", "shape": [1, 1], "data": [3]}]}
    assert server.request("POST", "/v2/models/twice/infer", json.dumps(number).encode(), SAMPLED)[0] == 400
    first, second = receiver.wait("step lookup", 2)
    assert (first.name, second.name) == ("step lookup", "step lookup#2")
    outcomes = [attributes(span)["headrace.step.outcome"] for span in (first, second)]
    assert outcomes == ["ok", "bad_request"]
    assert first.end_time_unix_nano <= second.start_time_unix_nano


def test_tritons_extension_drives_it(clean: tuple[Server, Receiver]) -> None:
    server, receiver = clean
    with triton.InferenceServerClient(server.address) as client:
        before = client.get_trace_settings()
        assert (before["trace_mode"], before["trace_level"], before["trace_rate"]) == (
            "opentelemetry",
            ["TIMESTAMPS"],
            "0",
        )
        changed = client.update_trace_settings(
            "affine", {"trace_rate": "1", "trace_count": "2", "trace_mode": "opentelemetry"}
        )
        assert changed["trace_count"] == "2"
        for _ in range(4):
            assert infer(server) == 200
        spans = receiver.wait("infer affine", 2)
        assert len({span.trace_id for span in spans}) == 2
        assert not any(span.parent_span_id for span in spans)
        assert client.get_trace_settings("affine")["trace_count"] == "0"
        assert infer(server, headers=SAMPLED) == 200, "the count does not hold for those whose callers trace them"
        receiver.wait("infer affine", 3)
        client.update_trace_settings("affine", {"trace_level": ["OFF"]})
        assert infer(server, headers=SAMPLED) == 200
        with pytest.raises(InferenceServerException, match="trace_mode must be opentelemetry"):
            client.update_trace_settings("affine", {"trace_mode": "triton"})
        reset = dict.fromkeys(("trace_level", "trace_rate", "trace_count", "trace_mode"))
        assert client.update_trace_settings("affine", reset) == before
    assert infer(server, headers=SAMPLED, id="on again") == 200
    receiver.wait("infer affine", 4)
    assert "trace" in json.loads(server.request("GET", "/v2")[2])["extensions"]


def test_an_exemplar_leads_from_a_bucket_to_the_trace(clean: tuple[Server, Receiver]) -> None:
    server, _ = clean
    assert infer(server, headers=SAMPLED) == 200
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    page = server.request("GET", "/metrics", headers=accept)[2].decode()
    buckets = [
        line for line in page.splitlines() if line.startswith("headrace_total_seconds_bucket{") and "affine" in line
    ]
    assert any(f'trace_id="{TRACE}"' in line for line in buckets)


def test_an_unreachable_receiver_does_not_affect_requests(tmp_path: Path) -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        port: int = occupied.getsockname()[1]
    options = ("--otlp-endpoint", f"http://127.0.0.1:{port}", "--trace-rate", "1")
    with serving(repository(tmp_path), tmp_path, *options) as server:
        assert infer(server, id="lost") == 200
        until(lambda: "spans are lost, they cannot be delivered" in server.text)
        assert 'headrace_telemetry_dropped_total{kind="spans"} 0.0' not in server.request("GET", "/metrics")[2].decode()
        receiver = Receiver()
        with over_grpc(receiver, port):

            def is_delivered() -> bool:
                assert infer(server, id="found") == 200
                return bool(receiver.named("infer affine"))

            until(is_delivered)
            until(lambda: "spans are delivered again" in server.text)
        assert server.text.count("spans are lost") == 1
        assert "Traceback" not in server.text
