"""Several models and both encodings on the same connections."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.bench.inprocess import Oracle
from loadtest.bench.results import CaseResult, Figure
from loadtest.bench.session import Bench, interleave
from loadtest.bench.spread import Spread
from loadtest.bench.wrk import Load
from loadtest.protocol import HttpRequest, binary_request, json_request

MODELS = ("tiny", "digits", "add_sub")


@dataclass(frozen=True, slots=True)
class Mixed:
    """Every connection sends to each model in turn, once in binary and once in JSON.

    Attributes:
        name: as `--only` takes it.
        connections: one request in flight on each.
    """

    name: str
    connections: int

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"{', '.join(MODELS)} in turn, binary and JSON, {self.connections} connections, server on one core"

    def planned_s(self, bench: Bench) -> float:
        """One contender."""
        return float(bench.rounds * bench.seconds(4))

    def run(self, bench: Bench) -> CaseResult:
        """Check every kind of request, then measure."""
        with bench.headrace(*MODELS, cpus=bench.cores.server) as server:
            requests: list[HttpRequest] = []
            for model in MODELS:
                oracle = Oracle(bench.model_path(model))
                inputs = oracle.example(rows=1)
                for request in (binary_request(model, inputs), json_request(model, inputs)):
                    bench.check(server, request, oracle, inputs)
                    requests.append(request)
            load = Load(tuple(requests), self.connections, bench.seconds(4), cpus=bench.cores.client)
            bench.warm_up(server, load)
            samples = interleave({"headrace": lambda: bench.measure(server, load)}, bench.rounds)["headrace"]
        figures = (
            Figure("headrace", "requests/s", Spread.of([sample.requests_per_s for sample in samples])),
            Figure("headrace", "p50 us", Spread.of([sample.p50_us for sample in samples])),
            Figure("headrace", "p99 us", Spread.of([sample.p99_us for sample in samples])),
        )
        return CaseResult(self.name, self.title, figures)
