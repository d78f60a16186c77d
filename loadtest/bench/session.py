"""State shared by all cases: models, cores, durations and rounds, and how servers are started and checked."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import grpc
from headrace_bench.processor import tree_cpu_s

from loadtest import grpc_protocol, servers
from loadtest.bench.clients import CallLoad, Load, Sample, run_grpc, run_http
from loadtest.bench.inprocess import Oracle, WrongAnswer
from loadtest.bench.results import CaseResult
from loadtest.grpc_protocol import MODEL_INFER
from loadtest.protocol import Array, HttpRequest, binary_request, decode_answer, send
from loadtest.servers import HOST, Running, ServerCommand

Measured = TypeVar("Measured")
_WARM_UP_CALLS = 2000


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores of servers, and one of the client; or all of them for both."""

    server: tuple[int, ...]
    client: tuple[int, ...]

    @property
    def both(self) -> tuple[int, ...]:
        """For cases where the model's own work is what is measured."""
        return (*self.server, *self.client)


def cores_of(usable: Sequence[int], servers: int = 1) -> Cores:
    """Give the first cores to servers, the next one to the client."""
    return Cores(tuple(usable[:servers]), tuple(usable[servers : servers + 1]))


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """An inference and the oracle that checks its answer."""

    model: str
    inputs: Mapping[str, Array]
    oracle: Oracle

    @property
    def request(self) -> HttpRequest:
        """The request over HTTP, with binary tensors."""
        return binary_request(self.model, self.inputs)

    @property
    def message(self) -> bytes:
        """The request over gRPC."""
        return grpc_protocol.infer_message(self.model, self.inputs)


