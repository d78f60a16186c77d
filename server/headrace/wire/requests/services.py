"""Interfaces of the server to the protocols; `headrace.server.app` passes the implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from headrace.core import response_bodies as responses
from headrace.core.access import AccessControl, QuotaBucket
from headrace.core.completion import LoopCompletion
from headrace.core.errors import HeadraceError, NotFound
from headrace.core.request import InferRequest, InferResponse, Probe
from headrace.core.telemetry import TraceContext
from headrace.core.tensor import ModelSpec, Region
from headrace.observability.access_log import AccessRecord
from headrace.observability.counters import Recorder
from headrace.observability.logs import LogSettings
from headrace.observability.tracing import SamplingDecision, Tracer
from headrace.wire.requests.codec_threads import CodecThreads
from headrace.wire.requests.load_report import LoadedVersion, LoadReports
from headrace.wire.requests.request_options import RequestOptionsReader


class ComputeTimes(Protocol):
    """Compute times of a version by batch size; see `headrace.inference.scheduling.latency_table.LatencyTable`."""

    def table(self) -> list[responses.ProfileRow]:
        """Return one entry per measured batch size."""


class Handle(LoadedVersion, Protocol):
    """A leased model version, which is not closed before `release`; see `VersionHandle`.

    Attributes:
        spec: input and output tensor specs.
        recorder: counters of the version.
        protocol_cache: objects that protocols keep as long as the version lives, by the object that keeps them. For the event
            loop alone.
    """

    spec: ModelSpec
    recorder: Recorder
    protocol_cache: dict[object, Any]

    @property
    def has_cache(self) -> bool:
        """True if responses may come from a response cache."""

    def admit(self) -> None:
        """Check that the version accepts requests now; raises HeadraceError before a request is decoded."""

    def check_load(self, received_ns: int, deadline_ns: int, client: str) -> None:
        """Reject a request before it is decoded, if its model is overloaded; raises HeadraceError."""

    def infer(self, request: InferRequest) -> LoopCompletion:
        """Queue a request; raises HeadraceError if it is rejected."""

    def record_failure(self, error: HeadraceError, received_ns: int, answered: InferResponse | None = None) -> None:
        """Count a failed request; `received_ns` is the monotonic time of its arrival."""

    def release(self) -> None:
        """End the lease."""


class RegistryHandle(Handle, Protocol):
    """A leased version of the registry, with what only routes of the control plane read."""

    @property
    def latency_table(self) -> ComputeTimes:
        """Compute times by batch size."""

    def probes(self) -> Sequence[Probe]:
        """Start the readiness checks of the model's code, without waiting; empty if it has none."""


class KeyQuotas(Protocol):
    """Quotas of keys that another process keeps."""

    async def charge(self, bucket: QuotaBucket) -> None:
        """Take a token; raises QuotaExceeded."""


class Models(Protocol):
    """Registry of the models that serve; see `headrace.models.registry.Registry`."""

    def lease(self, name: str, version: str) -> RegistryHandle:
        """Lease a version, "" for the latest; raises NotFound or Unavailable. The caller ends the lease with `release`."""

    def versions(self, name: str) -> Sequence[str]:
        """Return the versions of a model that are READY."""

    def config(self, model: str, version: str = "") -> Mapping[str, object]:
        """Return the configuration in force in Triton's JSON."""

    def statistics(self, name: str, version: str) -> list[responses.VersionStatistics]:
        """Return statistics in Triton's JSON; of all models if `name` is ""."""

    def index(self) -> list[responses.IndexRow]:
        """List every version in the repository with its state and the reason for it."""

    def ready(self) -> bool:
        """Return True if every model that should serve can serve."""


class ModelTraffic(Protocol):
    """Distributes the requests of one model that name no version; see `headrace.traffic.split.TrafficSplit`."""

    def lease(self, headers: Mapping[str, str]) -> Handle:
        """Lease the version for a request with these sticky headers; raises NotFound or Unavailable."""


class TrafficSplits(Protocol):
    """Traffic of all models; see `headrace.traffic.router.TrafficRouter`."""

    @property
    def splits(self) -> Mapping[str, ModelTraffic]:
        """Traffic of each model that has a configuration of it; replaced as a whole."""

    def show(self, model: str) -> responses.TrafficReport:
        """Return shares, states and figures of a model; raises NotFound without traffic."""

    async def change(self, name: str, changes: Mapping[str, Any]) -> responses.TrafficReport:
        """Change the traffic of a model, and return it; raises BadRequest, Conflict, NotFound or Unavailable."""


class NoTraffic:
    """A process that distributes no traffic.

    Attributes:
        splits: empty.
    """

    splits: Mapping[str, ModelTraffic] = MappingProxyType({})

    def show(self, model: str) -> responses.TrafficReport:
        """Raise NotFound."""
        raise NotFound(f"this process distributes no traffic: it has none of model '{model}'")

    async def change(self, name: str, changes: Mapping[str, Any]) -> responses.TrafficReport:
        """Raise NotFound."""
        return self.show(name)


