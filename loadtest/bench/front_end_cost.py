"""Processor time and latency of a server with front-end processes. Linux only.

    python -m loadtest.bench.front_end_cost server     processor time of each process for 1,000 requests over HTTP
    python -m loadtest.bench.front_end_cost engine     that of the engine process alone, by group size, without HTTP
    python -m loadtest.bench.front_end_cost caller     latency of one caller, beside a ping-pong of two processes

Processor time depends less on other programs of the machine than rates do. Each figure is that of the cheapest round, with the
median of all rounds beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import uvloop
from headrace.core.clock import NS_PER_US

from loadtest.bench.engine_alone import EngineAlone, EngineSample, thread_times
from loadtest.bench.one_caller import measure_one_caller
from loadtest.bench.report import markdown_table
from loadtest.onnx_models import onnx_model
from loadtest.servers import descendants, headrace, running

_ROLES = ("supervisor", "engine", "front end")


def process_times(parent: int) -> dict[str, int]:
    """Return the processor time of a server's processes in nanoseconds, by their titles; "server" without front ends."""
    times: dict[str, int] = {}
    for pid in (parent, *descendants(parent)):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        role = next((role for role in _ROLES if role in title), "server" if pid == parent else "other")
        times[role] = times.get(role, 0) + sum(thread_times(pid).values())
    return times


def measure_server(repository: Path, model: str, front_ends: int, callers: int, seconds: float) -> dict[str, float]:
    """Return the microseconds of processor time of each role for one request, all front ends summed."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        options = ("--front-ends", str(front_ends))
        with running(headrace(repository, models=(model,), options=options), Path(folder)) as server:
            load = ("--concurrency", str(callers), "--warm-up", "0", "--processes", "1")
            bench = [sys.executable, "-m", "headrace", "bench", server.url, model, *load]
            subprocess.run([*bench, "--duration", "0.5"], check=True, stdout=subprocess.DEVNULL)
            before = process_times(server.pid)
            command = [*bench, "--duration", str(seconds), "--json", str(result)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            after = process_times(server.pid)
        requests = sum(point["succeeded"] for point in json.loads(result.read_text())["points"])
    if not requests:
        raise RuntimeError(f"no request has succeeded within {seconds:g} s: measure for a longer time")
    return {role: (time_ns - before.get(role, 0)) / requests / NS_PER_US for role, time_ns in after.items()}


def _server(options: argparse.Namespace) -> None:
    rows: list[Sequence[str]] = []
    with _served(options) as (repository, model):
        for front_ends in options.front_ends:
            callers = options.callers * max(front_ends, 1)
            rounds = [
                measure_server(repository, model, front_ends, callers, options.seconds) for _ in range(options.rounds)
            ]
            for role in rounds[0]:
                times = [each.get(role, 0.0) for each in rounds]
                rows.append((str(front_ends), role, f"{min(times):.1f}", f"{statistics.median(times):.1f}"))
    print("\n".join(markdown_table(("front ends", "process", "us a request", "median"), rows)))


def _engine(options: argparse.Namespace) -> None:
    rows = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_engine_rows(options))
    head = (
        "front ends",
        "members of a group",
        "us a request",
        "event loop",
        "other threads",
        "median",
        "rows of a batch",
    )
    print("\n".join(markdown_table(head, rows)))


async def _engine_rows(options: argparse.Namespace) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    with _served(options) as (repository, model):
        for front_ends in options.front_ends:
            async with EngineAlone(repository, model, front_ends, _cpus(options)) as engine:
                for members in options.members:
                    samples = await engine.drive(members, options.callers, options.seconds, options.rounds)
                    rows.append((str(front_ends), str(members), *_engine_figures(samples)))
    return rows


_LARGE = "first_bytes"


@contextmanager
def _served(options: argparse.Namespace) -> Iterator[tuple[Path, str]]:
    """Return repository and model of a run: those of the command line, or with `--row-bytes` a model that is written for it."""
    with tempfile.TemporaryDirectory() as folder:
        if options.row_bytes:
            _write_large_model(Path(folder), options.row_bytes)
            yield Path(folder), _LARGE
        else:
            yield options.repository, options.model


def _write_large_model(repository: Path, row_bytes: int) -> None:
    """Write a model that returns the first four bytes of each row as FP32, so that nearly all its time is that of the server."""
    constants = {"start": np.array([0]), "end": np.array([4]), "axis": np.array([1])}
    nodes = [
        onnx.helper.make_node("Slice", ["x", "start", "end", "axis"], ["first"]),
        onnx.helper.make_node("Cast", ["first"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    inputs = {"x": (onnx.TensorProto.UINT8, ("batch", row_bytes))}
    model = onnx_model(nodes, inputs, {"y": (onnx.TensorProto.FLOAT, ("batch", 4))}, constants)
    folder = repository / _LARGE / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder.parent / "config.yaml").write_text("max_batch_size: 64\n")


def _cpus(options: argparse.Namespace) -> tuple[int, ...] | None:
    return tuple(options.cpus) if options.cpus else None


def _engine_figures(samples: Sequence[EngineSample]) -> tuple[str, ...]:
    best = min(samples, key=lambda sample: sample.total_us)
    median = statistics.median(sample.total_us for sample in samples)
    figures = best.total_us, best.loop_us, best.other_us, median
    return (*(f"{figure:.2f}" for figure in figures), f"{best.batch_rows:.0f}")


def _caller(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = measure_one_caller(options.repository, options.rounds, options.requests, Path(folder), _cpus(options))
    rows: list[Sequence[str]] = []
    for name, values in (
        ("one process", result.one_process),
        ("one front end", result.front_end),
        ("ping-pong of two processes", result.ping_pong),
    ):
        rows.append((name, f"{min(values):.0f}", f"{statistics.median(values):.0f}"))
    print("\n".join(markdown_table(("p50 of one caller", "us, best round", "median round"), rows)))
    for name, spread in (("added by the front end", result.added), ("beyond the ping-pong", result.beyond_ping_pong)):
        print(
            f"{name}: {spread.median:.0f} us (median of {spread.rounds} rounds; {spread.low:.0f} to {spread.high:.0f})"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.front_end_cost", description=(__doc__ or "").split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    server, engine, caller = (commands.add_parser(name) for name in ("server", "engine", "caller"))
    for command in (server, engine, caller):
        command.add_argument("--repository", type=Path, default=Path("model_repository"))
    for command, front_ends, seconds in ((server, [0, 1, 2], 4.0), (engine, [1, 6], 0.5)):
        command.add_argument("--model", default="tiny")
        command.add_argument(
            "--front-ends", type=int, nargs="+", default=front_ends, help="numbers (default: %(default)s)"
        )
        command.add_argument(
            "--row-bytes", type=int, default=0, help="size of a row of a model for this run, in place of --model"
        )
        command.add_argument("--callers", type=int, default=64, help="of each front end (default: %(default)s)")
        command.add_argument("--seconds", type=float, default=seconds, help="of a round (default: %(default)s)")
    server.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    engine.add_argument("--rounds", type=int, default=8, help="of each size (default: %(default)s)")
    engine.add_argument("--members", type=int, nargs="+", default=[1, 4, 16, 64], help="(default: %(default)s)")
    caller.add_argument("--rounds", type=int, default=20, help="(default: %(default)s)")
    caller.add_argument("--requests", type=int, default=200, help="of a round (default: %(default)s)")
    for command in (engine, caller):
        command.add_argument("--cpus", type=int, nargs="+", help="cores of the measured servers (default: all)")
    options = parser.parse_args(arguments)
    {"server": _server, "engine": _engine, "caller": _caller}[options.command](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
