"""Gain of a stream: ModelStreamInfer against unary calls, the same server, the same number in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loadtest.bench import grpc_calls, h2load
from loadtest.bench.cases.grpc_front_end import MODEL
from loadtest.bench.grpc_calls import ECHO, FAST, GRPCIO, Question
from loadtest.bench.h2load import CallLoad
from loadtest.bench.inprocess import Oracle
from loadtest.bench.results import CaseResult, Comparison, Figure, Target
from loadtest.bench.session import Bench, interleave
from loadtest.bench.spread import Spread, ratios
from loadtest.bench.streaming import StreamLoad
from loadtest.grpc_protocol import MODEL_INFER

UNARY, STREAM = "unary", "stream"


@dataclass(frozen=True, slots=True)
class Rate:
    """Inferences a second, and the share of one core that the client used."""

    per_s: float
    client_busy: float


@dataclass(frozen=True, slots=True)
class GrpcStream:
    """One stream a connection, as many messages in flight on it as the unary load has calls.

    Attributes:
        name: as `--only` takes it.
        connections: HTTP/2 connections.
        in_flight: calls on each, or messages on its stream.
        to_unary: what streamed inferences a second over unary ones have to be, with either engine.
    """

    name: str
    connections: int
    in_flight: int
    to_unary: Target

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        total = self.connections * self.in_flight
        return f"tiny, ModelStreamInfer against unary, {total} in flight on {self.connections} connections each"

    def planned_s(self, bench: Bench) -> float:
        """Both ways a round, for each server."""
        return 6.0 * bench.rounds * self._sample_s(bench)

    def run(self, bench: Bench) -> CaseResult:
        """Both ways on each server, in interleaved rounds."""
        h2load.require()
        oracle = Oracle(bench.model_path(MODEL))
        question = Question(MODEL, oracle.example(rows=1), oracle)
        contenders: dict[str, Callable[[], Rate]] = {}
        with grpc_calls.both_engines(bench, MODEL) as engines:
            unary = [grpc_calls.headrace_target(server, question) for server in engines]
            streams = [grpc_calls.headrace_target(server, question, stream=True) for server in engines]
            answer_bytes = grpc_calls.answer_size(unary[0])
            with bench.start(grpc_calls.echo_command(answer_bytes, bench.cores.server)) as echo:
                unary.append(grpc_calls.echo_target(echo, question.message))
                streams.append(grpc_calls.echo_target(echo, question.message, stream=True))
                for targets in zip(unary, streams, strict=True):
                    contenders |= self._both_ways(bench, question.message, *targets)
                samples = interleave(contenders, bench.rounds)
        return self._result(samples)

    def _sample_s(self, bench: Bench) -> int:
        return bench.seconds(4)

    def _both_ways(
        self, bench: Bench, message: bytes, unary: grpc_calls.Target, streamed: grpc_calls.Target
    ) -> dict[str, Callable[[], Rate]]:
        """One server's two contenders."""
        seconds, cpus = self._sample_s(bench), bench.cores.client
        calls = CallLoad(MODEL_INFER, message, self.connections, self.in_flight, cpus=cpus, record_latencies=False)
        messages = StreamLoad(message, self.connections, self.in_flight, seconds, cpus)
        call = grpc_calls.unary_contender(bench, unary, calls, seconds)
        stream = grpc_calls.stream_contender(bench, streamed, messages)

        def call_rate() -> Rate:
            sample = call()
            return Rate(sample.calls_per_s, sample.client_busy)

        def stream_rate() -> Rate:
            sample = stream()
            return Rate(sample.answers_per_s, sample.client_busy)

        return {f"{unary.name}, {UNARY}": call_rate, f"{unary.name}, {STREAM}": stream_rate}

    def _result(self, samples: dict[str, list[Rate]]) -> CaseResult:
        rates = {name: [rate.per_s for rate in rounds] for name, rounds in samples.items()}
        figures = tuple(Figure(name, "inferences/s", Spread.of(values)) for name, values in rates.items())
        comparisons = tuple(
            Comparison(
                f"{name}: {STREAM} / {UNARY}, inferences/s",
                "",
                ratios(rates[f"{name}, {STREAM}"], rates[f"{name}, {UNARY}"]),
                target,
            )
            for name, target in ((FAST, self.to_unary), (GRPCIO, self.to_unary), (ECHO, None))
        )
        busy = {
            way: max(rate.client_busy for name, rounds in samples.items() for rate in rounds if name.endswith(way))
            for way in (UNARY, STREAM)
        }
        note = f"the clients used at most {busy[UNARY]:.0%} (unary) and {busy[STREAM]:.0%} (stream) of their core"
        return CaseResult(self.name, self.title, figures, comparisons, (note,))
