"""`headrace bench URL MODEL`: puts load on a running V2 server and reports latencies, throughput, goodput and errors."""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
from headrace.core.errors import BadRequest, HeadraceError
from headrace.core.tensor import BY_NAME
from headrace.server.commands.connection import ConnectionOptions
from headrace_reports.command_line import is_pipe, open_console, printable
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from headrace_bench import report
from headrace_bench.inputs import InputOptions, InputSpec
from headrace_bench.processes import default_processes
from headrace_bench.session import FORMAT, Bench, BenchOptions, Events, LoadPoint, read_arrivals
from headrace_bench.target import parse_url
from headrace_bench.wire import parse_headers

_DURATION_S = 10.0
_CONCURRENCY = (8,)


def main(args: argparse.Namespace, console: Console | None = None, errors: Console | None = None) -> int:
    """Run the loads, or compare two runs, and print the figures.

    Args:
        args: options of `headrace_bench.options.add_arguments`.
        console: output of the figures; None uses standard output.
        errors: output of errors and progress; None uses standard error.

    Returns:
        0; 1 if the server or a file failed, if no request succeeded, or if an answer was wrong; 2 for arguments that do not fit
        together; 130 if Ctrl-C came before a load began.
    """
    console = console or open_console(highlight=False)
    errors = errors or open_console(stderr=True, highlight=False)
    try:
        if args.compare:
            return _compare(args, console)
        options = read_options(args)
    except HeadraceError as error:
        _complain(errors, str(error))
        return 2 if isinstance(error, BadRequest) else 1
    if warning := "" if options.url.is_tls else options.connection.clear_text_warning(options.url.host):
        errors.print(Text.assemble(("warning: ", "yellow"), printable(warning)), soft_wrap=True)
    try:
        document = asyncio.run(_run(options, errors))
        _write(args, document)
    except HeadraceError as error:
        _complain(errors, str(error))
        return 1
    except KeyboardInterrupt:
        _complain(errors, "interrupted before a load began: nothing was measured")
        return 130
    report.show(console, document)
    points = document["points"]
    succeeded = any(point["succeeded"] for point in points)
    wrong = any("wrong answer" in point["errors"] for point in points)
    return 0 if succeeded and not wrong else 1


def read_options(args: argparse.Namespace) -> BenchOptions:
    """Return the options of a run.

    Raises:
        BadRequest: arguments are missing or do not fit together, or a file is wrong.
    """
    if args.url and not args.model and "://" not in args.url:
        args.url, args.model = args.default_url, args.url  # one word is the model
    if not args.model:
        raise BadRequest(
            "the model is missing: write headrace bench MODEL, headrace bench http://127.0.0.1:8000 MODEL, or "
            "--compare A.json B.json"
        )
    url = parse_url(args.url)
    if args.body == "json" and (url.protocol == "grpc" or args.shared_memory):
        raise BadRequest(
            "--body json is a form of HTTP bodies: leave it out for gRPC and with --shared-memory, whose tensors are binary"
        )
    points, trace_s = _points(args)
    callers = max((int(point.value) for point in points if point.mode == "closed"), default=0)
    if url.protocol == "http" and args.connections and args.connections < callers:
        raise BadRequest(
            f"--connections {args.connections} carry fewer requests than --concurrency {callers}: a connection of HTTP/1.1 "
            "carries one request at a time; raise --connections or leave it out"
        )
    described = [InputSpec(name, BY_NAME[datatype], shape) for name, datatype, shape in args.input]
    inputs = InputOptions(
        args.batch or 0,
        dict(args.shape),
        dict(args.range),
        args.distinct,
        args.npz,
        args.pictures,
        args.seed,
        described,
    )
    is_trace = trace_s is not None
    return BenchOptions(
        url,
        args.model,
        args.model_version,
        points,
        trace_s,
        args.duration or (0.0 if is_trace else _DURATION_S),
        args.warm_up if args.warm_up is not None else (0.0 if is_trace else 1.0),
        args.repeat,
        args.processes or default_processes(),
        args.connections or 0,
        inputs,
        args.shared_memory,
        args.body == "json",
        args.slo,
        args.check,
        parse_headers(args.header),
        args.timeout,
        ConnectionOptions.from_arguments(args),
        args.server_pid or 0,
    )


