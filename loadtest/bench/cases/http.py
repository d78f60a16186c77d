"""The path from the socket to a small model and back: speed beside other servers, cost of metrics, idle connections, memory."""

from __future__ import annotations

import json
import math
import socket
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import ClassVar, Literal

import numpy as np
from headrace.commands.connection import ConnectionOptions

from deploy.make_keys import KEYS_FILE, make_keys
from loadtest import servers
from loadtest.bench.inprocess import WrongAnswer
from loadtest.bench.results import CaseResult, Comparison, Figure, Target, at_most, figures_of
from loadtest.bench.session import Bench, Case, Question, answer, interleave
from loadtest.bench.spread import Spread, ratios
from loadtest.bench.wrk import Load, LoadFailed
from loadtest.protocol import HttpRequest, json_request
from loadtest.servers import HOST, Running, ServerCommand, cpu_seconds, resident_bytes

MODEL = "tiny"
MODELS = ("tiny", "digits", "add_sub")
HEADRACE, BARE, NAIVE, NAIVE_ASYNC = "headrace", "bare ASGI", "naive FastAPI", "naive FastAPI, async handler"
ROUNDS_A_PAIR = 5
MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class FrontEnd(Case):
    """One row a request, the server on one core, the client on the other; bare ASGI and a server written by hand beside it.

    Attributes:
        encoding: of the tensor for Headrace and bare ASGI; the naive server takes JSON always.
        to_bare: target of requests a second over bare ASGI's.
        to_naive: the same over the naive server's.
        extra_p50_us: target of the median latency above bare ASGI's.
    """

    encoding: Literal["binary", "json"]
    to_bare: Target | None = None
    to_naive: Target | None = None
    extra_p50_us: Target | None = None

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        plural = "s" if self.connections > 1 else ""
        return f"tiny, {self.encoding} bodies, {self.connections} connection{plural}, server on one core"

    def run(self, bench: Bench) -> CaseResult:
        """Check all answers, then measure in interleaved rounds."""
        question = bench.question(MODEL)
        request = question.request if self.encoding == "binary" else json_request(MODEL, question.inputs)
        body = json.dumps({"input": question.inputs["input"].tolist()}).encode()
        naive_request = HttpRequest("/predict", body, {"Content-Type": "application/json"})
        with (
            bench.headrace(MODEL) as ours,
            bench.start(self._naive(bench, NAIVE, "def")) as naive,
            bench.start(self._naive(bench, NAIVE_ASYNC, "async")) as naive_async,
        ):
            size = len(bench.check(ours, question, request))
            bare_command = servers.peer("bare_asgi", BARE, "--answer-bytes", str(size), cpus=bench.cores.server)
            with bench.start(bare_command) as bare:
                _check_size(bare, request, size)
                for server in (naive, naive_async):
                    _check_prediction(server, naive_request, question)
                requests = {ours: request, bare: request, naive: naive_request, naive_async: naive_request}
                samples = self.samples(bench, {server: self.load(bench, sent) for server, sent in requests.items()})
        targets = {BARE: self.to_bare, NAIVE: self.to_naive, NAIVE_ASYNC: None}
        comparisons = [
            Comparison.ratio(
                f"headrace / {name}, requests/s", "requests_per_s", samples[HEADRACE], samples[name], target
            )
            for name, target in targets.items()
        ]
        if self.extra_p50_us is not None:
            label = "headrace - bare ASGI, p50"
            comparisons.append(Comparison.p50_difference(label, samples[HEADRACE], samples[BARE], self.extra_p50_us))
        figures = figures_of(samples, {"requests_per_s": "requests/s", "p50_us": "p50 us"})
        note = f"request body {len(request.body)} bytes, answer body {size} bytes, the same for bare ASGI"
        return CaseResult(self.name, self.title, figures, comparisons, (note,))

    def _naive(self, bench: Bench, name: str, handler: str) -> ServerCommand:
        model = str(bench.model_path(MODEL).resolve())
        return servers.peer("naive_fastapi", name, "--model", model, "--handler", handler, cpus=bench.cores.server)


def _check_prediction(server: Running, request: HttpRequest, question: Question) -> None:
    """Check that the naive server computes the same; WrongAnswer if not."""
    _, body = answer(server, request)
    output = np.asarray(json.loads(body)["output"], dtype=np.float32)
    question.oracle.check(question.inputs, {"output": output})


def _check_size(server: Running, request: HttpRequest, answer_bytes: int) -> None:
    """Check that bare ASGI takes our body and sends as many bytes as Headrace does; WrongAnswer if not."""
    _, body = answer(server, request)
    if len(body) != answer_bytes:
        raise WrongAnswer(f"{server.name} answered with {len(body)} bytes, expected {answer_bytes}")


