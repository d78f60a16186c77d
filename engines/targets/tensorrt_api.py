"""TensorRT as it is installed: 10.x or 11.x, and all that differs between them; and its log.

TensorRT 11 knows strongly typed networks alone: precisions stand in the model, the flags that allowed FP16 and INT8 and the INT8
calibrators are gone (TensorRT documentation, "Migrating from TensorRT 10.x to 11.x"). No other file asks for the version.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from engines.errors import BuildError
from server.core.errors import HeadraceError, Unsupported
from server.cuda import tensorrt

logger = logging.getLogger("headrace.tensorrt")

# The first version that is given convolutions in FP8: with 10.2 they are reported on Hopper, with 10.3 on Ada
# (github.com/NVIDIA/TensorRT, issues 3987 and 4081). Seen by us with 10.6 on an H200.
FP8_CONVOLUTIONS = (10, 2)
_ERRORS_KEPT = 20
# A warning that may be why no kernel is left in the end.
_SHORTAGE = "memory is insufficient"


class Log:
    """TensorRT's messages, on their way to our log; errors are collected while somebody tells them himself.

    Attributes:
        raised: an interrupt that struck while a message was taken; no exception can pass through TensorRT.
    """

    def __init__(self) -> None:
        self._collecting: deque[str] | None = None
        self.raised: BaseException | None = None

    def take(self, severity: int, text: str) -> None:
        """One message; `severity` is 0 (internal error) to 4 (verbose), as in `ILogger.Severity`."""
        try:
            self._take(severity, text)
        except BaseException as error:
            self.raised = error

    def _take(self, severity: int, text: str) -> None:
        if severity >= 3:
            # Hundreds of thousands while an engine is built.
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s", text)
        elif severity == 2:
            logger.info("%s", text)
            if self._collecting is not None and _SHORTAGE in text:
                self._collecting.append(text)
        elif self._collecting is None:
            logger.error("%s", text)
        else:
            logger.info("%s", text)
            self._collecting.append(text)

    @contextlib.contextmanager
    def collect(self) -> Iterator[deque[str]]:
        """The errors, and warnings of too little memory, logged from here on, oldest first, the last few if there are many.

        May be nested.
        """
        outer, self._collecting = self._collecting, deque(maxlen=_ERRORS_KEPT)
        try:
            yield self._collecting
        finally:
            self._collecting = outer


class TensorRt:
    """One installed TensorRT.

    Attributes:
        trt: the module `tensorrt`.
        version: e.g. "10.6.0".
        log: its messages.
        logger: what TensorRT's objects are made with; TensorRT keeps the first one of a process, so there is only this one.
    """

    def __init__(self, trt: Any) -> None:
        self.trt = trt
        self.version = tensorrt.version(trt)
        self.log = Log()
        self.logger = tensorrt.make_logger(trt, self.log.take)

    @property
    def calibrates(self) -> bool:
        """True if it can make a model INT8 itself: weak typing and calibrators, gone with TensorRT 11."""
        return hasattr(self.trt, "IInt8EntropyCalibrator2") and hasattr(self.trt.BuilderFlag, "INT8")

    @property
    def fp8_convolutions(self) -> bool:
        """True if it is given convolutions in FP8; else only products, and convolutions stay FP16."""
        major, minor = (int(number) for number in self.version.split(".")[:2])
        return (major, minor) >= FP8_CONVOLUTIONS

    def builder(self, errors: Collection[str]) -> Any:
        """An IBuilder; `errors` is what is logged meanwhile. Without a GPU this ends the process: look for one before."""
        return self._made(self.trt.Builder, errors)

    def runtime(self, errors: Collection[str]) -> Any:
        """An IRuntime; `errors` is what is logged meanwhile. Without a GPU this ends the process: look for one before."""
        return self._made(self.trt.Runtime, errors)

    def _made(self, kind: Any, errors: Collection[str]) -> Any:
        try:
            return kind(self.logger)
        except TypeError as error:
            # The binding says no more than that it was given nothing.
            told = "; ".join(errors) or str(error)
            raise BuildError(f"TensorRT {self.version} does not start: {told}: check driver and free memory") from error

    def network(self, builder: Any, *, strongly_typed: bool) -> Any:
        """An empty network; in TensorRT 11 every network is strongly typed and nothing is asked for."""
        if strongly_typed and self.calibrates:
            return builder.create_network(1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        return builder.create_network(0)

    def allow_int8(self, config: Any, calibrator: Any, profile: Any) -> None:
        """Let TensorRT choose INT8 and FP16 where they are fast (weak typing).

        Args:
            config: IBuilderConfig.
            calibrator: IInt8EntropyCalibrator2.
            profile: IOptimizationProfile with the shapes of the calibrator's batches, None where all shapes are fixed.

        Raises:
            BuildError: this TensorRT cannot.
        """
        if not self.calibrates:
            raise BuildError(
                f"TensorRT {self.version} has no calibrator of its own: write optimization.calibration.method: entropy"
            )
        config.set_flag(self.trt.BuilderFlag.INT8)
        config.set_flag(self.trt.BuilderFlag.FP16)
        config.int8_calibrator = calibrator
        if profile is not None and not config.set_calibration_profile(profile):
            raise BuildError(
                "TensorRT does not take the shapes of the calibration samples: check optimization.profiles"
            )

    def scratch_bytes(self, engine: Any) -> int:
        """GPU memory for activations that an execution context works in."""
        return int(engine.device_memory_size_v2)

    def context(self, engine: Any, scratch: int, size_bytes: int) -> Any:
        """An IExecutionContext that works in memory of the caller's, None if there is no room for what else it needs.

        Args:
            engine: ICudaEngine.
            scratch: address of the memory; contexts that share it may not run at the same time.
            size_bytes: of the memory, `scratch_bytes` at least.
        """
        context = engine.create_execution_context(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is not None and size_bytes:
            context.set_device_memory(scratch, size_bytes)
        return context

    def weights_bytes(self, engine: Any) -> int | None:
        """GPU memory for weights, None where this TensorRT does not tell."""
        if not hasattr(engine, "get_engine_stat"):
            return None
        return int(engine.get_engine_stat(self.trt.EngineStat.TOTAL_WEIGHTS_SIZE))

    def load_plugins(self) -> None:
        """Make TensorRT's own plug-ins known."""
        tensorrt.load_plugins(self.trt, self.logger)


def load() -> TensorRt:
    """The TensorRT of this machine, loaded on first use.

    Raises:
        BuildError: there is none, or it is too old.
    """
    try:
        return _loaded(tensorrt.found("install it by NVIDIA's instructions, or use NVIDIA's container"))
    except Unsupported as error:
        raise BuildError(str(error)) from error


@functools.cache
def _loaded(trt: Any) -> TensorRt:
    return TensorRt(trt)


@contextlib.contextmanager
def as_build_error(what: str) -> Iterator[None]:
    """Turn what the server's rooms raise (no GPU, no memory) into the builders' error.

    Args:
        what: what is being worked on, for the message.
    """
    try:
        yield
    except BuildError:
        raise
    except HeadraceError as error:
        raise BuildError(f"{what}: {error}") from error
