"""The installed TensorRT: start it, read its version, turn its logged errors into messages.

A server loads and runs plans; the builder builds them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from headrace.cuda import devices as gpus
from headrace.cuda import tensorrt

logger = logging.getLogger("headrace.tensorrt")

_MAX_ERRORS = 20
_OTHER_MACHINE = re.compile(
    r"incompatible device|not compatible with this version|expecting (?:compute|library version)"
)
_NO_MEMORY = re.compile(r"out of memory|OutOfMemory|insufficient memory|Requested size was", re.IGNORECASE)

# TensorRT's names of element types; BF16 has no NumPy type and travels as its bit pattern.
_DTYPES = {
    "FLOAT": "<f4",
    "HALF": "<f2",
    "BF16": "<u2",
    "INT8": "i1",
    "UINT8": "u1",
    "INT32": "<i4",
    "INT64": "<i8",
    "BOOL": "?",
}


class BucketTiming(NamedTuple):
    """Times of one number of rows.

    Attributes:
        replay_us: by its CUDA graph.
        plain_us: without, by a context that had other shapes before.
    """

    replay_us: float
    plain_us: float


class TuningResult(NamedTuple):
    """How the batches of a plan are run.

    Attributes:
        buckets: numbers of rows that have contexts and graphs of their own, ascending; none where there is no batch dimension.
        whole: of the buckets those whose batches are one graph each; 0 for that of a model without a batch dimension.
        lone: those whose batches are one graph each while nothing else of the instance is in the air; likewise.
        timings: by rows what was measured; empty if nothing was.
        exact: numbers of rows that run as they are, in no bucket.
    """

    buckets: tuple[int, ...]
    one_graph: frozenset[int] = frozenset()
    timings: Mapping[int, BucketTiming] = {}
    exact: frozenset[int] = frozenset()
    one_graph_when_idle: frozenset[int] = frozenset()

    def padded(self, rows: int) -> int:
        """Rows that are run for a batch of `rows`, at most the last bucket."""
        return rows if rows in self.exact else self.buckets[bisect_left(self.buckets, rows)]


class InstalledTensorRt(NamedTuple):
    """What a plan depends on besides its model.

    Attributes:
        version: of TensorRT, e.g. "10.6.0".
        gpu: what it runs on.
    """

    version: str
    gpu: gpus.Gpu


class TensorRtLibrary:
    """One installed TensorRT.

    Attributes:
        trt: the module `tensorrt`.
        version: e.g. "10.6.0".
        choices: how plans are best run, by all that it depends on, for the life of the process. Single operations on it only:
            instances open in threads of their own.
    """

    def __init__(self, trt: Any) -> None:
        self.trt = trt
        self.tuning_results: dict[Hashable, TuningResult] = {}
        self.version = tensorrt.version(trt)
        self._errors = threading.local()
        # TensorRT keeps the first logger of a process, so there is one for all models.
        self._logger = tensorrt.make_logger(trt, self._take)
        tensorrt.load_plugins(trt, self._logger)

    def runtime(self) -> Any:
        """An IRuntime, None if TensorRT gives none; the device is current (without a GPU this ends the process)."""
        try:
            return self.trt.Runtime(self._logger)
        except TypeError:  # the binding was handed a null pointer
            return None

    @contextlib.contextmanager
    def collect_errors(self) -> Iterator[deque[str]]:
        """The errors that TensorRT logs in this thread from here on, which then only whoever collects them tells."""
        outer = getattr(self._errors, "found", None)
        self._errors.found = found = deque[str](maxlen=_MAX_ERRORS)
        try:
            yield found
        finally:
            self._errors.found = outer

    def _take(self, severity: int, text: str) -> None:
        found = getattr(self._errors, "found", None)
        if severity <= 1 and found is not None:
            found.append(text)
            severity = 2
        # What writes the log may find a full disk or a closed file.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            logger.log(logging.ERROR if severity <= 1 else logging.DEBUG, "%s", text)


def load() -> TensorRtLibrary:
    """The TensorRT of this machine, loaded on first use.

    Raises:
        Unsupported: there is none, or it is too old.
    """
    return _started(tensorrt.import_tensorrt("install Headrace's extra 'gpu', or use NVIDIA's container"))


@functools.cache
def _started(trt: Any) -> TensorRtLibrary:
    return TensorRtLibrary(trt)


def gpu_is_visible() -> bool:
    """True if an NVIDIA driver and a GPU are there; starts neither CUDA nor TensorRT."""
    return gpus.is_visible()


def installed(device: int = 0) -> InstalledTensorRt:
    """What plans for one GPU of this machine depend on.

    Raises:
        Unsupported: there is no GPU, no driver or no TensorRT; says what to install.
    """
    gpu = gpus.describe(device)
    return InstalledTensorRt(load().version, gpu)


def numpy_type(datatype: Any) -> np.dtype[Any] | None:
    """How NumPy holds a `tensorrt.DataType`; None if it holds it in no way."""
    found = _DTYPES.get(datatype.name)
    return None if found is None else np.dtype(found)


def is_out_of_memory(errors: Collection[str]) -> bool:
    """True if TensorRT complains that there is no memory.

    Args:
        errors: that it has logged.
    """
    return any(_NO_MEMORY.search(error) for error in errors)


def load_failure(errors: Collection[str], here: InstalledTensorRt) -> tuple[str, str]:
    """Why a plan is not loaded, and the cure.

    Args:
        errors: that TensorRT has logged.
        here: what it was to be loaded with.
    """
    last = list(errors)[-1].strip() if errors else "TensorRT logged no error"
    rebuild = "build it again on this machine with `headrace build`"
    if any(_OTHER_MACHINE.search(error) for error in errors):
        return f"was not built by TensorRT {here.version} on {here.gpu.name} ({last})", rebuild
    if is_out_of_memory(errors):
        cure = "close what else uses the GPU, or serve fewer models or instances"
        return f"does not fit into the memory of {here.gpu.name} ({last})", cure
    return f"is no plan that TensorRT {here.version} can load ({last})", rebuild
