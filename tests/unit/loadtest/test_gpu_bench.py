"""The GPU bench's own workings: what it makes of samples, that nothing hangs it, and what its clients count."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.bench.results import at_least
from loadtest.gpu import client
from loadtest.gpu.client import Client, _Opened, closed_loop, open_loop
from loadtest.gpu.crowd import Crowd, CrowdFailed, _joined, _replies
from loadtest.gpu.lines import Answer, HttpLines
from loadtest.gpu.parts import NothingMeasured, in_turns
from loadtest.gpu.report import Compare, PartFindings, Reporter
from loadtest.gpu.watch import watch
from loadtest.protocol import HttpRequest
from loadtest.regions import remove_left
from loadtest.servers import HOST, ROOT
from tests.support.processes import alive
from tests.support.waiting import until

# What a part of the bench does first: find its pipe.
_PART = "import json, os, sys, time, subprocess\nfd = int(sys.argv[-1])\n"
_SEND_NOTE = "os.write(fd, json.dumps({'note': 'hello'}).encode() + b'\\n')\n"


def findings(*messages: tuple[str, Any]) -> PartFindings:
    part = PartFindings("b fp16", "title")
    for kind, content in messages:
        part.take(kind, content)
    return part


def sample(what: str, value: float, number: int = 0, unit: str = "images/s", **detail: float) -> tuple[str, Any]:
    return "sample", {"what": what, "unit": unit, "value": value, "round": number, "detail": detail}


def verdict(compare: Compare) -> tuple[str, Any]:
    """As it comes out of the pipe."""
    read, write = os.pipe()
    Reporter(write).compare(compare)
    os.close(write)
    with os.fdopen(read) as pipe:
        ((kind, content),) = json.loads(pipe.read()).items()
    return kind, content


def test_ratios_are_computed_within_a_round() -> None:
    part = findings(
        verdict(Compare("ours / raw", "ours", "raw", "images/s", target=at_least(0.95))),
        sample("raw", 100.0, 0),
        sample("ours", 90.0, 0),
        sample("raw", 50.0, 1),
        sample("ours", 49.0, 1),
        sample("ours", 1.0, 2),  # the run was cut here: no raw beside it
        sample("raw", 7.0, 1, unit="p50 us"),
    )
    (comparison,) = part.result().comparisons
    assert (comparison.spread.low, comparison.spread.high, comparison.spread.rounds) == (0.9, 0.98, 2)
    assert comparison.verdict == "MISS"
    assert part.medians("images/s") == {"raw": 75.0, "ours": 49.0}


def test_differences_and_a_replaced_comparison() -> None:
    part = findings(
        verdict(Compare("best", "a", "raw", "p50 us", "difference")),
        verdict(Compare("best", "b", "raw", "p50 us", "difference")),
        *(sample(what, value, unit="p50 us") for what, value in (("a", 5.0), ("b", 12.0), ("raw", 4.0))),
    )
    (comparison,) = part.result().comparisons
    assert (comparison.spread.median, comparison.unit) == (8.0, "p50 us")


def test_a_failed_part_has_its_figures() -> None:
    part = findings(sample("raw", 1.0), ("failure", "the GPU is gone"))
    assert part.result().failure == ""
    assert part.result().notes == ("FAILED: the GPU is gone",)
    assert findings(("failure", "never began")).result().failure == "never began"


def run_part(code: str, limit_s: float) -> tuple[str, list[Any], float, bytes]:
    part_messages: list[Any] = []
    with io.FileIO(os.memfd_create("log"), "w+") as log:
        start_s = time.monotonic()
        reason = watch(
            [sys.executable, "-c", _PART + code], limit_s, log, lambda *message: part_messages.append(message)
        )
        taken_s = time.monotonic() - start_s
        log.seek(0)
        return reason, part_messages, taken_s, log.read()


def test_messages_of_a_part_are_read_and_its_output_is_saved() -> None:
    reason, part_messages, _, log = run_part(_SEND_NOTE + "print('to the log')", 30)
    assert (reason, part_messages) == ("", [("note", "hello")])
    assert log == b"to the log\n"


def test_a_part_that_crashes_is_a_reason() -> None:
    reason, part_messages, _, _ = run_part(_SEND_NOTE + "os.abort()", 30)
    assert part_messages == [("note", "hello")]
    assert "ended with -6" in reason


@pytest.mark.slow
def test_a_part_that_hangs_is_killed_with_its_children() -> None:
    code = (
        "import signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "os.write(fd, json.dumps({'note': child.pid}).encode() + b'\\n')\n"
        "time.sleep(600)"
    )
    reason, ((_, child),), taken_s, _ = run_part(code, 1.0)
    assert "longer than 1 s" in reason
    assert taken_s < 60
    until(lambda: not alive(child))


def test_orphaned_children_of_a_part_are_killed() -> None:
    code = (
        "child = subprocess.Popen(['sleep', '600'])\nos.write(fd, json.dumps({'note': child.pid}).encode() + b'\\n')\n"
    )
    reason, ((_, child),), _, _ = run_part(code, 30)
    assert reason == ""
    until(lambda: not alive(child))


def test_a_checkout_that_is_not_installed_has_a_version_name(tmp_path: Path) -> None:
    code = (
        "import importlib.metadata, subprocess, sys\n"
        "found = importlib.metadata.version\n"
        "def missing(name): raise importlib.metadata.PackageNotFoundError(name)\n"
        "importlib.metadata.version = missing\n"
        "from pathlib import Path\n"
        "from loadtest.gpu.part_process import name_package\n"
        "name_package(Path(sys.argv[1]))\n"
        "importlib.metadata.version = found\n"
        "tell = 'from importlib.metadata import version; print(version(\"headrace\"))'\n"
        "subprocess.run([sys.executable, '-c', tell], check=True)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    (written,) = (tmp_path / "metadata").glob("headrace-*.dist-info")
    assert finished.stdout.strip() in written.name
    assert finished.stdout.strip()


def test_a_failed_contender_is_omitted() -> None:
    measured: list[tuple[str, int]] = []

    def measure(name: str, number: int) -> None:
        if name == "weak" and number == 1:
            raise CrowdFailed("it is gone")
        measured.append((name, number))

    read, write = os.pipe()
    contenders = {name: lambda number, name=name: measure(name, number) for name in ("good", "weak")}
    in_turns(Reporter(write), 3, contenders)
    assert measured == [("good", 0), ("weak", 0), ("good", 1), ("good", 2)]
    with pytest.raises(NothingMeasured):
        in_turns(Reporter(write), 2, {"weak": lambda number: measure("weak", 1)})
    os.close(write)
    with os.fdopen(read) as pipe:
        notes = [json.loads(line)["note"] for line in pipe]
    assert len(notes) == 2
    assert "weak failed in round 1" in notes[0]


class VirtualTime:
    """Replaces the module `time`: it advances only in sleeps and waits, so that figures are exact on a busy machine."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    virtual = VirtualTime()
    monkeypatch.setattr(client, "time", virtual)
    return virtual


