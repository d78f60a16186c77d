"""Access records as spans: times, parents, links and limits, with an exporter that stores them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.waiting import until

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from headrace.core.clock import monotonic_ns
from headrace.core.errors import Forbidden
from headrace.core.request import BatchTimes
from headrace.core.telemetry import TraceContext
from headrace.observability import tracing
from headrace.observability.access_log import AccessRecord, phases
from headrace.observability.labelled_counter import DROPPED
from headrace.observability.spans import SpanWriter, otlp_exporter
from headrace.observability.tracing import Tracer, TraceSelection
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

NOW = monotonic_ns()
TRACE = "0af7651916cd43dd8448eb211c80319c"


class CollectedSpans(SpanExporter):
    """Keeps what it gets, or refuses it."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.exports = 0
        self.works: bool | Exception = True
        self.down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.exports += 1
        if isinstance(self.works, Exception):
            raise self.works
        self.spans.extend(spans)
        return SpanExportResult.SUCCESS if self.works else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.down = True

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


def account(times: BatchTimes | None, request_id: str = "", context: TraceContext | None = None) -> AccessRecord:
    return AccessRecord(
        *("http", "m", "1", "200", NOW, NOW + 80, NOW + 20, NOW + 70),
        request_id=request_id,
        context=context,
        rows=1,
        times=times,
        batch_rows=4,
        closed="full",
    )


def times() -> BatchTimes:
    return BatchTimes(NOW + 30, NOW + 40, NOW + 50, NOW + 60)


def written(*accounts: AccessRecord, hold_s: float = 0.0) -> CollectedSpans:
    exporter_stub = CollectedSpans()
    writer = SpanWriter(exporter_stub, hold_s=hold_s)
    for number, each in enumerate(accounts, 1):
        writer.put(each, f"{number:032x}")
    writer.close()
    assert exporter_stub.down
    return exporter_stub


def test_members_of_a_batch_that_is_held_are_linked_to_it_and_no_others() -> None:
    shared = times()
    other = shared._replace(split_ns=shared.split_ns + 1)
    copy = BatchTimes(*shared)  # as in a record of a front-end process
    exporter_stub = written(account(shared), account(other), account(copy))
    batches, members = exporter_stub.named("batch m"), exporter_stub.named("infer m")
    assert len(batches) == 2
    assert sorted(len(batch.links) for batch in batches) == [1, 2]
    by_id = {batch.context.span_id: batch for batch in batches}
    for member in members:
        (link,) = member.links
        batch = by_id[link.context.span_id]
        assert member.context.span_id in {each.context.span_id for each in batch.links}
        assert batch.start_time <= member.end_time
    assert len({span.context.trace_id for span in batches + members}) == 5


def test_a_batch_is_sent_after_its_delay_without_new_spans() -> None:
    exporter_stub = CollectedSpans()
    writer = SpanWriter(exporter_stub, hold_s=0.05)
    writer.put(account(times()), TRACE)
    until(lambda: exporter_stub.named("batch m"))
    writer.close()
    assert len(exporter_stub.named("batch m")) == 1


def test_a_request_that_was_cut_has_no_batch() -> None:
    exporter_stub = written(account(None))
    assert [span.name for span in exporter_stub.spans] == ["decode", "queue_to_split", "encode", "infer m"]


@pytest.mark.parametrize("hostile", ["\ud800", "\x00", "x" * 100_000, "token=abc"])
def test_what_clients_send_can_be_encoded(hostile: str) -> None:
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    exporter_stub = written(account(times(), hostile)._replace(model=hostile, error=hostile, client=hostile))
    message = encode_spans(exporter_stub.spans).SerializeToString()
    assert len(message) < 6000
    (span,) = [span for span in exporter_stub.spans if span.kind.name == "SERVER"]
    assert "abc" not in str((span.attributes or {}).get("headrace.request_id"))


@pytest.mark.parametrize("works", [False, RuntimeError("boom")])
def test_undelivered_spans_are_counted_and_logged_a_single_time(
    caplog: pytest.LogCaptureFixture, works: bool | Exception
) -> None:
    exporter_stub = CollectedSpans()
    exporter_stub.works = works
    before = dict(DROPPED.items()).get(("spans",), 0)
    writer = SpanWriter(exporter_stub, shown="http://h", hold_s=0)
    for number in range(1, 4):
        writer.put(account(None), TRACE)
        until(lambda expected=number: exporter_stub.exports >= expected)
    assert caplog.text.count("spans are lost") == 1
    exporter_stub.works = True
    with caplog.at_level("INFO"):
        writer.put(account(None), TRACE)
        writer.close()
    assert "delivered again to http://h" in caplog.text
    assert dict(DROPPED.items())[("spans",)] - before == 3 * 4


