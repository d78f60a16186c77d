"""A fake of a leased version, for the endpoints of both protocols."""

from __future__ import annotations

from typing import Any

from headrace.core.errors import HeadraceError
from headrace.core.request import InferResponse
from headrace.core.tensor import ModelSpec
from headrace.observability.counters import Recorder


class FakeHandle:
    """A version that admits every request and has the same load all the time; a test adds `infer`.

    Args:
        spec: inputs and outputs of the model.

    Attributes:
        failures: errors that were recorded.
        leases: leases that are not released.
        refuses: raised by `admit`.
        overloaded: raised by `check_load`.
    """

    report: Any

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.recorder = Recorder()
        self.protocol_cache: dict[object, Any] = {}
        self.failures: list[HeadraceError] = []
        self.leases = 0
        self.refuses: HeadraceError | None = None
        self.overloaded: HeadraceError | None = None

    def admit(self) -> None:
        if self.refuses is not None:
            raise self.refuses

    def check_load(self, received_ns: int, deadline_ns: int, client: str) -> None:
        if self.overloaded is not None:
            raise self.overloaded

    def load(self, by_level: bool = True) -> Any:
        return self.report

    def queue_load(self, _now_ns: int) -> tuple[int, int]:
        load = self.load()
        return load.depth, load.wait_ns

    def record_failure(self, error: HeadraceError, received_ns: int, answered: InferResponse | None = None) -> None:
        self.failures.append(error)

    def release(self) -> None:
        self.leases -= 1
