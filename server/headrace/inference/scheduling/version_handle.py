"""Base class of served versions: leases, counters, and the response cache in front of them.

`ModelHandle` queues requests for the instances of a model, `PipelineHandle` runs them through other
versions. The registry, the protocols and the control thread use both alike.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

from headrace.core.clock import Clock, monotonic_ns
from headrace.core.completion import GroupCompletion, LoopCompletion
from headrace.core.errors import HeadraceError, Unsupported
from headrace.core.request import InferRequest, InferResponse, ModelLoad, Probe
from headrace.core.response_bodies import SequenceFigures
from headrace.core.tensor import ModelSpec
from headrace.inference.scheduling.admission import AdmissionForecast, WaitForecast
from headrace.inference.scheduling.batch_proof import BatchVerdict
from headrace.inference.scheduling.instance import WarmUp
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.inference.scheduling.policy import HandlePolicy
from headrace.observability.counters import Recorder
from headrace.observability.totals import StepTotal
from headrace.runtimes.base import LoadedModel, ProcessStatus

_serials = count(1)


class Prediction(NamedTuple):
    """Predicted times of a request that would be queued now; zeros while the version is unmeasured.

    Attributes:
        wait_ns: queue time in nanoseconds.
        compute_ns: median compute time of its rows in nanoseconds.
    """

    wait_ns: int
    compute_ns: int


def decoupled_error(name: str) -> Unsupported:
    """Return the error of a request for a decoupled version whose caller takes exactly one response; `name` is the model's."""
    return Unsupported(
        f"model '{name}' is decoupled: it returns any number of responses, the request takes exactly one. Send it to "
        "/generate_stream over HTTP, in a stream over gRPC (ModelStreamInfer), or from a model by exec(decoupled=True)"
    )


class OverloadFigures(NamedTuple):
    """Figures from which a front-end process rejects requests under overload, before they are decoded.

    Attributes:
        forecast: prediction for a plain request; None if none is rejected for its completion time.
        requests: queued requests.
        size_bytes: memory of the queued requests.
        max_count, max_size_bytes: bounds of the queue.
        objective_ns: promised latency; 0 for none.
        wait: wait of a request without a due time; None if it is allowed.
    """

    forecast: AdmissionForecast | None
    requests: int
    size_bytes: int
    max_count: int
    max_size_bytes: int
    objective_ns: int
    wait: WaitForecast | None = None


class RequestCache(Protocol):
    """Response cache of one version."""

    def infer(self, request: InferRequest, compute: Callable[[InferRequest], LoopCompletion]) -> LoopCompletion:
        """Return the completion of a cached response, or compute it; raises as `VersionHandle.compute`."""

    def report(self) -> Mapping[str, object]:
        """Return its figures for `headrace explain`."""

    def close(self) -> None:
        """Remove its entries, because the version is closed; any thread but that of the event loop."""


