"""What limits a model now, told to whoever asks."""

from __future__ import annotations

from dataclasses import asdict

from headrace.core.clock import NS_PER_US
from headrace.repository.registry import Registry
from headrace.scheduling.bottlenecks import Limit, Situation, limits, numbers
from headrace.scheduling.handle import ModelHandle


class Explainer:
    """Explains how a version fares; any thread may call it.

    Args:
        registry: of the versions that serve.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __call__(self, model: str, version: str) -> dict[str, object]:
        """What limits a version now, what matters most first, and the figures of the last seconds.

        Args:
            model: its name.
            version: "" for the latest.

        Returns:
            name, version, limit (one word), summary (a sentence), findings (kind, explanation, cure, setting, expected of each)
            and numbers.

        Raises:
            NotFound, Unavailable: as of `Registry.lease`.
        """
        handle = self._registry.lease(model, version)
        try:
            now = Situation(
                handle.recorder.recent(),
                handle.policy,
                handle.profile,
                handle.alive,
                handle.depth,
                handle.spec.max_batch_size > 0,
                handle.profile.buckets,
                handle.parked,
            )
            load = handle.load(by_level=False)
            told = {"predicted_wait_us": load.wait_ns / NS_PER_US, "late_since_load": load.late}
            found = [*_off_gpu(handle), *limits(now)]
            first = found[0]
            return {
                "name": model,
                "version": handle.spec.version,
                "limit": first.kind,
                "summary": f"{first.explanation}; cure: {first.cure}" if first.cure else first.explanation,
                "findings": [asdict(limit) for limit in found],
                "numbers": numbers(now) | told,
            }
        finally:
            handle.release()


def _off_gpu(handle: ModelHandle) -> list[Limit]:
    """Why the CPU serves a version on a machine with a GPU, or though a GPU is asked for; nothing where neither holds."""
    reason = handle.spec.parameters.get("headrace.not_on_gpu")
    if not reason:
        return []
    explanation = f"{handle.spec.parameters.get('headrace.runtime')} runs it on the CPU, not on the GPU: {reason}"
    return [
        Limit("not_on_gpu", explanation, 'see docs/gpu.md, "Which runtime serves a model"', "optimization.precision")
    ]
