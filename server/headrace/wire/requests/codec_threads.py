"""Threads that decode and encode large bodies, so that the event loop keeps serving small requests and health checks.

Code for JSON, texts and classes holds the interpreter lock. So a thread alone is not enough: the codecs work in steps of about a
millisecond and call `headrace.core.clock.pause` between two of them, which gives the lock to the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headrace.core.clock import allow_pauses
from headrace.core.errors import HeadraceError, Overloaded
from headrace.core.threads import start_pool

# A switch of threads takes about 0.1 ms. Smaller bodies are decoded and encoded on the event loop.
LARGE_BYTES = 128 << 10
# More threads would only wait for the interpreter lock; compression works without it.
THREADS = 2
# Smaller bodies have a thread of their own: the largest take more than a second.
_MEDIUM_BYTES = 2 << 20

Result = TypeVar("Result")


class CodecThreads:
    """The codec threads of a server.

    Ownership: the event loop.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, "codec")
        self._medium = ThreadPoolExecutor(1, "codec of medium bodies")

    def start(self) -> None:
        """Start the threads now: later, the system may start no more.

        Raises:
            Unavailable: the threads cannot be started.
        """
        self._executor = start_pool(THREADS, "codec")
        self._medium = start_pool(1, "codec of medium bodies")

    async def run(self, function: Callable[..., Result], *args: object, size_bytes: int = 0) -> Result:
        """Run a function on a codec thread, after the functions that wait for one. A cancelled function that waits never runs.

        Args:
            function: the function.
            args: its arguments.
            size_bytes: size of its work; 0 if it is not known.

        Raises:
            Overloaded: no thread can be started.
        """
        try:
            executor = self._medium if 0 < size_bytes <= _MEDIUM_BYTES else self._executor
            future = asyncio.get_running_loop().run_in_executor(executor, _call, function, args)
        except RuntimeError as error:
            raise Overloaded(f"no thread for a large body: {error}, retry later") from None
        try:
            return await future
        finally:
            del future  # with an error, a reference cycle: error, traceback, this frame

    def close(self) -> None:
        """Wait for the running functions and end the threads."""
        self._executor.shutdown(cancel_futures=True)
        self._medium.shutdown(cancel_futures=True)


def _call(function: Callable[..., Result], args: tuple[object, ...]) -> Result:
    allow_pauses()
    try:
        return function(*args)
    except HeadraceError as error:
        raise error.with_traceback(None) from None  # the frames hold tensors
