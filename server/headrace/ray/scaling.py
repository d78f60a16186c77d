"""Number of replicas from the load that they record. Runs in Ray Serve's controller; imports nothing of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from headrace.server.embedding import ServerLoad

UTILIZATION = "headrace_utilization"
"""Name of the metric that the policy reads."""


def load_metrics(load: ServerLoad) -> dict[str, float]:
    """Return the metrics that a replica records for Ray's autoscaler: `headrace_utilization` and `headrace_in_flight`.

    Args:
        load: of the replica's server.
    """
    return {UTILIZATION: load.utilization, "headrace_in_flight": float(load.in_flight)}


class ScalingContext(Protocol):
    """Attributes of `ray.serve.config.AutoscalingContext` that the policy reads."""

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """Recorded metrics by name and replica, averaged over the look-back period."""

    @property
    def target_num_replicas(self) -> int:
        """Number of replicas that Ray has set."""


class UtilizationPolicy:
    """Autoscaling policy: as many replicas as bring the utilization of each to a target.

    Ray Serve applies the smallest and largest number of replicas, factors and delays of the `autoscaling_config` to the result.
    Load that came over gRPC, past Ray's proxies, counts too.

    Args:
        target_utilization: utilization of each replica to aim for, above 0; see `headrace.Server.load`.
    """

    def __init__(self, target_utilization: float = 0.7) -> None:
        if not target_utilization > 0:
            raise ValueError(
                f"target_utilization is {target_utilization}, it must be above 0: write 0.7 for 70 % of a replica"
            )
        self._target = target_utilization

    def __call__(self, context: ScalingContext) -> tuple[float, dict[str, Any]]:
        """Return the desired number of replicas, and no state.

        Args:
            context: of Ray Serve.
        """
        recorded = (context.aggregated_metrics or {}).get(UTILIZATION)
        if not recorded:  # no replica has recorded yet
            return context.target_num_replicas, {}
        return sum(recorded.values()) / self._target, {}
