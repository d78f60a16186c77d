"""Explains what limits a served version: the bottlenecks of its last seconds, and for a pipeline its slowest step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headrace.core.clock import NS_PER_MS, NS_PER_US, monotonic_ns
from headrace.core.response_bodies import Bottleneck, Explanation
from headrace.inference.pipelines.pipeline_handle import PipelineHandle
from headrace.inference.pipelines.step_totals import slowest_step
from headrace.inference.scheduling.bottlenecks import LoadSnapshot, find_bottlenecks, find_full_slots, snapshot_figures
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.models.registry import Registry
from headrace.observability.processor import ProcessorMeter


def explain(registry: Registry, model: str, version: str = "", meter: ProcessorMeter | None = None) -> Explanation:
    """Return the bottlenecks of a version, most important first, and the figures of the last seconds; thread-safe.

    Args:
        registry: registry of the versions.
        model: name of the model.
        version: version number or label; "" is the latest.
        meter: measures the processor; None if nothing does.

    Raises:
        NotFound, Unavailable: see `Registry.lease`.
    """
    handle = registry.lease(model, version)
    try:
        recent = handle.recorder.recent()
        snapshot = LoadSnapshot(
            recent,
            handle.policy,
            handle.latency_table,
            handle.alive,
            handle.depth,
            handle.spec.max_batch_size > 0,
            handle.evicted,
            None if meter is None else meter.use(recent.seconds),
        )
        load = handle.load(by_level=False)
        figures: dict[str, object] = {"predicted_wait_us": load.wait_ns / NS_PER_US, "late_since_load": load.late}
        if isinstance(handle, PipelineHandle):
            bottlenecks, figures["steps"] = _find_slowest_step(registry, meter, handle)
        else:
            bottlenecks = [*_unproven(handle), *_off_gpu(handle), *find_bottlenecks(snapshot)]
        sequences = handle.sequence_figures
        if sequences is not None and (full := find_full_slots(sequences, handle.policy)) is not None:
            bottlenecks.insert(0, full)
        first = bottlenecks[0]
        document: Explanation = {
            "name": model,
            "version": handle.spec.version,
            "limit": first.kind,
            "summary": f"{first.explanation}; cure: {first.cure}" if first.cure else first.explanation,
            "findings": bottlenecks,
            "numbers": snapshot_figures(snapshot) | figures,
        }
        if handle.cache is not None:
            document["cache"] = dict(handle.cache.report())
        if handle.padding is not None:
            document["padding"] = dict(handle.padding)
        if handle.batch_verdict.verified or handle.batch_verdict.reason:
            document["batches"] = handle.batch_verdict.report()
        if sequences is not None:
            document["sequences"] = sequences
        if (traffic := registry.traffic_report(model)) is not None:
            document["traffic"] = traffic
        return document
    finally:
        handle.release()


def _longest_step(handle: PipelineHandle) -> str:
    """Return which step would take the longest by the latency tables of its models; "" while they are unmeasured."""
    now_ns = monotonic_ns()
    costs_ns: dict[str, int] = {}
    for step in handle.graph.steps:
        member = handle.member(step)
        costs_ns[step.name] = 0 if member is None else member.predict_ns(1, 0, now_ns).compute_ns
    longest = max(costs_ns, key=lambda name: costs_ns[name])
    if not costs_ns[longest]:
        return ""
    return (
        f"; by the latency tables step '{longest}' takes the longest: {costs_ns[longest] / NS_PER_MS:.3g} ms of "
        f"{sum(costs_ns.values()) / NS_PER_MS:.3g} ms compute for one row"
    )


def _find_slowest_step(
    registry: Registry, meter: ProcessorMeter | None, handle: PipelineHandle
) -> tuple[list[Bottleneck], dict[str, Mapping[str, float]]]:
    """Return the step that takes the longest with the bottlenecks of its model, and the mean times of each step."""
    recent = {name: step for name, step in handle.step_totals.recent(monotonic_ns()).items() if step.count}
    if not recent:
        return [
            Bottleneck("idle", f"no request has run through the steps in the last seconds{_longest_step(handle)}")
        ], {}
    figures: dict[str, Mapping[str, float]] = {
        name: {
            "requests": step.count,
            "total_us": round(step.total_ns / step.count / NS_PER_US, 1),
            "compute_us": round(step.compute_ns / step.count / NS_PER_US, 1),
        }
        for name, step in recent.items()
    }
    slowest = slowest_step(recent)
    times = figures[slowest]
    step = next(step for step in handle.graph.steps if step.name == slowest)
    explanation = (
        f"step '{slowest}' (model {step.model}) takes {times['total_us'] / 1e3:.3g} ms of each request, "
        f"{times['compute_us'] / 1e3:.3g} ms of it compute; the steps together take "
        f"{sum(each['total_us'] for each in figures.values()) / 1e3:.3g} ms"
    )
    bottlenecks = [Bottleneck("slowest_step", explanation)]
    if registry.serving(step.model, step.version) is not None:
        inner = explain(registry, step.model, step.version, meter)["findings"]
        bottlenecks += [replace(each, explanation=f"step '{slowest}': {each.explanation}") for each in inner]
        bottlenecks[0] = replace(
            bottlenecks[0], cure=inner[0].cure, setting=inner[0].setting, expected=inner[0].expected
        )
    return bottlenecks, figures


def _unproven(handle: VersionHandle) -> list[Bottleneck]:
    """Return a bottleneck if batches are not run because they change answers; else empty."""
    batches = handle.batch_verdict
    if batches.state not in ("alone", "limited"):
        return []
    effect = "each request runs alone" if batches.alone else f"batches have {batches.allowed} rows only"
    cure = "see docs/proof.md; write max_batch_size: 0, or export or build the model again"
    return [Bottleneck("unproven_batches", f"{effect}: {batches.reason}", cure, "proof")]


def _off_gpu(handle: VersionHandle) -> list[Bottleneck]:
    """Return a bottleneck if the CPU serves a version although a GPU is present or requested, or the second GPU runtime instead
    of TensorRT; else empty.
    """
    second = handle.spec.parameters.get("headrace.not_on_tensorrt")
    if second:
        explanation = f"ONNX Runtime's CUDA provider runs it on the GPU, not TensorRT, which is faster: {second}"
        return [Bottleneck("not_on_tensorrt", explanation, 'see docs/gpu.md, "ONNX Runtime\'s CUDA provider"')]
    reason = handle.spec.parameters.get("headrace.not_on_gpu")
    if not reason:
        return []
    explanation = f"{handle.spec.parameters.get('headrace.runtime')} runs it on the CPU, not on the GPU: {reason}"
    return [
        Bottleneck(
            "not_on_gpu",
            explanation,
            'see docs/gpu.md, "Which runtime serves a model"; a model that TensorRT refuses needs the extra gpu-onnx',
            "optimization.precision",
        )
    ]
