"""The GPU bench's own workings: what it makes of samples, that nothing hangs it, and what its clients count."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench.results import at_least
from loadtest.gpu.client import closed_loop
from loadtest.gpu.parts import NothingMeasured, in_turns
from loadtest.gpu.report import Compare, PartFindings, Reporter
from loadtest.gpu.table import _has_time
from loadtest.gpu.watch import watch
from loadtest.gpu.wire import FOLDER, PREFIX, remove_left
from loadtest.load import LoadFailed
from loadtest.servers import ROOT
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
            raise LoadFailed("it is gone")
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


def test_a_closed_loop_counts_requests_within_its_window() -> None:
    sends = [lambda: time.sleep(0.005)] * 4
    actual = closed_loop(sends, time.monotonic(), 0.05, 0.5)
    assert actual["failures"] == []
    assert all(latency_ms >= 5 for latency_ms in actual["latencies_ms"])
    assert 4 <= len(actual["latencies_ms"]) <= 4 * 0.5 / 0.005


def test_a_failed_request_is_a_result_of_a_closed_loop() -> None:
    def fail() -> None:
        raise ValueError("503")

    assert closed_loop([fail, fail], time.monotonic(), 0.0, 3600)["failures"] == ["ValueError: 503"]


@pytest.mark.skipif(not os.path.isdir(FOLDER), reason=f"needs {FOLDER}")
def test_memory_of_clients_that_were_killed_is_unlinked() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    left, mine = (Path(FOLDER) / f"{PREFIX}{pid}" for pid in (ended.pid, os.getpid()))
    for path in (left, mine):
        path.write_bytes(b"x")
    try:
        assert remove_left() >= 1
        assert not left.exists()
        assert mine.exists()
    finally:
        mine.unlink()


@pytest.mark.slow
@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_reported(tmp_path: Path) -> None:
    finished = bench(tmp_path, tmp_path / "work", "--quick", "--only", "a")
    assert finished.returncode == 2, finished.stdout
    assert "prepare fp16 FAILED" in finished.stdout
    assert "engines for TensorRT cannot be built on this machine" in (tmp_path / "report.md").read_text()
    (result,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert "BuildError" in result["failure"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and engines of the runs without a GPU."""
    return tmp_path_factory.mktemp("work")


@pytest.mark.slow
def test_engine_scheduler_and_wire_are_measured_without_a_gpu(tmp_path: Path, work: Path) -> None:
    words = ["--backend", "onnxruntime", "--quick", "--only", "a,b,d,c,two-gpus"]
    for seconds in ("0.05", "0.5"):  # a busy machine may answer nothing in the first
        folder = tmp_path / seconds
        finished = bench(folder, work, *words, "--seconds", seconds)
        whole = json.loads((folder / "results.json").read_text())
        actual = {result["name"]: result for result in whole["results"]}
        if finished.returncode == 0 and len(actual["d fp32"]["comparisons"]) == 7:
            break
    assert finished.returncode == 0, finished.stdout
    assert sorted(file.name for file in folder.iterdir()) == ["log.txt", "report.md", "results.json"]
    assert [name.split()[0] for name in actual] == ["prepare", "a", "b", "d", "c", "two-gpus"]
    for name, result in actual.items():
        assert not result["failure"], name
        assert all(figure["spread"]["median"] > 0 for figure in result["figures"] if figure["unit"] != "images/s"), name
    ways = {figure["contender"] for figure in actual["c fp32"]["figures"]}
    assert {"http body", "http system", "grpc body", "grpc system"} <= ways
    assert len(actual["d fp32"]["comparisons"]) == 7
    assert "in process, pinned, blocking call" in {figure["contender"] for figure in actual["d fp32"]["figures"]}
    (two,) = (part["samples"] for part in whole["parts"] if part["name"] == "two-gpus fp32")
    assert {sample["what"].split(",")[0] for sample in two} == {"one GPU", "two GPUs"}
    assert remove_left() == 0


def test_a_round_without_time_is_cut() -> None:
    read, write = os.pipe()
    measured: list[int] = []
    in_turns(Reporter(write), 3, {"one": measured.append}, partial(_has_time, time.monotonic(), []))
    os.close(write)
    with os.fdopen(read) as pipe:
        assert json.loads(pipe.read()) == {"note": "no time was left for more than 1 rounds"}
    assert measured == [0]


@pytest.mark.slow
def test_the_table_is_measured_without_a_gpu(tmp_path: Path, work: Path) -> None:
    words = ["--only", "table", "--front-ends", "default,1", "--cells", "http mlp of 1 by 1,grpc images of 8"]
    finished = bench(tmp_path, work, "--backend", "onnxruntime", "--quick", "--seconds", "0.05", *words)
    assert finished.returncode == 0, finished.stdout
    (part,) = (part for part in json.loads((tmp_path / "results.json").read_text())["parts"] if "table" in part["name"])
    cells = ("http mlp of 1 by 1 x 1", "grpc images of 8 by 6 x 8")
    contenders = {f"{cell} | {mode}" for cell in cells for mode in ("default", "1")}
    units = {
        name: {sample["unit"] for sample in part["samples"] if sample["what"] == name and sample["value"] > 0}
        for name in contenders
    }
    assert all(
        {"requests/s", "p50 ms", "p99 ms", "client core share", "server us"} <= found for found in units.values()
    )
    assert {"engine us", "front ends us", "supervisor us"} <= units[f"{cells[0]} | 1"]
    remarks = {s["what"]: s["detail"]["remark"] for s in part["samples"] if "remark" in s["detail"]}
    assert set(remarks) == contenders
    assert all(text.startswith("answers ") for text in remarks.values())
    assert {s["what"] for s in part["samples"]} - contenders == {
        "engine, mlp of 1 by 1 x 1",
        "engine, images of 8 by 6 x 8",
        "ping-pong, mlp of 1",
        "ping-pong, images of 8",
    }
    assert "| remark |" in (tmp_path / "report.md").read_text()


def bench(folder: Path, work: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest.gpu", "--output", str(folder), "--work", str(work), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
