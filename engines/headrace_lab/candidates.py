"""Algorithms of our own as candidates: compiled in the background, opened in parallel, each with the fastest of its variants."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy.typing as npt
from headrace.core.errors import HeadraceError
from headrace.runtimes.cuda.driver import CudaStream, current

from headrace_lab.inputs import DeviceOperands, HostOperands
from headrace_lab.kernels.base import Convolution, ConvShape
from headrace_lab.kernels.resources import Algorithm, compile_only
from headrace_lab.measure import RecordedLaunches, capture_launches, trial_us

# Proposals of an algorithm that has a cost model; more take more time than they win.
_MAX_PROPOSALS = 12
# Variants within this factor of the fastest are timed twice before one is selected.
_NEAR = 1.25


class OwnCandidate:
    """A convolution of one algorithm on a layer's operands."""

    half_sums = False

    def __init__(
        self, algorithm: Algorithm, convolution: Convolution, operands: DeviceOperands, stream: CudaStream
    ) -> None:
        self.name = algorithm.name
        self.variant = algorithm.variant
        self.workspace_bytes: int | None = convolution.workspace_bytes
        self._convolution = convolution
        self._operands = operands
        self._stream = stream

    def _launch(self, index: int) -> None:
        operands = self._operands
        self._convolution.launch(self._stream, operands.x[index], operands.y[index], operands.residual[index])

    def run(self) -> int:
        """Run once on the first set of activations, wait, and return the address of the output (n, out_h, out_w, k). The output
        is poisoned before.
        """
        self._operands.poison(0, self._stream)
        self._launch(0)
        self._stream.synchronize()
        return self._operands.y[0]

    def capture(self, launches: int) -> RecordedLaunches:
        """Record launches that rotate over the sets of activations."""
        return capture_launches(self._stream, self._launch, launches, len(self._operands))

    def close(self) -> None:
        """Free all memory; all work must be done."""
        self._convolution.close()


def families(algorithms: Iterable[Algorithm]) -> dict[str, list[Algorithm]]:
    """Group algorithms by name, each with its variants."""
    result: dict[str, list[Algorithm]] = {}
    for algorithm in algorithms:
        result.setdefault(algorithm.name, []).append(algorithm)
    return result


def variants_for(variants: Sequence[Algorithm], shape: ConvShape) -> list[Algorithm]:
    """Return the variants to try on a shape: those of the list, or the best proposals of the algorithm's cost model."""
    result: list[Algorithm] = []
    for variant in variants:
        result += variant.variants(shape)[:_MAX_PROPOSALS]
    return result


def estimate_us(variants: Sequence[Algorithm], shape: ConvShape) -> float | None:
    """Return the least time that the cost models of the variants predict, in microseconds; None without a model.

    The shape must be supported.
    """
    times = [variant.estimate_us(shape) for variant in variants_for(variants, shape)]
    predicted = [time for time in times if time is not None]
    return min(predicted) if predicted and len(predicted) == len(times) else None


@dataclass(frozen=True, slots=True)
class Opened:
    """Result of opening one algorithm.

    Attributes:
        candidate: the fastest variant; None if none can be used.
        reason: reason why none can be used; "" if one can.
        tried: number of variants that were timed.
    """

    candidate: OwnCandidate | None
    reason: str = ""
    tried: int = 0


# Added to the nice value of threads that compile: the thread that measures has the processor first.
_COMPILER_NICE = 10


class Compilation:
    """Kernels that are compiled in the background.

    Attributes:
        variants: number of variants.
    """

    def __init__(self) -> None:
        self.variants = 0
        self._started_s = time.monotonic()
        self._lock = threading.Lock()
        self._open = 0
        self._last_s = self._started_s

    def add(self, job: Future[None]) -> None:
        """Count a variant's job."""
        self.variants += 1
        with self._lock:
            self._open += 1
        job.add_done_callback(self._end)

    def _end(self, job: Future[None]) -> None:
        with self._lock:
            self._open -= 1
            if not job.cancelled():
                self._last_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """Duration until the last kernel was compiled; until now if some are missing."""
        with self._lock:
            return (time.monotonic() if self._open else self._last_s) - self._started_s