class VersionHandle(ABC):
    """A served version. A leased version is not closed.

    Ownership: `lease`, `admit`, `infer`, `record_failure` and `release` are called on the event loop, `infer_blocking` and
    `release` on any other thread that holds a lease; the rest by the control thread. `_lock` guards `_leases`, `_holds` and
    `closing`.

    Args:
        spec: tensor specs of the version.
        policy: serving policy.
        recorder: counters of the version.
        latency_table: measured compute times by rows.
        clock: returns monotonic nanoseconds.

    Attributes:
        used_ns: monotonic time of the latest request; 0 before the first.
        closing: True once the version is closing and accepts no leases.
        is_unused: True before the first load of a version that begins evicted, and before its first request.
        serial: number of the handle, unique in this process.
        digest: digest of all that decides its responses, equal in other processes; "" if unknown. Set before the version is
            published.
        callee_revision: returns a number that changes with the models that it may call by itself, 0 before the first call; None
            for a model that cannot call others.
        protocol_cache: objects that protocols keep as long as the version lives, by the object that keeps them.
        announced_rows: rows of pipeline requests that will reach the version after earlier steps; changed on the event loop.
        batch_verdict: which batch sizes are proven; set by each load.
        row_differences: rows that had other outputs when they ran again alone; None if no rows are sampled.
        infer: starts a request and returns its completion, to be awaited: `compute`, or the response cache in front of it. An
            attribute, since a method that looks for a cache would be one more call for every request.
    """

    def __init__(
        self,
        spec: ModelSpec,
        policy: HandlePolicy,
        recorder: Recorder,
        latency_table: LatencyTable,
        clock: Clock = monotonic_ns,
    ) -> None:
        self.spec, self.policy, self.recorder, self.latency_table = spec, policy, recorder, latency_table
        self.used_ns = self.announced_rows = 0
        self.serial, self.digest, self.is_unused = next(_serials), "", False
        self.protocol_cache: dict[object, Any] = {}
        self.callee_revision: Callable[[], int] | None = None
        self.infer: Callable[[InferRequest], LoopCompletion] = self.compute
        self.batch_verdict = BatchVerdict()
        self.row_differences: int | None = None
        self._cache: RequestCache | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._leases, self._holds, self.closing = 0, 0, False
        self._idle = threading.Event()  # set once the version is closing and has no leases and no holds

    @property
    def has_cache(self) -> bool:
        """True if `infer` looks into a response cache, which keeps the outputs of a response."""
        return self._cache is not None

    def lease(self, count: int = 1) -> bool:
        """Take leases, one for each request; False if the version is being closed. The registry calls this."""
        with self._lock:
            if self.closing and not self._holds:
                return False
            self._leases += count
        return True

    def release(self, count: int = 1) -> None:
        """Give leases back."""
        with self._lock:
            self._leases -= count
            if self.closing:
                self._set_idle()

    def hold(self) -> bool:
        """Keep the version open for requests of another process that are on their way; False if it is being closed."""
        with self._lock:
            if self.closing:
                return False
            self._holds += 1
        return True

    def end_hold(self) -> None:
        """End a `hold`."""
        with self._lock:
            self._holds -= 1
            if self.closing:
                self._set_idle()

    def _set_idle(self) -> None:
        if self._leases == 0 and self._holds == 0:
            self._idle.set()

    def end_leases(self) -> bool:
        """Accept no more leases but under a `hold`, before a `close`.

        Returns:
            True if there are neither leases nor holds: nothing that `close` waits for but what runs and is queued.
        """
        with self._lock:
            self.closing = True
            self._set_idle()
        return self._idle.is_set()

    def _close_cache(self) -> None:
        """Remove the entries of the response cache, once no request is in flight."""
        if self._cache is not None:
            self._cache.close()

    @property
    def in_flight(self) -> int:
        """Number of requests between lease and release."""
        return self._leases

    @property
    def padding(self) -> Mapping[str, str] | None:
        """State of padding and its reason; None if the model has no `pad`."""
        return None

    @property
    def cache(self) -> RequestCache | None:
        """Response cache in front of the version; None without one. Set before the version is published."""
        return self._cache

    @cache.setter
    def cache(self, cache: RequestCache | None) -> None:
        self._cache = cache
        self.infer = self.compute if cache is None else partial(cache.infer, compute=self.compute)

    @property
    def live_sequences(self) -> int:
        """Number of live sequences; 0 for a version without sequences."""
        return 0

    @property
    def sequence_figures(self) -> SequenceFigures | None:
        """Figures of the sequences; None for a version without sequences."""
        return None

    def drain_sequences(self) -> None:  # noqa: B027  # a version without sequences
        """End the live sequences at the end of the process, each once its queued requests have run."""

    def charge(self, client: str, now_ns: int) -> None:  # noqa: B027  # a version without quotas
        """Charge a request that the response cache serves to the client's quota; raises QuotaExceeded."""

    def record_failure(self, error: HeadraceError, received_ns: int, answered: InferResponse | None = None) -> None:
        """Count a request that ended with an error.

        Args:
            error: its error.
            received_ns: monotonic time of its arrival.
            answered: outcome of its completion, if that was a response, so that it was counted as answered.
        """
        answered_ns = None if answered is None else answered.duration_ns(received_ns)
        self.recorder.failure(error.reason, max(self._clock() - received_ns, 0), answered_ns)

    @abstractmethod
    def admit(self) -> None:
        """Check that the version can serve, before a request is decoded; raises Unavailable."""

    def check_load(self, received_ns: int, deadline_ns: int, client: str) -> None:  # noqa: B027  # not of pipelines
        """Reject a request before it is decoded, if the version is overloaded.

        Args:
            received_ns: monotonic time of arrival.
            deadline_ns: monotonic deadline, 0 for none.
            client: name of the client, "" for none.

        Raises:
            HeadraceError: `infer` would raise it for a request of any content.
        """

    @abstractmethod
    def compute(self, request: InferRequest) -> LoopCompletion:
        """Start a request, without the cache; raises HeadraceError if it is rejected."""

    @property
    def max_group_rows(self) -> int:
        """Most rows of a group for `infer_group`; 1 if the version takes no groups."""
        return 1

    def infer_group(
        self, request: InferRequest, on_settled: Callable[[GroupCompletion], object]
    ) -> list[GroupCompletion]:
        """Start a group of requests; see `ModelHandle.infer_group`."""
        raise ValueError(f"'{self.spec.name}' takes no groups, {request.rows} rows came: start each request by itself")

    @abstractmethod
    def infer_blocking(self, request: InferRequest) -> InferResponse:
        """Run a request and block until its response, on any thread but that of the event loop; raises HeadraceError."""

    @abstractmethod
    def predict_ns(self, rows: int, level: int, now_ns: int) -> Prediction:
        """Predict queue and compute time of a request; `announced_rows` count as queued before it.

        Args:
            rows: rows of the request.
            level: priority level of the request, from 1; 0 for the default.
            now_ns: monotonic.
        """

    def overload(self, _now_ns: int) -> OverloadFigures | None:
        """Return figures for rejections in front-end processes; None if only the version itself can decide."""
        return None

    def learn_rejections(self, count: int, kind: int) -> None:  # noqa: B027  # a version without admission control
        """Learn from requests of an urgency class that front-end processes have rejected because of the safety margin."""

    @abstractmethod
    def load(self, by_level: bool = True) -> ModelLoad:
        """Return the load of the version; also of each priority level if `by_level`."""

    def queue_load(self, _now_ns: int) -> tuple[int, int]:
        """Return the number of queued requests and the predicted wait in nanoseconds, as `load` does."""
        load = self.load(by_level=False)
        return load.depth, load.wait_ns

    @property
    @abstractmethod
    def ready(self) -> bool:
        """True while it can serve."""

    def probes(self) -> Sequence[Probe]:
        """Start the readiness checks of the model's code, without waiting; empty if it has none."""
        return ()

    def problem(self) -> str:
        """Return why it cannot serve, for the index; "" if it can."""
        return "" if self.ready else "all its instances have died"

    def shortage(self) -> str:
        """Return which part of its instances serves, for the index; "" if all do, or none."""
        return ""

    def end_on(self, gpus: Collection[int]) -> None:  # noqa: B027  # a version without instances
        """End the instances on GPUs that have failed; any thread may call."""

    @property
    def calls(self) -> frozenset[str]:
        """Names of the models that a pipeline calls; empty for a model."""
        return frozenset()

    def revision(self) -> tuple[int, ...]:
        """Return numbers that differ once another version computes its responses, or part of them; any thread may call."""
        return (self.serial,) if self.callee_revision is None else (self.serial, self.callee_revision())

    @property
    def reads_ids(self) -> bool:
        """True if the model, or one that a pipeline calls, gets the ids of requests."""
        return self.policy.reads_ids

    def digests(self) -> str:
        """Return `digest`, with those of the versions that it calls; "" if one is unknown."""
        return self.digest if self.callee_revision is None or not self.callee_revision() else ""

    def steps(self) -> Mapping[str, StepTotal]:
        """Return counts and times of the steps of a pipeline by name; empty for a model."""
        return {}

    @property
    def process_status(self) -> ProcessStatus | None:
        """Status of the child process of the model; None without one."""
        return None

    @property
    def alive(self) -> int:
        """Number of live instances; a pipeline counts as one while it can serve."""
        return int(self.ready)

    @property
    def restarts(self) -> int:
        """Number of restarted instances."""
        return 0

    @property
    def evicted(self) -> bool:
        """True while the model is out of memory and requests wait for `restore`."""
        return False

    @property
    def depth(self) -> int:
        """Number of queued requests; a pipeline has no queue of its own."""
        return 0

    @abstractmethod
    def close(self, timeout_s: float | None) -> bool:
        """End the version after its leases and queued requests; False if a batch still ran after `timeout_s`."""

    def evict(self, timeout_s: float) -> bool:
        """Free the memory of the model and keep its queue; False if nothing was freed, as of a pipeline."""
        return False

    def restore(self, model: LoadedModel, warm_up: WarmUp | None = None) -> bool:
        """Start the instances again after `evict`; False if the version is closed or not evicted."""
        model.close()
        return False

    def refuse(self, error: HeadraceError) -> None:  # noqa: B027  # a version that is never evicted
        """Settle the queued requests with an error, because the evicted model cannot be loaded."""
