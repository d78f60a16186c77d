"""Whether memory stays flat: resident bytes after a warm-up against those after many more requests."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from loadtest.bench.inprocess import Oracle
from loadtest.bench.results import CaseResult, Comparison, Figure, Target
from loadtest.bench.session import Bench
from loadtest.bench.spread import Spread, ratios
from loadtest.bench.wrk import Load
from loadtest.protocol import binary_request
from loadtest.servers import Running, resident_bytes

MODEL = "tiny"
MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Memory:
    """One server process, never restarted in between.

    Attributes:
        name: as `--only` takes it.
        connections: one request in flight on each.
        warm_up_requests: answered before the first look.
        requests: answered between the first look and the second.
        growth: what the second over the first may be.
    """

    name: str
    connections: int
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
        """Send, look, send, look."""
        oracle = Oracle(bench.model_path(MODEL))
        inputs = oracle.example(rows=1)
        request = binary_request(MODEL, inputs)
        load = Load((request,), self.connections, 1, cpus=bench.cores.client)
        share = 10 if bench.quick else 1
        with bench.headrace(MODEL, cpus=bench.cores.server) as server:
            bench.check(server, request, oracle, inputs)
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