def test_an_endpoint_over_http_without_a_path_gets_that_of_the_specification() -> None:
    for endpoint, used in (("http://h:1", "/v1/traces"), ("http://h:1/", "/v1/traces"), ("http://h:1/own", "/own")):
        exporter: Any = otlp_exporter(endpoint, "http")
        assert exporter._endpoint == f"http://h:1{used}"
        exporter.shutdown()


def test_phases_are_consecutive_for_any_timestamps() -> None:
    odd = account(BatchTimes(NOW + 30, NOW + 25, NOW + 50, NOW + 90))
    result = phases(odd)
    assert all(phase.begin_ns <= phase.end_ns for phase in result)
    assert phases(odd._replace(queued_ns=0)) == []


# --- The tracer with spans ---------------------------------------------------------------------------------------------


class Sink:
    """Keeps what is put."""

    def __init__(self) -> None:
        self.failed = False
        self.traces: list[str] = []
        self.closed = False

    def put(self, account: AccessRecord, trace_id: str) -> None:
        self.traces.append(trace_id)

    def close(self) -> None:
        self.closed = True


SAMPLED, NOT_SAMPLED = TraceContext(TRACE, "b" * 16, True), TraceContext(TRACE, "b" * 16, False)


def test_rate_0_and_an_exhausted_count_still_follow_the_caller_s_decision() -> None:
    tracer = Tracer("", spans=Sink(), rate=1)
    tracer.update("", {"trace_count": "1"})
    assert tracer.select("m", None) is not None
    assert tracer.select("m", None) is None
    tracer.update("", {"trace_count": None, "trace_rate": "0"})
    assert tracer.select("m", None) is None
    assert tracer.select("m", SAMPLED) is not None
    assert tracer.active


def test_clients_cannot_have_more_traced_than_so_much_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MAX_PROPAGATED_HZ", 10)
    now_ns = [0]
    tracer = Tracer("", spans=Sink(), clock=lambda: now_ns[0])
    before = dict(DROPPED.items()).get(("spans",), 0)
    assert sum(tracer.select("m", SAMPLED) is not None for _ in range(50)) == 10
    assert dict(DROPPED.items())[("spans",)] - before == 40
    tracer.update("", {"trace_rate": "1"})
    assert sum(tracer.select("m", None) is not None for _ in range(50)) == 50, (
        "the operator may have as many as he likes"
    )
    now_ns[0] = 1_000_000_000
    assert tracer.select("m", SAMPLED) is not None


def test_the_mode_is_one_of_those_the_operator_has_made_ready(tmp_path: Any) -> None:
    sink = Sink()
    both = Tracer(str(tmp_path / "trace.json"), spans=sink, rate=1)
    assert both.settings("")["trace_mode"] == "opentelemetry"
    assert both.update("m", {"trace_mode": ["triton"]})["trace_mode"] == "triton"
    assert both.select("m", SAMPLED) == TraceSelection("", 0)
    assert both.select("n", SAMPLED) == TraceSelection(TRACE)
    both.close()
    assert sink.closed
    with pytest.raises(
        Forbidden, match="trace_mode must be opentelemetry: triton needs a server started with --trace-file"
    ):
        Tracer("", spans=Sink()).update("", {"trace_mode": "triton"})
    with pytest.raises(Forbidden, match=r"trace_mode must be triton: opentelemetry needs .* --otlp-endpoint"):
        Tracer("t.json").update("", {"trace_mode": "opentelemetry"})
    with pytest.raises(Forbidden, match="--otlp-endpoint"):
        Tracer("").update("", {"trace_level": "TIMESTAMPS"})


def test_a_failed_span_exporter_turns_tracing_off() -> None:
    sink = Sink()
    tracer = Tracer("", spans=sink, rate=1)
    sink.failed = True
    assert tracer.select("m", SAMPLED) is None
    assert not tracer.active
