"""Import of TensorRT for server and builder: its version and its logger.

Nothing is imported before `import_tensorrt`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

from headrace.core.errors import Unsupported
from headrace.runtimes.cuda import convolution_plugin

_MIN_MAJOR = 10


def import_tensorrt(cure: str) -> Any:
    """Import the module `tensorrt`.

    Args:
        cure: advice for the error message if it is missing.

    Raises:
        Unsupported: TensorRT is missing or too old.
    """
    try:
        trt = importlib.import_module("tensorrt")
    except (ImportError, OSError) as error:
        raise Unsupported(f"TensorRT cannot be imported ({error}): {cure}") from error
    version_text = str(getattr(trt, "__version__", "0"))
    major = version_text.partition(".")[0]
    if not major.isdecimal() or int(major) < _MIN_MAJOR:
        raise Unsupported(f"TensorRT {version_text} is too old: install {_MIN_MAJOR}.x or newer")
    return trt


def version(trt: Any) -> str:
    """Return the version of a module `tensorrt`, e.g. "10.6.0"."""
    return ".".join(str(trt.__version__).split(".")[:3])


def make_logger(trt: Any, take: Callable[[int, str], None]) -> Any:
    """Create an ILogger; TensorRT uses the first one of a process for all objects.

    Args:
        trt: the module `tensorrt`.
        take: called on any thread with each message and its severity, 0 (internal error) to 4 (verbose) as in
            `ILogger.Severity`; must not raise, since no exception can pass through TensorRT.
    """

    class Logger(trt.ILogger):  # type: ignore[misc]  # the base is known at run time only
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            take(int(severity), msg)

    return Logger()


def load_plugins(trt: Any, logger: Any) -> convolution_plugin.Creator | None:
    """Register TensorRT's own plug-ins and ours; networks without plug-ins work without TensorRT's library of them.

    Returns:
        The creator of our plug-in; None if this TensorRT has no `IPluginV3`.
    """
    with contextlib.suppress(AttributeError, RuntimeError):
        trt.init_libnvinfer_plugins(logger, "")
    return convolution_plugin.register(trt)
