"""Out-of-band load reports: the interval and its bounds, the bound on streams, permissions, and the descriptors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf import duration_pb2
from headrace.core.access import OpenAccess
from headrace.core.errors import BadRequest, HeadraceError, Overloaded, Unavailable
from headrace.wire.grpc import load_service
from headrace.wire.grpc.load_service import LoadService
from headrace.wire.requests.load_report import LoadReports, ServerFigures

from tests.support.orca import orca_message

FIGURES = ServerFigures(0.5, 100.0, 1.0)


def service() -> LoadService:
    return LoadService(LoadReports("on-request", lambda _now_ns: FIGURES), OpenAccess())


def request(seconds: int = 0, nanos: int = 0) -> bytes:
    duration = duration_pb2.Duration(seconds=seconds, nanos=nanos).SerializeToString()
    return b"\x0a" + bytes([len(duration)]) + duration


class Call:
    """A call with one message; `written` is set by the first report, and `error` is raised by the next write."""

    def __init__(self, message: bytes | None) -> None:
        self.message, self.stopping = message, False
        self.reports: list[Any] = []
        self.written = asyncio.Event()
        self.error: HeadraceError | None = None

    async def read(self) -> bytes | None:
        return self.message

    async def write(self, message: list[bytes]) -> None:
        if self.error is not None:
            raise self.error
        self.reports.append(orca_message().FromString(b"".join(message)))
        self.written.set()


@pytest.mark.parametrize(
    ("content", "expected_s"),
    [
        (b"", 1.0),
        (request(), 1.0),
        (request(seconds=-5), 1.0),
        (request(nanos=10**8), 1.0),
        (request(seconds=2, nanos=5 * 10**8), 2.5),
        (request(seconds=2**60), 3600.0),
    ],
)
def test_the_interval_is_that_of_the_request_within_bounds(content: bytes, expected_s: float) -> None:
    assert service()._interval_s(content) == expected_s


@pytest.mark.parametrize(
    ("content", "words"), [(b"\xff", "is not an OrcaLoadReportRequest"), (b"\x12" + b"a" * 20_000, "at most 16384")]
)
def test_an_invalid_request_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        service()._interval_s(content)


async def test_a_stream_ends_when_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_service, "_STOP_INTERVAL_S", 0.001)

    loads, call = service(), Call(request(seconds=3600))
    task = asyncio.create_task(loads.stream(call))  # type: ignore[arg-type]  # the part of a call that it uses
    await call.written.wait()
    (report,) = call.reports
    assert (report.application_utilization, report.rps_fractional, report.eps) == (0.5, 100.0, 1.0)
    call.stopping = True
    with pytest.raises(Unavailable, match="shutting down"):
        await task
    assert loads._streams == 0


async def test_streams_are_bounded_and_end_with_their_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_service, "MAX_REPORT_STREAMS", 2)

    loads = service()
    calls = [Call(request(seconds=60)) for _ in range(2)]
    tasks = [asyncio.create_task(loads.stream(call)) for call in calls]  # type: ignore[arg-type]  # as above
    for call in calls:
        await call.written.wait()
    with pytest.raises(Overloaded, match="2 streams of load reports are open"):
        await loads.stream(Call(request()))  # type: ignore[arg-type]  # as above
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    third = Call(request(seconds=60))
    tasks[0] = asyncio.create_task(loads.stream(third))  # type: ignore[arg-type]  # as above
    await third.written.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert loads._streams == 0
    await loads.stream(Call(None))  # type: ignore[arg-type]  # a client that has closed without a message