class SlowLines:
    """Answers one after the other, each so long after the one before."""

    def __init__(self, clock: VirtualTime, slots: int, service_s: float, wrong: str = "") -> None:
        self.slots = slots
        self._clock = clock
        self._service_s = service_s
        self._wrong = wrong
        self._queue: deque[tuple[float, int]] = deque()
        self._free_s = 0.0

    def begin(self, slot: int) -> None:
        assert all(busy != slot for _, busy in self._queue)
        self._free_s = max(self._free_s, self._clock.now_s) + self._service_s
        self._queue.append((self._free_s, slot))

    def poll(self, timeout_s: float) -> list[Answer]:
        # A look that waits for nothing takes its time too.
        until_s = self._clock.now_s + max(timeout_s, 10e-6)
        if not self._queue or self._queue[0][0] > until_s:
            self._clock.now_s = until_s
            return []
        due_s, slot = self._queue.popleft()
        self._clock.now_s = max(self._clock.now_s, due_s)
        return [Answer((slot, due_s, self._wrong))]

    def ask(self, slot: int) -> str:
        raise AssertionError("loops do not ask")

    def renew(self) -> None:
        raise AssertionError("loops do not connect")

    def close(self) -> None:
        self._queue.clear()


def test_a_closed_loop_counts_responses_within_its_window(clock: VirtualTime) -> None:
    actual = closed_loop(SlowLines(clock, 4, 0.005), clock.now_s, 0.1, 0.5)
    used = _joined([actual], actual["per_s"])
    assert actual["wrong"] == 0
    assert used.per_s == pytest.approx(200)
    assert used.percentile_ms(50) == pytest.approx(20)  # four share what takes 5 ms
    assert len(used.latencies_us) in (100, 101)


