"""Cost of gRPC: unary calls and streams of both engines beside a `grpc.aio` server that does nothing; a long run of calls."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loadtest.bench import grpc_calls, h2load
from loadtest.bench.grpc_calls import ECHO, FAST, GRPCIO
from loadtest.bench.h2load import CallLoad, CallSample
from loadtest.bench.inprocess import WrongAnswer
from loadtest.bench.results import CaseResult, Comparison, Figure, Target, at_most, figures_of
from loadtest.bench.session import Bench, Case, interleave
from loadtest.bench.spread import Spread
from loadtest.bench.streaming import StreamLoad, StreamSample
from loadtest.bench.wrk import LoadFailed
from loadtest.grpc_protocol import MODEL_INFER, PREFIX_BYTES
from loadtest.servers import resident_bytes

MODEL = "tiny"
MEBIBYTE = 1024 * 1024
DELAY_US = 1000
WITH_DELAY = f"{GRPCIO}, queue delay {DELAY_US} us"
DEFAULT = "headrace, default options"
UNARY, STREAM = "unary", "stream"


@dataclass(frozen=True, slots=True)
class GrpcCase(Case):
    """ModelInfer of one row with raw contents, the server on one core, the client on the other.

    Attributes:
        in_flight: calls, or messages of a stream, on each HTTP/2 connection at a time.
    """

    in_flight: int

    def call_load(self, bench: Bench, message: bytes, *, record_latencies: bool = False) -> CallLoad:
        """Unary calls; their number follows from the speed of the server."""
        cpus = bench.cores.client
        return CallLoad(MODEL_INFER, message, self.connections, self.in_flight, 1, cpus, record_latencies)


@dataclass(frozen=True, slots=True)
class GrpcFrontEnd(GrpcCase):
    """Unary calls.

    Attributes:
        grpcio_to_echo: target of calls a second over the bare server's with the grpcio engine.
        fast_to_echo: the same with the fast engine.
    """

    grpcio_to_echo: Target
    fast_to_echo: Target

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        total = self.connections * self.in_flight
        return f"tiny, unary gRPC, {total} in flight on {self.connections} connections, server on one core"

    def run(self, bench: Bench) -> CaseResult:
        """Check all answers, then measure in interleaved rounds."""
        h2load.require()
        question = bench.question(MODEL)
        message = question.message
        with (
            grpc_calls.both_engines(bench, MODEL) as both,
            _with_delay(bench).headrace(MODEL, name=WITH_DELAY, options=("--grpc-engine", "grpcio")) as delayed,
        ):
            targets = [grpc_calls.headrace_target(server, question) for server in (*both, delayed)]
            sizes = [grpc_calls.answer_size(target) for target in targets]
            if sizes[0] != sizes[1]:
                raise WrongAnswer(f"the engines' answers have {sizes[0]} and {sizes[1]} bytes, expected the same")
            with bench.start(grpc_calls.echo_command(sizes[0], bench.cores.server)) as echo:
                targets.append(grpc_calls.echo_target(echo, message))
                load = self.call_load(bench, message, record_latencies=True)
                seconds = bench.seconds(self.sample_s)
                contenders = {
                    target.name: grpc_calls.unary_contender(bench, target, load, seconds) for target in targets
                }
                samples = interleave(contenders, bench.rounds)
        figures = figures_of(samples, {"calls_per_s": "calls/s", "p50_us": "p50 us", "p99_us": "p99 us"})
        targets_to_echo = {GRPCIO: self.grpcio_to_echo, WITH_DELAY: self.grpcio_to_echo, FAST: self.fast_to_echo}
        comparisons = [
            Comparison.ratio(f"{name} / {ECHO}, calls/s", "calls_per_s", samples[name], samples[ECHO], target)
            for name, target in targets_to_echo.items()
        ]
        notes = (
            f"request message {len(message)} bytes, answer {sizes[0]} bytes, the same for the bare server",
            f"h2load used at most {_busiest(list(samples.values())):.0%} of its core",
        )
        return CaseResult(self.name, self.title, figures, comparisons, notes)


@dataclass(frozen=True, slots=True)
class GrpcDefault(GrpcCase):
    """Unary calls to a server with its default options, beside the bare `grpc.aio` server in the same rounds.

    Attributes:
        model: of the repository that `loadtest.peers` measures: tiny or mlp.
        to_echo: target of calls a second over the bare server's.
    """

    model: str
    to_echo: Target

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        total = self.connections * self.in_flight
        return f"{self.model}, unary gRPC with default options, {total} in flight, server on one core"

    def run(self, bench: Bench) -> CaseResult:
        """Check all answers, then measure in interleaved rounds."""
        from loadtest.peers.__main__ import prepare

        h2load.require()
        folder = bench.scratch / self.name
        prepare(folder, bench.model_path(MODEL))
        bench = replace(bench, repository=folder / "repository")
        question = bench.question(self.model)
        with bench.headrace(self.model, name=DEFAULT) as server:
            headrace = grpc_calls.headrace_target(server, question)
            size = grpc_calls.answer_size(headrace)
            with bench.start(grpc_calls.echo_command(size, bench.cores.server)) as echo:
                load = self.call_load(bench, question.message, record_latencies=True)
                seconds = bench.seconds(self.sample_s)
                targets = (headrace, grpc_calls.echo_target(echo, question.message))
                samples = interleave(
                    {target.name: grpc_calls.unary_contender(bench, target, load, seconds) for target in targets},
                    bench.rounds,
                )
        figures = figures_of(samples, {"calls_per_s": "calls/s", "p50_us": "p50 us", "p99_us": "p99 us"})
        ratio = Comparison.ratio(
            f"{self.model}: {DEFAULT} / {ECHO}, calls/s", "calls_per_s", samples[DEFAULT], samples[ECHO], self.to_echo
        )
        notes = (
            f"request message {len(question.message)} bytes, answer {size} bytes, the same for the bare server",
            f"h2load used at most {_busiest(list(samples.values())):.0%} of its core",
        )
        return CaseResult(self.name, self.title, figures, (ratio,), notes)


def _with_delay(bench: Bench) -> Bench:
    """The bench on a copy of the model with a queue delay.

    grpcio hands over one call a turn of its loop. An instance that never waits then runs batches of one, and the threads pass
    the interpreter back and forth for each. The difference to the model without a delay is the cost of that.
    """
    folder = bench.scratch / "delayed" / MODEL
    shutil.copytree(bench.repository / MODEL, folder)
    config = folder / "config.pbtxt"
    text, count = re.subn(
        r"dynamic_batching \{ *\}",
        f"dynamic_batching {{ max_queue_delay_microseconds: {DELAY_US} }}",
        config.read_text(encoding="utf-8"),
    )
    if count != 1:
        raise LoadFailed(f"{config}: expected one 'dynamic_batching {{ }}' to give a delay to, found {count}")
    config.write_text(text, encoding="utf-8")
    return replace(bench, repository=folder.parent)


def _busiest(samples: Sequence[Sequence[CallSample | StreamSample]]) -> float:
    """The largest share of one core that a client used."""
    return max(sample.client_busy for rounds in samples for sample in rounds)


@dataclass(frozen=True, slots=True)
class GrpcStream(GrpcCase):
    """ModelStreamInfer against unary calls: one stream a connection, with as many messages in flight as the unary load has calls.

    Attributes:
        to_unary: target of streamed inferences a second over unary ones, with either engine.
    """

    to_unary: Target

    contenders = 6

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        total = self.connections * self.in_flight
        return f"tiny, ModelStreamInfer against unary, {total} in flight on {self.connections} connections each"

    def run(self, bench: Bench) -> CaseResult:
        """Measure both on each server, in interleaved rounds."""
        h2load.require()
        question = bench.question(MODEL)
        message, seconds = question.message, bench.seconds(self.sample_s)
        calls = self.call_load(bench, message)
        messages = StreamLoad(message, self.connections, self.in_flight, seconds, bench.cores.client)
        contenders: dict[str, Callable[[], CallSample | StreamSample]] = {}
        with grpc_calls.both_engines(bench, MODEL) as engines:
            unary = [grpc_calls.headrace_target(server, question) for server in engines]
            streams = [grpc_calls.headrace_target(server, question, stream=True) for server in engines]
            answer_bytes = grpc_calls.answer_size(unary[0])
            with bench.start(grpc_calls.echo_command(answer_bytes, bench.cores.server)) as echo:
                unary.append(grpc_calls.echo_target(echo, message))
                streams.append(grpc_calls.echo_target(echo, message, stream=True))
                for called, streamed in zip(unary, streams, strict=True):
                    contenders[f"{called.name}, {UNARY}"] = grpc_calls.unary_contender(bench, called, calls, seconds)
                    contenders[f"{called.name}, {STREAM}"] = grpc_calls.stream_contender(bench, streamed, messages)
                samples = interleave(contenders, bench.rounds)
        comparisons = [
            Comparison.ratio(
                f"{name}: {STREAM} / {UNARY}, inferences/s",
                "calls_per_s",
                samples[f"{name}, {STREAM}"],
                samples[f"{name}, {UNARY}"],
                target,
            )
            for name, target in ((FAST, self.to_unary), (GRPCIO, self.to_unary), (ECHO, None))
        ]
        busy = {
            kind: _busiest([rounds for name, rounds in samples.items() if name.endswith(kind)])
            for kind in (UNARY, STREAM)
        }
        note = f"the clients used at most {busy[UNARY]:.0%} (unary) and {busy[STREAM]:.0%} (stream) of their core"
        figures = figures_of(samples, {"calls_per_s": "inferences/s"})
        return CaseResult(self.name, self.title, figures, comparisons, (note,))


@dataclass(frozen=True, slots=True)
class GrpcMillion(GrpcCase):
    """A very long run of calls to the fast engine on one connection, of which none may fail.

    Attributes:
        calls: altogether.
        expected_per_s: for the progress bar.
    """

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
        question, calls = bench.question(MODEL), self._count(bench)
        load = replace(self.call_load(bench, question.message), calls=calls)
        with bench.headrace(MODEL, name=FAST, options=("--grpc-engine", "fast")) as server:
            target = grpc_calls.headrace_target(server, question)
            grpc_calls.warm_up(bench, target, load)
            answer_bytes, counted_before = grpc_calls.answer_size(target), target.succeeded()
            before = resident_bytes(server.pid) / MEBIBYTE
            bench.progress(f"{calls:,} calls", self.planned_s(bench))
            # The number of failures is the result here, so a failure does not end the case.
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
