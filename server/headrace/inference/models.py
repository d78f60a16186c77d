"""What the front ends need of the rest of the server, handed in by `app`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.core.completion import LoopCompletion
from headrace.core.errors import HeadraceError
from headrace.core.request import InferRequest, ModelLoad
from headrace.core.telemetry import TraceContext
from headrace.core.tensor import Array, ModelSpec, ResidentRows
from headrace.observability.access_log import AccessRecord
from headrace.observability.counters import Recorder
from headrace.observability.tracing import Exemplars, SamplingDecision


class Profile(Protocol):
    """How long batches of a version compute; see `headrace.scheduling.latency_table.LatencyTable`."""

    def table(self) -> Sequence[Mapping[str, object]]:
        """rows, median_us, p95_us, observations, source of each number of rows known."""


class Handle(Protocol):
    """A leased model version; see `headrace.scheduling.handle.ModelHandle`."""

    spec: ModelSpec
    recorder: Recorder

    @property
    def profile(self) -> Profile:
        """How long its batches compute."""

    def admit(self) -> None:
        """Refuse early."""

    def infer(self, request: InferRequest) -> LoopCompletion:
        """Queue a request."""

    def load(self, by_level: bool = True) -> ModelLoad:
        """How busy it is, each priority level by itself if `by_level`, else as a whole."""

    def failed(self, error: HeadraceError, received_ns: int) -> None:
        """Count an error."""

    def release(self) -> None:
        """Give the lease back."""


class Models(Protocol):
    """The registry as the front ends see it; see `headrace.repository.registry.Registry`."""

    def lease(self, name: str, version: str) -> Handle:
        """A version to run requests on; "" is the latest. Give it back with `release`."""

    def versions(self, name: str) -> Sequence[str]:
        """The versions that are ready."""

    def config(self, name: str, version: str) -> Mapping[str, object]:
        """The configuration in Triton's JSON."""

    def statistics(self, name: str, version: str) -> Sequence[Mapping[str, object]]:
        """Statistics in Triton's JSON, of all models if `name` is ""."""

    def index(self) -> Sequence[Mapping[str, object]]:
        """Every model found, its state and the reason for it."""

    def ready(self) -> bool:
        """True if all that should be served can be."""


class Repository(Protocol):
    """Loading and unloading while the server runs; see `headrace.repository.reconciler.Reconciler`."""

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model, or load it anew; returns when the new versions serve.

        Args:
            name: of the model.
            config: a configuration in Triton's JSON that takes the place of the model's own, or None.
            files: by path in the model's folder, what takes the place of the files there; needs `config`.

        Raises:
            Forbidden: not switched on (model control, or overrides).
            NotFound: no repository has the model.
            ConfigError: it cannot be served; what served before still does.
        """

    async def unload(self, name: str, dependents: bool) -> None:
        """Stop serving a model once its requests in flight are answered; returns when nothing new is taken.

        Args:
            name: of the model.
            dependents: unload the models with it that only it needs.

        Raises:
            Forbidden: not switched on.
            NotFound: no such model.
        """


class Region(Protocol):
    """Shared memory that a client has registered. Bounds are relative to the region and checked by `check`."""

    def check(self, offset: int, size_bytes: int) -> None:
        """Hold a range against the region.

        Raises:
            BadRequest: it does not lie in the region.
        """

    def locate(self, offset: int, size_bytes: int, devices: frozenset[int]) -> ResidentRows | None:
        """A range where it lies, uint8[size_bytes], for these GPUs or whoever copies it; None if it has to be read now.

        Raises:
            BadRequest: it does not lie in the region.
        """

    def read(self, offset: int, size_bytes: int) -> Array:
        """A copy as uint8[size_bytes]; raises what `check` raises, or BadRequest if the memory is gone."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put data there; raises what `check` raises, or BadRequest if the memory is gone."""


