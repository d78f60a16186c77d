"""`python -m loadtest.run`: locust, headless, against a Headrace of its own or a running one, with thresholds.

Exit status: 0 if every answer was right and p99 within its bound, 1 if not, 2 if the test could not be run: the server or a
model is not there, or locust fails.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace.core.errors import BadRequest
from headrace.server.commands.connection import (
    API_KEY_VARIABLE,
    ConnectionOptions,
    add_arguments,
    connection_error_text,
    host_of,
    request,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table

from loadtest.crowd import SHAPES
from loadtest.servers import HEADRACE_COMMAND, HOST, ROOT, ServerFailed, headrace, running

# Mixes of users, as in real traffic: their requests, pauses and thresholds.
#
# A class of users stands in `loadtest/locustfile.py`; its weight is its share of all users.

P99_MS = 1000.0
SMALL_MODELS = ("tiny", "digits", "add_sub")
ALL_MODELS = (*SMALL_MODELS, "efficientnet_lite0")


@dataclass(frozen=True, slots=True)
class Mix:
    """A mix of users.

    Attributes:
        text: description.
        users: weight of each class of users, by the class's name.
        models: models of their requests, in the order in which they are looked up.
        think_s: how long a user pauses between an answer and the next question, on average; 0: not at all.
        p99_ms: limits that replace `P99_MS`, by pattern of request names; the first match counts.
    """

    text: str
    users: Mapping[str, int]
    models: tuple[str, ...] = ALL_MODELS
    think_s: float = 0.0
    p99_ms: Mapping[str, float] = field(default_factory=dict)


MIXES: Mapping[str, Mix] = {
    "everything": Mix(
        "every protocol and encoding without a pause: small models, now and then a photograph",
        {"JsonUser": 1, "BinaryUser": 1, "MixedUser": 1, "GrpcUser": 1},
    ),
    "web": Mix(
        "back ends of web sites: many users that pause, small JSON and gRPC requests, and what watches the server",
        {"JsonUser": 12, "GrpcUser": 6, "OnlookerUser": 1},
        think_s=0.2,
        p99_ms={"*": 500.0},
    ),
    "gallery": Mix(
        "people with photographs: one or an album at a time, cropped and mirrored, over HTTP and gRPC, then a look",
        {"GalleryUser": 4, "GrpcGalleryUser": 2, "JsonUser": 2},
        think_s=1.0,
        p99_ms={"efficientnet_lite0*": 3000.0},
    ),
    "nightly": Mix(
        "jobs that send full batches without a pause, beside a few people who wait for theirs",
        {"BatchUser": 2, "JsonUser": 2, "OnlookerUser": 1},
        SMALL_MODELS,
        p99_ms={"* x64": 2000.0},
    ),
}


RESULTS = ROOT / "loadtest" / "results"


@dataclass(frozen=True, slots=True)
class Line:
    """Locust's counts for one kind of request; latencies in milliseconds, as locust rounds them."""

    name: str
    requests: int
    failures: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float


class TargetNotReady(RuntimeError):
    """The server or a model that the load needs is not there; the text has the remedy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenarios, print the summary, return the exit status."""
    options = _parser().parse_args(arguments)
    console = Console()
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / time.strftime("%Y%m%d-%H%M%S")
    try:
        with _target(options) as (host, grpc_address):
            connection = ConnectionOptions.from_arguments(options)
            name, is_tls = host_of(host)
            if not is_tls and (warning := connection.clear_text_warning(name)):
                console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
            check_target(host, grpc_address, MIXES[options.mix], connection)
            console.print(f"{options.mix}: {MIXES[options.mix].text}", markup=False, highlight=False)
            console.print(
                f"{options.users} users ({options.shape}) for {options.duration_s} s on {host}", highlight=False
            )
            status = _run_locust(host, grpc_address, options, stem, connection.api_key)
        if status not in (0, 1):
            console.print(f"locust exited with {status}: see its output above", style="red")
            return 2
        lines = summarise(json.loads(stem.with_suffix(".json").read_text()), options.duration_s)
    except (TargetNotReady, ServerFailed, BadRequest, OSError, ValueError, subprocess.TimeoutExpired) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 2
    console.print(_table(lines))
    console.print(f"report: {stem.with_suffix('.html').relative_to(ROOT)}")
    problems = verdicts(lines, partial(allowed_p99_ms, options), options.failed_percent)
    for problem in problems:
        console.print(f"FAIL  {problem}", style="bold red", markup=False)
    if not problems:
        console.print("PASS  failures and p99 are within their bounds", style="bold green")
    return int(bool(problems))