class Repository(Protocol):
    """Loads and unloads models while the server runs; see `headrace.models.reconciler.Reconciler`.

    Attributes:
        allows_files: True if a load request may contain a configuration and files.
    """

    @property
    def allows_files(self) -> bool: ...  # noqa: D102  # see the class

    def check_control(self, name: str) -> None:
        """Check a load or unload before its request is read; raises Forbidden or BadRequest (the name)."""

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load or reload a model; returns when the new versions serve.

        Args:
            name: of the model.
            config: configuration in Triton's JSON that replaces the one in the repository, or None.
            files: content by path within the model's folder, replaces these files; requires `config`.

        Raises:
            Forbidden: model control or overrides are not enabled.
            NotFound: the model is in no repository.
            ConfigError: the model cannot be served; versions that served before still serve.
        """

    async def unload(self, name: str, dependents: bool) -> None:
        """Unload a model; returns when it accepts no new requests. Requests in flight are completed.

        Args:
            name: of the model.
            dependents: True to also unload the models that only this model uses.

        Raises:
            Forbidden: model control is not enabled.
            NotFound: the model does not exist.
        """


class Regions(Protocol):
    """Registered regions of both kinds, "system" and "cuda", which share one set of names.

    Unregistering removes the name. A request in flight holds a reference to its `Region`: the memory is unmapped with the last
    reference.
    """

    def find(self, name: str) -> Region:
        """Return a region; raises NotFound, or Forbidden if shared memory is disabled."""

    def register_system(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Map POSIX shared memory; raises Forbidden, Conflict (the name is in use) or BadRequest (key, bounds)."""

    def register_cuda(self, name: str, handle: bytes, device: int, size_bytes: int) -> None:
        """Map memory of a GPU by its IPC handle; raises Forbidden, Conflict, BadRequest or Unsupported (no GPU)."""

    def unregister(self, kind: str, name: str) -> None:
        """Unregister a region, or all of the kind if `name` is ""; an unknown name is no error, as in Triton."""

    def status(self, kind: str, name: str) -> Sequence[responses.SystemRegionStatus | responses.CudaRegionStatus]:
        """Describe one region, or all of the kind if `name` is ""; raises NotFound if no region of the kind has this name."""


class Observer(Protocol):
    """Receives records of requests; see `headrace.observability.tracing.RequestObserver`."""

    @property
    def active(self) -> bool:
        """False if no request can be selected."""

    def sample(self, model: str, context: TraceContext | None, /) -> SamplingDecision | None:
        """Select a request for a trace and the log, while `active`."""

    def record_success(self, sampling: SamplingDecision, access_record: AccessRecord, recorder: Recorder, /) -> None:
        """Record a selected request that succeeded."""

    def record_failure(self, sampling: SamplingDecision | None, access_record: AccessRecord, /) -> None:
        """Record a request that failed, selected or not."""


class Overview(Protocol):
    """Data of the server's web page; see `headrace.models.overview.ServerOverview`."""

    async def status(self) -> responses.OverviewStatus:
        """Return time, readiness and every version: state, reason, and counts and gauges if it serves."""

    async def layers(self, model: str, version: str = "") -> responses.LayerTimes:
        """Return the compute time of each layer; raises NotFound (also if it was not measured) or Unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceServices:
    """Services of the server for inference, which front ends have too.

    Attributes:
        models: registry.
        regions: shared memory.
        observer: traces and logs requests.
        extensions: protocol extensions that are enabled.
        options_reader: parser of the request options and credentials in headers and metadata.
        codec_threads: decode and encode large bodies.
        heartbeat_s: seconds without a response after which an event stream has a comment.
        quotas: of keys, if another process keeps them; None if the principals of this process do.
        load_reports: reports for load balancers.
        traffic: distributes requests over the versions of models.
    """

    models: Models
    regions: Regions
    observer: Observer
    extensions: Sequence[str]
    options_reader: RequestOptionsReader = field(default_factory=RequestOptionsReader)
    codec_threads: CodecThreads = field(default_factory=CodecThreads)
    heartbeat_s: float = 15.0
    quotas: KeyQuotas | None = None
    load_reports: LoadReports = field(default_factory=LoadReports)
    traffic: TrafficSplits = field(default_factory=NoTraffic)

    @property
    def access(self) -> AccessControl:
        """Keys and scopes of callers."""
        return self.options_reader.access


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlServices(InferenceServices):
    """Services of the server for all routes and methods.

    Attributes:
        repository: loads and unloads models.
        traces: trace settings.
        logs: log settings.
        overview: data of the web page.
        version: of Headrace.
        explain: reports the bottlenecks of a version ("" for the latest); see `headrace.models.explanation`.
        name: of the server, in its metadata.
    """

    repository: Repository
    traces: Tracer
    logs: LogSettings
    overview: Overview
    version: str
    explain: Callable[..., responses.Explanation]
    name: str = "headrace"
