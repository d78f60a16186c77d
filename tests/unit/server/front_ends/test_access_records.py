"""Access records of front ends: what the engine process logs and traces of them is what it logs of its own requests."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from headrace.core.clock import NS_PER_S
from headrace.core.request import BatchTimes, PipelineStepTimes
from headrace.core.telemetry import RequestLogMode, TraceContext
from headrace.observability.access_log import MAX_ERRORS_HZ, AccessRecord, RequestLog
from headrace.observability.counters import Recorder
from headrace.observability.labelled_counter import DROPPED
from headrace.observability.tracing import RequestObserver, Tracer
from headrace.server.front_ends.access_records import (
    ERRORS_LOGGED,
    SUCCESSES,
    TRACES,
    ForwardingObserver,
    RecordSink,
    record_needs,
)
from headrace.server.front_ends.shared_page import SharedPage

CONTEXT = TraceContext("a" * 32, "b" * 16, True, "state=1")
OK_RECORD = AccessRecord(
    protocol="http",
    model="digits",
    version="2",
    status="200",
    received_ns=1_000_000,
    ended_ns=9_000_000,
    queued_ns=2_000_000,
    done_ns=8_000_000,
    request_id="first",
    client="alice",
    rows=3,
    context=CONTEXT,
    times=BatchTimes(3_000_000, 4_000_000, 5_000_000, 6_000_000),
    batch_rows=8,
    closed="full",
    steps=(PipelineStepTimes("a", "m", "1", 1, 2, BatchTimes(1, 2, 3, 4), 2, "ok", 1),),
)
FAILED = AccessRecord("grpc", "digits", "2", "UNAVAILABLE", 1_000_000, 2_000_000, reason="overloaded", error="full")


class Needs:
    """Needs of an engine process."""

    def __init__(self, value: int) -> None:
        self.record_needs = value


class Run:
    """A front end's observer, whose messages reach an engine's at the end of each turn of the loop."""

    def __init__(self, mode: RequestLogMode, trace_file: Path | None = None, needs: int | None = None) -> None:
        self.lines = io.BytesIO()
        self.tracer = Tracer("" if trace_file is None else str(trace_file))
        self.engine = RequestObserver(self.tracer, RequestLog(mode, self.lines))  # type: ignore[arg-type]
        self.recorder = Recorder()
        self.sink = RecordSink(self.engine, lambda model, version: self.recorder if version == "2" else None)
        self.turns: list[Callable[[], None]] = []
        self.messages: list[bytes] = []
        self.front_end = ForwardingObserver(self.messages.append, self.turns.append)
        self.front_end.needs = Needs(record_needs(self.engine) if needs is None else needs)

    def end_turn(self) -> None:
        while self.turns:
            self.turns.pop()()
        while self.messages:
            self.sink.receive(self.messages.pop(0))

    def logged(self) -> list[dict[str, object]]:
        self.end_turn()
        self.engine.close()
        return [json.loads(line) for line in self.lines.getvalue().splitlines()]


def direct(mode: RequestLogMode, record: AccessRecord) -> dict[str, object]:
    """The line that one process writes for a record."""
    run = Run(mode)
    sampling = run.engine.sample(record.model, record.context)
    if record.error:
        run.engine.record_failure(sampling, record)
    else:
        assert sampling is not None
        run.engine.record_success(sampling, record, run.recorder)
    (line,) = run.logged()
    return line


@pytest.mark.parametrize("record", [OK_RECORD, FAILED], ids=["success", "failure"])
def test_lines_equal_those_of_one_process(record: AccessRecord) -> None:
    run = Run("all")
    sampling = run.front_end.sample(record.model, record.context)
    if record.error:
        run.front_end.record_failure(sampling, record)
    else:
        assert sampling is not None
        run.front_end.record_success(sampling, record, run.recorder)
    (line,) = run.logged()
    expected = direct("all", record)
    del line["time"], expected["time"]  # wall clock
    assert line == expected


def test_records_of_one_turn_are_one_message() -> None:
    run = Run("all")
    for number in range(3):
        run.front_end.record_success(
            run.front_end.sample("m", None), OK_RECORD._replace(request_id=str(number)), run.recorder
        )
    assert (len(run.turns), run.messages) == (1, [])
    run.turns.pop()()
    assert len(run.messages) == 1
    assert [line["id"] for line in run.logged()] == ["0", "1", "2"]


def test_nothing_is_sent_while_nothing_is_wanted() -> None:
    run = Run("off")
    assert (record_needs(run.engine), run.front_end.active) == (0, False)
    run.front_end.record_failure(None, FAILED)
    run.front_end.record_failure(None, FAILED._replace(context=CONTEXT))
    assert not run.turns
    run.front_end.needs = None
    assert not run.front_end.active
    run.front_end.record_failure(None, FAILED)
    assert not run.turns, "no engine process"


def test_errors_are_logged_and_bounded() -> None:
    run = Run("errors")
    assert (record_needs(run.engine), run.front_end.active) == (ERRORS_LOGGED, False)
    before = dict(DROPPED.items()).get(("request_log",), 0)
    for _ in range(MAX_ERRORS_HZ + 5):
        run.front_end.record_failure(None, FAILED)
    run.front_end.record_failure(None, FAILED._replace(ended_ns=3 * NS_PER_S))
    lines = run.logged()
    assert len(lines) == MAX_ERRORS_HZ + 1
    assert {line["error"] for line in lines} == {"full"}
    assert dict(DROPPED.items())[("request_log",)] - before == 5


def test_the_engine_samples(tmp_path: Path) -> None:
    run = Run("off", tmp_path / "traces.json")
    changes = []
    run.engine.on_change(lambda: changes.append(record_needs(run.engine)))
    run.tracer.update("", {"trace_level": ["TIMESTAMPS"], "trace_rate": "3"})
    assert changes == [SUCCESSES | TRACES]
    run.front_end.needs = Needs(changes[0])
    for number in range(9):
        assert run.front_end.active
        sampling = run.front_end.sample("digits", None)
        assert sampling is not None
        run.front_end.record_success(sampling, OK_RECORD._replace(request_id=str(number)), run.recorder)
    run.end_turn()
    run.tracer.update("", {"trace_level": ["OFF"]})
    assert changes[1:] == [0]
    run.engine.close()
    traces = json.loads((tmp_path / "traces.json").read_text())
    assert sum("timestamps" in each for each in traces) == 3


def test_other_messages_are_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        Run("all").sink.receive(b"\x93\x01\x02\x03")


SENDING = """
import socket, sys
from headrace.server.front_ends.access_records import ForwardingObserver
from headrace.server.front_ends.shared_page import SharedPage
from headrace.observability.counters import Recorder
from tests.unit.server.front_ends.test_access_records import OK_RECORD, FAILED
page, sock = SharedPage(int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2]))
turns = []
observer = ForwardingObserver(sock.sendall, turns.append)
observer.needs = page
for number in range(100):
    if observer.active:
        observer.record_success(observer.sample("digits", None), OK_RECORD._replace(request_id=str(number)), Recorder())
    observer.record_failure(None, FAILED._replace(request_id=str(number), ended_ns=number * 10**9))
    turns.pop()()
    assert sock.recv(1) == b"a"
"""


def test_records_of_another_process_are_logged() -> None:
    run = Run("all")
    page = SharedPage.create(1)
    page.set_record_needs(record_needs(run.engine))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [sys.executable, "-c", SENDING, str(page.fd), str(theirs.fileno())]
    process = subprocess.Popen(words, pass_fds=[page.fd, theirs.fileno()], cwd=Path(__file__).parents[4])
    theirs.close()
    with ours:
        while message := ours.recv(1 << 16):
            run.sink.receive(message)
            ours.send(b"a")
    assert process.wait() == 0
    lines = run.logged()
    assert [line["id"] for line in lines] == [str(number) for number in range(100) for _ in range(2)]
    assert [line["reason"] for line in lines] == ["ok", "overloaded"] * 100
    os.close(page.fd)
