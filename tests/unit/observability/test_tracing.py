"""Trace settings of Triton's extension, and trace files that Triton's tools can read."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from headrace.core.errors import BadRequest, Forbidden, TooLarge, Unavailable
from headrace.core.request import BatchTimes
from headrace.observability import tracing
from headrace.observability.access_log import AccessRecord
from headrace.observability.tracing import Tracer, TraceSelection
from hypothesis import given
from hypothesis import strategies as st

DEFAULTS: Mapping[str, object] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "trace.json",
    "trace_mode": "triton",
}
ON = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
TIMES = BatchTimes(taken_ns=30, assembled_ns=40, computed_ns=50, split_ns=60)


def account(
    model: str = "m", request_id: str = "", times: BatchTimes | None = TIMES, version: str = "3"
) -> AccessRecord:
    return AccessRecord(
        "http", model, version, "200", 10, 80, queued_ns=20, done_ns=70, request_id=request_id, rows=1, times=times
    )


def answer(tracer: Tracer, model: str = "m", request_id: str = "", times: BatchTimes | None = TIMES) -> None:
    """As `RequestObserver` does: look at `active`, pick, then record."""
    if tracer.active and (pick := tracer.select(model, None)) is not None:
        tracer.record(pick, account(model, request_id, times))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.fixture
def tracer(path: Path) -> Iterator[Tracer]:
    tracer = Tracer(str(path))
    yield tracer
    tracer.close()


def traces(path: Path) -> list[dict[str, object]]:
    """The first object of every trace in a file."""
    return [each for each in json.loads(path.read_bytes()) if "timestamps" not in each]


def ids(path: Path) -> list[object]:
    return [each["request_id"] for each in traces(path)]


# --- Settings ----------------------------------------------------------------------------------------------------------


def test_settings_without_changes_are_the_defaults(tracer: Tracer) -> None:
    assert tracer.settings("") == tracer.settings("m") == DEFAULTS
    assert tracer.update("", {}) == DEFAULTS
    assert tracer.active is False


def test_settings_come_from_the_model_then_the_server_then_the_default(tracer: Tracer) -> None:
    assert tracer.update("m", {"trace_rate": "5"}) == {**DEFAULTS, "trace_rate": "5"}
    assert tracer.settings("") == tracer.settings("other") == DEFAULTS
    tracer.update("", {"trace_rate": "7", "log_frequency": "9"})
    assert tracer.settings("other")["trace_rate"] == "7"
    assert tracer.settings("m") == {**DEFAULTS, "trace_rate": "5", "log_frequency": "9"}
    assert tracer.update("m", {"trace_rate": None})["trace_rate"] == "7"
    assert tracer.update("", {"trace_rate": None, "log_frequency": None}) == DEFAULTS
    assert tracer.settings("m") == DEFAULTS


def test_a_client_of_grpc_has_nothing_but_lists(tracer: Tracer) -> None:
    tracer.update("", {"trace_level": ["TIMESTAMPS"], "trace_rate": ["3"], "log_frequency": ["4"]})
    assert tracer.settings("") == {**DEFAULTS, "trace_level": ["TIMESTAMPS"], "trace_rate": "3", "log_frequency": "4"}
    assert tracer.update("", {"trace_level": [], "trace_rate": [], "log_frequency": []}) == DEFAULTS


def test_settings_may_be_sent_back_as_they_were_read(tracer: Tracer) -> None:
    assert tracer.update("", tracer.settings("")) == DEFAULTS
    assert tracer.update("m", tracer.settings("m")) == DEFAULTS


@pytest.mark.parametrize("value", ["/etc/cron.d/x", ["/etc/cron.d/x"], "", 1, "../trace.json"])
def test_the_trace_file_is_the_operators(tracer: Tracer, value: object) -> None:
    with pytest.raises(Forbidden, match="--trace-file"):
        tracer.update("", {"trace_file": value})


def test_without_a_trace_file_nothing_is_traced() -> None:
    tracer = Tracer("")
    for changes in (ON, {"trace_level": "TIMESTAMPS"}):
        for model in ("", "m"):
            with pytest.raises(Forbidden, match="--trace-file"):
                tracer.update(model, changes)
    assert tracer.active is False
    assert tracer.update("", {"trace_level": ["OFF"], "trace_rate": "5"})["trace_rate"] == "5"
    tracer.close()


@pytest.mark.parametrize("levels", [["TIMESTAMPS", "TENSORS"], ["TENSORS", "TIMESTAMPS"], ["TIMESTAMPS", "TIMESTAMPS"]])
def test_several_levels_are_answered_with_those_in_force(tracer: Tracer, levels: list[str]) -> None:
    assert tracer.update("", {"trace_level": levels})["trace_level"] == ["TIMESTAMPS"]
    assert tracer.active


def test_a_level_that_is_not_recorded_is_named(tracer: Tracer) -> None:
    with pytest.raises(BadRequest, match="'TENSORS' is not recorded"):
        tracer.update("", {"trace_level": ["TENSORS"]})
    with pytest.raises(BadRequest, match="'MAX' is unknown"):
        tracer.update("", {"trace_level": ["MAX"]})


@pytest.mark.parametrize(
    "changes",
    [
        {"trace_level": "MAX"},
        {"trace_level": ["TIMESTAMPS", "OFF"]},
        {"trace_level": ["OFF", "OFF"]},
        {"trace_level": ["TIMESTAMPS", "ACTIVITIES"]},
        {"trace_level": ["TENSORS"]},
        {"trace_level": [["OFF"]]},
        {"trace_level": 0},
        {"trace_rate": "0"},
        {"trace_rate": "-1"},
        {"trace_rate": "1.5"},
        {"trace_rate": " 1"},
        {"trace_rate": "٣"},
        {"trace_rate": 1.0},
        {"trace_rate": True},
        {"trace_rate": ["1", "2"]},
        {"trace_rate": str(2**32)},
        {"trace_rate": "9" * 5000},
        {"trace_count": "-2"},
        {"trace_count": str(2**31)},
        {"log_frequency": "-1"},
        {"trace_mode": "zipkin"},
        {"trace_mode": ["triton", "opentelemetry"]},
        {"log_info": True},
        {"\x1b[2J": "1"},
    ],
)
def test_refused_settings_change_nothing(tracer: Tracer, changes: dict[str, object]) -> None:
    with pytest.raises(BadRequest) as caught:
        tracer.update("", {**ON, **changes})
    assert tracer.settings("") == DEFAULTS
    assert tracer.active is False
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["OFF", "1", "-1"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.text(max_size=5), st.dictionaries(st.sampled_from([*DEFAULTS]) | st.text(max_size=20), JSON, max_size=3))
def test_any_json_is_accepted_or_refused(model: str, changes: dict[str, object]) -> None:
    tracer = Tracer("")
    try:
        tracer.update(model, changes)
    except (BadRequest, Forbidden):
        assert tracer.settings(model) == {**DEFAULTS, "trace_file": ""}
    assert tracer.active is False


def test_the_number_of_models_with_settings_is_bounded(monkeypatch: pytest.MonkeyPatch, tracer: Tracer) -> None:
    monkeypatch.setattr("headrace.observability.tracing._MAX_MODELS", 2)
    tracer.update("a", {"trace_level": "OFF"})
    tracer.update("b", {"trace_rate": "5"})
    with pytest.raises(TooLarge):
        tracer.update("c", {"trace_level": "OFF"})
    tracer.update("b", {"trace_rate": "6"})
    tracer.update("c", {"trace_rate": None})
    tracer.update("a", {"trace_level": None})
    tracer.update("c", {"trace_level": "OFF"})
    with pytest.raises(BadRequest):
        tracer.update("x" * 2000, {"trace_rate": "5"})


# --- What is traced ----------------------------------------------------------------------------------------------------


def test_the_file_is_tritons(tracer: Tracer, path: Path) -> None:
    tracer.update("", ON)
    tracer.record(TraceSelection(""), account("m", "my id"))
    tracer.record(TraceSelection(""), account("n", times=None, version="1")._replace(queued_ns=21, done_ns=71))
    tracer.record(TraceSelection(""), account("n")._replace(reason="overloaded"))
    tracer.close()
    assert json.loads(path.read_bytes()) == [
        {"id": 1, "model_name": "m", "model_version": 3, "request_id": "my id"},
        {
            "id": 1,
            "timestamps": [
                {"name": "REQUEST_START", "ns": 10},
                {"name": "QUEUE_START", "ns": 20},
                {"name": "COMPUTE_START", "ns": 30},
                {"name": "COMPUTE_INPUT_END", "ns": 40},
                {"name": "COMPUTE_OUTPUT_START", "ns": 50},
                {"name": "COMPUTE_END", "ns": 60},
                {"name": "REQUEST_END", "ns": 70},
            ],
        },
        {"id": 2, "model_name": "n", "model_version": 1},
        {
            "id": 2,
            "timestamps": [
                {"name": "REQUEST_START", "ns": 10},
                {"name": "QUEUE_START", "ns": 21},
                {"name": "REQUEST_END", "ns": 71},
            ],
        },
    ]


def test_hostile_ids_stay_inside_their_string(tracer: Tracer, path: Path) -> None:
    tracer.update("", ON)
    hostile = ['"}]', "\n\x1b[2J", "\ud800", "x" * 100_000]
    for each in hostile:
        answer(tracer, request_id=each)
    tracer.close()
    assert ids(path) == [each[:256] for each in hostile]
    assert path.stat().st_size < 5000


def test_every_nth_is_traced(tracer: Tracer, path: Path) -> None:
    tracer.update("", {"trace_level": ["TIMESTAMPS"], "trace_rate": "3"})
    for index in range(1, 11):
        answer(tracer, request_id=str(index))
    tracer.close()
    assert ids(path) == ["3", "6", "9"]


def test_the_count_runs_out_and_tracing_with_it(tracer: Tracer, path: Path) -> None:
    tracer.update("", {**ON, "trace_count": "2"})
    for index in range(5):
        assert tracer.active is (index < 2)
        answer(tracer, request_id=str(index))
    assert tracer.settings("")["trace_count"] == "0"
    tracer.update("", {"trace_rate": "1"})
    assert tracer.active is False
    tracer.update("", {"trace_count": "1"})
    answer(tracer, request_id="again")
    tracer.update("", {"trace_count": None})
    assert tracer.active is True
    answer(tracer, request_id="for ever")
    tracer.close()
    assert ids(path) == ["0", "1", "again", "for ever"]


def test_a_count_continues_if_other_settings_change(tracer: Tracer) -> None:
    tracer.update("", {**ON, "trace_count": "9"})
    tracer.update("m", {"trace_count": "5"})
    for _ in range(3):
        answer(tracer, "m")
        answer(tracer, "n")
    assert tracer.update("", {"log_frequency": "100"})["trace_count"] == "6"
    assert tracer.settings("m")["trace_count"] == "2"


def test_a_model_has_its_own_level_and_counts_its_own_requests(tracer: Tracer, path: Path) -> None:
    tracer.update("m", {"trace_level": ["TIMESTAMPS"], "trace_rate": "2"})
    assert tracer.active is True
    for index in range(4):
        answer(tracer, "m", f"m{index}")
        answer(tracer, "n", f"n{index}")
    tracer.update("", ON)
    tracer.update("m", {"trace_level": ["OFF"]})
    answer(tracer, "m", "off")
    answer(tracer, "n", "on")
    tracer.update("m", {"trace_level": None, "trace_rate": None})
    answer(tracer, "m", "as all")
    tracer.update("", {"trace_level": None})
    assert tracer.active is False
    tracer.close()
    assert ids(path) == ["m1", "m3", "on", "as all"]


def test_files_rotate_by_their_number_of_traces(tracer: Tracer, path: Path) -> None:
    tracer.update("", {**ON, "log_frequency": "2"})
    for index in range(5):
        answer(tracer, request_id=str(index))
    tracer.close()
    names = sorted(each.name for each in path.parent.iterdir())
    assert names == ["trace.json.0", "trace.json.1", "trace.json.2"]
    assert [ids(path.parent / name) for name in names] == [["0", "1"], ["2", "3"], ["4"]]


def writers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "headrace-traces"}


def test_without_traces_there_is_no_file(tracer: Tracer, path: Path) -> None:
    tracer.update("", {"trace_level": ["TIMESTAMPS"], "trace_rate": "10"})
    answer(tracer)
    tracer.close()
    assert not path.exists()


def test_without_a_trace_file_there_is_no_thread() -> None:
    before = writers()
    Tracer("").close()
    assert writers() <= before


def test_close_writes_queued_traces_and_ends_the_thread(path: Path) -> None:
    before = writers()
    tracer = Tracer(str(path))
    assert len(writers() - before) == 1
    tracer.update("", ON)
    for index in range(2000):
        answer(tracer, request_id=str(index))
    tracer.close()
    assert ids(path) == [str(index) for index in range(2000)]
    assert writers() <= before
    answer(tracer)
    tracer.close()


def test_the_file_is_json_after_every_trace(tracer: Tracer, path: Path) -> None:
    tracer.update("", ON)
    array = tracing._JsonArray(str(path))
    assert json.loads(path.read_bytes()) == []
    for number in range(1, 4):
        array.append(tracing.TraceRecord(number, "m", "1", str(number), (("REQUEST_START", 1),), 0))
        assert ids(path) == [str(each) for each in range(1, number + 1)]
    array.close()


# --- What goes wrong ---------------------------------------------------------------------------------------------------


def wait_until_failed(tracer: Tracer) -> None:
    thread = tracer._writer._thread
    assert thread is not None
    thread.join(60)
    assert tracer._writer.failed


def test_an_unwritable_file_ends_tracing_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer(str(tmp_path / "missing" / "trace.json"))
    tracer.update("", ON)
    answer(tracer)
    wait_until_failed(tracer)
    assert "cannot be written: No such file or directory" in caplog.text
    answer(tracer)
    assert tracer.active is False
    with pytest.raises(Unavailable) as caught:
        tracer.update("", ON)
    assert str(tmp_path) not in str(caught.value)
    assert tracer.update("", {"trace_level": ["OFF"]})["trace_level"] == ["OFF"]
    tracer.close()


def test_the_death_of_the_writer_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tracer: Tracer
) -> None:
    monkeypatch.setattr(tracing, "_to_triton", lambda _: 1 / 0)
    tracer.update("", ON)
    answer(tracer)
    wait_until_failed(tracer)
    assert "headrace-traces stops: unexpected exception" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    answer(tracer)
    assert tracer.active is False


def test_no_client_can_fill_the_disk(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer(str(path), max_bytes=20_000)
    tracer.update("", {**ON, "log_frequency": "1"})
    for _ in range(200):
        answer(tracer)
    wait_until_failed(tracer)
    answer(tracer)
    assert tracer.active is False
    assert "reached their maximum size" in caplog.text
    files = list(path.parent.iterdir())
    assert 1 <= len(files) <= 5
    assert all(len(traces(each)) == 1 for each in files)
    tracer.close()


def test_written_traces_are_not_counted_as_dropped(path: Path) -> None:
    writer = tracing.TraceWriter(str(path), max_bytes=20_000)
    for number in range(200):
        writer.put(tracing.TraceRecord(number + 1, "m", "1", str(number), (("REQUEST_START", 1),), 0))
    writer.close()
    written = len(ids(path))
    assert 1 <= written < 200
    assert written + writer.dropped == 200


def test_a_slow_disk_drops_traces_and_does_not_block(
    monkeypatch: pytest.MonkeyPatch, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "_QUEUE_RECORDS", 10)
    begun, release = threading.Event(), threading.Event()
    write = tracing.TraceWriter._write

    def slow(self: tracing.TraceWriter, record: tracing.TraceRecord) -> None:
        begun.set()
        assert release.wait(60)
        write(self, record)

    monkeypatch.setattr(tracing.TraceWriter, "_write", slow)
    tracer = Tracer(str(path))
    tracer.update("", ON)
    answer(tracer, request_id="0")
    assert begun.wait(60)
    for index in range(1, 50):
        answer(tracer, request_id=str(index))
    release.set()
    with caplog.at_level(logging.WARNING):
        tracer.close()
    assert ids(path) == [str(index) for index in range(11)]
    assert "39 traces were dropped" in caplog.text
