"""Status of all models for the server's own page, with their request rates of the last ten minutes.

Figures are totals since a version was loaded. The reader computes rates and percentiles of the last minute from the
difference of two responses. Requests pay nothing for being observed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.config.manifest import is_artefact_name, read_layers
from headrace.core import response_bodies as responses
from headrace.core.clock import NS_PER_MS, NS_PER_S, REPORT_STEP_NS, Clock, allow_pauses, monotonic_ns, pause
from headrace.core.errors import ConfigError
from headrace.core.telemetry import StoreStatus
from headrace.inference.pipelines.graph import Step
from headrace.inference.pipelines.pipeline_handle import PipelineHandle
from headrace.inference.pipelines.step_totals import slowest_step
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.models.folders import find
from headrace.models.registry import Registry, placement
from headrace.observability.histograms import FIRST_NATIVE, SCHEMA, Counts
from headrace.observability.history import PERIOD_NS, RequestHistory
from headrace.observability.totals import StepTotal

# One report is shared by all requests within this time, and longer if creating it takes long: any number of viewers takes
# only a small share of the interpreter's time.
_FRESH_NS = 400 * NS_PER_MS
_SHARE = 20


@dataclass(eq=False, repr=False)
class ServerOverview:
    """Status of all models for the server's own page; called on the event loop.

    Attributes:
        registry: registry of the models.
        repositories: folders of models.
        clock: monotonic nanoseconds.
        processes: returns the figures of each process; None for a server of one process.
        stores: returns the state of each repository that mirrors a store; None without any.
    """

    registry: Registry
    repositories: Sequence[Path]
    clock: Clock = monotonic_ns
    processes: Callable[[], Sequence[responses.ProcessFigures]] | None = None
    stores: Callable[[], Sequence[StoreStatus]] | None = None

    def __post_init__(self) -> None:
        self._started_ns = self.clock()
        self._stale_ns = self._started_ns
        self._status: responses.OverviewStatus  # set by the first refresh
        self._refresh_task: asyncio.Task[None] | None = None
        self._history = RequestHistory()
        self._timer: asyncio.TimerHandle | None = None
        self._sample_task: asyncio.Task[None] | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sample the request counts of all versions periodically, until `stop`."""
        self._sample_task = loop.create_task(self._sample(loop))

    def stop(self) -> None:
        """End the sampling."""
        for each in (self._timer, self._sample_task):
            if each is not None:
                each.cancel()

    async def _sample(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(PERIOD_NS / NS_PER_S, self.start, loop)
        # Not on the event loop: thousands of models take some milliseconds.
        await asyncio.to_thread(self._sample_history)

    def _sample_history(self) -> None:
        allow_pauses(REPORT_STEP_NS)
        self._history.sample(self.registry.used_sources(), self.clock())

    async def status(self) -> responses.OverviewStatus:
        """Return time, readiness, and for every version its state and reason, and its counters and gauges if it serves."""
        if self._refresh_task is None and self.clock() >= self._stale_ns:
            self._refresh_task = asyncio.create_task(self._refresh())
        if self._refresh_task is not None:
            # Shared by all callers: the cancellation of one must not cancel it for the others.
            await asyncio.shield(self._refresh_task)
        return self._status

    async def layers(self, model: str, version: str = "") -> responses.LayerTimes:
        """Return the compute time of each layer of a serving version, as measured by `headrace inspect --publish`.

        Args:
            model: name of the model.
            version: version number or label; "" is the latest.

        Raises:
            NotFound, Unavailable: no such version, or it does not serve.
        """
        handle = self.registry.lease(model, version)
        try:
            number, engine = handle.spec.version, str(handle.spec.parameters.get("engine.file", ""))
        finally:
            handle.release()
        folder = find(self.repositories, model)
        cure = f"measure them with `headrace inspect {model} --version {number} --publish`"
        try:
            report = None if folder is None else await asyncio.to_thread(read_layers, folder.path / number)
        except ConfigError as error:
            return _no_layers(model, number, str(error))
        if report is None:
            return _no_layers(
                model, number, f"no layer times are published for model '{model}' version {number}: {cure}"
            )
        # Reports of an engine that no longer serves are not shown; a model's own file has no engine name.
        if report.artefact != engine and (engine or is_artefact_name(report.artefact)):
            text = f"the measured layers are those of {report.artefact}, which does not serve: {cure}"
            return _no_layers(model, number, text)
        return report.to_json()

    async def _refresh(self) -> None:
        try:
            now_ns = self.clock()
            # Not on the event loop: a thousand models take a tenth of a second.
            self._status = await asyncio.to_thread(self._collect, now_ns)
            self._stale_ns = now_ns + max(_FRESH_NS, _SHARE * (self.clock() - now_ns))
        finally:
            self._refresh_task = None

    def _collect(self, now_ns: int) -> responses.OverviewStatus:
        allow_pauses(REPORT_STEP_NS)
        handles = {(model, version): handle for model, version, handle in self.registry.sources()}
        models: list[responses.VersionStatus] = []
        for row in self.registry.index():
            handle = handles.get((row["name"], row["version"]))
            models.append({**row, "serving": None if handle is None else self._serving(handle)})
            pause()
        models_ready, models_expected = self.registry.model_counts()
        return {
            "time_ns": now_ns,
            "uptime_ns": now_ns - self._started_ns,
            "ready": self.registry.ready(),
            "models_ready": models_ready,
            "models_expected": models_expected,
            "buckets_per_doubling": 1 << SCHEMA,
            "history_period_ns": PERIOD_NS,
            "processes": [] if self.processes is None else list(self.processes()),
            "stores": [] if self.stores is None else [_store(each, now_ns) for each in self.stores()],
            "models": models,
        }

    def _serving(self, handle: VersionHandle) -> responses.ServingStatus:
        spec, totals, load = handle.spec, handle.recorder.totals(), handle.load()
        where = placement(spec.parameters)
        return {
            "platform": spec.platform,
            "engine": str(spec.parameters.get("engine.precision", "")),
            "runtime": where.get("runtime", ""),
            "device": where.get("device", ""),
            "precision": where.get("precision", ""),
            "artefact": where.get("artefact", ""),
            "not_on_gpu": where.get("not_on_gpu", ""),
            "unproven_batches": handle.batch_verdict.reason if handle.batch_verdict.faults else "",
            "max_batch_size": spec.max_batch_size and handle.policy.batch.max_rows,
            "instances": handle.policy.instances,
            "living": load.instances,
            "restarts": handle.restarts,
            "parked": handle.evicted,
            "queued": load.depth,
            "wait_ns": load.wait_ns,
            "in_flight": load.in_flight,
            "late": load.late,
            "requests": totals.successes,
            "rows": totals.rows,
            "failures": dict(totals.failures),
            "batches": dict(totals.reasons),
            "sizes": {str(rows): size.count for rows, size in sorted(totals.sizes.items())},
            "queue_ns": totals.queue_ns,
            "assemble_ns": totals.assemble_ns,
            "compute_ns": totals.compute_ns,
            "split_ns": totals.split_ns,
            "total_ns": totals.request_ns,
            "latency": _by_bucket(totals.phases["total"].native),
            "pipeline": _pipeline(handle) if isinstance(handle, PipelineHandle) else None,
            "sequences": handle.sequence_figures,
            "traffic": _version_traffic(self.registry.traffic_report(spec.name), spec.version),
            **self._history.rates(handle.recorder),
        }


def _no_layers(model: str, number: str, reason: str) -> responses.LayerTimes:
    """Return a report without layers."""
    return {
        "format": 1,
        "model": model,
        "version": int(number),
        "artefact": "",
        "precision": "",
        "machine": "",
        "reason": reason,
        "shapes": {},
        "rows": 0,
        "median_us": 0.0,
        "p99_us": 0.0,
        "rows_per_s": 0.0,
        "total_us": 0.0,
        "layers": [],
    }


def _store(status: StoreStatus, now_ns: int) -> responses.RepositoryStoreStatus:
    age_s = max(now_ns - status.compared_ns, 0) // NS_PER_S if status.compared_ns else None
    return {"url": status.url, "reachable": not status.error, "error": status.error, "compared_s_ago": age_s}


def _version_traffic(report: responses.TrafficReport | None, version: str) -> responses.VersionTraffic | None:
    """Return the row of a version in the report of its model's traffic; None without one."""
    return next((row for row in (report["versions"] if report else ()) if row["version"] == version), None)


def _by_bucket(native: Counts) -> dict[str, int]:
    # Values that count as zero have the index below the first one, which ends where the first one begins.
    return {str(FIRST_NATIVE - 1 + index): int(native[index]) for index in native.nonzero()[0].tolist()}


def _pipeline(handle: PipelineHandle) -> responses.PipelineStatus:
    """Return the graph of a pipeline with the figures of its steps."""
    graph, totals = handle.graph, handle.steps()
    return {
        "kind": graph.kind,
        "inputs": graph.inputs,
        "outputs": dict(graph.outputs),
        "limiting": slowest_step(handle.step_totals.recent(monotonic_ns())),
        "steps": [_step(step, handle.member(step), totals[step.name]) for step in graph.steps],
    }


def _step(step: Step, member: VersionHandle | None, total: StepTotal) -> responses.StepStatus:
    """Return a step as it is configured, with its totals and the load of the version that runs it now."""
    load = None if member is None else member.load(by_level=False)
    return {
        "name": step.name,
        "model": step.model,
        "version": "" if member is None or step.builtin else member.spec.version,
        "builtin": bool(step.builtin),
        "joined": step.joined,
        "inputs": dict(step.inputs),
        "outputs": dict(step.outputs),
        "when": "" if step.when is None else step.when.text,
        "condition": () if step.when is None else step.when.tensors,
        "each": step.each,
        "fallback": step.fallback,
        "ready": member is not None and member.ready,
        # Of all callers of the model, not of this pipeline alone.
        "queued": 0 if load is None else load.depth,
        "in_flight": 0 if load is None else load.in_flight,
        "requests": total.requests,
        "fallbacks": total.fallbacks,
        "skipped": total.skipped,
        "failures": total.failures,
        "latency": _by_bucket(total.latency.native),
    }