class Regions(Protocol):
    """Every region that clients have registered, system and CUDA ("kind") under one set of names.

    A request in flight holds the `Region` it works on: unregistering takes the name away, the memory goes with the last user.
    """

    def find(self, name: str) -> Region:
        """A region; NotFound if there is none of that name, Forbidden if shared memory is off."""

    def register_system(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Take on POSIX shared memory; Forbidden, Conflict (name taken), BadRequest (key, bounds)."""

    def register_cuda(self, name: str, handle: bytes, device: int, size_bytes: int) -> None:
        """Take on memory of a GPU by its IPC handle; Forbidden, Conflict, BadRequest, Unsupported (no GPU here)."""

    def unregister(self, kind: str, name: str) -> None:
        """Let go of a region, of all of the kind if `name` is ""; a name that is not there is no error, as in Triton."""

    def status(self, kind: str, name: str) -> Sequence[Mapping[str, object]]:
        """name, key, offset, byte_size (CUDA: name, device_id, byte_size) of one region, of all if `name` is "".

        Raises:
            NotFound: no region of that name and kind.
        """


class TraceControl(Protocol):
    """Triton's trace settings; see `headrace.observability.tracing.Tracer`."""

    def settings(self, model: str) -> Mapping[str, object]:
        """In force for a model, or for all if `model` is ""; values are strings, `trace_level` a list of them."""

    def update(self, model: str, changes: Mapping[str, object]) -> Mapping[str, object]:
        """Change settings (None resets one) and give what is in force then.

        Raises:
            BadRequest: an unknown setting or a value it does not take.
            Forbidden: what only the operator sets (trace_file).
        """


class Observer(Protocol):
    """Who traces and logs requests; see `headrace.observability.tracing.RequestObserver`."""

    @property
    def active(self) -> bool:
        """True if any request might be chosen: the only thing that one looks at while nothing is traced or logged."""

    def sample(self, model: str, context: TraceContext | None) -> SamplingDecision | None:
        """Called once for each request while `active`, before it is queued; None: it is not chosen."""

    def answered(self, sampling: SamplingDecision, record: AccessRecord, exemplars: Exemplars) -> None:
        """A request that was chosen has its answer."""

    def failed(self, sampling: SamplingDecision | None, record: AccessRecord) -> None:
        """A request, chosen or not, got an error."""


class LogControl(Protocol):
    """Triton's log settings; see `headrace.observability.logs.LogSettings`."""

    def settings(self) -> Mapping[str, bool | int | str]:
        """In force now."""

    def update(self, changes: Mapping[str, object]) -> Mapping[str, bool | int | str]:
        """Change settings and give what is in force then.

        Raises:
            BadRequest: an unknown setting or a value it does not take.
            Forbidden: what only the operator sets (log_file).
        """


class Overview(Protocol):
    """What the server's own page shows; see `headrace.repository.reports.ServerOverview`."""

    async def status(self) -> Mapping[str, object]:
        """Time, readiness, and every version: its state and reason, and its counts and gauges if it serves."""

    async def layers(self, model: str, version: str) -> Mapping[str, object]:
        """How long each layer of what serves takes; raises NotFound where nobody has measured it, or what `lease` raises."""


@dataclass(frozen=True, slots=True)
class Services:
    """Everything the front ends need, in one parcel.

    Attributes:
        models: the registry.
        repository: loading and unloading.
        regions: shared memory.
        traces: trace settings.
        observer: told of requests.
        logs: log settings.
        overview: for the server's own page.
        version: of Headrace.
        name: of the server, in its metadata.
        extensions: of the protocol, exactly those that are switched on.
        explain: reports in JSON what limits a model's version now ("" is the latest), see `headrace.repository.reports`.
    """

    models: Models
    repository: Repository
    regions: Regions
    traces: TraceControl
    observer: Observer
    logs: LogControl
    overview: Overview
    version: str
    extensions: Sequence[str]
    explain: Callable[[str, str], Mapping[str, object]]
    name: str = "headrace"
