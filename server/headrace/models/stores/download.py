"""Downloads objects in parallel into files that are continued where they ended, and checks their digests."""

from __future__ import annotations

import errno
import hashlib
import logging
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.store_url import StoreUrl
from headrace.core.threads import start_thread
from headrace.models.stores.base import ModelStore, ObjectChanged, Stopped, StoredObject, StoreError
from headrace.observability.labelled_counter import STORE_BYTES

logger = logging.getLogger("headrace.stores")

_PARALLEL = 4
_READ_BYTES = 1 << 20
# Time between two lines of progress in the log.
_REPORT_S = 10


class Progress:
    """Counts and logs how far the downloads of a repository are. Thread-safe.

    Args:
        url: of the repository.
        objects: number of objects.
        total_bytes: of all objects, with what is there of them already.
        present_bytes: what is there already.
    """

    def __init__(self, url: StoreUrl, objects: int, total_bytes: int, present_bytes: int) -> None:
        self._url, self._total, self._bytes = url, total_bytes, present_bytes
        self._first_bytes = present_bytes
        self._start_ns = self._report_ns = monotonic_ns()
        self._lock = threading.Lock()
        again = f", {present_bytes / 1e6:.1f} MB of them are here already" if present_bytes else ""
        logger.info("repository %s: downloading %d files of %.1f MB%s", url, objects, total_bytes / 1e6, again)

    def add(self, count: int) -> None:
        """Count bytes that have been written."""
        STORE_BYTES.count(str(self._url), by=count)
        with self._lock:
            self._bytes += count
            now_ns = monotonic_ns()
            if now_ns - self._report_ns < _REPORT_S * NS_PER_S:
                return
            self._report_ns = now_ns
            rate = (self._bytes - self._first_bytes) / max(now_ns - self._start_ns, 1) * NS_PER_S
        text = "repository %s: %.0f %% of %.1f MB, %.1f MB/s"
        logger.info(text, self._url, 100 * self._bytes / max(self._total, 1), self._total / 1e6, rate / 1e6)


class Downloader:
    """Downloads objects of one store.

    Args:
        store: the store.
        url: its URL, for messages.
        partial: folder of incomplete files.
        stop: ends a download.
    """

    def __init__(self, store: ModelStore, url: StoreUrl, partial: Path, stop: threading.Event) -> None:
        self._store, self._url, self._partial, self._stop = store, url, partial, stop
        # True once the ETag of a whole object was not its digest: objects of this bucket are encrypted with keys of KMS.
        self._etags_are_opaque = False

    def file(self, item: StoredObject) -> Path:
        """Return the file of an object while it is incomplete."""
        text = f"{item.path}\n{item.size}\n{item.etag}"
        return self._partial / hashlib.sha256(text.encode()).hexdigest()[:32]

    def missing_bytes(self, objects: Iterable[StoredObject]) -> int:
        """Return the bytes that a download of these objects would read."""
        return sum(max(item.size - _size(self.file(item)), 0) for item in objects)

    def fetch(self, objects: Sequence[StoredObject]) -> tuple[set[StoredObject], dict[StoredObject, StoreError]]:
        """Download objects; an error of one ends the download of all.

        Args:
            objects: from one listing.

        Returns:
            The objects that are complete, and the errors of others by object. Those that have changed since they were listed
            are in neither.

        Raises:
            StoreError: the disk cannot be written.
            Stopped: the server stops.
        """
        total = sum(item.size for item in objects)
        progress = Progress(self._url, len(objects), total, total - self.missing_bytes(objects))
        complete: set[StoredObject] = set()
        failures: dict[StoredObject, StoreError] = {}
        fatal: list[Exception] = []

        def run(item: StoredObject) -> None:
            if failures or fatal:
                return
            try:
                self._fetch(item, progress)
                complete.add(item)
            except ObjectChanged:
                logger.info("repository %s: %s has changed during the download", self._url, item.path)
            except StoreError as error:
                failures[item] = error
            except Exception as error:
                fatal.append(error)

        # Daemons: a request to a store may take longer than the server has to end.
        items, lock = iter(objects), threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    item = next(items, None)
                if item is None:
                    return
                run(item)

        threads = [
            threading.Thread(target=work, name=f"download {number}", daemon=True)
            for number in range(min(_PARALLEL, len(objects)))
        ]
        for thread in threads:
            start_thread(thread)
        for thread in threads:
            thread.join()
        if fatal:
            raise self._described(fatal[0])
        return complete, failures

    def _described(self, error: Exception) -> Exception:
        if not isinstance(error, OSError):
            return error
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error.strerror)
        cure = "free some space, or name another --repository-cache-dir"
        return StoreError(f"{self._url} cannot be written to {self._partial}: {reason}: {cure}")

    def _fetch(self, item: StoredObject, progress: Progress) -> None:
        target = self.file(item)
        self._store.fetch(item, target, progress.add, self._stop)
        algorithm, _, expected = item.digest.partition(":")
        if not expected or (self._etags_are_opaque and not item.is_digest_certain):
            return
        digest = file_digest(target, algorithm, self._stop)
        if digest == expected:
            return
        logger.warning("repository %s: %s does not match its checksum, it is downloaded again", self._url, item.path)
        target.unlink()
        self._store.fetch(item, target, progress.add, self._stop)
        again = file_digest(target, algorithm, self._stop)
        if again == expected:
            return
        if again == digest and not item.is_digest_certain:
            # Two downloads have the same content: the ETag is no MD5.
            self._etags_are_opaque = True
            text = "repository %s: ETags are no checksums (encrypted objects?), sizes and ETags are compared only"
            logger.info(text, self._url)
            return
        target.unlink()
        cure = "upload it again"
        raise StoreError(f"{self._url}/{item.path} does not match its {algorithm} {expected} in the store: {cure}")


def file_digest(path: Path, algorithm: str, stop: threading.Event) -> str:
    """Return the digest of a file in hexadecimal.

    Args:
        path: the file.
        algorithm: "md5", "sha256", or "git" for the SHA-1 of a git blob.
        stop: ends the reading; raises Stopped.
    """
    if algorithm == "git":
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    else:
        digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            if stop.is_set():
                raise Stopped
            digest.update(chunk)
    return digest.hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
