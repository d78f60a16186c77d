"""CPU time and memory of the server's processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from headrace.core.response_bodies import ProcessFigures
from headrace.observability.metrics import MetricsPage
from headrace.observability.metrics_server import LoopLag, ServerFacts
from headrace.server.front_ends.counter_array import CounterArray
from headrace.server.front_ends.process_figures import ServerProcesses

from tests.support.waiting import until

BUSY = "import sys\nsum(range(20_000_000))\nprint('x', flush=True)\nsys.stdin.read()"
TICKS_HZ = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def test_figures_are_those_of_proc() -> None:
    arrays = [CounterArray.create() for _ in range(3)]
    arrays[0].begin(100)
    arrays[1].begin(200)
    arrays[1].limits("grpc")[1] = 4
    files = {
        "/proc/7/stat": f"7 (head) race) S {' '.join(['0'] * 10)} {2 * TICKS_HZ} {TICKS_HZ} 0",
        "/proc/7/statm": "900 10 0",
        "/proc/100/stat": f"100 (x) R {' '.join(['0'] * 10)} {8 * TICKS_HZ} 0 0",
        "/proc/100/statm": "900 20 0",
    }

    def read(path: str) -> str:
        if path not in files:
            raise ProcessLookupError
        return files[path]

    processes = ServerProcesses(arrays, 7, read)
    names = ["supervisor", "engine", "front_end_1", "front_end_2"]
    figures = processes.figures()
    assert [each.name for each in figures] == names
    assert figures[0] == ProcessFigures("supervisor", 7, 3.0, 10 * PAGE_BYTES, 1, 0, 0, True)
    assert figures[1] == ProcessFigures("engine", 100, 8.0, 20 * PAGE_BYTES, 1, 0, 0, False)
    assert figures[2] == ProcessFigures("front_end_1", 200, 0.0, 0, 1, 4, 0, False), "it has just ended"
    assert figures[3] == ProcessFigures("front_end_2", 0, 0.0, 0, 0, 0, 0, False)
    del files["/proc/100/stat"]
    assert processes.figures()[1].cpu_s == 8.0, "its end is not recorded yet"
    arrays[0].end(9 * 10**9)
    arrays[0].begin(101)
    figures = processes.figures()
    assert (figures[1].cpu_s, figures[1].starts) == (9.0, 2)


def test_cpu_time_of_real_processes_never_falls() -> None:
    array = CounterArray.create()
    processes = ServerProcesses([array], os.getpid())
    totals = []
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        array.begin(process.pid)
        assert process.stdout is not None
        process.stdout.read(1)
        until(lambda: processes.figures()[1].cpu_s > (totals[-1] if totals else 0.0))
        figures = processes.figures()[1]
        assert figures.memory_bytes > 1 << 20
        totals.append(figures.cpu_s)
        process.send_signal(signal.SIGKILL)
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = -9
        array.end(int((usage.ru_utime + usage.ru_stime) * 1e9))
        totals.append(processes.figures()[1].cpu_s)
    assert totals == sorted(totals)
    assert totals[-1] > 1.5 * totals[0] > 0


def test_metrics_have_each_process() -> None:
    class States:
        def states(self) -> list[tuple[str, str, str]]:
            return []

        def ready(self) -> bool:
            return True

    arrays = [CounterArray.create() for _ in range(3)]
    arrays[0].begin(os.getpid())
    arrays[1].expect(True)
    arrays[1].limits("http")[1] = 3
    arrays[1].count_move()
    processes = ServerProcesses(arrays, os.getpid())
    facts = ServerFacts(States(), "1", LoopLag(), processes=processes.figures)
    text = MetricsPage(list, facts=facts).render()[1].decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['headrace_process_up{process="engine"}'] == "1.0"
    assert values['headrace_process_up{process="front_end_1"}'] == "0.0"
    assert 'headrace_process_up{process="front_end_2"}' not in values, "the load does not need it"
    assert float(values['headrace_process_cpu_seconds_total{process="engine"}']) == pytest.approx(
        float(values['headrace_process_cpu_seconds_total{process="supervisor"}']), abs=1
    )
    assert float(values['headrace_process_resident_memory_bytes{process="engine"}']) > 1 << 20
    assert values['headrace_process_starts_total{process="engine"}'] == "1.0"
    assert values['headrace_process_connections{process="front_end_1"}'] == "3.0"
    assert values['headrace_process_connections{process="engine"}'] == "0.0"
    assert values['headrace_process_connections_moved_total{process="front_end_1"}'] == "1.0"
    alone = MetricsPage(list, facts=ServerFacts(States(), "1", LoopLag())).render()[1].decode()
    assert "headrace_process_up{" not in alone