def check_target(
    host: str, grpc_address: str, mix: Mix, options: ConnectionOptions | None = None, timeout_s: float = 5.0
) -> None:
    """Check that the server and the models of a mix are there, before any load.

    Args:
        host: URL of the server.
        grpc_address: host and port of gRPC; used only where the mix has users of gRPC.
        mix: users and models.
        options: TLS files and key; None for neither.
        timeout_s: of each question.

    Raises:
        TargetNotReady: the first thing that is missing.
    """
    options = options or ConnectionOptions()
    start = "start one with `headrace serve`, or leave out --host for a server of its own"
    _get(host, "/v2/health/ready", options, f"no server is ready at {host}", start, timeout_s)
    for model in mix.models:
        cure = "the load needs the demo models: `make models` builds them, `headrace serve` serves them"
        problem = f"model {model} is not ready at {host}"
        _get(host, f"/v2/models/{model}/ready", options, problem, cure, timeout_s)
    if any(user.startswith("Grpc") for user in mix.users):
        # Imported where it is needed: runs over HTTP do without.
        from headrace.core.errors import HeadraceError
        from headrace.server.commands.infer_client import InferClient

        try:
            with InferClient(grpc_address, timeout_s, options):
                pass
        except HeadraceError as error:
            cure = "name the address of gRPC with --grpc-address HOST:PORT, grpcs://HOST:PORT with TLS"
            raise TargetNotReady(f"no server answers gRPC at {grpc_address}: {error}; {cure}") from None


def _get(host: str, path: str, options: ConnectionOptions, problem: str, cure: str, timeout_s: float) -> None:
    """GET a route of a server that must answer 200.

    Raises:
        TargetNotReady: it does not; with the server's own words, or the system's.
    """
    try:
        status, content = request(host, path, timeout_s, options, max_bytes=1000)
        if status == 200:
            return
        body = content.decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):
            body = json.loads(body)["error"]
        reason = f"{status} {body}".strip()
        cure = options.refusal_cure(status, host_of(host)[0]) or cure
    except (OSError, http.client.HTTPException) as error:
        reason = connection_error_text(error, host, options)
    except ValueError as error:  # after OSError, because a certificate that is not trusted is both
        reason = str(error)
    raise TargetNotReady(f"{problem}: {reason}; {cure}")


def summarise(entries: Sequence[Mapping[str, Any]], duration_s: float) -> list[Line]:
    """The lines of locust's JSON statistics, by name."""
    lines = []
    for entry in sorted(entries, key=lambda entry: str(entry["name"])):
        times = {float(time_ms): int(count) for time_ms, count in entry["response_times"].items()}
        # From the first request to the last: a single one has no rate of its own.
        elapsed_s = entry["last_request_timestamp"] - entry["start_time"] if entry["num_requests"] > 1 else duration_s
        lines.append(
            Line(
                name=entry["name"],
                requests=entry["num_requests"],
                failures=entry["num_failures"],
                requests_per_s=entry["num_requests"] / max(elapsed_s, 1e-9),
                p50_ms=percentile(times, 0.50),
                p99_ms=percentile(times, 0.99),
            )
        )
    return lines


def percentile(times: Mapping[float, int], share: float) -> float:
    """The time, in ms, within which `share` of the requests were answered: `times` counts requests by time."""
    wanted, seen = share * sum(times.values()), 0
    for time_ms in sorted(times):
        seen += times[time_ms]
        if seen >= wanted:
            return time_ms
    return 0.0


def verdicts(lines: Sequence[Line], allowed_ms: Callable[[str], float], failed_percent: float = 0.0) -> list[str]:
    """Return one sentence for each broken threshold.

    Args:
        lines: locust's counts.
        allowed_ms: the highest p99 by a request's name.
        failed_percent: of each kind of request, how many may fail.
    """
    if not any(line.requests for line in lines):
        return ["no request was answered"]
    problems = [
        f"{line.name}: {line.failures} of {line.requests} failed"
        for line in lines
        if line.failures * 100 > failed_percent * line.requests
    ]
    problems += [
        f"{line.name}: p99 is {line.p99_ms:g} ms, allowed are {allowed_ms(line.name):g} ms"
        for line in lines
        if line.p99_ms > allowed_ms(line.name)
    ]
    return problems


def allowed_p99_ms(options: argparse.Namespace, name: str) -> float:
    """The highest p99 of a kind of request: by the command line, else by the mix."""
    bounds: list[tuple[str, float]] = options.p99_ms_of
    for pattern, allowed_ms in [*bounds, *([] if options.p99_ms else MIXES[options.mix].p99_ms.items())]:
        if fnmatchcase(name, pattern):
            return allowed_ms
    return float(options.p99_ms or P99_MS)