def test_a_closed_loop_stops_where_everything_is_refused(clock: VirtualTime) -> None:
    actual = closed_loop(SlowLines(clock, 2, 0.001, "503"), clock.now_s, 0.0, 0.2)
    assert actual["wrong"] == 3
    assert actual["errors"] == ["503"]
    assert actual["per_s"] == 0


def test_latencies_of_an_open_loop_count_from_the_intended_moment(clock: VirtualTime) -> None:
    # Twice as much is offered as is served, through one slot: waiting for the slot must show.
    actual = open_loop(SlowLines(clock, 1, 0.02), clock.now_s, 2.0, 100.0, np.random.default_rng(3))
    used = _joined([actual], 0.0)
    assert 150 < actual["offered"] < 250
    assert 95 <= actual["in_time"] <= 100
    assert actual["offered"] == len(used.latencies_us) + actual["unanswered"]
    assert actual["unanswered"] > 50
    assert 800 < used.percentile_ms(95) < 1200  # half of what came within two seconds is still before it
    assert actual["late"] > 80


def test_an_open_loop_below_capacity_does_not_queue(clock: VirtualTime) -> None:
    actual = open_loop(SlowLines(clock, 8, 0.001), clock.now_s, 0.5, 100.0, np.random.default_rng(4))
    used = _joined([actual], 0.0)
    assert actual["unanswered"] == 0
    assert actual["offered"] == len(used.latencies_us) > 25
    assert actual["late"] == 0
    assert used.percentile_ms(50) == pytest.approx(1.0, abs=0.02)


def test_http_connections_send_large_bodies_and_report_errors() -> None:
    received: list[int] = []
    body = bytes(3 << 20)
    with socket.create_server((HOST, 0)) as listener:
        server = threading.Thread(target=answer_twice, args=(listener, len(body), received), daemon=True)
        server.start()
        lines = HttpLines(listener.getsockname()[1], [HttpRequest("/x", body, {"A": "b"})])
        lines.begin(0)
        answers: list[Answer] = []
        while not answers:
            answers += lines.poll(10)
        assert [(slot, wrong) for slot, _, wrong in answers] == [(0, "")]
        assert "503" in lines.ask(0)
        lines.close()
        server.join(10)
    assert received == [len(body), len(body)]


def answer_twice(listener: socket.socket, size: int, received: list[int]) -> None:
    """One connection: 200 in two pieces, with a header that looks like the length's, then 503."""
    connection, _ = listener.accept()
    with connection:
        for status in ("200 OK", "503 No"):
            data = b""
            while b"\r\n\r\n" not in data or len(data) - data.index(b"\r\n\r\n") - 4 < size:
                data += connection.recv(1 << 20)
            received.append(len(data) - data.index(b"\r\n\r\n") - 4)
            connection.sendall(f"HTTP/1.1 {status}\r\nX-Content-Length: 99\r\nContent-".encode())
            time.sleep(0.02)
            connection.sendall(b"Length: 5\r\n\r\nhello")


