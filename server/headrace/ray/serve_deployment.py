"""Creates the Ray Serve deployment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from headrace.core.store_url import is_store_url, parse_store_url
from headrace.ray.replica import Replica, ReplicaOptions
from headrace.ray.scaling import UtilizationPolicy

# Ray holds back requests above this number in a replica. Batches form in the replica's queue, which has bounds of its own.
MAX_ONGOING_REQUESTS = 1000
# Time that Ray adds to the drain timeout before it kills a replica: it looks for ongoing requests at an interval.
_SHUTDOWN_MARGIN_S = 10.0


def deployment(
    *repositories: str | os.PathLike[str],
    models: Iterable[str] | None = None,
    state_dir: str | os.PathLike[str] = "~/.cache/headrace/state",
    profile_s: float = 0.25,
    gpu_memory_fraction: float = 0.9,
    host_memory_budget: int = 0,
    drain_timeout_s: float = 30.0,
    grpc: bool = True,
    min_replicas: int = 1,
    max_replicas: int | None = None,
    target_utilization: float = 0.7,
    autoscaling_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> serve.Deployment:
    """Create a Ray Serve deployment whose replicas embed `headrace.Server`; `bind` it without arguments.

    Args:
        *repositories: model repositories or their URLs, folders of one model, or ONNX files; the same on every node.
        models: names of the models to load; None loads all.
        state_dir, profile_s, gpu_memory_fraction, host_memory_budget, drain_timeout_s: see `headrace.Server`.
        grpc: each replica listens for gRPC on a free port of its node; `describe` returns the address.
        min_replicas: smallest number of replicas.
        max_replicas: largest number of replicas; None for `min_replicas`, without autoscaling.
        target_utilization: utilization of each replica that autoscaling aims for, see `UtilizationPolicy`.
        autoscaling_config: further fields of `ray.serve.config.AutoscalingConfig`.
        **options: further options of `ray.serve.deployment`: name, ray_actor_options, max_ongoing_requests and others.

    Raises:
        ValueError: no repository, a URL that names none, or numbers of replicas that contradict each other.

    Example:
        >>> serve.run(headrace.ray.deployment("/models", min_replicas=1, max_replicas=3).bind(), route_prefix="/")
    """
    if not repositories:
        raise ValueError("no repository is given: name a folder of models, the folder of one model, or an ONNX file")
    max_replicas = min_replicas if max_replicas is None else max_replicas
    server = {
        "models": None if models is None else tuple(models),
        "state_dir": os.path.expanduser(state_dir),
        "profile_s": profile_s,
        "gpu_memory_fraction": gpu_memory_fraction,
        "host_memory_budget": host_memory_budget,
        "drain_timeout_s": drain_timeout_s,
    }
    locations = tuple(_location(os.fspath(path)) for path in repositories)
    replica_options = ReplicaOptions(locations, server, grpc)
    options.setdefault("name", "headrace")
    options.setdefault("max_ongoing_requests", MAX_ONGOING_REQUESTS)
    options.setdefault("graceful_shutdown_timeout_s", drain_timeout_s + _SHUTDOWN_MARGIN_S)
    options |= _replicas(min_replicas, max_replicas, target_utilization, autoscaling_config or {}, options)
    return serve.deployment(**options)(serve.ingress()(_replica_class(replica_options)))


def _location(repository: str) -> str:
    """Return an absolute path, or a URL as it is; raises ValueError for one that names no repository."""
    if is_store_url(repository):
        parse_store_url(repository)  # raises here, not in the replicas
        return repository
    return os.path.abspath(os.path.expanduser(repository))


def _replicas(
    min_replicas: int,
    max_replicas: int,
    target_utilization: float,
    autoscaling: Mapping[str, Any],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the options of Ray Serve for the number of replicas; raises ValueError."""
    if "num_replicas" in options:
        raise ValueError("num_replicas is not accepted: write min_replicas, and max_replicas for autoscaling")
    if max_replicas < max(min_replicas, 1):
        raise ValueError(
            f"max_replicas is {max_replicas} and min_replicas is {min_replicas}: max_replicas must be at least 1 and at least "
            "min_replicas; write a larger one"
        )
    if max_replicas == min_replicas:
        if autoscaling:
            raise ValueError("autoscaling_config needs max_replicas above min_replicas: write max_replicas")
        return {"num_replicas": min_replicas}
    UtilizationPolicy(target_utilization)  # raises here, not in Ray's controller
    policy = AutoscalingPolicy(
        policy_function=f"{UtilizationPolicy.__module__}:{UtilizationPolicy.__name__}",
        policy_kwargs={"target_utilization": target_utilization},
    )
    fields = {"policy": policy, **autoscaling, "min_replicas": min_replicas, "max_replicas": max_replicas}
    return {"autoscaling_config": AutoscalingConfig(**fields)}


def _replica_class(replica_options: ReplicaOptions) -> type[Replica]:
    class HeadraceReplica(Replica):
        """A replica with its options: `bind` needs no arguments."""

        options = replica_options

    return HeadraceReplica
