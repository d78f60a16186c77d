"""Shared page: load and overload figures of every served version, in memory that the engine process writes and front ends read.

Each version has a record. Its writer makes the sequence number odd, stores the figures, and makes it even (a seqlock: C. Lameter,
Effective synchronization on Linux/NUMA systems, 2005). A reader retries until the number is even and the same before and after.
Since Python has no memory barriers, a record ends with a checksum, which holds on machines that reorder stores too.

A front end rejects a request by the page before it decodes it, with the same error as admission control and the full queue.
It rejects only what the engine process would reject, whatever the options of the request. Versions with priority levels, quotas,
shares of clients or a response cache have no figures for that. Figures older than a second reject nothing.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from headrace.core.clock import NS_PER_MS, NS_PER_S, Clock, monotonic_ns
from headrace.core.errors import HeadraceError
from headrace.core.request import ModelLoad
from headrace.inference.scheduling.admission import LATE_TEXT, STANDING_TEXT, WaitForecast, rejection, wait_too_long
from headrace.inference.scheduling.queue import FAR_NS
from headrace.inference.scheduling.selector import queue_full
from headrace.inference.scheduling.version_handle import OverloadFigures, VersionHandle
from headrace.server.front_ends.counter_array import (
    SLOTS,
    CounterArray,
    FailureTotals,
    VersionFailures,
    create_memory,
    map_memory,
    version_key,
)
from headrace.server.front_ends.reported_loads import NO_LOAD, ReportedLoads
from headrace.wire.requests.load_report import FRESH_NS, ServerFigures

# Cells of a record before its figures: key of the version, whether requests may be rejected, sequence number, checksum.
_KEY, _REJECTS, _SEQUENCE, _CHECKSUM, _FIRST = range(5)
_FIGURES = struct.Struct("<7qdq11q")
_RECORD_CELLS = 32
# The header of the page is the record of the whole server; its key is the epoch.
_HEADER_CELLS = _RECORD_CELLS
_EPOCH, _RECORD_NEEDS = _KEY, _REJECTS
_SERVER = struct.Struct("<q3d")  # time of the record and `ServerFigures`
PAGE_BYTES = (_HEADER_CELLS + SLOTS * _RECORD_CELLS) * 8
# A reader gives up after this many torn reads: the writer has ended in the middle of a record.
_MAX_READS = 1000
# Figures of a page that is no longer written reject nothing.
_MAX_AGE_NS = NS_PER_S
# Shortest time between two writes, and between two while requests are in flight and nothing happens.
_INTERVAL_NS = NS_PER_MS
_QUIET_INTERVAL_S = 0.005
# After so many answers since the last write a queue that is empty is written with the next record that is due.
_FEW = 16
# Writes take one part in so many of the event loop's time, as long as that leaves them no further apart than the second number.
_COST_PARTS = 50
_MAX_INTERVAL_NS = 10 * NS_PER_MS


class VersionRecord(NamedTuple):
    """Record of one version; times are monotonic nanoseconds.

    Attributes:
        depth, rows, in_flight, running_rows, instances, wait_ns, drain_ns, rows_hz, late: as in `ModelLoad`.
        written_ns: time of the record.
        start_ns, done_ns, max_wait_ns: as in `AdmissionForecast`; `start_ns` is 0 without a forecast.
        size_bytes: memory of the queued requests.
        max_count, max_size_bytes: bounds of the queue; `max_count` is 0 if the engine process decides.
        objective_ns: promised latency.
        retry_after_ns: delay before a retry.
        wait_until_ns, wait_bound_ns: as in `headrace.inference.scheduling.admission.WaitForecast`; 0 without one.
    """

    depth: int
    rows: int
    in_flight: int
    running_rows: int
    instances: int
    wait_ns: int
    drain_ns: int
    rows_hz: float
    late: int
    written_ns: int
    start_ns: int
    done_ns: int
    max_wait_ns: int
    size_bytes: int
    max_count: int
    max_size_bytes: int
    objective_ns: int
    retry_after_ns: int
    wait_until_ns: int = 0
    wait_bound_ns: int = 0

    @property
    def load(self) -> ModelLoad:
        """Load of the version, without that of its levels."""
        return ModelLoad(*self[:9], ())

    def rejection(self, now_ns: int, has_deadline: bool = False) -> HeadraceError | None:
        """Return the error of a request that arrives now; None if it is accepted, or the engine process decides."""
        if now_ns - self.written_ns > _MAX_AGE_NS:
            return None
        retry_after_s = self.retry_after_ns / NS_PER_S
        if self.start_ns:
            due_ns = now_ns + self.objective_ns
            if self.done_ns > due_ns:
                return rejection(LATE_TEXT, self.done_ns, due_ns, now_ns, retry_after_s)
            if self.max_wait_ns < FAR_NS and self.start_ns > now_ns + self.max_wait_ns:
                return rejection(STANDING_TEXT, self.done_ns, due_ns, now_ns, retry_after_s)
        if now_ns < self.wait_until_ns and not has_deadline:
            return wait_too_long(WaitForecast(self.wait_until_ns, self.wait_bound_ns), now_ns, retry_after_s)
        if self.max_count and (self.depth >= self.max_count or (self.depth and self.size_bytes >= self.max_size_bytes)):
            return queue_full(self.depth, self.size_bytes, self.max_count, self.max_size_bytes, retry_after_s)
        return None


class SharedPage:
    """The page in one process.

    Ownership: `write` and `clear` are for the engine process, under the lock of `PageWriter`. Front ends read.

    Args:
        fd: descriptor of the memory; it stays open as long as the page.

    Attributes:
        fd: see above.
        epoch: number of the engine process, which differs after a restart.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._cells = map_memory(fd, PAGE_BYTES)
        self._bytes = memoryview(self._cells).cast("B")
        self._keys = np.frombuffer(self._cells, np.int64)[_HEADER_CELLS::_RECORD_CELLS]
        self.epoch = self._cells[_EPOCH]

    @classmethod
    def create(cls, epoch: int) -> SharedPage:
        """Create an empty page; raises OSError.

        Args:
            epoch: number of the engine process, from 1.
        """
        page = cls(create_memory("headrace-page", PAGE_BYTES))
        page._cells[_EPOCH] = page.epoch = epoch
        return page

    # In front ends

    @property
    def record_needs(self) -> int:
        """Access records that the engine process needs; see `headrace.server.front_ends.access_records`."""
        return self._cells[_RECORD_NEEDS]

    def slot(self, serial: int) -> int:
        """Return the slot of a version; -1 if it has none. Takes some microseconds: callers keep the result.

        Args:
            serial: number of the version.
        """
        matches = np.flatnonzero(self._keys == version_key(self.epoch, serial))
        return int(matches[0]) if len(matches) else -1

    def has(self, slot: int, serial: int) -> bool:
        """Return True if a slot is that of a version."""
        key_at = _HEADER_CELLS + slot * _RECORD_CELLS + _KEY
        return slot >= 0 and self._cells[key_at] == version_key(self.epoch, serial)

    def read(self, slot: int, serial: int) -> VersionRecord | None:
        """Return the record of a version; None if it has ended or has no slot."""
        if slot < 0:
            return None
        base = _HEADER_CELLS + slot * _RECORD_CELLS
        figures = self._read(base, _FIGURES, version_key(self.epoch, serial))
        return None if figures is None else VersionRecord._make(figures)

    def _read(self, base: int, layout: struct.Struct, key: int) -> tuple[Any, ...] | None:
        """Return the figures of a record once it is not being written; None before the first write, or if its key differs.

        Args:
            base: first cell of the record.
            layout: of the figures.
            key: of the record.
        """
        cells, first = self._cells, (base + _FIRST) * 8
        for _ in range(_MAX_READS):
            sequence = cells[base + _SEQUENCE]
            if sequence & 1:
                continue
            content = bytes(self._bytes[first : first + layout.size])
            is_whole = cells[base + _CHECKSUM] == _checksum(content, sequence)
            if not sequence or cells[base + _KEY] != key:
                return None
            if is_whole and cells[base + _SEQUENCE] == sequence:
                return layout.unpack(content)
        return None

    def _write(self, base: int, layout: struct.Struct, key: int, figures: Iterable[float]) -> None:
        cells, first = self._cells, (base + _FIRST) * 8
        content = layout.pack(*figures)
        sequence = cells[base + _SEQUENCE] + 2
        cells[base + _SEQUENCE] = sequence - 1
        self._bytes[first : first + layout.size] = content
        cells[base + _CHECKSUM] = _checksum(content, sequence)
        cells[base + _KEY] = key
        cells[base + _SEQUENCE] = sequence

    def load(self, slot: int, serial: int) -> ModelLoad:
        """Return the load of a version; zeros if it has ended or has no slot."""
        record = self.read(slot, serial)
        return NO_LOAD if record is None else record.load

    def server_figures(self, now_ns: int) -> ServerFigures | None:
        """Return the load of the server; None while it is unknown, or not written any more."""
        written_ns, *figures = self._read(0, _SERVER, self.epoch) or (0,)
        return ServerFigures(*figures) if written_ns and now_ns - written_ns <= _MAX_AGE_NS else None

    def rejection(
        self, slot: int, serial: int, has_deadline: bool = False, clock: Clock = monotonic_ns
    ) -> HeadraceError | None:
        """Return the error of a request that arrives now; None if it is accepted, or the engine process decides.

        While nothing can be rejected this is one comparison, and the clock is not read.
        """
        if slot < 0 or not self._cells[_HEADER_CELLS + slot * _RECORD_CELLS + _REJECTS]:
            return None
        record = self.read(slot, serial)
        return None if record is None else record.rejection(clock(), has_deadline)

    # In the engine process

    def set_record_needs(self, needs: int) -> None:
        """Set the access records that front ends send."""
        self._cells[_RECORD_NEEDS] = needs

    def write(self, slot: int, key: int, record: VersionRecord, rejects: bool) -> None:
        """Write the record of a version."""
        cells, base = self._cells, _HEADER_CELLS + slot * _RECORD_CELLS
        self._write(base, _FIGURES, key, record)
        if bool(cells[base + _REJECTS]) != rejects:
            cells[base + _REJECTS] = rejects

    def write_server(self, now_ns: int, figures: ServerFigures) -> None:
        """Write the load of the server."""
        self._write(0, _SERVER, self.epoch, (now_ns, *figures))

    def clear(self, slot: int) -> None:
        """End the record of a version."""
        base = _HEADER_CELLS + slot * _RECORD_CELLS
        self._cells[base + _REJECTS] = self._cells[base + _KEY] = 0


