"""Loads on gRPC servers, checked against the servers' own counts.

The load clients do not decode answers. So before each sample a call by grpcio is compared with ONNX Runtime, and after it three
things must hold: every call ended, the answers have the size of right ones to the byte, and the server counted as many
successes as the client sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import grpc

from loadtest import grpc_protocol, servers
from loadtest.bench import h2load, streaming
from loadtest.bench.h2load import CallLoad, CallSample
from loadtest.bench.inprocess import WrongAnswer
from loadtest.bench.session import Bench, Question
from loadtest.bench.streaming import StreamLoad, StreamSample
from loadtest.bench.wrk import LoadFailed
from loadtest.grpc_protocol import ECHO_COUNT, MODEL_INFER
from loadtest.protocol import send_json
from loadtest.servers import HOST, Running, ServerCommand

# A server may count a batch a moment after its answers have left.
COUNT_TIMEOUT_S = 2.0
WARM_UP_CALLS = 2000
FAST, GRPCIO, ECHO = "headrace, fast engine", "headrace, grpcio engine", "bare grpc.aio echo"


@dataclass(frozen=True, slots=True)
class Target:
    """A gRPC server under load.

    Attributes:
        name: in reports.
        port: of gRPC.
        check: one message by the method that will be measured; compares the answer and returns its size in bytes, without the
            length prefix.
        succeeded: inferences answered with success so far, by the server's own count.
    """

    name: str
    port: int
    check: Callable[[], int]
    succeeded: Callable[[], int]


@contextmanager
def both_engines(bench: Bench, model: str) -> Iterator[tuple[Running, Running]]:
    """Two Headraces on the server's core, the first with the fast engine, the second with grpcio."""
    with (
        bench.headrace(model, name=FAST, options=("--grpc-engine", "fast")) as fast,
        bench.headrace(model, name=GRPCIO, options=("--grpc-engine", "grpcio")) as grpcio,
    ):
        yield fast, grpcio


def headrace_target(server: Running, question: Question, *, stream: bool = False) -> Target:
    """Headrace, its successes by its statistics of the model; `stream` for ModelStreamInfer."""
    port, message = server.grpc_port, question.message

    def check() -> int:
        answer = _one_answer(port, message, stream)
        decode = grpc_protocol.decode_stream_answer if stream else grpc_protocol.decode_answer
        question.oracle.check(question.inputs, decode(answer))
        return len(answer)

    def succeeded() -> int:
        statistics = send_json(HOST, server.port, f"/v2/models/{question.model}/stats")
        return sum(int(entry["inference_stats"]["success"]["count"]) for entry in statistics["model_stats"])

    return Target(server.name, port, check, succeeded)


def echo_command(answer_bytes: int, cpus: tuple[int, ...]) -> ServerCommand:
    """Command of the bare `grpc.aio` server."""
    return servers.peer("grpc_echo", ECHO, "--answer-bytes", str(answer_bytes), cpus=cpus, ready_path="")


def echo_target(server: Running, message: bytes, *, stream: bool = False) -> Target:
    """The bare server, which counts for itself."""
    port = server.port
    return Target(
        server.name,
        port,
        lambda: len(_one_answer(port, message, stream)),
        lambda: int(grpc_protocol.call(port, ECHO_COUNT, b"")),
    )


def _one_answer(port: int, message: bytes, stream: bool) -> bytes:
    if stream:
        return grpc_protocol.call_stream(port, message)
    return grpc_protocol.call(port, MODEL_INFER, message)


def answer_size(target: Target) -> int:
    """One right answer's size in bytes.

    Raises:
        WrongAnswer: there is none.
    """
    try:
        return target.check()
    except grpc.RpcError as error:
        detail = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
        raise WrongAnswer(f"{target.name} did not answer: {detail}") from error
    except ValueError as error:
        raise WrongAnswer(f"{target.name} did not answer as it should: {error}") from error


def measure(bench: Bench, target: Target, load: CallLoad) -> CallSample:
    """One sample of unary calls, checked before and after.

    Raises:
        WrongAnswer: the call before it was not answered right.
        LoadFailed: a call failed, or the counts differ.
    """
    answer_bytes = answer_size(target)
    with counted(target) as expect:
        sample = h2load.run(target.port, load, bench.scratch)
        h2load.require_success(sample, answer_bytes)
        expect(sample.succeeded)
    return sample


def measure_stream(bench: Bench, target: Target, load: StreamLoad) -> StreamSample:
    """One sample of streams, checked in the same way."""
    answer_bytes = answer_size(target)
    with counted(target) as expect:
        sample = streaming.run(target.port, answer_bytes, load, bench.scratch)
        expect(sample.answers)
    return sample


def warm_up(bench: Bench, target: Target, load: CallLoad) -> float:
    """The same load, briefly and uncounted; returns the calls a second of its second half."""
    bench.progress(f"warm up {target.name}", 0.0)
    brief = replace(load, calls=WARM_UP_CALLS)
    measure(bench, target, brief)
    return measure(bench, target, brief).calls_per_s


def unary_contender(bench: Bench, target: Target, load: CallLoad, seconds: int) -> Callable[[], CallSample]:
    """Warm a server up with the load; return a function that takes one sample of about so many seconds."""
    rate = warm_up(bench, target, load)
    full = replace(load, calls=max(WARM_UP_CALLS, round(rate * seconds)))

    def sample() -> CallSample:
        bench.progress(f"{target.name}, unary", seconds)
        return measure(bench, target, full)

    return sample


def stream_contender(bench: Bench, target: Target, load: StreamLoad) -> Callable[[], StreamSample]:
    """The same for streams."""
    bench.progress(f"warm up {target.name}", 0.0)
    measure_stream(bench, target, replace(load, seconds=1))

    def sample() -> StreamSample:
        bench.progress(f"{target.name}, stream", load.seconds)
        return measure_stream(bench, target, load)

    return sample


@contextmanager
def counted(target: Target) -> Iterator[Callable[[int], None]]:
    """Compare a load client's count with the server's; the body calls the yielded function with the client's count.

    Raises:
        LoadFailed: the two differ.
    """
    expected = 0

    def expect(count: int) -> None:
        nonlocal expected
        expected = count

    before = target.succeeded()
    yield expect
    done = settled_count(target, before + expected) - before
    if done != expected:
        raise LoadFailed(f"{target.name} counted {done:,} successes, the load client {expected:,}")


def settled_count(target: Target, expected: int) -> int:
    """The server's request count once it equals `expected`, or its value after a timeout."""
    deadline = time.monotonic() + COUNT_TIMEOUT_S
    while (count := target.succeeded()) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return count
