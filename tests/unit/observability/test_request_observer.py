"""Sampling decisions and their recipients: traces, exemplars, request log."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
from headrace.core.request import BatchTimes
from headrace.core.telemetry import RequestLogMode, TraceContext
from headrace.observability.access_log import AccessRecord, RequestLog
from headrace.observability.counters import Recorder
from headrace.observability.labelled_counter import DROPPED
from headrace.observability.tracing import RequestObserver, Tracer

from tests.unit.observability.test_spans import Sink

CONTEXT = TraceContext("a" * 32, "b" * 16, True)
GOOD = AccessRecord("http", "m", "1", "200", 10, 90, 20, 80, context=CONTEXT, times=BatchTimes(30, 40, 50, 60))
BAD = AccessRecord("grpc", "m", "", "INTERNAL", 10, 90, context=CONTEXT, reason="model_failed", error="broken")


class Kit:
    """RequestObserver with a log that is kept and spans that are counted."""

    def __init__(self, mode: RequestLogMode = "off", traced: bool = False, secret: bool = False) -> None:
        self.stream = io.BytesIO()
        self.sink = Sink()
        tracer = Tracer("", spans=self.sink if traced else None)
        self.observer = RequestObserver(tracer, RequestLog(mode, self.stream, rate=2), secret)
        self.recorder = Recorder()

    def lines(self) -> list[dict[str, object]]:
        self.observer.close()
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def traced() -> Iterator[Kit]:
    kit = Kit("sampled", traced=True)
    yield kit
    kit.observer.close()


@pytest.mark.parametrize(
    ("mode", "spans", "active"),
    [
        ("off", False, False),
        ("errors", False, False),
        ("sampled", False, True),
        ("all", False, True),
        ("off", True, True),
    ],
)
def test_it_is_active_only_if_a_response_may_be_sampled(mode: RequestLogMode, spans: bool, active: bool) -> None:
    assert Kit(mode, spans).observer.active is active


def test_a_traced_request_is_logged_with_its_trace_and_stands_as_an_example(traced: Kit) -> None:
    sampling = traced.observer.sample("m", CONTEXT)
    assert sampling is not None
    traced.observer.record_success(sampling, GOOD, traced.recorder)
    assert traced.sink.traces == ["a" * 32]
    (line,) = traced.lines()
    assert line["trace_id"] == "a" * 32
    examples = traced.recorder.totals().phases["total"].exemplars.values()
    assert [(each.trace_id, each.value_ns) for each in examples] == [("a" * 32, 50)]


def test_a_sample_of_the_rest_is_logged() -> None:
    kit = Kit("sampled")
    for number in range(6):
        sampling = kit.observer.sample("m", None)
        if sampling is not None:
            kit.observer.record_success(sampling, GOOD._replace(request_id=str(number), context=None), kit.recorder)
    assert [line["id"] for line in kit.lines()] == ["1", "3", "5"]


def test_failures_before_sampling_are_logged_and_traced(traced: Kit) -> None:
    traced.observer.record_failure(None, BAD)
    traced.observer.record_failure(None, BAD._replace(context=CONTEXT._replace(sampled=False)))
    assert traced.sink.traces == ["a" * 32]
    lines = traced.lines()
    assert [(line["level"], line["status"], line["error"]) for line in lines] == [("error", "INTERNAL", "broken")] * 2


@pytest.mark.parametrize(("mode", "lines"), [("errors", 102), ("sampled", 102), ("all", 302)])
def test_malformed_requests_do_not_fill_the_log(mode: RequestLogMode, lines: int) -> None:
    kit = Kit(mode)
    before = dict(DROPPED.items())[("request_log",)]
    for _ in range(300):
        kit.observer.record_failure(None, BAD)
    for _ in range(2):
        kit.observer.record_failure(None, BAD._replace(ended_ns=1_000_000_000))
    assert len(kit.lines()) == lines
    assert dict(DROPPED.items())[("request_log",)] - before == 302 - lines


def test_off_is_off() -> None:
    kit = Kit("off")
    kit.observer.record_failure(None, BAD)
    assert kit.lines() == []


def test_secret_client_names_are_replaced_by_pseudonyms() -> None:
    kit = Kit("errors", secret=True)
    kit.observer.record_failure(None, BAD._replace(client="hunter2"))
    (line,) = kit.lines()
    assert str(line["client"]).startswith("secret-")
    assert "hunter2" not in str(line)
    assert kit.observer.client_name("hunter2") == line["client"], "the same name as everywhere else"
    assert Kit("errors").observer.client_name("shop") == "shop"


def test_a_log_on_a_full_disk_is_closed_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Full(io.BytesIO):
        def write(self, _: object) -> int:
            raise OSError(28, "No space left on device")

    log = RequestLog("all", Full())
    log.put(GOOD)
    log.close()
    assert "No space left on device" in caplog.text
    assert not log.active
    assert not log.errors