def _points(args: argparse.Namespace) -> tuple[list[LoadPoint], Any]:
    if args.poisson and not args.rate:
        raise BadRequest("--poisson has no rate: give the mean rate with --rate HZ")
    if args.trace is not None:
        times_s = read_arrivals(args.trace, args.model)
        return [LoadPoint("trace", len(times_s) / max(float(times_s[-1]), 1e-3))], times_s
    if args.rate:
        return [LoadPoint("poisson" if args.poisson else "constant", rate) for rate in args.rate], None
    return [LoadPoint("closed", count) for count in args.concurrency or _CONCURRENCY], None


async def _run(options: BenchOptions, errors: Console) -> dict[str, Any]:
    """Run the loads with a progress bar on a terminal; Ctrl-C ends them early."""
    loop = asyncio.get_running_loop()
    if is_pipe(errors) or not errors.is_terminal:
        bench = Bench(options, Events())
        return await _interruptible(bench, loop)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors, transient=True) as bar:
        bench = Bench(options, _Bar(bar).events())
        return await _interruptible(bench, loop)


async def _interruptible(bench: Bench, loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
    task = loop.create_task(bench.run())

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)  # the second Ctrl-C ends the process
        if bench.has_begun:
            bench.interrupt()
        else:
            task.cancel()

    with suppress(NotImplementedError, ValueError):  # a caller on another thread than the main one has no signals
        loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


class _Bar:
    """Progress bar of the running load."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: TaskID | None = None
        self._begun_s = 0.0

    def events(self) -> Events:
        return Events(self._begin, self._progress, lambda _point: None)

    def _begin(self, label: str, seconds: float) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(label, total=seconds, rate="")
        self._begun_s = time.monotonic()

    def _progress(self, requests: int, errors: int) -> None:
        if self._task is not None:
            elapsed_s = time.monotonic() - self._begun_s
            failed = f", {errors:,} errors" if errors else ""
            rate = f"{requests / max(elapsed_s, 1e-3):,.0f} requests/s{failed}"
            self._bar.update(self._task, completed=elapsed_s, rate=rate)


def _compare(args: argparse.Namespace, console: Console) -> int:
    from headrace_bench.compare import compare, show_comparison

    if args.url or args.model:
        raise BadRequest("--compare takes two files and no server: leave URL and MODEL out")
    first, second = (read_document(path) for path in args.compare)
    comparison = compare(first, second, [path.name for path in args.compare])
    show_comparison(console, comparison)
    if args.json is not None:
        _write_file(args.json, orjson.dumps(comparison, option=orjson.OPT_INDENT_2))
    if args.html is not None:
        from headrace_bench.page import comparison_page

        _write_file(args.html, comparison_page(comparison, first, second).encode())
    return 0


def read_document(path: Path) -> dict[str, Any]:
    """Read a document of `--json`.

    Raises:
        BadRequest: the file cannot be read, or is none.
    """
    try:
        document = orjson.loads(path.read_bytes())
    except OSError as error:
        raise BadRequest(f"{path}: cannot be read: {error.strerror or error}: name a file that --json wrote") from None
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"{path}: is not JSON ({error}): name a file that --json wrote") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("format_version") != 1:
        raise BadRequest(f"{path}: holds no results of headrace bench: name a file that --json wrote")
    return document


def _write(args: argparse.Namespace, document: dict[str, Any]) -> None:
    if args.json is not None:
        _write_file(args.json, orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    if args.html is not None:
        from headrace_bench.page import run_page

        _write_file(args.html, run_page(document).encode())


def _write_file(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise HeadraceError(f"{path}: cannot be written: {error.strerror or error}: name a writable file") from None


def _complain(errors: Console, message: str) -> None:
    errors.print(Text.assemble(("headrace bench: ", "bold red"), printable(message)), soft_wrap=True)
