"""The load client for gRPC: `h2load` of nghttp2, written in C++, which implements HTTP/2 but not gRPC.

One client thread does ten times what a Python server can answer. What it cannot see (`grpc-status` stands in trailers that it
skips) the cases check from outside: see `grpc_calls`.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.bench.wrk import LoadFailed, cpu_seconds_of_children
from loadtest.grpc_protocol import PREFIX_BYTES, framed
from loadtest.servers import HOST, pinned

HOW_TO_INSTALL = (
    "the gRPC cases drive their load with h2load, which is not installed: `apt-get install nghttp2-client` "
    "(macOS: `brew install nghttp2`)"
)
_RATE = re.compile(r"^finished in .*?, ([\d.]+) req/s", re.MULTILINE)
_COUNTS = re.compile(r"^requests: (\d+) total, .* (\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", re.M)
_DATA = re.compile(r"^traffic: .*\((\d+)\) data$", re.MULTILINE)
IDLE_LIMIT_S = 30


@dataclass(frozen=True, slots=True)
class CallLoad:
    """Unary calls, the same message in each.

    Attributes:
        method: the path, "/package.Service/Method".
        message: serialized, without its length prefix.
        connections: kept open.
        in_flight: calls on each connection at a time.
        calls: altogether; a count and not a time, so that the server's own count can be held against it exactly.
        cpus: the client's cores.
        record_latencies: keep the time of every call; costs the client one write to a file a call.
    """

    method: str
    message: bytes
    connections: int
    in_flight: int
    calls: int = 1
    cpus: tuple[int, ...] | None = None
    record_latencies: bool = True


@dataclass(frozen=True, slots=True)
class CallSample:
    """Result of one run.

    Attributes:
        calls: number of calls requested.
        succeeded: ended with the HTTP status 200, whatever their gRPC status.
        calls_per_s: succeeded ones.
        data_bytes: of all answers' DATA frames, length prefixes included.
        p50_us: median of the time from a call's start to its end; 0 if not recorded.
        p99_us: the same for the slowest hundredth.
        client_busy: the share of one core that h2load used, start and end included.
    """

    calls: int
    succeeded: int
    calls_per_s: float
    data_bytes: int
    p50_us: float = 0.0
    p99_us: float = 0.0
    client_busy: float = 0.0


def is_installed() -> bool:
    """Whether h2load is installed."""
    return shutil.which("h2load") is not None


def require() -> None:
    """Raise LoadFailed with the way to install h2load if it is not installed."""
    if not is_installed():
        raise LoadFailed(HOW_TO_INSTALL)


def run(port: int, load: CallLoad, scratch: Path) -> CallSample:
    """Put one load on one server, with prior knowledge of HTTP/2 and without TLS.

    Raises:
        LoadFailed: h2load failed. Calls that failed are in the sample: see `require_success`.
    """
    body_path, log_path = scratch / "call.bin", scratch / "calls.log"
    body_path.write_bytes(framed(load.message))
    log_path.unlink(missing_ok=True)
    command = [*pinned(load.cpus), "h2load", "-t1", f"-c{load.connections}", f"-m{load.in_flight}", f"-n{load.calls}"]
    command += ["-N", f"{IDLE_LIMIT_S}s", "-H", "content-type: application/grpc", "-H", "te: trailers"]
    command += ["-d", str(body_path)] + (["--log-file", str(log_path)] if load.record_latencies else [])
    before_s = cpu_seconds_of_children()
    finished = subprocess.run(
        [*command, f"http://{HOST}:{port}{load.method}"], capture_output=True, text=True, check=False
    )
    busy_s = cpu_seconds_of_children() - before_s
    if finished.returncode != 0:
        raise LoadFailed(f"h2load exited with {finished.returncode}: {(finished.stderr or finished.stdout).strip()}")
    sample = parse(finished.stdout)
    if load.record_latencies and sample.succeeded > 1:
        p50_us, p99_us = _percentiles(log_path)
        sample = replace(sample, p50_us=p50_us, p99_us=p99_us)
    return replace(sample, client_busy=busy_s * sample.calls_per_s / max(1, sample.succeeded))


def parse(output: str) -> CallSample:
    """Read what h2load printed.

    Raises:
        LoadFailed: it is no report of h2load.
    """
    rate, counts, data = _RATE.search(output), _COUNTS.search(output), _DATA.search(output)
    if rate is None or counts is None or data is None:
        raise LoadFailed(f"h2load printed no report that can be read:\n{output.strip()}")
    return CallSample(int(counts[1]), int(counts[2]), float(rate[1]), int(data[1]))


def require_success(sample: CallSample, answer_bytes: int) -> None:
    """Every call must have ended well and brought a message of this size.

    Raises:
        LoadFailed: some did not, so that the figures must not be used.
    """
    if sample.succeeded != sample.calls:
        raise LoadFailed(f"of {sample.calls} calls only {sample.succeeded} succeeded")
    expected = sample.calls * (PREFIX_BYTES + answer_bytes)
    if sample.data_bytes != expected:
        raise LoadFailed(
            f"{sample.calls} calls brought {sample.data_bytes} bytes of messages, expected {expected}: "
            "some were answered with an error instead"
        )


def _percentiles(log_path: Path) -> tuple[float, float]:
    """Median and 99th percentile in us: a line of the log is start, status and duration."""
    times_us = [int(line.rsplit("\t", 1)[1]) for line in log_path.read_text().splitlines()]
    cuts = statistics.quantiles(times_us, n=100)
    return cuts[49], cuts[98]
