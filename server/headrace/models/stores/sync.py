"""Keeps the mirrors of all stores up to date: at start, at an interval, or when a client loads a model.

`local_copies` mirrors repositories once, for commands that read them without serving.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from headrace.config.documents import refuse
from headrace.core.clock import monotonic_ns
from headrace.core.errors import Unavailable
from headrace.core.store_url import StoreUrl
from headrace.core.telemetry import StoreStatus
from headrace.core.threads import start_thread
from headrace.models.stores.base import Stopped, StoreError
from headrace.models.stores.cache import open_mirrors
from headrace.models.stores.mirror import Mirror
from headrace.models.stores.opening import open_store
from headrace.observability.labelled_counter import STORE_BYTES, STORE_SYNCS

logger = logging.getLogger("headrace.stores")

_RESULTS = ("unchanged", "changed", "failed")


class RepositoryStores:
    """Mirrors of the repositories that are in stores.

    Ownership: `load_initial` and `apply` belong to the control thread, `_main` is the thread "stores". `_condition` guards
    `_requests` and `_status`.

    Args:
        mirrors: by URL, in the order of the repositories.
        interval_s: time between two comparisons with the stores, in seconds; None for comparisons on request only.
        stop: the event that ends the downloads of the mirrors.
    """

    def __init__(self, mirrors: Sequence[Mirror], interval_s: float | None, stop: threading.Event) -> None:
        self._mirrors = mirrors
        self._interval_s = interval_s
        self._stop = stop
        self._condition = threading.Condition()
        self._requests: list[Future[Mapping[Path, str]]] = []
        self._status = {mirror.repository: StoreStatus(str(mirror.url)) for mirror in mirrors}
        self._thread = threading.Thread(target=self._main, name="stores", daemon=True)
        self._is_started = False
        for mirror in mirrors:
            url = str(mirror.url)
            STORE_SYNCS.declare_each((url, result) for result in _RESULTS)
            STORE_BYTES.declare(url)

    def load_initial(self) -> None:
        """Download everything; the repositories are whole afterwards.

        Returns early if the server stops.

        Raises:
            ConfigError: a store cannot be read.
        """
        for mirror in self._mirrors:
            try:
                mirror.sync()
            except StoreError as error:
                STORE_SYNCS.count(str(mirror.url), "failed")
                raise refuse(f"--model-repository {mirror.url}", None, str(error)) from None
            except Stopped:
                return
            mirror.apply()
            self._set_status(mirror, "")
            STORE_SYNCS.count(str(mirror.url), "changed")
            logger.info("repository %s is served from %s", mirror.url, mirror.repository)

    def start(self) -> None:
        """Start the thread; raises Unavailable if the system starts no further thread."""
        start_thread(self._thread)
        self._is_started = True

    def stop(self) -> None:
        """End downloads; requests that wait get an error. Does not wait for a request to a store."""
        self._stop.set()
        with self._condition:
            self._condition.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        if self._is_started:
            self._thread.join(timeout_s)

    def apply(self) -> None:
        """Bring the local repositories in line with the last comparison."""
        for mirror in self._mirrors:
            mirror.apply()

    def status(self) -> list[StoreStatus]:
        """Return the state of each store. Thread-safe."""
        with self._condition:
            return list(self._status.values())

    async def refresh(self) -> Mapping[Path, str]:
        """Compare all stores now and download what is missing.

        Returns:
            The errors of stores, by local repository.

        Raises:
            Unavailable: the server stops.
        """
        outcome: Future[Mapping[Path, str]] = Future()
        outcome.set_running_or_notify_cancel()  # a cancelled caller does not cancel the comparison
        with self._condition:
            if self._stop.is_set() or not self._is_started:
                raise Unavailable("the stores of models are not compared yet, or the server is stopping")
            self._requests.append(outcome)
            self._condition.notify_all()
        return await asyncio.wrap_future(outcome)

    def _main(self) -> None:
        while self._wait():
            with self._condition:
                requests, self._requests = self._requests, []
            for mirror in self._mirrors:
                self._compare(mirror)
            with self._condition:
                errors = {path: status.error for path, status in self._status.items() if status.error}
            for request in requests:
                request.set_result(errors)
        with self._condition:
            requests, self._requests = self._requests, []
        for request in requests:
            request.set_exception(Unavailable("the server is stopping"))

    def _wait(self) -> bool:
        """Wait for a request or the end of the interval; False if the server stops."""
        with self._condition:
            self._condition.wait_for(lambda: bool(self._requests) or self._stop.is_set(), self._interval_s)
            return not self._stop.is_set()

    def _compare(self, mirror: Mirror) -> None:
        url = str(mirror.url)
        with self._condition:
            before = self._status[mirror.repository].error
        try:
            result = "changed" if mirror.sync() else "unchanged"
            error = ""
        except Stopped:
            return
        except StoreError as failure:
            result, error = "failed", str(failure)
        except Exception as failure:  # a fault of a library must not end the thread
            result, error = "failed", f"{url} cannot be compared ({type(failure).__name__}): see the log of the server"
            if not before:
                logger.exception("repository %s cannot be compared", url)
        STORE_SYNCS.count(url, result)
        self._set_status(mirror, error)
        # Once, however long the store is away.
        if error and not before:
            logger.error("repository %s: %s; what is loaded stays in service", url, error)
        elif before and not error:
            logger.info("repository %s can be read again", url)

    def _set_status(self, mirror: Mirror, error: str) -> None:
        with self._condition:
            last = self._status[mirror.repository]
            compared_ns = last.compared_ns if error else monotonic_ns()
            self._status[mirror.repository] = StoreStatus(last.url, error, compared_ns)


@contextmanager
def local_copies(
    locations: Sequence[Path | StoreUrl], cache: str, bound_bytes: int, hosts: Collection[str]
) -> Iterator[list[Path]]:
    """Return the local folder of each location, in their order. URLs are downloaded whole, as a server does.

    The copies are held until the context ends, and stay in the cache for the next server or command.

    Args:
        locations: folders and URLs.
        cache: folder of all copies; "" for none.
        bound_bytes: largest size of all copies.
        hosts: see `open_store`.

    Raises:
        ConfigError: a store cannot be read, a package is missing, or the cache cannot be used.
    """
    stop = threading.Event()
    urls = [location for location in locations if isinstance(location, StoreUrl)]
    with open_mirrors(urls, cache) as folders:
        copies: dict[StoreUrl, Path] = {}
        try:
            for folder, url in folders.items():
                assert url is not None
                mirror = Mirror(url, folder, bound_bytes, stop, partial(open_store, hosts=hosts))
                try:
                    mirror.sync()
                except StoreError as error:
                    raise refuse(str(url), None, str(error)) from None
                mirror.apply()
                copies[url] = folder
            yield [copies[location] if isinstance(location, StoreUrl) else location for location in locations]
        finally:
            stop.set()