def test_a_connection_that_idled_too_long_is_opened_anew() -> None:
    with socket.create_server((HOST, 0)) as listener:
        lines = HttpLines(listener.getsockname()[1], [HttpRequest("/x", b"", {})])
        listener.accept()[0].close()  # the server gives up on a client that says nothing
        executing = Client()
        executing._opened["k"] = _Opened(lines, None)
        server = threading.Thread(target=answer_twice, args=(listener, 0, []), daemon=True)
        server.start()
        with pytest.raises(ValueError, match="503"):  # the second answer; the first one came
            executing.execute({"do": "lone", "key": "k", "warm_s": 0.0, "seconds": 10.0})
        server.join(10)
        executing.execute({"do": "shut", "key": "k"})


def test_a_client_that_cannot_connect_raises(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    with Crowd(1, tmp_path) as crowd, pytest.raises(CrowdFailed, match="could not open x: ConnectionRefused"):
        crowd.open("x", 1, transport="http", data="body", http_port=port, grpc_port=0, model="m", rows=1, side=8)


def test_a_late_reply_is_not_mistaken_for_the_next_one() -> None:
    error_lines = '{"number": 1, "error": "late"}\n{"number": 2, "per_s": 5}\n'
    with subprocess.Popen(["printf", "%s", error_lines], stdout=subprocess.PIPE) as process:
        assert _replies([process], 2, 10) == [{"number": 2, "per_s": 5}]
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE) as silent:
        with pytest.raises(CrowdFailed, match="1 clients sent no reply"):
            _replies([silent], 1, 0.1)
        silent.kill()


@pytest.mark.slow
@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_reported(tmp_path: Path) -> None:
    finished = bench(tmp_path, "--quick", "--only", "a")
    assert finished.returncode == 2, finished.stdout
    assert "prepare fp16 FAILED" in finished.stdout
    assert "engines for TensorRT cannot be built on this machine" in (tmp_path / "report.md").read_text()
    (result,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert "BuildError" in result["failure"]


@pytest.mark.slow
def test_engine_scheduler_and_wire_are_measured_without_a_gpu(tmp_path: Path) -> None:
    finished = bench(tmp_path, "--backend", "onnxruntime", "--quick", "--seconds", "0.2", "--only", "a,b,d,c")
    assert finished.returncode == 0, finished.stdout
    whole = json.loads((tmp_path / "results.json").read_text())
    actual = {result["name"]: result for result in whole["results"]}
    assert [name.split()[0] for name in actual] == ["prepare", "a", "b", "d", "c"]
    for name, result in actual.items():
        assert not result["failure"], name
        assert all(figure["spread"]["median"] > 0 for figure in result["figures"] if figure["unit"] != "images/s"), name
    ways = {figure["contender"] for figure in actual["c fp32"]["figures"]}
    assert {"http body", "http system", "grpc system", "grpc body"} <= ways
    assert len(actual["d fp32"]["comparisons"]) == 6
    assert "in process, pinned, blocking call" in {figure["contender"] for figure in actual["d fp32"]["figures"]}
    assert remove_left() == 0


@pytest.mark.slow
def test_sweep_instances_and_two_gpus_are_measured_without_a_gpu(tmp_path: Path) -> None:
    finished = bench(tmp_path, "--backend", "onnxruntime", "--quick", "--seconds", "0.2", "--only", "f,e,two-gpus")
    assert finished.returncode == 0, finished.stdout
    files = sorted(file.name for file in tmp_path.iterdir() if file.is_file())
    assert files == ["log.txt", "report.md", "results.json", "sweep.svg"]
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    samples = {part["name"]: part["samples"] for part in parts}
    offered = [sample["detail"]["share"] for sample in samples["f fp32"] if sample["unit"] == "p99 ms"]
    assert offered == [50, 80, 95, 110]
    assert {sample["what"].split(",")[0] for sample in samples["two-gpus fp32"]} == {"one GPU", "two GPUs"}
    assert sum(sample["unit"] == "p50 us of one caller" for sample in samples["e fp32"]) == 3


def bench(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest.gpu", "--output", str(folder), "--work", str(folder / "work"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
