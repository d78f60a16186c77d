"""State that all processes of a server share: counters with limits, and the table of versions that front ends serve."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from functools import partial

from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.models.registry import Registry
from headrace.server.front_ends.channel import Start
from headrace.server.front_ends.counter_array import CounterArray, CounterArrays
from headrace.server.front_ends.front_end_requests import FrontEndRequests
from headrace.server.front_ends.passed_requests import FrontEndPeer
from headrace.server.front_ends.shared_page import PageWriter
from headrace.server.settings import Settings
from headrace.server.wiring import ServerLimits

logger = logging.getLogger("headrace.front_ends")


def shared_arrays(start: Start) -> CounterArrays:
    """Open the counters of all processes, and begin to count in those of this one."""
    arrays = CounterArrays([CounterArray(fd) for fd in start.arrays], start.number)
    arrays.own.begin(os.getpid())
    arrays.share_counters()
    return arrays


def shared_limits(arrays: CounterArrays, settings: Settings) -> ServerLimits:
    """Create limits on clients that hold for all processes together."""
    bodies = arrays.body_memory(settings.limits)
    return ServerLimits.create(settings, bodies, partial(arrays.client_limits, bodies=bodies))


class TableSync:
    """Sends the table of served versions to all front ends after each change, before the call that caused it is answered.

    Ownership: the event loop; `publish` is called by the control thread.

    Args:
        loop: event loop of the engine process.
        registry: its versions.
        requests: makes the table.
        writer: of the shared page, which has a record of each version in the table.
        peers: front ends, by number.
        timeout_s: longest wait for the front ends. One that hangs is killed by the supervisor.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        registry: Registry,
        requests: FrontEndRequests,
        writer: PageWriter,
        peers: Mapping[int, FrontEndPeer],
        timeout_s: float = 30.0,
    ) -> None:
        self._loop = loop
        self._registry = registry
        self._requests = requests
        self._writer = writer
        self._peers = peers
        self._timeout_s = timeout_s
        self._written: set[VersionHandle] = set()

    def publish(self) -> None:
        """Send the table to all front ends and wait until they have applied it; called on the control thread."""
        if self._loop.is_closed():
            return
        sending = self._send_all()
        try:
            future = asyncio.run_coroutine_threadsafe(sending, self._loop)
        except RuntimeError:  # the loop has ended since
            sending.close()
            return
        try:
            future.result(self._timeout_s)
        except TimeoutError:
            future.cancel()
            logger.error("a front end has not applied the served models within %g s", self._timeout_s)

    async def send(self, peer: FrontEndPeer) -> None:
        """Send the table to one front end."""
        await peer.stream.notify("table", self._table())

    async def _send_all(self) -> None:
        table = self._table()
        peers = list(self._peers.values())
        if peers:
            await asyncio.gather(*(peer.stream.notify("table", table) for peer in peers))

    def _table(self) -> bytes:
        handles = {handle for _, handle in self._registry.selections()}
        for handle in handles - self._written:
            self._writer.add(handle)
        for handle in self._written - handles:
            self._writer.remove(handle)
        self._written = handles
        return self._requests.table_bytes()
