"""Throughput of a served model relative to ONNX Runtime in process, in images a second."""

from __future__ import annotations

from dataclasses import dataclass, field

from loadtest.bench.inprocess import Oracle, rows_per_s_in_fresh_process
from loadtest.bench.results import CaseResult, Comparison, Figure, Target
from loadtest.bench.session import Bench, interleave
from loadtest.bench.spread import Spread, completion_rate, ratios
from loadtest.bench.wrk import Load
from loadtest.protocol import binary_request
from loadtest.servers import Running, cpu_seconds

BATCHES = (1, 2, 4, 8, 16)
QUICK_BATCHES = (1, 8)


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor time for an image, in ms, one value a round: what server and client take of the cores they share."""

    server_ms: list[float] = field(default_factory=list)
    client_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModelThroughput:
    """One image a request; server, client and ONNX Runtime in process all have the same two cores.

    Attributes:
        model: which one; also the case's name.
        connections: one request in flight on each.
        ratio: what images a second over those in process have to be.
    """

    model: str
    connections: int
    ratio: Target

    @property
    def name(self) -> str:
        """As `--only` takes it."""
        return self.model

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"{self.model}, binary bodies, {self.connections} connections, everything on both cores"

    def planned_s(self, bench: Bench) -> float:
        """The sweep, then two contenders a round."""
        return len(self._batches(bench)) * bench.seconds(6) + 2.0 * bench.rounds * bench.seconds(20)

    def run(self, bench: Bench) -> CaseResult:
        """Find the best batch size in process, then measure in interleaved rounds."""
        sweep = {batch: self._in_process(bench, batch, bench.seconds(6)) for batch in self._batches(bench)}
        best = max(sweep, key=lambda batch: sweep[batch])
        oracle = Oracle(bench.model_path(self.model))
        inputs = oracle.example(rows=1)
        request = binary_request(self.model, inputs)
        load = Load((request,), self.connections, bench.seconds(20), cpus=bench.cores.both, record_completions=True)
        with bench.headrace(self.model, cpus=bench.cores.both) as server:
            bench.check(server, request, oracle, inputs)
            del oracle
            bench.warm_up(server, load)
            costs = Costs()
            rates = interleave(
                {
                    "headrace": lambda: self._served(bench, server, load, costs),
                    "in process": lambda: self._in_process(bench, best, bench.seconds(20)),
                },
                bench.rounds,
            )
        figures = (
            Figure("headrace", "images/s", Spread.of(rates["headrace"])),
            Figure(f"ONNX Runtime in process, batches of {best}", "images/s", Spread.of(rates["in process"])),
            Figure("headrace", "CPU ms/image", Spread.of(costs.server_ms)),
            Figure("its client (wrk)", "CPU ms/image", Spread.of(costs.client_ms)),
        )
        compared = ratios(rates["headrace"], rates["in process"])
        comparison = Comparison("headrace / ONNX Runtime in process, images/s", "", compared, self.ratio)
        swept = ", ".join(f"{batch}: {rate:.1f}" for batch, rate in sweep.items())
        notes = (f"in process, images/s by batch size: {swept}", f"request body {len(request.body)} bytes")
        return CaseResult(self.name, self.title, figures, (comparison,), notes)

    def _batches(self, bench: Bench) -> tuple[int, ...]:
        return QUICK_BATCHES if bench.quick else BATCHES

    def _in_process(self, bench: Bench, batch: int, seconds: int) -> float:
        bench.progress(f"{self.model} in process, batches of {batch}", seconds)
        cpus = bench.cores.both
        return rows_per_s_in_fresh_process(bench.model_path(self.model), batch, len(cpus), seconds, cpus)

    def _served(self, bench: Bench, server: Running, load: Load, costs: Costs) -> float:
        """Images a second, from the first answers after the ramp (one on each connection) to the last."""
        before_s = cpu_seconds(server.pid)
        sample = bench.measure(server, load)
        costs.server_ms.append((cpu_seconds(server.pid) - before_s) * 1e3 / sample.requests)
        costs.client_ms.append(sample.client_cpu_s * 1e3 / sample.requests)
        return completion_rate(sample.completions_s[self.connections :])
