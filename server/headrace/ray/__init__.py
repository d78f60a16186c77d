"""Headrace as a Ray Serve deployment: Ray places, scales and routes, each replica embeds `headrace.Server` and batches.

Needs Ray on every node of the cluster: `pip install '.[ray]'` in a checkout of Headrace. It is imported with the first use of
`deployment`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.ray.scaling import UtilizationPolicy
    from headrace.ray.serve_deployment import deployment

__all__ = ["UtilizationPolicy", "deployment"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'headrace.ray' has no attribute {name!r}")
    if name == "UtilizationPolicy":
        from headrace.ray.scaling import UtilizationPolicy

        return UtilizationPolicy
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"headrace.ray needs Ray Serve, which cannot be imported ({error}): pip install '.[ray]' in a checkout of Headrace"
        ) from error
    from headrace.ray.serve_deployment import deployment

    return deployment


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
