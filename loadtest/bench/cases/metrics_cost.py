"""Cost of metrics: Headrace with its metrics on against Headrace with its metrics off."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from statistics import median

from loadtest.bench.inprocess import Oracle
from loadtest.bench.results import CaseResult, Comparison, Figure, Target
from loadtest.bench.session import Bench, interleave
from loadtest.bench.spread import Spread, ratios
from loadtest.bench.wrk import Load
from loadtest.protocol import binary_request
from loadtest.servers import Running, cpu_seconds

MODEL = "tiny"
ROUNDS_A_PAIR = 5


@dataclass(frozen=True, slots=True)
class MetricsCost:
    """Pairs of fresh servers, each pair on one core; the idle one of the two costs nothing.

    The effect is smaller than what two processes that run the same code differ by (memory layout, hash seeds: 3 to 5 %), so
    one pair cannot show it however long it is measured. Many pairs can: each gives one ratio, and their median is judged.

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
        """One-line description of the measurement."""
        return f"metrics on against off: tiny, binary bodies, {self.connections} connections, pairs of fresh servers"

    def planned_s(self, bench: Bench) -> float:
        """Two contenders a round in each pair."""
        return 2.0 * self._pairs(bench) * ROUNDS_A_PAIR * bench.seconds(1)

    def run(self, bench: Bench) -> CaseResult:
        """Start a pair, check both, measure in interleaved rounds; and again."""
        oracle = Oracle(bench.model_path(MODEL))
        inputs = oracle.example(rows=1)
        request = binary_request(MODEL, inputs)
        load = Load((request,), self.connections, bench.seconds(1), cpus=bench.cores.client)
        rates: dict[str, list[float]] = {"on": [], "off": []}
        costs: dict[str, list[float]] = {"on": [], "off": []}
        for _ in range(self._pairs(bench)):
            with self._start(bench, "on", "1") as on, self._start(bench, "off", "0") as off:
                for server in (on, off):
                    bench.check(server, request, oracle, inputs)
                    bench.warm_up(server, load)
                samples = interleave(
                    {"on": partial(_sample, bench, on, load), "off": partial(_sample, bench, off, load)}, ROUNDS_A_PAIR
                )
            for name, rounds in samples.items():
                rates[name].append(median(rate for rate, _ in rounds))
                costs[name].append(median(cpu_us for _, cpu_us in rounds))
        figures = [Figure(f"metrics {name}", "requests/s", Spread.of(values)) for name, values in rates.items()]
        figures += [Figure(f"metrics {name}", "CPU us/request", Spread.of(values)) for name, values in costs.items()]
        comparisons = (
            Comparison("metrics on / off, requests/s", "", ratios(rates["on"], rates["off"]), self.ratio),
            # The same by the kernel's CPU time, which a busy neighbour disturbs less.
            Comparison("metrics off / on, CPU time a request", "", ratios(costs["off"], costs["on"])),
        )
        return CaseResult(self.name, self.title, tuple(figures), comparisons)

    def _pairs(self, bench: Bench) -> int:
        return bench.rounds * 2

    def _start(self, bench: Bench, name: str, value: str) -> AbstractContextManager[Running]:
        env = {"HEADRACE_METRICS": value, "PYTHONHASHSEED": "0"}
        return bench.headrace(MODEL, cpus=bench.cores.server, name=f"metrics {name}", env=env)


def _sample(bench: Bench, server: Running, load: Load) -> tuple[float, float]:
    """Requests a second, and the processor time in us that the server used for each."""
    before_s = cpu_seconds(server.pid)
    sample = bench.measure(server, load)
    return sample.requests_per_s, (cpu_seconds(server.pid) - before_s) * 1e6 / sample.requests
