"""The load clients: `wrk` for HTTP/1.1 and `h2load` for gRPC, two programs in C and C++ that need less of a core than the server.

Neither decodes an answer. wrk fails a run at the first status of 400 and more. h2load skips `grpc-status`, which stands in
trailers: `run_grpc` compares the bytes of all answers with those of right ones instead.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.grpc_protocol import PREFIX_BYTES, framed
from loadtest.load import LoadFailed
from loadtest.protocol import HttpRequest
from loadtest.servers import HOST, pinned

PACKAGES = {"wrk": "wrk", "h2load": "nghttp2-client"}
REPORT_PREFIX = "bench-report "
_TIMEOUT_S = 30

# Percentiles come from `done`, which has microseconds; the printed table rounds them.
_DONE = """
function done(summary, latency, requests)
  local times = {}
  for _, thread in ipairs(threads) do
    for _, time in ipairs(thread:get("completions")) do times[#times + 1] = string.format("%.6f", time) end
  end
  local e = summary.errors
  io.write(string.format(
    'REPORT_PREFIX{"requests":%d,"duration_us":%d,"p50_us":%.1f,"p99_us":%.1f,' ..
    '"errors":{"connect":%d,"read":%d,"write":%d,"status":%d,"timeout":%d},"completions_s":[%s]}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    e.connect, e.read, e.write, e.status, e.timeout, table.concat(times, ",")))
end
""".replace("REPORT_PREFIX", REPORT_PREFIX)

_RECORD = """
local ffi = require("ffi")
ffi.cdef("typedef struct { long s; long ns; } bench_time; int clock_gettime(int clock, bench_time *time);")
local now = ffi.new("bench_time")
function response()
  ffi.C.clock_gettime(1, now)
  completions[#completions + 1] = tonumber(now.s) + tonumber(now.ns) / 1e9
end
"""

_RATE = re.compile(r"^finished in .*?, ([\d.]+) req/s", re.MULTILINE)
_COUNTS = re.compile(r"^requests: (\d+) total, .* (\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", re.M)
_DATA = re.compile(r"^traffic: .*\((\d+)\) data$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one run.

    Attributes:
        request: sent by every connection again and again.
        connections: kept open.
        seconds: length of the run.
        cpus: the client's cores.
        record_completions: keep the time of every answer; only for slow models, since it costs the client time.
    """

    request: HttpRequest
    connections: int
    seconds: int
    cpus: tuple[int, ...] | None = None
    record_completions: bool = False


@dataclass(frozen=True, slots=True)
class CallLoad:
    """Unary calls of gRPC.

    Attributes:
        method: the path, "/package.Service/Method".
        message: serialized, without its length prefix.
        answer_bytes: size of a right answer, without its length prefix.
        connections: kept open.
        in_flight: calls on each connection at a time.
        calls: number of calls.
        cpus: the client's cores.
    """

    method: str
    message: bytes
    answer_bytes: int
    connections: int
    in_flight: int
    calls: int
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Result of one run.

    Attributes:
        requests: answered with success.
        requests_per_s: over the whole run.
        p50_us: median latency.
        p99_us: latency of the slowest hundredth.
        client_busy: share of one core that the client used.
        server_us: processor time of the server for a request.
        completions_s: times of the answers on the monotonic clock, if they were recorded.
    """

    requests: int
    requests_per_s: float
    p50_us: float
    p99_us: float
    client_busy: float = 0.0
    server_us: float = 0.0
    completions_s: tuple[float, ...] = ()


def missing() -> str:
    """Return how to install the clients that are not installed, or ""."""
    absent = [name for name in PACKAGES if shutil.which(name) is None]
    packages = " ".join(PACKAGES[name] for name in absent)
    return f"the load comes from {' and '.join(absent)}, not installed: `apt-get install {packages}`" if absent else ""


def run_http(base_url: str, load: Load, scratch: Path) -> Sample:
    """Put one load on one server with wrk.

    Raises:
        LoadFailed: wrk failed, or any request got an error instead of an answer with a status below 400.
    """
    script_path = scratch / "load.lua"
    script_path.write_text(script(load, scratch))
    command = [*pinned(load.cpus), "wrk", "-t1", f"-c{load.connections}", f"-d{load.seconds}s"]
    command += ["--timeout", f"{_TIMEOUT_S}s", "-s", str(script_path), base_url + load.request.path]
    output, busy_s = _run(command)
    return parse_wrk(output, busy_s)


def run_grpc(port: int, load: CallLoad, scratch: Path) -> Sample:
    """Put one load on one server with h2load, with prior knowledge of HTTP/2 and without TLS.

    Raises:
        LoadFailed: h2load or a call failed, or a call brought no message of the right size.
    """
    body_path, log_path = scratch / "call.bin", scratch / "calls.log"
    body_path.write_bytes(framed(load.message))
    log_path.unlink(missing_ok=True)
    command = [*pinned(load.cpus), "h2load", "-t1", f"-c{load.connections}", f"-m{load.in_flight}", f"-n{load.calls}"]
    command += ["-N", f"{_TIMEOUT_S}s", "-H", "content-type: application/grpc", "-H", "te: trailers"]
    command += ["-d", str(body_path), "--log-file", str(log_path), f"http://{HOST}:{port}{load.method}"]
    output, busy_s = _run(command)
    sample = parse_h2load(output, load.answer_bytes)
    # A line of the log is start, status and duration.
    times_us = [int(line.rsplit("\t", 1)[1]) for line in log_path.read_text().splitlines()]
    cuts = statistics.quantiles(times_us, n=100) if len(times_us) > 1 else [0.0] * 99
    busy = busy_s * sample.requests_per_s / sample.requests
    return replace(sample, p50_us=cuts[49], p99_us=cuts[98], client_busy=busy)


def _run(command: list[str]) -> tuple[str, float]:
    """Return the output of a client and the processor time that it used in seconds."""
    before_s = _cpu_seconds_of_children()
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        reason = finished.stderr.strip() or finished.stdout.strip()
        raise LoadFailed(f"{shutil.which(command[0]) or command[0]} exited with {finished.returncode}: {reason}")
    return finished.stdout, _cpu_seconds_of_children() - before_s


def _cpu_seconds_of_children() -> float:
    """Of those that have ended: between two calls only the client does."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def script(load: Load, scratch: Path) -> str:
    """Return the Lua script of a load; its body is written as a file into `scratch`.

    Without a `request` function wrk formats once and sends the same buffer again and again.
    """
    body_path = scratch / "body.bin"
    body_path.write_bytes(load.request.body)
    lines = [
        f'local file = assert(io.open({_quoted(str(body_path))}, "rb"))',
        'wrk.method, wrk.body = "POST", file:read("*a")',
        "file:close()",
        f"wrk.headers = {_table(load.request.headers)}",
        "local threads = {}",
        "completions = {}",
        "function setup(thread) threads[#threads + 1] = thread end",
    ]
    return "\n".join(lines) + (_RECORD if load.record_completions else "") + _DONE


def parse_wrk(output: str, busy_s: float = 0.0) -> Sample:
    """Read the report line out of what wrk printed.

    Raises:
        LoadFailed: there is no report, nothing was answered, or any request failed.
    """
    reports = [line for line in output.splitlines() if line.startswith(REPORT_PREFIX)]
    if len(reports) != 1:
        raise LoadFailed(f"wrk printed {len(reports)} reports, expected 1:\n{output.strip()}")
    report: dict[str, Any] = json.loads(reports[0].removeprefix(REPORT_PREFIX))
    failures = [f"{kind} {count}" for kind, count in report["errors"].items() if count]
    if failures:
        raise LoadFailed(f"of {report['requests']} requests some failed: {', '.join(failures)}")
    if report["requests"] == 0:
        raise LoadFailed("no request was answered within the run")
    seconds = report["duration_us"] / 1e6
    times = tuple(float(time) for time in report["completions_s"])
    rate = report["requests"] / seconds
    latencies = float(report["p50_us"]), float(report["p99_us"])
    return Sample(report["requests"], rate, *latencies, client_busy=busy_s / seconds, completions_s=times)


def parse_h2load(output: str, answer_bytes: int) -> Sample:
    """Read what h2load printed; without latencies.

    Raises:
        LoadFailed: it is no report of h2load, or not every call has ended well with a message of this size.
    """
    rate, counts, data = _RATE.search(output), _COUNTS.search(output), _DATA.search(output)
    if rate is None or counts is None or data is None:
        raise LoadFailed(f"h2load printed no report that can be read:\n{output.strip()}")
    calls, succeeded, received = int(counts[1]), int(counts[2]), int(data[1])
    if succeeded != calls:
        raise LoadFailed(f"of {calls} calls only {succeeded} succeeded")
    if received != calls * (PREFIX_BYTES + answer_bytes):
        raise LoadFailed(
            f"{calls} calls brought {received} bytes of messages, expected {calls * (PREFIX_BYTES + answer_bytes)}: "
            "some were answered with an error instead"
        )
    return Sample(calls, float(rate[1]), 0.0, 0.0)


def _quoted(text: str) -> str:
    if any(character in text for character in '"\\\n'):
        raise ValueError(f"{text!r} cannot stand in a Lua string")
    return f'"{text}"'


def _table(headers: Mapping[str, str]) -> str:
    entries: Sequence[str] = [f"[{_quoted(name)}] = {_quoted(value)}" for name, value in headers.items()]
    return "{" + ", ".join(entries) + "}"
