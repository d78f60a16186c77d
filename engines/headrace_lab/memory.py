"""Cost of GPU memory for each request: allocated each time, from a stream-ordered pool, or preallocated.

Every instance is a thread with a stream. A request takes a block for its inputs and one for its outputs, copies the inputs to the
GPU, copies on the GPU, copies the outputs back, waits, and returns the blocks. Only the origin of the blocks differs:

    allocation      cuMemAlloc and cuMemFree; the second one waits for all work of the GPU, of other instances too
    pool            cuMemAllocAsync and cuMemFreeAsync in the order of the instance's stream; freed memory stays in the pool
    slots           two blocks of each instance, allocated once, as the server's instances have

The loops are Python. Its interpreter lock is part of all three times alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import numpy as np
from headrace.runtimes.cuda import memory_pool
from headrace.runtimes.cuda.devices import Nvml
from headrace.runtimes.cuda.driver import CudaStream, DeviceError, current
from headrace.runtimes.cuda.memory import DeviceBlock, DeviceBuffer, PinnedBuffer, copy_on_gpu, download, upload
from headrace_engines.onnx_graph import Array
from headrace_reports.command_line import plural

from headrace_lab.gpu_load import GpuLoad, LoadSampler

STRATEGIES = ("allocation", "pool", "slots")
# Share of the best throughput that the advised number of instances must reach.
_ENOUGH = 0.95
# Gain of requests with a quarter of the bytes from which smaller inputs are advised.
_WORTH = 1.1
# Share of the power limit below which a GPU is mostly idle.
_LOW_POWER = 0.5
_MIN_REQUESTS = 3


class AllocatedMemory:
    """Blocks of cuMemAlloc.

    Attributes:
        waits_first: blocks are returned after the work is done, not after it is queued.
    """

    waits_first = True

    def take(self, size_bytes: int) -> int:
        """Allocate a block and return its address."""
        return memory_pool.allocate(size_bytes)

    def give(self, address: int) -> None:
        """Free a block; its work is done or queued."""
        memory_pool.free(address)

    def close(self) -> None:
        """Do nothing: no block outlives its request."""


class PooledMemory:
    """Blocks of a stream-ordered pool.

    Args:
        pool: pool of the GPU.
        stream: stream of the instance.
    """

    waits_first = False

    def __init__(self, pool: memory_pool.StreamMemoryPool, stream: CudaStream) -> None:
        self._pool, self._stream = pool, stream

    def take(self, size_bytes: int) -> int:
        """Allocate a block from the pool."""
        return self._pool.allocate(size_bytes, self._stream)

    def give(self, address: int) -> None:
        """Return a block to the pool."""
        self._pool.free(address, self._stream)

    def close(self) -> None:
        """Do nothing: the pool keeps its memory."""


class SlotMemory:
    """Preallocated blocks, by size."""

    waits_first = True

    def __init__(self, sizes: Sequence[int]) -> None:
        self._buffers = [DeviceBuffer(size) for size in sizes]
        self._free: dict[int, list[int]] = {}
        self._sizes = {buffer.address: size for buffer, size in zip(self._buffers, sizes, strict=True)}
        for address, size in self._sizes.items():
            self._free.setdefault(size, []).append(address)

    def take(self, size_bytes: int) -> int:
        """Return a free block of this size."""
        return self._free[size_bytes].pop()

    def give(self, address: int) -> None:
        """Make a block free again."""
        self._free[self._sizes[address]].append(address)

    def close(self) -> None:
        """Free the blocks."""
        for buffer in self._buffers:
            buffer.free()


RequestMemory = AllocatedMemory | PooledMemory | SlotMemory
"""Origin of the blocks of one instance."""


@dataclass(frozen=True, slots=True)
class MemoryResult:
    """Measurement of one strategy at one number of instances.

    Attributes:
        strategy: one of `STRATEGIES`.
        instances: number of threads.
        requests: completed requests.
        requests_per_s: throughput of all instances.
        median_us, p99_us: time of a request.
        memory_us, memory_p99_us: time of taking and returning blocks, median and 99th percentile of a request.
        held_bytes: memory between requests.
        peak_bytes: largest memory during the measurement.
        load: state of the GPU.
        energy_j: energy of one request; None if it is not known.
        reason: reason why it was not measured; "" if it was.
    """

    strategy: str
    instances: int
    requests: int = 0
    requests_per_s: float = 0.0
    median_us: float = 0.0
    p99_us: float = 0.0
    memory_us: float = 0.0
    memory_p99_us: float = 0.0
    held_bytes: int = 0
    peak_bytes: int = 0
    load: GpuLoad | None = None
    energy_j: float | None = None
    reason: str = ""


@dataclass(slots=True)
class _Times:
    """Times of one instance in nanoseconds, one for each request."""

    requests: list[int]
    memory: list[int]
    error: BaseException | None = None


class _Instance:
    """One thread that runs requests until a deadline.

    Args:
        gpu: number of the GPU.
        memory: origin of the blocks.
        stream: its stream.
        sizes: bytes of inputs and outputs.
    """

    def __init__(self, gpu: int, memory: RequestMemory, stream: CudaStream, sizes: tuple[int, int]) -> None:
        self._gpu, self._memory, self._stream, self._sizes = gpu, memory, stream, sizes
        self._pinned = [PinnedBuffer(), PinnedBuffer()]
        self._host: list[Array] = []
        for buffer, size in zip(self._pinned, sizes, strict=True):
            buffer.reserve(size)
            self._host.append(buffer.view((size,), np.dtype(np.uint8)))
        self._host[0][:] = np.random.default_rng(0).integers(0, 256, sizes[0], np.uint8)
        self.times = _Times([], [])

    def run(self, ready: threading.Barrier, seconds: float) -> None:
        """Run requests for a duration after all instances are ready."""
        try:
            with current(self._gpu):
                self._request()  # the first one initialises the stream
                self.times = _Times([], [])
                ready.wait()
                deadline_ns = time.perf_counter_ns() + int(seconds * 1e9)
                while len(self.times.requests) < _MIN_REQUESTS or time.perf_counter_ns() < deadline_ns:
                    self._request()
        except BaseException as error:
            self.times.error = error
            ready.abort()

    def _request(self) -> None:
        started_ns = time.perf_counter_ns()
        blocks = [DeviceBlock(self._memory.take(size)) for size in self._sizes]
        taken_ns = time.perf_counter_ns()
        upload(blocks[0], self._host[0], self._stream)
        copy_on_gpu(blocks[1].address, blocks[0], min(self._sizes), self._stream)
        download(self._host[1], blocks[1], self._stream)
        if self._memory.waits_first:
            self._stream.synchronize()
        returning_ns = time.perf_counter_ns()
        for block in blocks:
            self._memory.give(block.address)
        returned_ns = time.perf_counter_ns()
        if not self._memory.waits_first:
            self._stream.synchronize()
        ended_ns = time.perf_counter_ns()
        self.times.requests.append(ended_ns - started_ns)
        self.times.memory.append(taken_ns - started_ns + returned_ns - returning_ns)

    def check(self) -> None:
        """Check that the outputs are the inputs that were copied.

        Raises:
            DeviceError: they are not.
        """
        size = min(self._sizes)
        if not np.array_equal(self._host[0][:size], self._host[1][:size]):
            raise DeviceError("a request returned other bytes than it sent: check the GPU with nvidia-smi")

    def close(self) -> None:
        """Free the memory of the instance."""
        self._host.clear()
        for buffer in self._pinned:
            buffer.free()
        self._memory.close()


def measure_memory(
    strategy: str, instances: int, sizes: tuple[int, int], seconds: float, nvml: Nvml, gpu: int = 0
) -> MemoryResult:
    """Measure one strategy.

    Args:
        strategy: one of `STRATEGIES`.
        instances: number of threads.
        sizes: bytes of the inputs and outputs of a request.
        seconds: duration.
        nvml: reader of the GPU's state.
        gpu: number of the GPU.

    Raises:
        DeviceError: the GPU failed, or a request returned wrong bytes.
        OutOfDeviceMemory: there is not enough memory.
    """
    with current(gpu), ExitStack() as stack:
        pool = None
        if strategy == "pool":
            try:
                pool = memory_pool.StreamMemoryPool(gpu)
                stack.enter_context(pool.keeping_memory())
            except DeviceError as error:
                return MemoryResult(strategy, instances, reason=str(error))
        started = []
        for _ in range(instances):
            stream = CudaStream()
            instance = _Instance(gpu, _memory(strategy, pool, stream, sizes), stream, sizes)
            stack.callback(instance.close)
            started.append(instance)
        load = _run(started, seconds, gpu, nvml)
        for instance in started:
            instance.check()
        blocks = instances * sum(sizes)
        held = {"allocation": 0, "slots": blocks}
        return _result(
            strategy,
            [instance.times for instance in started],
            load,
            held[strategy] if pool is None else pool.reserved_bytes,
            blocks if pool is None else pool.peak_reserved_bytes,
        )


def _memory(
    strategy: str, pool: memory_pool.StreamMemoryPool | None, stream: CudaStream, sizes: tuple[int, int]
) -> RequestMemory:
    if pool is not None:
        return PooledMemory(pool, stream)
    return AllocatedMemory() if strategy == "allocation" else SlotMemory(sizes)


def _run(instances: Sequence[_Instance], seconds: float, gpu: int, nvml: Nvml) -> GpuLoad:
    ready = threading.Barrier(len(instances) + 1)
    threads = [
        threading.Thread(target=instance.run, args=(ready, seconds), name=f"instance {number}")
        for number, instance in enumerate(instances)
    ]
    with LoadSampler(gpu, nvml) as sampler:
        for thread in threads:
            thread.start()
        with suppress(threading.BrokenBarrierError):  # an instance failed; its error is raised below
            ready.wait()
            sampler.restart()
        for thread in threads:
            thread.join()
    for instance in instances:
        error = instance.times.error
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return sampler.load


def _result(strategy: str, times: Sequence[_Times], load: GpuLoad, held: int, peak: int) -> MemoryResult:
    requests = np.array([value for one in times for value in one.requests]) / 1e3
    memory = np.array([value for one in times for value in one.memory]) / 1e3
    # Each instance has its own duration: the last request of one may end later than those of others.
    rate = sum(len(one.requests) / (sum(one.requests) / 1e9) for one in times)
    return MemoryResult(
        strategy=strategy,
        instances=len(times),
        requests=len(requests),
        requests_per_s=rate,
        median_us=float(np.median(requests)),
        p99_us=float(np.percentile(requests, 99)),
        memory_us=float(np.median(memory)),
        memory_p99_us=float(np.percentile(memory, 99)),
        held_bytes=held,
        peak_bytes=peak,
        load=load,
        energy_j=load.energy_each_j(len(requests)),
    )


def memory_advice(results: Sequence[MemoryResult], smaller: MemoryResult | None = None) -> list[str]:
    """Return sentences on the measured costs: strategy, number of instances, precision of the inputs, GPU, lowered clocks.

    Args:
        results: measurements with full inputs.
        smaller: slots with inputs of a quarter of the bytes; None if that was not measured.
    """
    measured = [result for result in results if not result.reason]
    by_instances: dict[int, dict[str, MemoryResult]] = {}
    for result in measured:
        by_instances.setdefault(result.instances, {})[result.strategy] = result
    lines = []
    for instances, row in sorted(by_instances.items()):
        if "slots" not in row:
            continue
        slots = row["slots"]
        parts = [
            f"{name} costs {result.memory_us - slots.memory_us:.1f} us more a request and reaches "
            f"{result.requests_per_s / slots.requests_per_s:.0%} of the requests of slots"
            for name, result in row.items()
            if name != "slots"
        ]
        if parts:
            lines.append(f"{plural(instances, 'instance')}: {'; '.join(parts)}.")
    slot_results = sorted((r for r in measured if r.strategy == "slots"), key=lambda result: result.instances)
    if len(slot_results) > 1:
        best = max(result.requests_per_s for result in slot_results)
        enough = next(result for result in slot_results if result.requests_per_s >= _ENOUGH * best)
        verb = "reaches" if enough.instances == 1 else "reach"
        lines.append(
            f"{plural(enough.instances, 'instance')} {verb} {enough.requests_per_s / best:.0%} of the best throughput with "
            "slots; more instances of these Python loops hold memory and add latency only."
        )
    return [*lines, *_precision_advice(slot_results, smaller), *_gpu_advice(measured, slot_results)]


def _precision_advice(slots: Sequence[MemoryResult], smaller: MemoryResult | None) -> list[str]:
    full = next((one for one in slots if smaller is not None and one.instances == smaller.instances), None)
    if smaller is None or smaller.reason or full is None:
        return []
    ratio = smaller.requests_per_s / full.requests_per_s
    text = (
        f"Precision: with 8-bit inputs in place of 32-bit ones, {plural(smaller.instances, 'instance')} of slots reach"
    )
    text += f"{'es' if smaller.instances == 1 else ''} {ratio:.2f} times the requests"
    if ratio >= _WORTH:
        return [f"{text}: send pixels or 16-bit inputs where the model's accuracy allows it."]
    return [f"{text}: the copies are not the limit, smaller inputs gain little."]


def _gpu_advice(measured: Sequence[MemoryResult], slots: Sequence[MemoryResult]) -> list[str]:
    lines = []
    reasons = {reason for result in measured if result.load is not None for reason in result.load.slowed}
    if reasons:
        lines.append(f"The clocks were lowered ({', '.join(sorted(reasons))}): compare only figures of one run.")
    load = max(slots, key=lambda one: one.requests_per_s).load if slots else None
    if load is not None and load.power_w is not None and load.power_limit_w:
        share = load.power_w / load.power_limit_w
        lines.append(
            f"GPU: at the best throughput with slots it draws {load.power_w:.0f} of {load.power_limit_w:.0f} W ({share:.0%}). "
            + (
                "Host and copies are the limit, a smaller GPU would do for them; `headrace lab overlap` measures a model."
                if share < _LOW_POWER
                else "No clock and no limit was changed."
            )
        )
    return lines
