"""Reports about serving models: counters for the server's own page, and the bottleneck of a model.

All figures are totals since the version was loaded. The reader computes rates, percentiles of the last minute and curves from
the
difference of two responses: the server keeps no history, and requests pay nothing for being observed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from headrace.config.manifest import is_artefact_name, read_layers
from headrace.core.clock import NS_PER_MS, NS_PER_US, Clock, monotonic_ns
from headrace.core.errors import ConfigError, NotFound
from headrace.observability.counters import FIRST_NATIVE, SCHEMA
from headrace.repository.folders import find
from headrace.repository.registry import PLACEMENT, Registry
from headrace.scheduling.bottlenecks import Bottleneck, LoadSnapshot, find_bottlenecks, snapshot_figures
from headrace.scheduling.handle import ModelHandle

# One report is shared by all requests within this time, and longer if creating it takes long: any number of viewers takes
# only a small share of the interpreter's time.
_FRESH_NS = 400 * NS_PER_MS
_SHARE = 20


class ServerOverview:
    """Status of all models for the server's own page; called on the event loop.

    Args:
        registry: registry of the models.
        repositories: folders of models.
        clock: monotonic nanoseconds.
    """

    def __init__(self, registry: Registry, repositories: Sequence[Path], clock: Clock = monotonic_ns) -> None:
        self._registry = registry
        self._repositories = repositories
        self._clock = clock
        self._started_ns = clock()
        self._stale_ns = self._started_ns
        self._status: Mapping[str, object] = {}
        self._refresh_task: asyncio.Task[None] | None = None

    async def status(self) -> Mapping[str, object]:
        """Return time, readiness, and for every version its state and reason, and its counters and gauges if it serves."""
        if self._refresh_task is None and self._clock() >= self._stale_ns:
            self._refresh_task = asyncio.create_task(self._refresh())
        if self._refresh_task is not None:
            # Shared by all callers: the cancellation of one must not cancel it for the others.
            await asyncio.shield(self._refresh_task)
        return self._status

    async def layers(self, model: str, version: str) -> Mapping[str, object]:
        """Return the compute time of each layer of a serving version, as measured by `headrace inspect --publish`.

        Args:
            model: name of the model.
            version: version number or label; "" is the latest.

        Raises:
            NotFound, Unavailable: no such version, or it does not serve.
            NotFound: the layers of the served file have not been measured.
        """
        handle = self._registry.lease(model, version)
        try:
            number, engine = handle.spec.version, str(handle.spec.parameters.get("engine.file", ""))
        finally:
            handle.release()
        folder = find(self._repositories, model)
        cure = f"measure them with `headrace inspect {model} --version {number} --publish`"
        try:
            report = None if folder is None else await asyncio.to_thread(read_layers, folder.path / number)
        except ConfigError as error:
            raise NotFound(str(error)) from None
        if report is None:
            raise NotFound(f"no layer times are published for model '{model}' version {number}: {cure}")
        # Reports of an engine that no longer serves are not shown; a model's own file has no engine name.
        if report.artefact != engine and (engine or is_artefact_name(report.artefact)):
            raise NotFound(f"the measured layers are those of {report.artefact}, which does not serve: {cure}")
        return report.to_json()

    async def _refresh(self) -> None:
        try:
            now_ns = self._clock()
            # Not on the event loop: a thousand models take a tenth of a second.
            self._status = await asyncio.to_thread(self._collect, now_ns)
            self._stale_ns = now_ns + max(_FRESH_NS, _SHARE * (self._clock() - now_ns))
        finally:
            self._refresh_task = None

    def _collect(self, now_ns: int) -> Mapping[str, object]:
        handles = {(model, version): handle for model, version, handle in self._registry.sources()}
        models = []
        for row in self._registry.index():
            handle = handles.get((str(row["name"]), str(row["version"])))
            models.append({**row, "serving": None if handle is None else _serving(handle)})
        models_ready, models_expected = self._registry.model_counts()
        return {
            "time_ns": now_ns,
            "uptime_ns": now_ns - self._started_ns,
            "ready": self._registry.ready(),
            "models_ready": models_ready,
            "models_expected": models_expected,
            "buckets_per_doubling": 1 << SCHEMA,
            "models": models,
        }


def _serving(handle: ModelHandle) -> Mapping[str, object]:
    spec, totals, load = handle.spec, handle.recorder.totals(), handle.load()
    latency = totals.phases["total"].native
    return {
        "platform": spec.platform,
        "engine": str(spec.parameters.get("engine.precision", "")),
        **{name: str(spec.parameters.get(f"headrace.{name}", "")) for name in PLACEMENT},
        "max_batch_size": spec.max_batch_size and handle.policy.batch.max_rows,
        "instances": handle.policy.instances,
        "living": load.instances,
        "restarts": handle.restarts,
        "parked": handle.evicted,
        "queued": load.depth,
        "wait_ns": load.wait_ns,
        "in_flight": load.in_flight,
        "late": load.late,
        "requests": totals.requests,
        "rows": totals.rows,
        "failures": dict(totals.failures),
        "batches": dict(totals.reasons),
        "sizes": {str(rows): size.count for rows, size in sorted(totals.sizes.items())},
        "queue_ns": totals.queue_ns,
        "assemble_ns": totals.assemble_ns,
        "compute_ns": totals.compute_ns,
        "split_ns": totals.split_ns,
        "total_ns": totals.request_ns,
        # Values that count as zero have the index below the first one, which ends where the first one begins.
        "latency": {str(FIRST_NATIVE - 1 + index): int(latency[index]) for index in latency.nonzero()[0].tolist()},
    }


class Explainer:
    """Explains what limits a version; callable from any thread.

    Args:
        registry: registry of the versions.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __call__(self, model: str, version: str) -> dict[str, object]:
        """Return the bottlenecks of a version, most important first, and the figures of the last seconds.

        Args:
            model: name of the model.
            version: version number or label; "" is the latest.

        Returns:
            name, version, limit (one word), summary (a sentence), findings (kind, explanation, cure, setting and expected of
            each) and
            numbers.

        Raises:
            NotFound, Unavailable: see `Registry.lease`.
        """
        handle = self._registry.lease(model, version)
        try:
            snapshot = LoadSnapshot(
                handle.recorder.recent(),
                handle.policy,
                handle.profile,
                handle.alive,
                handle.depth,
                handle.spec.max_batch_size > 0,
                handle.profile.buckets,
                handle.evicted,
            )
            load = handle.load(by_level=False)
            figures = {"predicted_wait_us": load.wait_ns / NS_PER_US, "late_since_load": load.late}
            bottlenecks = [*_off_gpu(handle), *find_bottlenecks(snapshot)]
            first = bottlenecks[0]
            return {
                "name": model,
                "version": handle.spec.version,
                "limit": first.kind,
                "summary": f"{first.explanation}; cure: {first.cure}" if first.cure else first.explanation,
                "findings": [asdict(bottleneck) for bottleneck in bottlenecks],
                "numbers": snapshot_figures(snapshot) | figures,
            }
        finally:
            handle.release()


def _off_gpu(handle: ModelHandle) -> list[Bottleneck]:
    """Return a bottleneck if the CPU serves a version although a GPU is present or requested; else empty."""
    reason = handle.spec.parameters.get("headrace.not_on_gpu")
    if not reason:
        return []
    explanation = f"{handle.spec.parameters.get('headrace.runtime')} runs it on the CPU, not on the GPU: {reason}"
    return [
        Bottleneck(
            "not_on_gpu", explanation, 'see docs/gpu.md, "Which runtime serves a model"', "optimization.precision"
        )
    ]
