"""Cost of gRPC: `tiny` through both engines, beside a `grpc.aio` server that does nothing."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace

from loadtest.bench import grpc_calls, h2load
from loadtest.bench.grpc_calls import ECHO, FAST, GRPCIO, Question
from loadtest.bench.h2load import CallLoad, CallSample
from loadtest.bench.inprocess import Oracle, WrongAnswer
from loadtest.bench.results import CaseResult, Comparison, Figure, Target
from loadtest.bench.session import Bench, interleave
from loadtest.bench.spread import Spread, ratios
from loadtest.bench.wrk import LoadFailed
from loadtest.grpc_protocol import MODEL_INFER

MODEL = "tiny"
DELAY_US = 1000
GATHERED = f"{GRPCIO}, queue delay {DELAY_US} us"


@dataclass(frozen=True, slots=True)
class GrpcFrontEnd:
    """Unary ModelInfer of one row with raw contents, the server on one core, the client on the other.

    Attributes:
        name: as `--only` takes it.
        connections: HTTP/2 connections.
        in_flight: calls on each of them at a time.
        grpcio_to_echo: what calls a second over the bare server's have to be with the grpcio engine.
        fast_to_echo: the same with the fast engine.
    """

    name: str
    connections: int
    in_flight: int
    grpcio_to_echo: Target
    fast_to_echo: Target

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        total = self.connections * self.in_flight
        return f"tiny, unary gRPC, {total} in flight on {self.connections} connections, server on one core"

    def planned_s(self, bench: Bench) -> float:
        """Four contenders a round."""
        return 4.0 * bench.rounds * self._sample_s(bench)

    def run(self, bench: Bench) -> CaseResult:
        """Check all answers, then measure in interleaved rounds."""
        h2load.require()
        oracle = Oracle(bench.model_path(MODEL))
        question = Question(MODEL, oracle.example(rows=1), oracle)
        message = question.message
        with (
            grpc_calls.both_engines(bench, MODEL) as both,
            _gathering(bench).headrace(
                MODEL, cpus=bench.cores.server, name=GATHERED, options=("--grpc-engine", "grpcio")
            ) as gathering,
        ):
            engines = (*both, gathering)
            targets = [grpc_calls.headrace_target(server, question) for server in engines]
            sizes = [grpc_calls.answer_size(target) for target in targets]
            if sizes[0] != sizes[1]:
                raise WrongAnswer(f"the engines' answers have {sizes[0]} and {sizes[1]} bytes, expected the same")
            with bench.start(grpc_calls.echo_command(sizes[0], bench.cores.server)) as echo:
                targets.append(grpc_calls.echo_target(echo, message))
                load = CallLoad(MODEL_INFER, message, self.connections, self.in_flight, cpus=bench.cores.client)
                contenders = {
                    target.name: grpc_calls.unary_contender(bench, target, load, self._sample_s(bench))
                    for target in targets
                }
                samples = interleave(contenders, bench.rounds)
        return self._result(samples, len(message), sizes[0])

    def _sample_s(self, bench: Bench) -> int:
        return bench.seconds(4)

    def _result(self, samples: dict[str, list[CallSample]], request_bytes: int, answer_bytes: int) -> CaseResult:
        rates = {name: [sample.calls_per_s for sample in rounds] for name, rounds in samples.items()}
        figures = [Figure(name, "calls/s", Spread.of(values)) for name, values in rates.items()]
        for unit in ("p50 us", "p99 us"):
            figures += [
                Figure(name, unit, Spread.of([getattr(sample, unit.replace(" ", "_")) for sample in rounds]))
                for name, rounds in samples.items()
            ]
        comparisons = (
            Comparison(f"{GRPCIO} / {ECHO}, calls/s", "", ratios(rates[GRPCIO], rates[ECHO]), self.grpcio_to_echo),
            Comparison(f"{GATHERED} / {ECHO}, calls/s", "", ratios(rates[GATHERED], rates[ECHO]), self.grpcio_to_echo),
            Comparison(f"{FAST} / {ECHO}, calls/s", "", ratios(rates[FAST], rates[ECHO]), self.fast_to_echo),
        )
        busy = max(sample.client_busy for rounds in samples.values() for sample in rounds)
        notes = (
            f"request message {request_bytes} bytes, answer {answer_bytes} bytes, the same for the bare server",
            f"h2load used at most {busy:.0%} of its core",
        )
        return CaseResult(self.name, self.title, tuple(figures), comparisons, notes)


def _gathering(bench: Bench) -> Bench:
    """The bench on a copy of the model that lets requests wait for company.

    grpcio hands over one call a turn of its loop, so that an instance which never waits runs batches of one, and the threads
    pass the interpreter back and forth for each. What that costs is the difference to the model as it is.
    """
    folder = bench.scratch / "gathering" / MODEL
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
