"""Counters of the server's processes in shared memory: one array of fixed size for each process, summed when metrics are scraped.

The supervisor creates the arrays and keeps them for its life: one for the engine process (number 0) and one for each number of
a front end. A process that replaces one that ended gets the same array and counts on. So totals never fall, and an ended process
needs no farewell: an increment is one aligned store of eight bytes, complete or absent after SIGKILL. Only gauges (connections,
bytes) are set to zero by `CounterArray.end`.

The classes that count are the ordinary ones: `ClientLimits`, `BodyMemory`, `LoopLag` and the counter of errors, with cells of
an array in place of a list.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from headrace.core import errors
from headrace.core.limits import BodyMemory, Cells, ClientLimits, Limits
from headrace.observability.histograms import Counts, Histogram
from headrace.observability.labelled_counter import DROPPED, ERRORS
from headrace.observability.metrics_server import LoopLag
from headrace.wire.requests.load_report import COUNT_CELLS

PROTOCOLS = ("http", "grpc", "metrics")
REASONS = tuple(
    sorted({kind.reason for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "reason")})
)
"""Reasons of the errors that a front end can return, in the order of their counters."""
SLOTS = 4096
"""Model versions with counters of their own; see `headrace.server.front_ends.shared_page`."""

_ERROR_LABELS = tuple((protocol, reason) for protocol in PROTOCOLS[:2] for reason in REASONS)
_DROPPED_LABELS = (("traces",), ("spans",), ("request_log",), ("log",))
_SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_CELL_BYTES = 8


class _Blocks:
    """Assigns consecutive cells."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, cells: int) -> slice:
        first, self.size = self.size, self.size + cells
        return slice(first, self.size)