def _lower_priority() -> None:
    """Lower the priority of this thread alone, where the system has priorities of threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _COMPILER_NICE)


class OwnAlgorithms:
    """Opens algorithms on one GPU; compiles in parallel threads.

    Args:
        device: number of the GPU.
        capability: its compute capability.
        stream: stream of the candidates.
        threads: number of threads that compile.
    """

    def __init__(self, device: int, capability: tuple[int, int], stream: CudaStream, threads: int) -> None:
        self._device = device
        self._capability = capability
        self._stream = stream
        # A layer is opened while kernels of later ones are compiled: not behind them in one queue.
        self._threads = ThreadPoolExecutor(threads, "lab-open")
        self._compilers = ThreadPoolExecutor(threads, "lab-compile", _lower_priority)

    def refusals(self, variants: Sequence[Algorithm], shape: ConvShape, dtype: npt.DTypeLike) -> list[str]:
        """Return the reasons of all variants; "" for one that supports the shape."""
        return [variant.refusal(shape, dtype, self._capability) for variant in variants]

    def compile_ahead(self, work: Iterable[tuple[Sequence[Algorithm], HostOperands]]) -> Compilation:
        """Start to compile the kernels of algorithms for their layers, in parallel and in order.

        The code stays in the compiler's cache; nothing is loaded on the GPU. A kernel that `open` needs before its turn is
        compiled there, once. A variant that cannot be compiled fails when its layer is measured.

        Args:
            work: variants of an algorithm, and operands of a layer; weights of Winograd's algorithm are part of its kernels.
        """
        compilation = Compilation()
        keys: set[tuple[object, ...]] = set()
        for variants, operands in work:
            shape, dtype = operands.shape, operands.dtype
            for variant in variants_for(variants, shape):
                if variant.refusal(shape, dtype, self._capability):
                    continue
                key = variant.name, variant.variant, dtype, operands.epilogue, *variant.kernel_key(shape)
                if key not in keys:
                    keys.add(key)
                    compilation.add(self._compilers.submit(self._compile, variant, operands))
        return compilation

    def _compile(self, variant: Algorithm, operands: HostOperands) -> None:
        with compile_only():
            opened = self._open(variant, operands)
            if not isinstance(opened, HeadraceError):
                opened.close()

    def _open(self, variant: Algorithm, operands: HostOperands) -> Convolution | HeadraceError:
        epilogue = operands.epilogue
        bias = operands.bias if epilogue.bias else None
        try:
            with current(self._device):
                return variant.open(self._device, operands.shape, operands.dtype, epilogue, operands.weights, bias)
        except HeadraceError as error:
            return error

    def open(
        self, variants: Sequence[Algorithm], host: HostOperands, operands: DeviceOperands, fixed: str | None = None
    ) -> Opened:
        """Open an algorithm with its fastest variant.

        Args:
            variants: variants of one algorithm.
            host: operands of the layer.
            operands: the same on the GPU.
            fixed: the only variant to open; None to time all.
        """
        possible = [
            variant for variant in variants_for(variants, host.shape) if fixed is None or variant.variant == fixed
        ]
        reasons = self.refusals(possible, host.shape, host.dtype)
        usable = [variant for variant, reason in zip(possible, reasons, strict=True) if not reason]
        if not usable:
            return Opened(None, next(iter(dict.fromkeys(reasons)), "no variant is left"))
        results = list(self._threads.map(lambda variant: self._open(variant, host), usable))
        errors = [str(result) for result in results if isinstance(result, HeadraceError)]
        candidates = [
            OwnCandidate(variant, result, operands, self._stream)
            for variant, result in zip(usable, results, strict=True)
            if not isinstance(result, HeadraceError)
        ]
        best = self._fastest(candidates, errors)
        for candidate in candidates:
            if candidate is not best:
                candidate.close()
        if best is None:
            return Opened(None, errors[0])
        return Opened(best, "", len(candidates))

    def _fastest(self, candidates: Sequence[OwnCandidate], errors: list[str]) -> OwnCandidate | None:
        if len(candidates) == 1:
            return candidates[0]
        times: dict[int, float] = {}
        for number, candidate in enumerate(candidates):
            try:
                candidate.run()
                times[number] = trial_us(self._stream, candidate)
            except HeadraceError as error:
                errors.append(str(error))
        if not times:
            return None
        # A second trial of those that one disturbance could have made slower.
        limit_us = _NEAR * min(times.values())
        near = [number for number, time_us in times.items() if time_us <= limit_us]
        if len(near) > 1:
            for number in near:
                times[number] = min(times[number], trial_us(self._stream, candidates[number]))
        return candidates[min(near, key=lambda number: times[number])]

    def close(self) -> None:
        """End the threads; kernels whose turn has not come are not compiled."""
        self._compilers.shutdown(cancel_futures=True)
        self._threads.shutdown()
