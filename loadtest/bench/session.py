"""State shared by all cases: models, cores, durations and rounds, and how servers are started and checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from loadtest import servers
from loadtest.bench import wrk
from loadtest.bench.inprocess import Oracle, WrongAnswer
from loadtest.bench.results import CaseResult
from loadtest.protocol import Array, HttpRequest, decode_answer, send
from loadtest.servers import HOST, Running, ServerCommand

Measured = TypeVar("Measured")


@dataclass(frozen=True, slots=True)
class Cores:
    """Two cores: one for the server and one for the client, or both for both."""

    server: tuple[int, ...]
    client: tuple[int, ...]

    @property
    def both(self) -> tuple[int, ...]:
        """For cases where the model's own work is what is measured."""
        return (*self.server, *self.client)


@dataclass(frozen=True, slots=True)
class Bench:
    """One call of the bench.

    Attributes:
        repository: the model repository with the demo models.
        command: starts Headrace.
        rounds: how often each contender is measured in a case.
        quick: short samples, to see that all works; the figures mean little.
        cores: where servers and clients run.
        scratch: a folder for logs, scripts and bodies.
        progress: called with each step that begins and its duration in seconds.
    """

    repository: Path
    command: tuple[str, ...]
    rounds: int
    quick: bool
    cores: Cores
    scratch: Path
    progress: Callable[[str, float], None]

    def seconds(self, full: int) -> int:
        """The length of a sample that takes `full` seconds in an unhurried run; wrk wants whole seconds."""
        return max(1, full // 6) if self.quick else full

    def model_path(self, model: str) -> Path:
        """The ONNX file of a model's newest version.

        Raises:
            FileNotFoundError: it was not built.
        """
        found = [
            path for path in (self.repository / model).glob("*/model.onnx") if re.fullmatch(r"\d+", path.parent.name)
        ]
        if not found:
            raise FileNotFoundError(
                f"no {model}/<version>/model.onnx in {self.repository}: build it with `make models`"
            )
        return max(found, key=lambda path: int(path.parent.name))

    @contextmanager
    def headrace(
        self,
        *models: str,
        cpus: tuple[int, ...],
        name: str = "headrace",
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Iterator[Running]:
        """Headrace with its default settings but for these options, serving these models and no other."""
        for model in models:
            self.model_path(model)
        command = servers.headrace(
            self.repository.resolve(),
            name=name,
            command=self.command,
            models=models,
            options=options,
            env=env,
            cpus=cpus,
        )
        with self.start(command) as server:
            yield server

    @contextmanager
    def start(self, command: ServerCommand) -> Iterator[Running]:
        """Any server, its log kept in the scratch folder."""
        self.progress(f"start {command.name}", 0.0)
        with servers.running(command, self.scratch) as server:
            yield server

    def check(self, server: Running, request: HttpRequest, oracle: Oracle, inputs: Mapping[str, Array]) -> bytes:
        """Send one request to Headrace, compare the answer with ONNX Runtime's, give the answer's body.

        Raises:
            WrongAnswer: the status is not 200, or the tensors are not right.
        """
        status, headers, body = send(HOST, server.port, request)
        if status != 200:
            raise WrongAnswer(f"{server.name} answered {status} to {request.path}: {body[:300]!r}")
        oracle.check(inputs, decode_answer(headers, body))
        return body

    def measure(self, server: Running, load: wrk.Load) -> wrk.Sample:
        """Put a load on a server for one sample."""
        self.progress(server.name, load.seconds)
        return self.load(server, load)

    def load(self, server: Running, load: wrk.Load) -> wrk.Sample:
        """The same without a step of progress."""
        return wrk.run(server.url, load, self.scratch)

    def warm_up(self, server: Running, load: wrk.Load) -> None:
        """The same load, briefly and uncounted."""
        self.progress(f"warm up {server.name}", 0.0)
        self.load(server, replace(load, seconds=self.seconds(2)))


class Case(Protocol):
    """Something to measure."""

    @property
    def name(self) -> str:
        """As `--only` takes it."""

    @property
    def title(self) -> str:
        """One-line description of the measurement."""

    def planned_s(self, bench: Bench) -> float:
        """The seconds that its samples take, for the progress bar."""

    def run(self, bench: Bench) -> CaseResult:
        """Measure."""


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
