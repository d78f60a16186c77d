"""Request options in the headers of an HTTP inference request, and refused values."""

from __future__ import annotations

import json

import pytest
from headrace.core.clock import NS_PER_MS, monotonic_ns
from headrace.core.errors import QuotaExceeded, WouldMiss
from headrace.wire.http import infer_endpoint
from headrace.wire.requests.load_report import FRESH_NS, LoadHeaders, LoadReports

from tests.unit.wire.http.test_infer_endpoint import BUSY, Handle, call, request


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the endpoint's clock: the deadline counts from the first bytes of a request, `received_ns` from the last."""
    now_ns = monotonic_ns()
    monkeypatch.setattr(infer_endpoint, "monotonic_ns", lambda: now_ns)


def test_the_earlier_of_header_and_parameter_counts() -> None:
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [0.5]}
    for own_us, expected_ms in ((1_000, 1), (900_000, 30), (0, 30), (-5, 30), (2**63, 30)):
        handle = Handle()
        body = json.dumps({"inputs": [tensor], "parameters": {"timeout": 1, "headrace_deadline_us": own_us}}).encode()
        assert call(handle, body, headers=[(b"x-request-timeout-ms", b"30")])
        (decoded,) = handle.requests
        assert decoded.deadline_ns - decoded.received_ns == expected_ms * NS_PER_MS


@pytest.mark.parametrize(
    ("header", "value"),
    [
        *((b"x-request-timeout-ms", value) for value in (b"", b"-1", b"1.5", b"1e3", b"soon", b"9" * 21, b"\xb2")),
        *((b"x-headrace-client", value) for value in (b"a b", b"x" * 129, b"\xe4", b"a\x7f", b" ")),
        (b"headrace-timing", b"yes please"),
    ],
)
def test_invalid_header_values_are_refused(header: bytes, value: bytes) -> None:
    handle = Handle()
    answer = call(handle, request(), headers=[(header, value)])
    assert answer is not None
    assert answer[0] == 400
    assert header.decode() in json.loads(answer[2])["error"]
    assert not handle.requests


def test_a_split_request_reports_only_its_total_time() -> None:
    answer = call(Handle(), request(), headers=[(b"headrace-timing", b"1")])
    assert answer is not None
    assert set(json.loads(answer[2])["parameters"]) == {"headrace_total_us"}
    assert answer[1]["server-timing"].startswith("total;dur=")


def test_responses_and_refusals_carry_the_load_report() -> None:
    for handle, status in (
        (Handle(), 200),
        (Handle(WouldMiss("late", 0.01)), 503),
        (Handle(QuotaExceeded("many")), 429),
    ):
        answer = call(handle, request())
        assert answer is not None
        assert answer[0] == status
        assert BUSY.items() <= answer[1].items()
    unknown = call(Handle(), model="other")
    assert unknown is not None
    assert not BUSY.keys() & unknown[1].keys()


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (b"text", "TEXT named_metrics.queue_depth=3, named_metrics.queue_rows=5, named_metrics.in_flight=4, "),
        (b"JSON", 'JSON {"named_metrics":{"queue_depth":3,"queue_rows":5,"in_flight":4,'),
        (b"bin", None),
        (b"\xff", None),
    ],
)
def test_the_load_report_in_the_formats_of_load_balancers(form: bytes, expected: str | None) -> None:
    answer = call(Handle(), request(), headers=[(b"endpoint-load-metrics-format", form)])
    assert answer is not None
    assert answer[0] == 200
    parameters = answer[1].get("endpoint-load-metrics")
    assert (parameters is None) == (expected is None)
    assert parameters is None or parameters.startswith(expected or "")


def test_the_load_is_refreshed_at_intervals() -> None:
    handle, headers = Handle(), LoadHeaders(LoadReports())
    parameters = [headers.at(now_ns, handle) for now_ns in range(1, 3 * FRESH_NS, FRESH_NS // 10)]  # type: ignore[arg-type]
    assert handle.loads == 3
    assert {each.lines for each in parameters} == {b"headrace-queue-depth: 3\r\nheadrace-predicted-wait-us: 1\r\n"}
