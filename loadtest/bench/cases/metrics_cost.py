"""What it costs to measure oneself: Headrace with its metrics on against Headrace with its metrics off."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from loadtest.bench.inprocess import Oracle
from loadtest.bench.results import CaseResult, Comparison, Figure, Target
from loadtest.bench.session import Bench, interleave
from loadtest.bench.spread import Spread, ratios
from loadtest.bench.wrk import Load
from loadtest.protocol import binary_request
from loadtest.servers import Running, cpu_seconds

MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class MetricsCost:
    """Both servers run at the same time on the same core; the one that is not asked costs nothing.

    The effect is smaller than the noise of one sample: many short rounds, and the median of their ratios.

    Attributes:
        name: as `--only` takes it.
        connections: one request in flight on each.
        ratio: what requests a second with metrics over those without have to be.
    """

    name: str
    connections: int
    ratio: Target

    @property
    def title(self) -> str:
        """What is measured, in a line."""
        return f"metrics on against off: tiny, binary bodies, {self.connections} connections, server on one core"

    def planned_s(self, bench: Bench) -> float:
        """Two contenders a round."""
        return 2.0 * self._rounds(bench) * bench.seconds(3)

    def run(self, bench: Bench) -> CaseResult:
        """Check both, then measure in interleaved rounds."""
        oracle = Oracle(bench.model_path(MODEL))
        inputs = oracle.example(rows=1)
        request = binary_request(MODEL, inputs)
        load = Load((request,), self.connections, bench.seconds(3), cpus=bench.cores.client)
        cpus = bench.cores.server
        with (
            bench.headrace(MODEL, cpus=cpus, name="metrics on", env={"HEADRACE_METRICS": "1"}) as on,
            bench.headrace(MODEL, cpus=cpus, name="metrics off", env={"HEADRACE_METRICS": "0"}) as off,
        ):
            for server in (on, off):
                bench.check(server, request, oracle, inputs)
                bench.warm_up(server, load)
            samples = interleave(
                {"on": partial(_sample, bench, on, load), "off": partial(_sample, bench, off, load)},
                self._rounds(bench),
            )
        rates = {name: [rate for rate, _ in rounds] for name, rounds in samples.items()}
        costs = {name: [cpu_us for _, cpu_us in rounds] for name, rounds in samples.items()}
        figures = [Figure(f"metrics {name}", "requests/s", Spread.of(values)) for name, values in rates.items()]
        figures += [Figure(f"metrics {name}", "CPU us/request", Spread.of(values)) for name, values in costs.items()]
        comparisons = (
            Comparison("metrics on / off, requests/s", "", ratios(rates["on"], rates["off"]), self.ratio),
            # The same question asked of the kernel's clock, which a busy neighbour disturbs less.
            Comparison("metrics off / on, CPU time a request", "", ratios(costs["off"], costs["on"])),
        )
        return CaseResult(self.name, self.title, tuple(figures), comparisons)

    def _rounds(self, bench: Bench) -> int:
        return bench.rounds * 3


def _sample(bench: Bench, server: Running, load: Load) -> tuple[float, float]:
    """Requests a second, and the processor time in us that the server used for each."""
    before_s = cpu_seconds(server.pid)
    sample = bench.measure(server, load)
    return sample.requests_per_s, (cpu_seconds(server.pid) - before_s) * 1e6 / sample.requests
