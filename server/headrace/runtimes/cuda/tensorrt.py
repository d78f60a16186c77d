"""Import of TensorRT for server and builder: its version and its logger.

Nothing is imported before `import_tensorrt`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from headrace.core.errors import Unsupported
from headrace.runtimes.cuda.convolution_plugin import PLUGIN, PluginRefused, missing_plugin, other_plugin, refuse

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


def load_plugins(trt: Any, logger: Any) -> None:
    """Register TensorRT's own plug-ins; networks without plug-ins work without TensorRT's library of them."""
    with contextlib.suppress(AttributeError, RuntimeError):
        trt.init_libnvinfer_plugins(logger, "")


def _convolution_plugin() -> Any:
    """Import our plug-in.

    Raises:
        PluginRefused: it is not installed.
    """
    try:
        return importlib.import_module("headrace_lab.kernels.plugin")
    except ModuleNotFoundError as error:
        raise PluginRefused(
            "contains kernels of the package headrace_lab, which is not installed (Headrace's wheel has it)"
        ) from error


def register_convolutions(trt: Any, errors: Collection[str]) -> bool:
    """Register our plug-in if a plan was not read for want of it; return True if the plan can be read now.

    Args:
        trt: the module `tensorrt`.
        errors: logged by TensorRT while it read the plan.
    """
    if not (missing_plugin(errors) and any(PLUGIN in error for error in errors)):
        return False
    try:
        return _convolution_plugin().register(trt) is not None
    except PluginRefused as error:
        refuse(error)
        return False


def plugin_problem(name: str, version: str, digest: str, layers: Mapping[str, str]) -> str:
    """Return the reason why an engine with a plug-in does not run with this Headrace; "" if it does.

    Args:
        name, version, digest, layers: of the plug-in, from the engine's manifest.
    """
    try:
        return other_plugin(name) or str(_convolution_plugin().plugin_problem(version, digest, layers))
    except PluginRefused as error:
        return str(error)
