"""Whether a channel lasts: a very long run of calls on one connection, of which none may fail."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.bench import grpc_calls, h2load
from loadtest.bench.grpc_calls import FAST, Question
from loadtest.bench.h2load import CallLoad
from loadtest.bench.inprocess import Oracle
from loadtest.bench.results import CaseResult, Comparison, Figure, at_most
from loadtest.bench.session import Bench
from loadtest.bench.spread import Spread
from loadtest.grpc_protocol import MODEL_INFER, PREFIX_BYTES
from loadtest.servers import resident_bytes

MODEL = "tiny"
MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class GrpcMillion:
    """Unary calls to the fast engine, all on one connection.

    Attributes:
        name: as `--only` takes it.
        in_flight: calls at a time.
        calls: altogether.
        expected_per_s: what the progress bar believes.
    """

    name: str
    in_flight: int
    calls: int
    expected_per_s: float = 50_000.0

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"unary calls on one connection of the fast engine, {self.in_flight} in flight: none may fail"

    def planned_s(self, bench: Bench) -> float:
        """A guess: it counts calls, not seconds."""
        return self._count(bench) / self.expected_per_s

    def run(self, bench: Bench) -> CaseResult:
        """Warm up, then all in one go."""
        h2load.require()
        oracle = Oracle(bench.model_path(MODEL))
        question = Question(MODEL, oracle.example(rows=1), oracle)
        calls, cpus = self._count(bench), bench.cores
        load = CallLoad(MODEL_INFER, question.message, 1, self.in_flight, calls, cpus.client, record_latencies=False)
        with bench.headrace(MODEL, cpus=cpus.server, name=FAST, options=("--grpc-engine", "fast")) as server:
            target = grpc_calls.headrace_target(server, question)
            grpc_calls.warm_up(bench, target, load)
            answer_bytes, counted_before = grpc_calls.answer_size(target), target.succeeded()
            before = resident_bytes(server.pid) / MEBIBYTE
            bench.progress(f"{calls:,} calls", self.planned_s(bench))
            # What failed is the result here, and no reason to give none.
            sample = h2load.run(target.port, load, bench.scratch)
            after = resident_bytes(server.pid) / MEBIBYTE
            answered = min(
                sample.succeeded,
                sample.data_bytes // (PREFIX_BYTES + answer_bytes),
                grpc_calls.settled_count(target, counted_before + calls) - counted_before,
            )
        figures = (
            Figure(f"{calls:,} calls", "calls/s", Spread.of([sample.calls_per_s])),
            Figure("resident memory before", "MiB", Spread.of([before])),
            Figure("resident memory after", "MiB", Spread.of([after])),
        )
        failed = Comparison(f"calls that failed, of {calls:,}", "", Spread.of([float(calls - answered)]), at_most(0.0))
        return CaseResult(self.name, self.title, figures, (failed,))

    def _count(self, bench: Bench) -> int:
        return self.calls // 100 if bench.quick else self.calls
