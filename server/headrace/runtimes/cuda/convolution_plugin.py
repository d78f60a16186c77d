"""The server's end of the TensorRT plug-in that runs our convolution kernels.

Its errors, which need none of its kernels. `tensorrt` imports the plug-in for an engine that has it.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Collection, Iterator

from headrace.core.errors import HeadraceError

PLUGIN = "HeadraceConvolution"
CURE = "build it again with `headrace build`"
"""Cure of every refused plug-in."""

_NOT_REGISTERED = re.compile(r"cannot find plugin|not found in plugin registry", re.IGNORECASE)


class PluginRefused(HeadraceError):
    """An engine's plug-in layer cannot run here; the cure is `CURE`."""

    reason = "plugin"


def missing_plugin(errors: Collection[str]) -> str:
    """Return the error that names a plug-in, or a version of one, that is not registered; "" without one.

    Args:
        errors: logged by TensorRT while it read a plan.
    """
    return next((error.strip() for error in errors if _NOT_REGISTERED.search(error)), "")


_refusals = threading.local()  # attribute `errors`: the list of this thread's `collect_refusals`


@contextlib.contextmanager
def collect_refusals() -> Iterator[list[Exception]]:
    """Yield the errors of this thread's plug-ins in the block: no exception passes through TensorRT."""
    outer = getattr(_refusals, "errors", None)
    errors: list[Exception] = []
    _refusals.errors = errors
    try:
        yield errors
    finally:
        _refusals.errors = outer


def refuse(error: Exception) -> None:
    """Add an error to those of `collect_refusals`."""
    errors = getattr(_refusals, "errors", None)
    if errors is not None:
        errors.append(error)


def other_plugin(name: str) -> str:
    """Return the reason why an engine with a plug-in of this name does not run with any Headrace; "" if the name is ours."""
    return "" if name == PLUGIN else f"built with the plug-in {name!r:.80}, this Headrace has {PLUGIN}"