class Mixed(Case):
    """Several models and both encodings: every connection sends to each model in turn, once in binary and once in JSON."""

    contenders = 1

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"{', '.join(MODELS)} in turn, binary and JSON, {self.connections} connections, server on one core"

    def run(self, bench: Bench) -> CaseResult:
        """Check every kind of request, then measure."""
        with bench.headrace(*MODELS) as server:
            requests: list[HttpRequest] = []
            for model in MODELS:
                question = bench.question(model)
                for request in (question.request, json_request(model, question.inputs)):
                    bench.check(server, question, request)
                    requests.append(request)
            samples = self.samples(bench, {server: self.load(bench, *requests)})
        figures = figures_of(samples, {"requests_per_s": "requests/s", "p50_us": "p50 us", "p99_us": "p99 us"})
        return CaseResult(self.name, self.title, figures)


@dataclass(frozen=True, slots=True)
class SwitchCost(Case):
    """Cost of a feature: pairs of fresh servers with it on and off, each pair on one core; the idle one of the two costs nothing.

    The effect is smaller than what two processes that run the same code differ by (memory layout, hash seeds: 3 to 5 %), so
    one pair cannot show it however long it is measured. Many pairs can: each gives one ratio, and their median is judged.

    Attributes:
        ratio: target of requests a second with the feature over those without; None for no target.
        feature: its name in reports.
    """

    ratio: Target | None = None

    feature: ClassVar[str]
    contenders = 2 * ROUNDS_A_PAIR
    sample_s = 1

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"{self.feature} on against off: tiny, binary bodies, {self.connections} connections, pairs of fresh servers"

    def rounds(self, bench: Bench) -> int:
        """Number of pairs."""
        return bench.rounds * 2

    def run(self, bench: Bench) -> CaseResult:
        """Start a pair, check both, measure in interleaved rounds; and again."""
        question = bench.question(MODEL)
        requests = {"on": self.request_on(bench, question), "off": question.request}
        loads = {name: self.load(bench, request) for name, request in requests.items()}
        rates: dict[str, list[float]] = {"on": [], "off": []}
        costs: dict[str, list[float]] = {"on": [], "off": []}
        for _ in range(self.rounds(bench)):
            with self._start(bench, "on") as on, self._start(bench, "off") as off:
                contenders = {}
                for name, server in (("on", on), ("off", off)):
                    bench.check(server, question, requests[name])
                    bench.warm_up(server, loads[name])
                    contenders[name] = partial(_sample, bench, server, loads[name])
                samples = interleave(contenders, ROUNDS_A_PAIR)
            for name, rounds in samples.items():
                rates[name].append(median(rate for rate, _ in rounds))
                costs[name].append(median(cpu_us for _, cpu_us in rounds))
        figures = [Figure(f"{self.feature} {name}", "requests/s", Spread.of(values)) for name, values in rates.items()]
        figures += [
            Figure(f"{self.feature} {name}", "CPU us/request", Spread.of(values)) for name, values in costs.items()
        ]
        comparisons = (
            Comparison(f"{self.feature} on / off, requests/s", "", ratios(rates["on"], rates["off"]), self.ratio),
            # The same by the kernel's CPU time, which a busy neighbour disturbs less.
            Comparison(f"{self.feature} off / on, CPU time a request", "", ratios(costs["off"], costs["on"])),
        )
        return CaseResult(self.name, self.title, figures, comparisons)

    def request_on(self, bench: Bench, question: Question) -> HttpRequest:
        """Return the request of the server with the feature."""
        del bench
        return question.request

    @abstractmethod
    def settings(self, bench: Bench, name: str) -> tuple[Sequence[str], Mapping[str, str]]:
        """Return options and environment of the server named "on" or "off"."""

    def _start(self, bench: Bench, name: str) -> AbstractContextManager[Running]:
        options, env = self.settings(bench, name)
        env = {**env, "PYTHONHASHSEED": "0"}
        return bench.headrace(MODEL, name=f"{self.feature} {name}", options=options, env=env)


class MetricsCost(SwitchCost):
    """Cost of metrics."""

    feature = "metrics"

    def settings(self, bench: Bench, name: str) -> tuple[Sequence[str], Mapping[str, str]]:
        """See `SwitchCost`."""
        return (), {"HEADRACE_METRICS": "1" if name == "on" else "0"}


class KeysCost(SwitchCost):
    """Cost of API keys, each request with the same key."""

    feature = "keys"

    def request_on(self, bench: Bench, question: Question) -> HttpRequest:
        """See `SwitchCost`."""
        make_keys(bench.scratch)
        key = (bench.scratch / "infer.key").read_text().strip()
        request = question.request
        return replace(request, headers={**request.headers, **ConnectionOptions(api_key=key).headers()})

    def settings(self, bench: Bench, name: str) -> tuple[Sequence[str], Mapping[str, str]]:
        """See `SwitchCost`."""
        return (("--api-keys-file", str(bench.scratch / KEYS_FILE)) if name == "on" else ()), {}


