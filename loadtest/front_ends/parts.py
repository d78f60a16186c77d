"""The parts on a CPU: small requests, one caller, an idle server, two cores, overload."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import onnx

from loadtest.front_ends.host import Host, LoadFailed, grpc_url, idle_cores
from loadtest.front_ends.ping_pong import median_us
from loadtest.onnx_models import convolution
from loadtest.peers.__main__ import mlp
from loadtest.servers import Running
from loadtest.slo.convolution import most_efficient

# Prints and writes one figure: its name and its values.
Report = Callable[..., None]

TINY, MLP, CONVOLUTION = "tiny", "mlp", "convolution"
_CALLERS = 64  # of one front end
_FIXED = 256  # callers of the samples that compare numbers of front ends under the same load
_IDLE_S = 5.0
_OVERLOAD = 2.0
_OBJECTIVES = (2.0, 5.0, 10.0)  # in durations of the most efficient batch
_FRONT_ENDS_OF_OVERLOAD = 4
_CONNECTIONS = 2000
_PLAIN = "none"
_BOUND_MS = 1000.0  # longest wait without an objective, by default


def small_requests(host: Host, report: Report, repository: Path, front_ends: Sequence[int]) -> None:
    """Requests a second of `tiny` with each number of front ends: 64 callers for each; over HTTP also 256 for any number."""
    base = dict[str, float]()
    for count in front_ends:
        each, fixed = (f"{_CALLERS} a front end", _CALLERS * max(count, 1)), (f"{_FIXED} in all", _FIXED)
        with host.serve(repository, [TINY], count) as server:
            for protocol, (name, callers) in (("http", each), ("http", fixed), ("grpc", each)):
                url = server.url if protocol == "http" else grpc_url(server)
                words = ("--concurrency", str(callers), "--warm-up", "0.5", *_processes(host), *_shared(protocol))
                try:
                    point = host.loaded(server, url, TINY, *words)
                except LoadFailed as error:
                    report("tiny", protocol=protocol, load=name, front_ends=count, failed=str(error)[-600:])
                    continue
                key = f"{protocol}, {name}"
                if count == 1:
                    base[key] = point["throughput_per_s"]
                ratio = point["throughput_per_s"] / base[key] if key in base else None
                report("tiny", protocol=protocol, load=name, front_ends=count, over_one=ratio, **figures(point))


def one_caller(host: Host, report: Report, repository: Path, front_ends: Sequence[int | str], rounds: int) -> None:
    """Median latency of one caller of `tiny`, and of a ping-pong of two processes; then processor time of the idle servers."""
    p50_us: dict[str, list[float]] = {}
    with ExitStack() as stack:
        servers = {count: stack.enter_context(host.serve(repository, [TINY], count)) for count in front_ends}
        for number in range(rounds):
            p50_us.setdefault("ping-pong", []).append(median_us(host.seconds / 2, host.server_cores[:2]))
            for count in servers if number % 2 == 0 else reversed(servers):
                for protocol, url in (("http", servers[count].url), ("grpc", grpc_url(servers[count]))):
                    words = ("--concurrency", "1", "--processes", "1", "--warm-up", "0.3")
                    point = host.bench(url, TINY, *words, seconds=host.seconds / 2)
                    key = f"{protocol}, front ends {count}"
                    p50_us.setdefault(key, []).append(point["latency_ms"]["p50"] * 1e3)
            report("one caller", round=number, p50_us={key: round(values[-1], 1) for key, values in p50_us.items()})
        for key, values in p50_us.items():
            report("one caller", load=key, p50_us=median(values), lowest_us=min(values), highest_us=max(values))
        ping_us = median(p50_us["ping-pong"])
        for protocol in ("http", "grpc"):
            plain = p50_us.get(f"{protocol}, front ends 0")
            second = p50_us.get(f"{protocol}, front ends 1")
            if plain and second:
                added_us = median(b - a for a, b in zip(plain, second, strict=True))
                report("one caller", load=f"{protocol}, added", added_us=added_us, over_ping_pong_us=added_us - ping_us)
        idle = idle_cores([server.pid for server in servers.values()], _IDLE_S, time.sleep)
        for count, cores_used in zip(servers, idle, strict=True):
            report("idle", front_ends=count, percent_of_a_core=100 * cores_used)


def two_cores(host: Host, report: Report, scratch: Path, rounds: int) -> None:
    """An `mlp` on a server with two cores: one front end beside the engine over one process."""
    repository = scratch / "mlp"
    _write_model(repository / MLP, mlp(), "max_batch_size: 64\ndynamic_batching: {}\n")
    cores = host.server_cores[:2]
    rates: dict[int, list[float]] = {0: [], 1: []}
    with ExitStack() as stack:
        servers = {count: stack.enter_context(host.serve(repository, [MLP], count, cores=cores)) for count in rates}
        for number in range(rounds):
            for count in rates if number % 2 == 0 else reversed(rates):
                words = ("--concurrency", str(_CALLERS), "--warm-up", "0.5", "--processes", "2")
                point = host.loaded(servers[count], servers[count].url, MLP, *words)
                rates[count].append(point["throughput_per_s"])
                report("two cores", front_ends=count, **figures(point))
    ratios = [two / one for one, two in zip(rates[0], rates[1], strict=True)]
    report("two cores", load="two processes over one", ratio=median(ratios), lowest=min(ratios), highest=max(ratios))


def overload(host: Host, report: Report, scratch: Path) -> None:
    """Goodput of a convolution net on the CPU at twice its capacity, with four front ends."""
    model = convolution((128, 128))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, host.server_cores[:1])
    try:
        rows, batch_ms = most_efficient(model)
    finally:
        os.sched_setaffinity(0, before)
    objectives = {_PLAIN: 0.0} | {f"{each:g} batches": round(each * batch_ms, 1) for each in _OBJECTIVES}
    config = "max_batch_size: 16\ndynamic_batching: {}\ninstance_group: [{kind: KIND_CPU, count: 1}]\n"
    config += 'parameters: {intra_op_thread_count: "1"}\n'
    repository = scratch / "overload"
    for name, slo_ms in objectives.items():
        more = f"slo: {{p99_ms: {slo_ms}}}\n" if slo_ms else ""
        _write_model(repository / _model_name(name), model, config + more)
    report("overload", note=f"the most efficient batch has {rows} rows and takes {batch_ms:.2f} ms on one thread")
    for count in (_FRONT_ENDS_OF_OVERLOAD, 0):
        with host.serve(repository, [_model_name(name) for name in objectives], count) as server:
            _overload_of(host, report, server, objectives, count)


def _overload_of(host: Host, report: Report, server: Running, objectives: dict[str, float], front_ends: int) -> None:
    plain = _model_name(_PLAIN)
    closed = [
        host.bench(server.url, plain, "--concurrency", str(callers), "--warm-up", "0.5", *_processes(host))
        for callers in (4, 16, 48)
    ]
    capacity = max(point["throughput_per_s"] for point in closed)
    for name, slo_ms in objectives.items():
        words = ["--rate", f"{_OVERLOAD * capacity:.1f}", "--poisson", "--warm-up", "1.5", *_processes(host)]
        words += ["--connections", str(_CONNECTIONS), "--slo", str(slo_ms or _BOUND_MS)]
        model = _model_name(name)
        try:
            point = host.loaded(server, server.url, model, *words, seconds=1.5 * host.seconds, failures=True)
        except LoadFailed as error:
            report("overload", front_ends=front_ends, objective=name, failed=str(error)[-600:])
            continue
        # Without an objective every answer counts; p99 shows whether the waits are bounded.
        good = point["goodput_per_s"] if slo_ms else point["throughput_per_s"]
        report(
            "overload",
            front_ends=front_ends,
            objective=name,
            objective_ms=slo_ms or None,
            capacity_per_s=capacity,
            of_capacity=good / capacity,
            sent_late=point["sent_late"],
            requests=point["requests"],
            errors=point["errors"],
            error_texts=point["error_texts"] or None,
            **figures(point),
        )


def figures(point: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a load that a report shows."""
    latency = point["latency_ms"]
    return {
        "requests_per_s": point["throughput_per_s"],
        "rows_per_s": point["rows_per_s"],
        "p50_ms": latency.get("p50"),
        "p99_ms": latency.get("p99"),
        "batch": (point["server"] or {}).get("mean_batch"),
        "client_cores": sum(point["client_busy"]),
        "busiest_client": max(point["client_busy"], default=0.0),
        "cores": {name: round(share, 2) for name, share in point["cores"].items()},
    }


def _processes(host: Host) -> tuple[str, str]:
    return "--processes", str(len(host.client_cores))


def _shared(protocol: str) -> tuple[str, ...]:
    """Connections of gRPC: calls share them, and each front end needs some."""
    return ("--connections", "64") if protocol == "grpc" else ()


def _model_name(objective: str) -> str:
    return f"{CONVOLUTION}_{objective.replace(' ', '_')}"


def _write_model(folder: Path, model: onnx.ModelProto, config: str) -> None:
    (folder / "1").mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.yaml").write_text(config)