class PageState(ReportedLoads):
    """The page of an engine process as `RemoteModels` reads it, with the failures that this front end counts by its slots.

    Ownership: the event loop.

    Args:
        page: of the engine process.
        array: counters of this front end.
    """

    def __init__(self, page: SharedPage, array: CounterArray) -> None:
        self._page = page
        self._failures = VersionFailures(array, page.epoch)
        self._slots: dict[int, int] = {}

    def load(self, version: int) -> ModelLoad:
        """Return the load of a version by its number; zeros if it has no slot."""
        return self._page.load(self._slot(version), version)

    def server_figures(self, now_ns: int) -> ServerFigures | None:
        """Return the load of the server; None while it is unknown."""
        return self._page.server_figures(now_ns)

    def check_load(self, version: int, deadline_ns: int) -> None:
        """Raise the error with which the engine process would reject any request of a version now.

        Args:
            version: its number.
            deadline_ns: monotonic deadline of the request; 0 for none.
        """
        slot = self._slots.get(version, -1)
        slot = self._slot(version) if slot < 0 else slot
        error = self._page.rejection(slot, version, deadline_ns != 0)
        if error is not None:
            raise error

    def count_failure(self, version: int, reason: str, time_ns: int) -> bool:
        """Count a failed request of a version; False if it must be sent, since the version has no slot any more, or none yet."""
        slot = self._slot(version)
        return self._page.has(slot, version) and self._failures.count(slot, version, reason, time_ns)

    def _slot(self, version: int) -> int:
        slot = self._slots.get(version, -1)
        if slot < 0:
            slot = self._page.slot(version)
            if slot >= 0:
                self._slots[version] = slot
        return slot