@dataclass(frozen=True, slots=True)
class Bench:
    """One call of the bench.

    Attributes:
        repository: the model repository with the demo models.
        python: interpreter whose Headrace is measured.
        against: interpreter of another checkout to compare with; "" for none.
        front_ends: processes of the server that read requests; 0 for one process.
        rounds: how often each contender is measured in a case.
        quick: short samples, to see that all works; the figures mean little.
        cores: where servers and clients run.
        scratch: a folder for logs, scripts and bodies.
        progress: called with each step that begins.
    """

    repository: Path
    python: str
    against: str
    front_ends: int
    rounds: int
    quick: bool
    cores: Cores
    scratch: Path
    progress: Callable[[str], None]

    def seconds(self, full: int) -> int:
        """The length of a sample that takes `full` seconds in an unhurried run; wrk wants whole seconds."""
        return max(1, full // 6) if self.quick else full

    def model_path(self, model: str) -> Path:
        """The ONNX file of a model's newest version.

        Raises:
            FileNotFoundError: it was not built.
        """
        paths = [
            path for path in (self.repository / model).glob("*/model.onnx") if re.fullmatch(r"\d+", path.parent.name)
        ]
        if not paths:
            raise FileNotFoundError(
                f"no {model}/<version>/model.onnx in {self.repository}: build it with `make models`"
            )
        return max(paths, key=lambda path: int(path.parent.name))

    def question(self, model: str) -> Question:
        """One row for a model."""
        oracle = Oracle(self.model_path(model))
        return Question(model, oracle.example(rows=1), oracle)

    def headrace(
        self,
        *models: str,
        cpus: tuple[int, ...] = (),
        name: str = "headrace",
        options: Sequence[str] = (),
    ) -> AbstractContextManager[Running]:
        """Headrace with its default settings but for these options, serving these models and no other.

        Args:
            models: names of the models.
            cpus: the cores that it may use; by default the server's.
            name: what reports call it.
            options: of `headrace serve`.
        """
        for model in models:
            self.model_path(model)
        command = servers.headrace(
            self.repository.resolve(),
            name=name,
            command=(self.python, "-m", "headrace", "serve"),
            models=models,
            options=(*options, *(("--front-ends", str(self.front_ends)) if self.front_ends else ())),
            cpus=cpus or self.cores.server,
        )
        return self.start(command)

    @contextmanager
    def start(self, command: ServerCommand) -> Iterator[Running]:
        """Any server, with its log in the scratch folder."""
        self.progress(f"start {command.name}")
        with servers.running(command, self.scratch) as server:
            yield server

    def check(self, server: Running, question: Question, request: HttpRequest | None = None) -> bytes:
        """Send a question to Headrace, compare the answer with ONNX Runtime's, return the answer's body.

        Args:
            server: the server.
            question: inputs and oracle.
            request: how the question is sent; by default with binary tensors.

        Raises:
            WrongAnswer: the status is not 200, or the tensors are not right.
        """
        headers, body = answer(server, request or question.request)
        question.oracle.check(question.inputs, decode_answer(headers, body))
        return body

    def measure(self, server: Running, load: Load | CallLoad) -> Sample:
        """Put a load on a server for one sample, which has the processor time of the server too."""
        before_s = tree_cpu_s(server.pid)
        if isinstance(load, Load):
            self.progress(server.name)
            sample = run_http(server.url, load, self.scratch)
        else:
            self.progress(server.name)
            sample = run_grpc(server.grpc_port or server.port, load, self.scratch)
        return replace(sample, server_us=(tree_cpu_s(server.pid) - before_s) * 1e6 / sample.requests)

    def contender(self, server: Running, load: Load | CallLoad, seconds: int) -> Callable[[], Sample]:
        """Warm a server up; return a function that takes one sample. Calls get the number that fills so many seconds."""
        self.progress(f"warm up {server.name}")
        if isinstance(load, Load):
            run_http(server.url, replace(load, seconds=self.seconds(2)), self.scratch)
            return partial(self.measure, server, replace(load, seconds=seconds))
        self.measure(server, replace(load, calls=_WARM_UP_CALLS))
        rate = self.measure(server, replace(load, calls=_WARM_UP_CALLS)).requests_per_s
        return partial(self.measure, server, replace(load, calls=max(_WARM_UP_CALLS, round(rate * seconds))))


def answer(server: Running, request: HttpRequest) -> tuple[dict[str, str], bytes]:
    """Send one request; return headers and body of the answer.

    Raises:
        WrongAnswer: the status is not 200.
    """
    status, headers, body = send(HOST, server.port, request)
    if status != 200:
        raise WrongAnswer(f"{server.name} answered {status} to {request.path}: {body[:300]!r}")
    return headers, body


def answered_message(port: int, name: str, message: bytes) -> bytes:
    """Call ModelInfer once by grpcio; return the message of the answer.

    Raises:
        WrongAnswer: the call failed.
    """
    try:
        return grpc_protocol.call(port, MODEL_INFER, message)
    except grpc.RpcError as error:
        detail = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
        raise WrongAnswer(f"{name} did not answer: {detail}") from error


@dataclass(frozen=True, slots=True)
class Case(ABC):
    """Something to measure.

    Attributes:
        name: as `--only` takes it.
        callers: requests in flight.
        sample_s: length of a sample in seconds.
    """

    name: str
    callers: int

    sample_s: ClassVar[int] = 4

    @property
    @abstractmethod
    def title(self) -> str:
        """One-line description of the measurement."""

    @abstractmethod
    def run(self, bench: Bench) -> CaseResult:
        """Check all answers, then measure."""

    def load(self, bench: Bench, request: HttpRequest) -> Load:
        """The load of one sample over HTTP."""
        return Load(request, self.callers, bench.seconds(self.sample_s), cpus=bench.cores.client)


def interleave(contenders: Mapping[str, Callable[[], Measured]], rounds: int) -> dict[str, list[Measured]]:
    """Measure every contender once a round, so that a drift of the machine meets all of them.

    Every second round goes the other way round: no contender always follows the same one.
    """
    results: dict[str, list[Measured]] = {name: [] for name in contenders}
    for number in range(rounds):
        order = list(contenders)
        for name in order if number % 2 == 0 else reversed(order):
            results[name].append(contenders[name]())
    return results
