"""Shadow requests: copies of requests that run behind the answers of the stable version, on one thread.

They never delay an answer: a copy waits in a bounded queue until the stable version has answered and has no queued request, and
is dropped where the queue is full. They never fail one: their errors are only counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from headrace.core.clock import NS_PER_S, Clock, monotonic_ns
from headrace.core.errors import HeadraceError, ModelFailed
from headrace.core.request import NO_RANGES, InferRequest, InferResponse
from headrace.core.tensor import Array, is_resident
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.models.traffic.comparison import OutputComparison, compare

logger = logging.getLogger("headrace.traffic")

MAX_REQUESTS = 64
MAX_BYTES = 64 << 20
# A larger copy would hold up the event loop for longer than a millisecond.
MAX_REQUEST_BYTES = 4 << 20
# A copy that has waited longer compares a version with what it no longer is.
_MAX_AGE_NS = 10 * NS_PER_S
_DEADLINE_NS = 30 * NS_PER_S


def can_copy(request: InferRequest) -> bool:
    """Return True for a request whose answer can be compared: not in memory that its client may change, and with one answer."""
    is_plain = request.members is None and request.responses is None and request.output_ranges is NO_RANGES
    return is_plain and not any(is_resident(array) for array in request.inputs.values())


def copies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Copy arrays: their memory is used for other requests after the answer."""
    return {name: np.array(array) for name, array in arrays.items()}


def _size_bytes(arrays: Mapping[str, Array]) -> int:
    """Return the memory of arrays; the elements of BYTES are estimated by their first one."""
    size_bytes = 0
    for array in arrays.values():
        size_bytes += array.nbytes
        if array.dtype.hasobject and array.size:
            size_bytes += array.size * len(array.item(0))
    return size_bytes


@dataclass(slots=True, eq=False)
class ShadowJob:
    """One shadow request.

    Attributes:
        request: copy of the request.
        stable: version that has answered it.
        shadow: returns a lease of the version that is compared, None while it does not serve.
        on_result: called on the event loop with the comparison, or with the reason why there is none: "failed", or that of a
            drop.
        expected: copy of the outputs of the stable version.
        size_bytes: memory of the copies.
        queued_ns: monotonic time of the answer.
    """

    request: InferRequest
    stable: VersionHandle
    shadow: Callable[[], VersionHandle | None]
    on_result: Callable[[OutputComparison | str], None]
    expected: dict[str, Array] | None = None
    size_bytes: int = 0
    queued_ns: int = 0


class ShadowQueue:
    """Runs shadow requests of all models one after the other. Ownership: the event loop, except `_run`.

    Args:
        loop: event loop of the server.
        clock: returns monotonic nanoseconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock = monotonic_ns) -> None:
        self._loop = loop
        self._clock = clock
        self._waiting: deque[ShadowJob] = deque()
        self._size_bytes = 0
        self._is_running = self._is_closed = False
        self._thread: ThreadPoolExecutor | None = None

    def copy(
        self,
        request: InferRequest,
        stable: VersionHandle,
        shadow: Callable[[], VersionHandle | None],
        on_result: Callable[[OutputComparison | str], None],
    ) -> ShadowJob | None:
        """Copy a request that the stable version runs; None if it is dropped, after `on_result` with the reason.

        Args:
            request: of a client.
            stable, shadow, on_result: see `ShadowJob`.
        """
        if not can_copy(request):
            on_result("not_comparable")
        elif (size_bytes := _size_bytes(request.inputs)) > MAX_REQUEST_BYTES:
            on_result("too_large")
        elif len(self._waiting) >= MAX_REQUESTS or self._size_bytes + size_bytes > MAX_BYTES:
            on_result("queue_full")
        else:
            copied = request.replace(inputs=copies(request.inputs), client="", call=None, resident_outputs=frozenset())
            return ShadowJob(copied, stable, shadow, on_result, size_bytes=size_bytes)
        return None

    def add(self, job: ShadowJob, response: InferResponse) -> None:
        """Queue a shadow request with the answer to compare, before that is written."""
        size_bytes = (
            _size_bytes(response.outputs) if not any(is_resident(each) for each in response.outputs.values()) else -1
        )
        if size_bytes < 0:
            job.on_result("not_comparable")
        elif size_bytes > MAX_REQUEST_BYTES:
            job.on_result("too_large")
        elif len(self._waiting) >= MAX_REQUESTS or self._size_bytes + job.size_bytes + size_bytes > MAX_BYTES:
            job.on_result("queue_full")
        else:
            job.expected, job.queued_ns = copies(response.outputs), self._clock()
            job.size_bytes += size_bytes
            self._size_bytes += job.size_bytes
            self._waiting.append(job)
            self._loop.call_soon(self.run_next)  # after the answer is written

    def run_next(self) -> None:
        """Start the next shadow request if none runs and the stable version has no queued request."""
        while self._waiting and not self._is_running and not self._is_closed:
            job = self._waiting[0]
            is_late = self._clock() - job.queued_ns > _MAX_AGE_NS
            if not is_late and job.stable.depth:
                return  # the next answer of the version calls again
            self._waiting.popleft()
            self._size_bytes -= job.size_bytes
            if is_late:
                job.on_result("waited_too_long")
                continue
            handle = job.shadow()
            if handle is None:
                job.on_result("not_ready")
                continue
            self._is_running = True
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "shadow")
            try:
                self._thread.submit(self._run, job, handle)
            except RuntimeError as error:  # the system starts no further thread
                logger.warning("a shadow request is dropped: %s", error)
                handle.release()
                self._is_running = False
                job.on_result("no_thread")

    def close(self) -> None:
        """Drop all waiting requests, and end the thread after the one that runs."""
        self._is_closed = True
        self._waiting.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, job: ShadowJob, handle: VersionHandle) -> None:
        """Run and compare a request, on the thread."""
        request, result = job.request, "failed"
        outcome: OutputComparison | str = result
        try:
            now_ns = self._clock()
            request.received_ns, request.deadline_ns = now_ns, now_ns + _DEADLINE_NS
            request.priority = handle.policy.levels if handle.policy.levels > 1 else 0  # the lowest level
            response = handle.infer_blocking(request)
            assert job.expected is not None
            outcome = compare(job.expected, response.outputs, request.rows if handle.spec.max_batch_size else 1)
        except ModelFailed:
            outcome = "failed"
        except HeadraceError as error:
            outcome = "failed" if error.reason == "bad_request" else error.reason
        except Exception:
            logger.exception("a shadow request of model %s failed", handle.spec.name)
        finally:
            handle.release()
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._end, job, outcome)

    def _end(self, job: ShadowJob, outcome: OutputComparison | str) -> None:
        self._is_running = False
        job.on_result(outcome)
        self.run_next()