@contextmanager
def _target(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The URL and the gRPC address of the server named, or of one that lives as long as the test."""
    if options.host:
        scheme = "grpcs://" if urlsplit(options.host).scheme == "https" else ""
        yield options.host, options.grpc_address or f"{scheme}{urlsplit(options.host).hostname}:8001"
        return
    with (
        tempfile.TemporaryDirectory(prefix="headrace-load-") as scratch,
        running(
            headrace(options.model_repository.resolve(), command=shlex.split(options.command)), Path(scratch)
        ) as server,
    ):
        yield server.url, f"{HOST}:{server.grpc_port}"


def _run_locust(host: str, grpc_address: str, options: argparse.Namespace, stem: Path, api_key: str) -> int:
    mix = MIXES[options.mix]
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py,loadtest/shapes.py"]
    command += ["--headless", "--only-summary", "--host", host, "--grpc-address", grpc_address]
    command += ["--shape", options.shape, "--peak-users", str(options.users), "--seconds", str(options.duration_s)]
    think_s = mix.think_s if options.think_s is None else options.think_s
    command += ["--think-s", str(think_s), "--stop-timeout", "10", "--loglevel", "WARNING"]
    command += ["--html", str(stem.with_suffix(".html")), "--json-file", str(stem)]  # locust adds .json
    for name in ("ca", "cert", "key"):
        command += [f"--{name}", getattr(options, name)] if getattr(options, name) else []
    weights = [{"user_class_name": name, "weight": weight} for name, weight in mix.users.items()]
    # Last, as it takes all words that follow.
    command += [*mix.users, "--config-users", *map(json.dumps, weights)]
    # Not on the command line, which all users of the machine can read.
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {API_KEY_VARIABLE: api_key})
    try:
        for _ in track(range(options.duration_s), "load", refresh_per_second=1, transient=True):
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        return process.wait(60.0)
    except BaseException:
        process.kill()
        process.wait()
        raise


def _table(lines: Sequence[Line]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("request")
    for column in ("requests", "failed", "requests/s", "p50 ms", "p99 ms"):
        table.add_column(column, justify="right")
    for line in lines:
        rate = f"{line.requests_per_s:,.0f}" if line.requests_per_s >= 10 else f"{line.requests_per_s:.1f}"
        cells = (f"{line.requests:,}", str(line.failures), rate)
        table.add_row(line.name, *cells, f"{line.p50_ms:g}", f"{line.p99_ms:g}")
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.run", description="Load Headrace with locust and judge it."
    )
    parser.add_argument(
        "--command",
        default=shlex.join(HEADRACE_COMMAND),
        help="how to start a server, e.g. that of another checkout (default: %(default)s)",
    )
    parser.add_argument("--host", metavar="URL", help="a running server (default: one of its own, on a free port)")
    parser.add_argument("--grpc-address", metavar="HOST:PORT", help="of a running server (default: its port 8001)")
    add_arguments(parser, os.environ.get(API_KEY_VARIABLE, ""))
    mixes = "; ".join(f"{name}: {mix.text}" for name, mix in MIXES.items())
    parser.add_argument("--mix", choices=list(MIXES), default="everything", help=f"{mixes} (default: %(default)s)")
    parser.add_argument("--shape", choices=list(SHAPES), default="steady", help="how the number of users changes")
    parser.add_argument("--users", type=int, default=24, help="most at a time (default: %(default)s)")
    parser.add_argument(
        "--duration", dest="duration_s", type=int, default=20, metavar="SECONDS", help="default: %(default)s"
    )
    parser.add_argument("--think-s", type=float, help="pause of a user between two requests (default: the mix's)")
    parser.add_argument(
        "--p99-ms", type=float, metavar="MS", help=f"for every kind of request (default: the mix's, or {P99_MS:g})"
    )
    parser.add_argument(
        "--p99-ms-of",
        type=_threshold,
        action="append",
        default=[],
        metavar="PATTERN=MS",
        help="for some kinds; repeatable",
    )
    parser.add_argument(
        "--failed-percent", type=float, default=0.0, help="of a kind that may fail (default: %(default)g)"
    )
    parser.add_argument("--model-repository", type=Path, default=ROOT / "model_repository")
    return parser


def _threshold(text: str) -> tuple[str, float]:
    pattern, _, number = text.rpartition("=")
    try:
        allowed_ms = float(number)
    except ValueError:
        allowed_ms = 0.0
    if not pattern or not allowed_ms > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATTERN=MS, e.g. 'efficientnet*=2000'")
    return pattern, allowed_ms


if __name__ == "__main__":
    sys.exit(main())
