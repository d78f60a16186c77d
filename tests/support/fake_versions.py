"""Served versions under the test's control, for pipelines: each request waits until the test answers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from headrace.core.completion import LoopCompletion, Mailbox, Outcome
from headrace.core.errors import HeadraceError, NotFound, Unavailable
from headrace.core.request import BatchTimes, InferRequest, InferResponse, ModelLoad
from headrace.core.tensor import FP32, Array, Datatype, ModelSpec, TensorSpec
from headrace.inference.scheduling.instance import WarmUp
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.inference.scheduling.policy import HandlePolicy
from headrace.inference.scheduling.version_handle import Prediction, VersionHandle
from headrace.observability.counters import Recorder
from headrace.runtimes.base import LoadedModel, ProcessStatus


def spec_of(
    name: str,
    inputs: Sequence[str] = ("X",),
    outputs: Sequence[str] = ("Y",),
    rows: int = 8,
    dtype: Datatype = FP32,
) -> ModelSpec:
    """Tensors of two numbers a row."""
    shape = (-1, 2) if rows else (2,)
    tensors = [{key: TensorSpec(key, dtype, shape) for key in keys} for keys in (inputs, outputs)]
    return ModelSpec(name, "1", "test", tensors[0], tensors[1], rows)


class FakeVersion(VersionHandle):
    """A version whose requests the test answers.

    Args:
        spec: its tensors.
        mailbox: mailbox of the loop.
        prediction: what `predict_ns` returns.

    Attributes:
        requests: requests in the order of their arrival, with their completions.
        rejection: raised by `compute`; None accepts.
        compute_ns: compute time in the answers' batch times.
    """

    def __init__(self, spec: ModelSpec, mailbox: Mailbox, prediction: Prediction | None = None) -> None:
        super().__init__(spec, HandlePolicy(), Recorder(False), LatencyTable())
        self.requests: list[tuple[InferRequest, LoopCompletion]] = []
        self.rejection: HeadraceError | None = None
        self.prediction = prediction or Prediction(0, 0)
        self.compute_ns = 1000
        self.is_ready = True
        self._mailbox = mailbox

    def compute(self, request: InferRequest) -> LoopCompletion:
        if self.rejection is not None:
            raise self.rejection
        completion = LoopCompletion(self._mailbox)
        self.requests.append((request, completion))
        return completion

    def answer(self, number: int = 0, outcome: Outcome | None = None) -> None:
        """Settle a request: with an outcome, or with twice its first input under every output."""
        request, completion = self.requests[number]
        if outcome is None:
            doubled: Array = np.asarray(next(iter(request.inputs.values()))) * 2
            times = BatchTimes(0, 100, 100 + self.compute_ns, 200 + self.compute_ns)
            outcome = InferResponse(dict.fromkeys(self.spec.outputs, doubled), times, request.rows, "idle")
        completion.settle(outcome)

    def predict_ns(self, rows: int, level: int, now_ns: int) -> Prediction:
        return self.prediction

    def admit(self) -> None:
        if not self.is_ready:
            raise Unavailable(f"all instances of model '{self.spec.name}' have died")

    def infer_blocking(self, request: InferRequest) -> InferResponse:
        raise AssertionError("a pipeline never blocks")

    def load(self, by_level: bool = True) -> ModelLoad:
        return ModelLoad(2, 3, self._leases, 1, 1, self.prediction.wait_ns, 7, 10.0, 0, ())

    ready = property(lambda self: self.is_ready)
    process_status = property(lambda self: _no_process())
    alive = property(lambda self: int(self.is_ready))
    restarts = property(lambda self: 0)
    evicted = property(lambda self: False)
    depth = property(lambda self: 0)

    def close(self, timeout_s: float | None) -> bool:
        self.end_leases()
        return self._idle.wait(timeout_s)

    def evict(self, timeout_s: float) -> bool:
        return False

    def restore(self, model: LoadedModel, warm_up: WarmUp | None = None) -> bool:
        return False

    def refuse(self, error: HeadraceError) -> None:
        pass


def _no_process() -> ProcessStatus | None:
    return None


class FakeMembers:
    """Versions by model name, as the registry has them.

    Args:
        versions: the versions that serve.
    """

    def __init__(self, *versions: VersionHandle) -> None:
        self.versions = {version.spec.name: version for version in versions}
        self.on_lease: Callable[[str], None] = lambda _name: None

    def lease(self, name: str, version: str) -> VersionHandle:
        self.on_lease(name)
        handle = self.versions.get(name)
        if handle is None or not handle.lease():
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        return handle

    def serving(self, name: str, version: str) -> VersionHandle | None:
        return self.versions.get(name)
