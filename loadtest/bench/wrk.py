"""The load client: `wrk`, written in C, with a generated Lua script that sends requests and reports results.

One client thread sends several hundred thousand requests a second, so a Python server is never waiting for it.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.protocol import HttpRequest
from loadtest.servers import pinned

HOW_TO_INSTALL = (
    "the bench drives its load with wrk, which is not installed: `apt-get install wrk` (macOS: `brew install wrk`)"
)
REPORT_PREFIX = "bench-report "

# Percentiles come from `done`, which has microseconds; the printed table rounds them.
_DONE = """
function done(summary, latency, requests)
  local times = {}
  for _, thread in ipairs(threads) do
    for _, time in ipairs(thread:get("completions")) do times[#times + 1] = string.format("%.6f", time) end
  end
  local e = summary.errors
  io.write(string.format(
    'REPORT_PREFIX{"requests":%d,"duration_us":%d,"p50_us":%.1f,"p90_us":%.1f,"p99_us":%.1f,"max_us":%.1f,' ..
    '"errors":{"connect":%d,"read":%d,"write":%d,"status":%d,"timeout":%d},"completions_s":[%s]}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(90), latency:percentile(99),
    latency.max, e.connect, e.read, e.write, e.status, e.timeout, table.concat(times, ",")))
end
"""

_RECORD = """
local ffi = require("ffi")
ffi.cdef("typedef struct { long s; long ns; } bench_time; int clock_gettime(int clock, bench_time *time);")
local now = ffi.new("bench_time")
function response()
  ffi.C.clock_gettime(1, now)
  completions[#completions + 1] = tonumber(now.s) + tonumber(now.ns) / 1e9
end
"""


class LoadFailed(RuntimeError):
    """A run whose figures must not be used: wrk failed, or not every request was answered with success."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one run.

    Attributes:
        requests: sent in turn by every connection; one is the rule.
        connections: kept open, one request in flight on each.
        seconds: how long.
        cpus: the client's cores.
        record_completions: keep the time of every answer; only for slow models, since it costs the client time.
        timeout_s: an answer that takes longer fails the run.
    """

    requests: tuple[HttpRequest, ...]
    connections: int
    seconds: int
    cpus: tuple[int, ...] | None = None
    record_completions: bool = False
    timeout_s: int = 30


@dataclass(frozen=True, slots=True)
class Sample:
    """Result of one run.

    Latencies in microseconds, completion times in seconds on the monotonic clock, processor time of wrk itself in seconds.
    """

    requests: int
    duration_s: float
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float
    completions_s: tuple[float, ...] = ()
    client_cpu_s: float = 0.0

    @property
    def requests_per_s(self) -> float:
        """Completed answers over the whole run."""
        return self.requests / self.duration_s


def is_installed() -> bool:
    """Whether wrk is installed."""
    return shutil.which("wrk") is not None


def run(base_url: str, load: Load, scratch: Path) -> Sample:
    """Put one load on one server.

    Raises:
        LoadFailed: wrk failed, or any request got an error instead of an answer with a status below 400.
    """
    script_path = scratch / "load.lua"
    script_path.write_text(script(load, scratch))
    command = [*pinned(load.cpus), "wrk", "-t1", f"-c{load.connections}", f"-d{load.seconds}s"]
    command += ["--timeout", f"{load.timeout_s}s", "-s", str(script_path), base_url + load.requests[0].path]
    before_s = cpu_seconds_of_children()
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise LoadFailed(f"wrk exited with {finished.returncode}: {finished.stderr.strip() or finished.stdout.strip()}")
    return replace(parse(finished.stdout), client_cpu_s=cpu_seconds_of_children() - before_s)


def script(load: Load, scratch: Path) -> str:
    """The Lua script of a load; bodies are written as files into `scratch`."""
    lines = [
        "local function bytes_of(path)",
        '  local file = assert(io.open(path, "rb"))',
        '  local bytes = file:read("*a")',
        "  file:close()",
        "  return bytes",
        "end",
        "local threads = {}",
        "completions = {}",
        "function setup(thread) threads[#threads + 1] = thread end",
    ]
    paths = [scratch / f"body{number}.bin" for number in range(len(load.requests))]
    for path, request in zip(paths, load.requests, strict=True):
        path.write_bytes(request.body)
    if len(paths) == 1:
        lines += _same_request(load.requests[0], paths[0])
    else:
        lines += _requests_in_turn(load.requests, paths)
    recording = _RECORD if load.record_completions else ""
    return "\n".join(lines) + recording + _DONE.replace("REPORT_PREFIX", REPORT_PREFIX)


def parse(output: str) -> Sample:
    """Read the report line out of what wrk printed.

    Raises:
        LoadFailed: there is no report, nothing was answered, or any request failed.
    """
    reports = [line for line in output.splitlines() if line.startswith(REPORT_PREFIX)]
    if len(reports) != 1:
        raise LoadFailed(f"wrk printed {len(reports)} reports, expected 1:\n{output.strip()}")
    report: dict[str, Any] = json.loads(reports[0].removeprefix(REPORT_PREFIX))
    failures = {kind: count for kind, count in report["errors"].items() if count}
    if failures:
        raise LoadFailed(f"of {report['requests']} requests some failed: {_counted(failures)}")
    if report["requests"] == 0:
        raise LoadFailed("no request was answered within the run")
    latencies = {name: float(report[name]) for name in ("p50_us", "p90_us", "p99_us", "max_us")}
    times = tuple(float(time) for time in report["completions_s"])
    return Sample(report["requests"], report["duration_us"] / 1e6, completions_s=times, **latencies)


def cpu_seconds_of_children() -> float:
    """Of those that have ended: between two calls only wrk does."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _same_request(request: HttpRequest, body_path: Path) -> list[str]:
    """Without a `request` function wrk formats once and sends the same buffer again and again."""
    return [
        'wrk.method = "POST"',
        f"wrk.headers = {_table(request.headers)}",
        f"wrk.body = bytes_of({_quoted(str(body_path))})",
    ]


def _requests_in_turn(requests: Sequence[HttpRequest], body_paths: Sequence[Path]) -> list[str]:
    lines = ["local prepared, turn = {}, 0", "function init()"]
    for number, (request, path) in enumerate(zip(requests, body_paths, strict=True), start=1):
        arguments = f"{_quoted(request.path)}, {_table(request.headers)}, bytes_of({_quoted(str(path))})"
        lines.append(f'  prepared[{number}] = wrk.format("POST", {arguments})')
    return [*lines, "end", "function request()", "  turn = turn % #prepared + 1", "  return prepared[turn]", "end"]


def _counted(failures: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in failures.items())


def _quoted(text: str) -> str:
    if any(character in text for character in '"\\\n'):
        raise ValueError(f"{text!r} cannot stand in a Lua string")
    return f'"{text}"'


def _table(headers: Mapping[str, str]) -> str:
    entries: Sequence[str] = [f"[{_quoted(name)}] = {_quoted(value)}" for name, value in headers.items()]
    return "{" + ", ".join(entries) + "}"
