"""The contract of a store: lists its objects, writes one of them to a file."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.observability.logs import redact

# Longer messages of libraries repeat the error of every layer below.
_MAX_TEXT = 300
_QUERY = re.compile(r"\?[^\s'\"<>)]*")


@dataclass(frozen=True, slots=True, order=True)
class StoredObject:
    """An object in a listing.

    Attributes:
        path: relative to the URL's folder, with "/".
        size: bytes.
        etag: changes with the content.
        digest: checksum of the content as ALGORITHM:HEX ("md5", "sha256", or "git" for the SHA-1 of a git blob); "" if the store
            has none.
        is_digest_certain: False if the digest may be something else: the ETag of encrypted objects in S3 is no MD5.
        modified_s: time of the last change, whole seconds since 1970; 0 if the store has none.
    """

    path: str
    size: int
    etag: str
    digest: str = ""
    is_digest_certain: bool = True
    modified_s: int = 0


class StoreError(Exception):
    """A store cannot be read. The message has no secrets, and says what to do."""


class ObjectChanged(Exception):
    """An object has been replaced or removed since it was listed."""


class Stopped(Exception):
    """The server stops during a download."""


class ModelStore(Protocol):
    """A folder of objects. Thread-safe."""

    def list_objects(self, stop: threading.Event) -> Sequence[StoredObject]:
        """Return all objects below the URL.

        Args:
            stop: ends the wait between two attempts.

        Raises:
            StoreError: the store cannot be read.
            Stopped: `stop` is set.
        """

    def fetch(self, item: StoredObject, target: Path, on_bytes: Callable[[int], None], stop: threading.Event) -> None:
        """Write an object to a file; a part that is there already is not read again.

        Args:
            item: from `list_objects`.
            target: file, complete only if this returns; its name is unique for content and path.
            on_bytes: called with the number of bytes of each part that was written.
            stop: ends the download.

        Raises:
            ObjectChanged: the object is not the listed one any more.
            StoreError: the store cannot be read.
            Stopped: `stop` is set.
        """


def short_text(error: BaseException) -> str:
    """Return the first line of an error without queries of URLs, which may be signatures, and without secrets."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A body in XML has nothing for people that the status does not say.
    text = redact(_QUERY.sub("", lines[0].partition("<")[0].rstrip(": ") if lines else type(error).__name__))
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