def _checksum(content: bytes, sequence: int) -> int:
    return crc32(content, sequence & 0xFFFFFFFF)


@dataclass(slots=True, eq=False)
class _Served:
    """A version with a slot."""

    handle: VersionHandle
    slot: int
    totals: FailureTotals
    margin_kind: int = -1  # urgency class whose margin causes rejections by the last record; -1 for none
    rejected: int = field(default=0)
    depth: int = 0  # by the last record
    wait_ns: int = 0  # by the last record
    answered: int = 0  # requests since the last record


class PageWriter:
    """Writes the records of versions: at most once a millisecond, less often if that takes long, and not if nothing is in flight.

    A record that is due is written before an answer is sent, if there is a queue or a wait now or by the last record: an answer
    has load figures of its own time, and a single request never finds itself in the queue. Otherwise it is written after the
    answer, within the interval: a lone request does not wait for it.

    Ownership: `touch` and `answered` are called on the event loop, `add` and `remove` on any thread. `_lock` guards the slots and
    all writes.

    Args:
        page: the page.
        loop: the event loop of the engine process.
        arrays: counters of all processes.
        clock: returns monotonic nanoseconds.
        server_figures: returns the load of the server at a monotonic time; None for a page without it.
    """

    def __init__(
        self,
        page: SharedPage,
        loop: asyncio.AbstractEventLoop,
        arrays: Iterable[CounterArray] = (),
        clock: Clock = monotonic_ns,
        server_figures: Callable[[int], ServerFigures] | None = None,
    ) -> None:
        self._server_figures, self._server_due_ns = server_figures, 0
        self.page = page
        self._loop = loop
        self._arrays = tuple(arrays)
        self._clock = clock
        self._lock = threading.Lock()
        self._served: dict[int, _Served] = {}
        self._free: list[int] = []
        self._used = 0
        self._touched: dict[int, None] = {}
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._flushed_ns, self._interval_ns = 0, _INTERVAL_NS

    def add(self, handle: VersionHandle) -> None:
        """Give a version a slot and write its record; call it before the version is published."""
        with self._lock:
            if handle.serial in self._served or (not self._free and self._used == SLOTS):
                return
            slot = self._free.pop() if self._free else self._used
            self._used = max(self._used, slot + 1)
            totals = FailureTotals(self._arrays, slot, version_key(self.page.epoch, handle.serial))
            handle.recorder.collect_failures = totals.collect
            served = self._served[handle.serial] = _Served(handle, slot, totals)
            self._write(served)

    def remove(self, handle: VersionHandle) -> None:
        """Count the last failures of a version and free its slot; call it once no front end leases it."""
        handle.recorder.request_counts()
        with self._lock:
            served = self._served.pop(handle.serial, None)
            if served is not None:
                handle.recorder.collect_failures = None
                self.page.clear(served.slot)
                self._free.append(served.slot)

    def touch(self, handle: VersionHandle) -> None:
        """Write the record of a version soon: requests have arrived."""
        self._touched[handle.serial] = None
        if self._timer is None:
            self._timer = self._loop.call_later(self._interval_ns / NS_PER_S, self._flush)

    def answered(self, handle: VersionHandle, members: int) -> None:
        """Write the record of a version before an answer is sent, if it is due or has a queue that is empty now; else soon.

        It waits while neither the version nor its record has a queue or a wait, and under load until it is due.

        Args:
            handle: of the version.
            members: requests that the answer is for; they are in flight still.
        """
        if self._timer is None or handle.serial not in self._touched:
            self.touch(handle)
        served = self._served.get(handle.serial)
        if served is None:
            return
        served.answered += members
        is_emptied = served.answered <= _FEW and served.depth > 0 and handle.in_flight <= members
        if is_emptied or (
            self._clock() - self._flushed_ns >= self._interval_ns and (served.depth or served.wait_ns or handle.depth)
        ):
            self._flush()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_ns = self._flushed_ns = self._clock()
        if now_ns >= self._server_due_ns and self._server_figures is not None:
            self._server_due_ns = now_ns + FRESH_NS
            self.page.write_server(now_ns, self._server_figures(now_ns))
        touched, self._touched = self._touched, {}
        with self._lock:
            for serial in touched:
                served = self._served.get(serial)
                if served is not None and self._write(served):
                    self._touched[serial] = None
        cost_ns = self._clock() - now_ns
        self._interval_ns = min(max(cost_ns * _COST_PARTS, _INTERVAL_NS), _MAX_INTERVAL_NS)
        if self._touched:  # their predictions change with the time
            self._timer = self._loop.call_later(_QUIET_INTERVAL_S, self._flush)

    def close(self) -> None:
        """Stop writing; on the event loop."""
        if self._timer is not None:
            self._timer.cancel()

    def _write(self, served: _Served) -> bool:
        """Write the record of a version; returns True if it changes without further requests."""
        handle, now_ns = served.handle, self._clock()
        rejected = served.totals.count("would_miss")
        if rejected != served.rejected and served.margin_kind >= 0:
            handle.learn_rejections(rejected - served.rejected, served.margin_kind)
        served.rejected = rejected
        load, figures = handle.load(by_level=False), handle.overload(now_ns)
        record = version_record(load, figures, now_ns)
        served.margin_kind, served.depth, served.wait_ns, served.answered = -1, record.depth, record.wait_ns, 0
        error = record.rejection(now_ns)
        if figures is not None and figures.forecast is not None and error is not None:
            forecast = figures.forecast
            if forecast.done_ns - forecast.margin_ns <= now_ns + figures.objective_ns < forecast.done_ns:
                served.margin_kind = forecast.kind
        self.page.write(served.slot, version_key(self.page.epoch, handle.serial), record, error is not None)
        return bool(load.depth or load.in_flight or load.running_rows)


def version_record(load: ModelLoad, figures: OverloadFigures | None, now_ns: int) -> VersionRecord:
    """Return the record of a version from its figures.

    Args:
        load: of the version.
        figures: for rejections; None for none.
        now_ns: monotonic.
    """
    forecast = None if figures is None else figures.forecast
    is_measured = load.drain_ns != 0 or forecast is not None
    retry_after_ns = max(load.drain_ns, NS_PER_MS) if is_measured else NS_PER_S
    return VersionRecord(
        *load[:9],
        written_ns=now_ns,
        start_ns=0 if forecast is None else forecast.start_ns,
        done_ns=0 if forecast is None else forecast.done_ns,
        max_wait_ns=0 if forecast is None else forecast.max_wait_ns,
        size_bytes=0 if figures is None else figures.size_bytes,
        max_count=0 if figures is None else figures.max_count,
        max_size_bytes=0 if figures is None else figures.max_size_bytes,
        objective_ns=0 if figures is None else figures.objective_ns,
        retry_after_ns=retry_after_ns,
        wait_until_ns=0 if figures is None or figures.wait is None else figures.wait.until_ns,
        wait_bound_ns=0 if figures is None or figures.wait is None else figures.wait.bound_ns,
    )