def _sample(bench: Bench, server: Running, load: Load) -> tuple[float, float]:
    """Requests a second, and the processor time in us that the server used for each."""
    before_s = cpu_seconds(server.pid)
    sample = bench.measure(server, load)
    return sample.requests_per_s, (cpu_seconds(server.pid) - before_s) * 1e6 / sample.requests


@dataclass(frozen=True, slots=True)
class IdleConnections(Case):
    """p99 of a few busy connections, with and without a thousand idle ones beside them.

    Attributes:
        idle: connections that were answered once and then rest.
    """

    idle: int

    contenders = 2
    sample_s = 3

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"p99 of tiny on {self.connections} connections, with and without {self.idle:,} idle connections"

    def rounds(self, bench: Bench) -> int:
        """Twice as many, as p99 varies more than a median."""
        return bench.rounds * 2

    def run(self, bench: Bench) -> CaseResult:
        """Measure in interleaved rounds on one server."""
        question = bench.question(MODEL)
        load = self.load(bench, question.request)

        def beside_idle(server: Running) -> float:
            with idle_connections(server.port, self.idle):
                return bench.measure(server, load).p99_us

        with bench.headrace(MODEL) as server:
            bench.check(server, question)
            bench.warm_up(server, load)
            p99s = interleave(
                {"with": lambda: beside_idle(server), "without": lambda: bench.measure(server, load).p99_us},
                self.rounds(bench),
            )
        alone, beside = Spread.of(p99s["without"]), Spread.of(p99s["with"])
        # What rounds without idle connections differ by among themselves is noise, and no effect.
        noise = at_most(alone.high / alone.median)
        compared = ratios([beside.median], [alone.median])
        return CaseResult(
            self.name,
            self.title,
            (Figure("no idle connections", "p99 us", alone), Figure(f"{self.idle:,} idle", "p99 us", beside)),
            (Comparison("p99 with / without, medians", "", compared, noise),),
            ("the target is the noise: the slowest round without idle connections over their median",),
        )


@contextmanager
def idle_connections(port: int, count: int) -> Iterator[None]:
    """Hold connections open, each of which was answered once.

    Raises:
        LoadFailed: the server had closed some by the end, so that the sample did not measure what it says.
    """
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            connection = socket.create_connection((HOST, port), timeout=10.0)
            held.append(connection)
            connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if b" 200 " not in connection.recv(4096):
                raise LoadFailed("the server refused a connection that was to be idle")
        yield
        still_open = sum(_is_open(connection) for connection in held)
        if still_open < count:
            raise LoadFailed(
                f"of {count} idle connections the server kept {still_open}; is its keep-alive time too short?"
            )
    finally:
        for connection in held:
            connection.close()


def _is_open(connection: socket.socket) -> bool:
    """Open and silent; an empty read is the other side's end."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


@dataclass(frozen=True, slots=True)
class Memory(Case):
    """Resident memory of one server process, after a warm-up and after many more requests.

    Attributes:
        warm_up_requests: answered before the first reading.
        requests: answered between the first reading and the second.
        growth: target of the second over the first.
    """

    warm_up_requests: int
    requests: int
    growth: Target

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"resident memory of the server before and after {self.requests:,} requests to tiny"

    def planned_s(self, bench: Bench) -> float:
        """A guess: it counts requests, not seconds."""
        return bench.seconds(12)

    def run(self, bench: Bench) -> CaseResult:
        """Send, read, send, read."""
        question = bench.question(MODEL)
        load = replace(self.load(bench, question.request), seconds=1)
        share = 10 if bench.quick else 1
        with bench.headrace(MODEL) as server:
            bench.check(server, question)
            sent_before = self._send_at_least(bench, server, load, self.warm_up_requests // share)
            before = resident_bytes(server.pid) / MEBIBYTE
            bench.progress(f"{self.requests // share:,} requests", self.planned_s(bench))
            sent_after = self._send_at_least(bench, server, load, self.requests // share)
            after = resident_bytes(server.pid) / MEBIBYTE
        figures = (
            Figure(f"after {sent_before:,} requests", "MiB", Spread.of([before])),
            Figure(f"after {sent_after:,} more", "MiB", Spread.of([after])),
        )
        comparison = Comparison("resident memory, after / before", "", ratios([after], [before]), self.growth)
        return CaseResult(self.name, self.title, figures, (comparison,))

    def _send_at_least(self, bench: Bench, server: Running, load: Load, requests: int) -> int:
        """Run wrk, which stops by the clock, until enough requests are answered; return their number."""
        sent = 0
        while sent < requests:
            bench.progress(f"{server.name}, {sent:,} of {requests:,} requests", 0.0)
            sample = bench.load(server, load)
            sent += sample.requests
            load = replace(load, seconds=max(1, math.ceil((requests - sent) / sample.requests_per_s)))
        return sent
