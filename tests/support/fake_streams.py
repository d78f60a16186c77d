"""Late streams: work is done only when a caller waits for it, and then in the worst order that events allow.

Whatever relies on work being done without having waited for it, or overwrites what is still to be read, gives wrong answers here.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from headrace.runtimes.tensorrt import tuning as tensorrt_tuning

from tests.support import fake_cuda
from tests.support.fake_cuda import DriverError, FakeCuda

_Step = Callable[[], bool]


class LateCuda(FakeCuda):
    """A fake GPU with queues.

    Attributes:
        queues: pending work by stream.
        broken: True makes all calls of the GPU fail, as after an illegal access.
        lost: GPUs whose calls fail.
        waits: number of waits for an event.
        row_us: duration of the engine for each row, besides `work_us` for each piece of work.
        enqueue_us: time of the host to queue the engine without a graph.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        super().__init__()
        self.queues: dict[int, deque[_Step]] = {}
        self.broken = False
        self.lost: set[int] = set()
        self.waits = 0
        self.row_us = 10.0
        self.enqueue_us = 100.0
        self.lock = threading.RLock()

    # Both are a thread's own matter.

    @property
    def pushed(self) -> list[int]:
        return self._here.__dict__.setdefault("pushed", [])  # type: ignore[no-any-return]

    @pushed.setter
    def pushed(self, value: list[int]) -> None:
        self._here.pushed = value

    @property
    def captured(self) -> Any:
        return getattr(self._here, "captured", None)

    @captured.setter
    def captured(self, value: Any) -> None:
        self._here.captured = value

    def submit(self, work: Callable[[], object], stream: int = 77) -> None:
        assert self.depth > 0, "no context is current"
        if self.captured is not None:
            self.captured.append(work)
            return
        self.launches += 1

        def step() -> bool:
            work()
            self.now_us += self.work_us
            return True

        self.queue(stream, step)

    def check(self) -> None:
        """Queue work on the GPU."""
        if self.broken or not self.lost.isdisjoint(self.pushed[-1:]):
            raise DriverError("an illegal memory access was encountered")

    def memory_info(self) -> tuple[int, int]:
        """Free and total device memory."""
        self.check()
        return self.room_bytes - self.used_bytes(), self.room_bytes

    def queue(self, stream: int, step: _Step) -> None:
        """Queue a step; it returns False as long as it cannot be done."""
        with self.lock:
            self.queues[stream].append(step)

    def advance(self, done: Callable[[], bool]) -> None:
        """Work, the last stream first, until it is done."""
        with self.lock:
            while not done():
                moved = False
                for queue in list(self.queues.values())[::-1]:
                    while queue and not done() and queue[0]():
                        queue.popleft()
                        moved = True
                assert moved or done(), "what is waited for never happens"


def install(monkeypatch: pytest.MonkeyPatch, cuda: LateCuda) -> None:
    """Let `headrace.runtimes.cuda` find the fake until the test is over."""
    fake_cuda.install(monkeypatch, cuda)
    # What is measured is the work itself, one piece after the other; once is enough.
    monkeypatch.setattr(tensorrt_tuning, "_BATCHES_QUEUED", 1)
    monkeypatch.setattr(tensorrt_tuning, "_ROUNDS", 1)
    monkeypatch.setattr(tensorrt_tuning, "perf_counter_ns", lambda: int(cuda.now_us * 1000))
    import pycuda.driver as module  # the fake

    module.Stream, module.Event = _stream_and_event(cuda)
    module.mem_get_info = cuda.memory_info
    _add_copies(module, cuda)


def _stream_and_event(cuda: LateCuda) -> tuple[type, type]:
    handles = itertools.count(77)

    class Stream:
        def __init__(self, flags: int) -> None:
            assert flags == 1
            assert cuda.depth > 0
            self.handle, self._gpu = next(handles), cuda.pushed[-1]
            cuda.queues[self.handle] = deque()

        def synchronize(self) -> None:
            assert cuda.captured is None, "waiting spoils a capture"
            cuda.check()
            cuda.advance(lambda: not cuda.queues[self.handle])

        def wait_for_event(self, event: Event) -> None:
            version = event.recorded
            cuda.queue(self.handle, lambda: event.done >= version)

        def __del__(self) -> None:
            assert not cuda.queues.pop(self.handle) or self._gpu in cuda.lost, "work was under way"

    class Event:
        def __init__(self, flags: int = 0) -> None:
            assert cuda.depth > 0
            self.recorded = self.done = 0
            self.at_us = 0.0

        def record(self, stream: Stream) -> None:
            self.recorded += 1
            cuda.queue(stream.handle, self._happen)

        def _happen(self) -> bool:
            self.done += 1
            self.at_us = cuda.now_us
            return True

        def time_since(self, earlier: Event) -> float:
            assert self.done == self.recorded, "it has not happened yet"
            return (self.at_us - earlier.at_us) / 1000

        def synchronize(self) -> None:
            cuda.check()
            cuda.waits += 1
            version = self.recorded
            cuda.advance(lambda: self.done >= version)
            cuda.check()

    return Stream, Event


def _add_copies(module: Any, cuda: LateCuda) -> None:
    def copy(target: int, source: int, size: int, stream: Any) -> None:
        assert cuda.depth > 0
        cuda.submit(lambda: ctypes.memmove(target, source, size), stream.handle)

    def copy_on_gpu(target: int, source: int, size: int, stream: Any) -> None:
        for address in (target, source):
            cuda.check_on_gpu(address, cuda.pushed[-1])
        copy(target, source, size, stream)

    module.memcpy_dtod_async = copy_on_gpu
    module.memcpy_htod_async = lambda to, values, stream: copy(to, values.ctypes.data, values.nbytes, stream)
    module.memcpy_dtoh_async = lambda values, at, stream: copy(values.ctypes.data, at, values.nbytes, stream)