_blocks = _Blocks()
_HEADER = _blocks.take(8)
_LIMITS = {protocol: _blocks.take(ClientLimits.CELLS) for protocol in PROTOCOLS}
_BODIES = _blocks.take(BodyMemory.CELLS)
_ERRORS = _blocks.take(len(_ERROR_LABELS))
_DROPPED = _blocks.take(len(_DROPPED_LABELS))
_LAG = _blocks.take(LoopLag.CELLS)
_REQUESTS = _blocks.take(COUNT_CELLS)
_SLOT_CELLS = 2 + len(REASONS)  # key of the version, time, and the number of each reason
_FAILURES = _blocks.take(SLOTS * _SLOT_CELLS)
ARRAY_BYTES = -(-_blocks.size * _CELL_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
"""Size of an array. Its pages take memory once they are written."""

# Cells of the header.
_PID, _STARTS, _ENDED_CPU_NS, _MOVED, _EXPECTED, _BUSY = range(6)
_REASON_INDEX = {reason: 2 + index for index, reason in enumerate(REASONS)}


def create_memory(name: str, size_bytes: int) -> int:
    """Create a memory file of fixed size and return its descriptor; raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_memory(fd: int, size_bytes: int) -> memoryview[int]:
    """Map a memory file of fixed size as int64 cells.

    Raises:
        ValueError: the file has another size, or could be made smaller: an access behind its end would raise SIGBUS.
    """
    if os.fstat(fd).st_size != size_bytes or fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError(
            f"descriptor {fd} is no sealed memory of {size_bytes} bytes: pass it from the supervisor of the same version"
        )
    return memoryview(mmap.mmap(fd, size_bytes)).cast("q")


class CounterArray:
    """Counters of one process of the server.

    Ownership: the process that has called `begin` writes, others read. `end` is for the supervisor, after the process has ended.

    Args:
        fd: descriptor of the memory; it stays open as long as the array.

    Attributes:
        fd: see above.
        bodies: cells of the `BodyMemory`.
        errors, dropped: cells of the counters of errors and of dropped telemetry.
        requests: cells of the requests that have ended and have failed; see `headrace.wire.requests.load_report`.
        lag: cells of the `LoopLag`, as an array.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._cells = cells = map_memory(fd, ARRAY_BYTES)
        self._header, self.bodies = cells[_HEADER], cells[_BODIES]
        self.errors, self.dropped, self.requests = cells[_ERRORS], cells[_DROPPED], cells[_REQUESTS]
        self.lag: Counts = np.frombuffer(cells[_LAG], np.int64)

    @classmethod
    def create(cls, name: str = "headrace-counters") -> CounterArray:
        """Create an array of zeros; raises OSError."""
        return cls(create_memory(name, ARRAY_BYTES))

    @property
    def pid(self) -> int:
        """Process id; 0 while no process counts here."""
        return self._header[_PID]

    @property
    def starts(self) -> int:
        """Number of processes that have counted here."""
        return self._header[_STARTS]

    @property
    def ended_cpu_ns(self) -> int:
        """CPU time of the processes that have ended."""
        return self._header[_ENDED_CPU_NS]

    @property
    def moved(self) -> int:
        """Number of connections that the processes have given up to another."""
        return self._header[_MOVED]

    @property
    def is_expected(self) -> bool:
        """True while the supervisor wants the process to run."""
        return bool(self._header[_EXPECTED])

    def expect(self, is_expected: bool) -> None:
        """Record whether the process should run; for the supervisor."""
        self._header[_EXPECTED] = is_expected

    def count_move(self) -> None:
        """Count a connection that this process has given up."""
        self._header[_MOVED] += 1

    @property
    def busy(self) -> int:
        """Connections in the middle of a request, and calls of gRPC, when the process last looked."""
        return self._header[_BUSY]

    @busy.setter
    def busy(self, count: int) -> None:
        self._header[_BUSY] = count

    @property
    def connections(self) -> int:
        """Open connections, of all protocols but the metrics port."""
        return self.limits("http")[1] + self.limits("grpc")[1]

    @property
    def all_connections(self) -> int:
        """Open connections, of all protocols."""
        return sum([self.limits(protocol)[1] for protocol in PROTOCOLS])

    def limits(self, protocol: str) -> memoryview[int]:
        """Return the cells of a protocol's `ClientLimits`."""
        return self._cells[_LIMITS[protocol]]

    def failures(self, slot: int) -> memoryview[int]:
        """Return the cells of a version: its key, the time of its failures in nanoseconds, and their number by reason."""
        first = _FAILURES.start + slot * _SLOT_CELLS
        return self._cells[first : first + _SLOT_CELLS]

    def begin(self, pid: int) -> None:
        """Start to count in a new process."""
        self._header[_PID] = pid
        self._header[_STARTS] += 1

    def end(self, cpu_ns: int) -> None:
        """Record the end of the process: gauges become 0, totals stay.

        Args:
            cpu_ns: its CPU time, user and system, in nanoseconds.
        """
        self.busy = 0
        for protocol in PROTOCOLS:
            self.limits(protocol)[1] = 0
        bodies = self.bodies
        for index in range(BodyMemory.CELLS):
            bodies[index] = 0
        self._header[_ENDED_CPU_NS] += cpu_ns
        self._header[_PID] = 0


class SummedCells:
    """Cells of several arrays, read as their sums."""

    def __init__(self, parts: Iterable[Cells]) -> None:
        self._parts = tuple(parts)

    def __getitem__(self, index: int, /) -> int:
        """Return the sum of a cell."""
        return sum([part[index] for part in self._parts])

    def __setitem__(self, index: int, value: int, /) -> None:
        """Refuse to write; raises TypeError."""
        raise TypeError("sums cannot be set: write to the array of this process")


class CounterArrays:
    """The arrays of all processes, as one of them sees them: its own to count in, and the sums over all.

    Args:
        arrays: of the engine process, then of each front end.
        number: index of the own array.
    """

    def __init__(self, arrays: Sequence[CounterArray], number: int) -> None:
        self.arrays, self.number = tuple(arrays), number
        self.own = self.arrays[number]
        self._others = [array for index, array in enumerate(self.arrays) if index != number]

    def body_memory(self, limits: Limits) -> BodyMemory:
        """Return the body memory of this process, whose limits hold for the sum of all processes.

        Together they reserve at most one part in 16 more than `max_total_body_bytes`, and one body for each process that
        reserves at the same moment.
        """
        return BodyMemory(limits, self.own.bodies, [each.bodies for each in self._others], len(self._others))

    def client_limits(self, limits: Limits, protocol: str, bodies: BodyMemory) -> ClientLimits:
        """Return the limits of a protocol in this process; `max_connections` holds for the sum of all processes."""
        others = [array.limits(protocol) for array in self._others]

        def connections() -> int:
            return sum([cells[1] for cells in others])

        return ClientLimits(limits, protocol, bodies, self.own.limits(protocol), connections)

    def loop_lag(self) -> LoopLag:
        """Return the measurement of this process's event loop."""
        return LoopLag(cells=self.own.lag)

    def share_counters(self) -> None:
        """Count errors and dropped telemetry of this process in its array; their `items` are the sums over all processes."""
        ERRORS.share(self.own.errors, _ERROR_LABELS, self.errors)
        DROPPED.share(self.own.dropped, _DROPPED_LABELS, self.dropped)

    # Sums over all processes, for the metrics

    def summed_limits(self, limits: Limits, protocols: Sequence[str] = PROTOCOLS) -> list[ClientLimits]:
        """Return limits for `headrace.observability.metrics_server.ServerFacts`, which reads and does not write them."""
        bodies = BodyMemory(limits, SummedCells([array.bodies for array in self.arrays]))
        return [
            ClientLimits(limits, protocol, bodies, SummedCells([array.limits(protocol) for array in self.arrays]))
            for protocol in protocols
        ]

    def summed_requests(self) -> SummedCells:
        """Return the requests that have ended and have failed, of all processes."""
        return SummedCells([array.requests for array in self.arrays])

    def histogram(self) -> Histogram:
        """Return the delays of all event loops."""
        cells = sum([array.lag for array in self.arrays])
        assert isinstance(cells, np.ndarray)
        histogram = Histogram(cells[1:])
        histogram.sum_ns = int(cells[0])
        return histogram

    def errors(self) -> Iterator[tuple[tuple[str, ...], int]]:
        """Yield protocol and reason with the number of errors."""
        return _sums(_ERROR_LABELS, [array.errors for array in self.arrays])

    def dropped(self) -> Iterator[tuple[tuple[str, ...], int]]:
        """Yield kind and number of dropped records."""
        return _sums(_DROPPED_LABELS, [array.dropped for array in self.arrays])


def _sums(labels: Sequence[tuple[str, ...]], parts: Sequence[Cells]) -> Iterator[tuple[tuple[str, ...], int]]:
    for index, values in enumerate(labels):
        yield values, sum([part[index] for part in parts])


class VersionFailures:
    """Failures of requests of each version that its front end has counted, such as refusals under overload.

    Ownership: the event loop of the front end.

    Args:
        array: of this process.
        epoch: number of the engine process; see `headrace.server.front_ends.shared_page.SharedPage`.
    """

    def __init__(self, array: CounterArray, epoch: int) -> None:
        self._array, self._epoch = array, epoch
        self._cells: dict[int, memoryview[int]] = {}

    def count(self, slot: int, serial: int, reason: str, time_ns: int) -> bool:
        """Count a failure.

        Args:
            slot: of the version on the shared page.
            serial: number of the version.
            reason: of the error.
            time_ns: from the request's arrival to the error.

        Returns:
            False if it is not counted: the version has no slot, or the reason no counter.
        """
        index = _REASON_INDEX.get(reason)
        if slot < 0 or index is None:
            return False
        cells = self._cells.get(slot)
        if cells is None:
            cells = self._cells[slot] = self._array.failures(slot)
        key = version_key(self._epoch, serial)
        if cells[0] != key:  # the slot was that of a version that has ended
            cells[0] = 0
            for each in range(1, _SLOT_CELLS):
                cells[each] = 0
            cells[0] = key
        cells[1] += time_ns
        cells[index] += 1
        return True


def version_key(epoch: int, serial: int) -> int:
    """Return the number of a version that no other has, also after a restart of the engine process."""
    return epoch << 40 | serial


class FailureTotals:
    """Failures that all processes have counted for one version, in the engine process; for `Recorder.collect_failures`.

    Args:
        arrays: of all processes.
        slot: of the version on the shared page.
        key: see `version_key`.
    """

    def __init__(self, arrays: Sequence[CounterArray], slot: int, key: int) -> None:
        self._parts = [array.failures(slot) for array in arrays]
        self._key = key
        self._time_ns = 0
        self._counts = dict.fromkeys(REASONS, 0)

    def count(self, reason: str) -> int:
        """Return the number of failures with a reason."""
        index = _REASON_INDEX[reason]
        return sum([part[index] for part in self._parts if part[0] == self._key])

    def collect(self) -> list[tuple[str, int, int]]:
        """Return reason, number and time in nanoseconds of the failures since the last call; the whole time is the first's."""
        sums = [0] * _SLOT_CELLS
        for part in self._parts:
            if part[0] == self._key:
                sums = [total + value for total, value in zip(sums, part.tolist(), strict=True)]
        added: list[tuple[str, int, int]] = []
        time_ns, self._time_ns = sums[1] - self._time_ns, sums[1]
        for reason, index in _REASON_INDEX.items():
            if (count := sums[index] - self._counts[reason]) > 0:
                self._counts[reason] = sums[index]
                added.append((reason, count, time_ns))
                time_ns = 0
        if time_ns:  # its number is stored a moment later
            self._time_ns -= time_ns
        return added
