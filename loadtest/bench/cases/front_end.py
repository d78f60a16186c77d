"""Cost of the path from the socket to the model and back: `tiny` beside bare ASGI and a server written by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from loadtest import servers
from loadtest.bench.inprocess import Oracle, WrongAnswer
from loadtest.bench.results import CaseResult, Comparison, Figure, Target
from loadtest.bench.session import Bench, interleave
from loadtest.bench.spread import Spread, differences, ratios
from loadtest.bench.wrk import Load, Sample
from loadtest.protocol import Array, HttpRequest, binary_request, json_request, send
from loadtest.servers import HOST, Running, ServerCommand

MODEL = "tiny"
HEADRACE, BARE, NAIVE, NAIVE_ASYNC = "headrace", "bare ASGI", "naive FastAPI", "naive FastAPI, async handler"


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """One row a request, the server on one core, the client on the other.

    Attributes:
        name: as `--only` takes it.
        encoding: how Headrace and bare ASGI get the tensor; the naive server takes JSON always.
        connections: one request in flight on each.
        to_bare: what requests a second over bare ASGI's have to be.
        to_naive: the same over the naive server's.
        extra_p50_us: what the median latency may be above bare ASGI's.
    """

    name: str
    encoding: Literal["binary", "json"]
    connections: int
    to_bare: Target | None = None
    to_naive: Target | None = None
    extra_p50_us: Target | None = None

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        plural = "s" if self.connections > 1 else ""
        return f"tiny, {self.encoding} bodies, {self.connections} connection{plural}, server on one core"

    def planned_s(self, bench: Bench) -> float:
        """Four contenders a round."""
        return 4.0 * bench.rounds * self._sample_s(bench)

    def run(self, bench: Bench) -> CaseResult:
        """Check all answers, then measure in interleaved rounds."""
        oracle = Oracle(bench.model_path(MODEL))
        inputs = oracle.example(rows=1)
        request = (binary_request if self.encoding == "binary" else json_request)(MODEL, inputs)
        naive_request = predict_request(inputs["input"])
        cpus = bench.cores.server
        with (
            bench.headrace(MODEL, cpus=cpus) as ours,
            bench.start(self._naive(bench, NAIVE, "def")) as naive,
            bench.start(self._naive(bench, NAIVE_ASYNC, "async")) as naive_async,
        ):
            answer = bench.check(ours, request, oracle, inputs)
            bare_command = servers.peer("bare_asgi", BARE, "--answer-bytes", str(len(answer)), cpus=cpus)
            with bench.start(bare_command) as bare:
                check_size(bare, request, len(answer))
                loads = {server.name: (server, self._load(bench, request)) for server in (ours, bare)}
                for server in (naive, naive_async):
                    check_prediction(server, naive_request, oracle, inputs)
                    loads[server.name] = (server, self._load(bench, naive_request))
                for server, load in loads.values():
                    bench.warm_up(server, load)
                samples = interleave(
                    {name: partial(bench.measure, server, load) for name, (server, load) in loads.items()},
                    bench.rounds,
                )
        return self._result(samples, len(request.body), len(answer))

    def _sample_s(self, bench: Bench) -> int:
        return bench.seconds(4)

    def _naive(self, bench: Bench, name: str, handler: str) -> ServerCommand:
        model = str(bench.model_path(MODEL).resolve())
        return servers.peer("naive_fastapi", name, "--model", model, "--handler", handler, cpus=bench.cores.server)

    def _load(self, bench: Bench, request: HttpRequest) -> Load:
        return Load((request,), self.connections, self._sample_s(bench), cpus=bench.cores.client)

    def _result(self, samples: dict[str, list[Sample]], request_bytes: int, answer_bytes: int) -> CaseResult:
        rates = {name: [sample.requests_per_s for sample in rounds] for name, rounds in samples.items()}
        medians = {name: [sample.p50_us for sample in rounds] for name, rounds in samples.items()}
        figures = [Figure(name, "requests/s", Spread.of(values)) for name, values in rates.items()]
        figures += [Figure(name, "p50 us", Spread.of(values)) for name, values in medians.items()]
        over = {name: ratios(rates[HEADRACE], rates[name]) for name in (BARE, NAIVE, NAIVE_ASYNC)}
        comparisons = [
            Comparison(f"headrace / {BARE}, requests/s", "", over[BARE], self.to_bare),
            Comparison(f"headrace / {NAIVE}, requests/s", "", over[NAIVE], self.to_naive),
            Comparison(f"headrace / {NAIVE_ASYNC}, requests/s", "", over[NAIVE_ASYNC]),
        ]
        if self.extra_p50_us is not None:
            above = differences(medians[HEADRACE], medians[BARE])
            comparisons.append(Comparison("headrace - bare ASGI, p50", "us", above, self.extra_p50_us))
        note = f"request body {request_bytes} bytes, answer body {answer_bytes} bytes, the same for bare ASGI"
        return CaseResult(self.name, self.title, tuple(figures), tuple(comparisons), (note,))


def predict_request(rows: Array) -> HttpRequest:
    """Request for the naive server."""
    body = json.dumps({"input": rows.tolist()}).encode()
    return HttpRequest("/predict", body, {"Content-Type": "application/json"})


def check_prediction(server: Running, request: HttpRequest, oracle: Oracle, inputs: dict[str, Array]) -> None:
    """The naive server computes the same; WrongAnswer if not."""
    status, _, body = send(HOST, server.port, request)
    if status != 200:
        raise WrongAnswer(f"{server.name} answered {status}: {body[:300]!r}")
    oracle.check(inputs, {"output": np.asarray(json.loads(body)["output"], dtype=np.float32)})


def check_size(server: Running, request: HttpRequest, answer_bytes: int) -> None:
    """Bare ASGI takes our body and sends as many bytes as we do; WrongAnswer if not."""
    status, _, body = send(HOST, server.port, request)
    if status != 200 or len(body) != answer_bytes:
        raise WrongAnswer(f"{server.name} answered {status} with {len(body)} bytes, expected {answer_bytes}")
