"""Repositories on the Hugging Face Hub through huggingface_hub: its endpoint, its tokens, its downloads."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from headrace.core.store_url import StoreUrl
from headrace.models.stores.base import ObjectChanged, Stopped, StoredObject, StoreError, short_text

# Pauses between attempts at a request that was throttled or got no answer, in seconds.
_PAUSES_S = (0.2, 1.0, 2.0, 4.0)
# Logs each request, with the signed addresses of files.
_NOISY_LOGGERS = ("httpx", "httpx2", "huggingface_hub")

# Requests of one listing, with repetitions. A page names the next one, which may be the same.
_MAX_PAGES = 1000

T = TypeVar("T")

# Checks each request of the library in this context; called with the host.
_check: ContextVar[Callable[[str], None] | None] = ContextVar("_check", default=None)


def _check_request(request: Any) -> None:
    check = _check.get()
    if check is not None:
        check(request.url.host)


class HubStore:
    """Reads one revision of a repository of the Hub.

    A listing is that of one commit, and files are read from that commit: a change in between cannot mix two of them.

    Args:
        url: of the repository.
    """

    def __init__(self, url: StoreUrl) -> None:
        from huggingface_hub import HfApi

        for name in _NOISY_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._url = url
        self._api = HfApi(library_name="headrace")
        self._commit = ""
        self._objects: Sequence[StoredObject] = ()

    def list_objects(self, stop: threading.Event) -> Sequence[StoredObject]:
        """Return all objects below the URL. The files are listed only if the revision has another commit."""
        with self._checked(stop):
            url = self._url
            commit = self._retried(lambda: self._api.repo_info(url.bucket, revision=url.revision).sha or "", stop)
            if commit != self._commit:
                self._objects = self._retried(partial(self._read_tree, commit), stop)
                self._commit = commit
        return self._objects

    @contextmanager
    def _checked(self, stop: threading.Event) -> Iterator[None]:
        """Refuse requests to other hosts than the Hub's, which would get the token, and listings without an end."""
        from huggingface_hub import get_session

        session, host, pages = get_session(), urlsplit(self._api.endpoint).hostname, 0
        hooks = session.event_hooks
        if _check_request not in hooks["request"]:
            session.event_hooks = {**hooks, "request": [*hooks["request"], _check_request]}

        def check(next_host: str) -> None:
            nonlocal pages
            pages += 1
            if stop.is_set():
                raise Stopped
            if next_host != host:
                cure = "HF_ENDPOINT is the address of the Hub"
                raise StoreError(f"{self._url} redirects to the host {next_host}, which is refused: {cure}")
            if pages > _MAX_PAGES:
                raise StoreError(f"{self._url} has a listing of more than {_MAX_PAGES} pages: check HF_ENDPOINT")

        token = _check.set(check)
        try:
            yield
        finally:
            _check.reset(token)

    def _read_tree(self, commit: str) -> Sequence[StoredObject]:
        from huggingface_hub.hf_api import RepoFile

        url = self._url
        tree = self._api.list_repo_tree(url.bucket, url.folder or None, recursive=True, revision=commit)
        return [self._stored(entry) for entry in tree if isinstance(entry, RepoFile)]

    def _stored(self, file: Any) -> StoredObject:
        # `file` is a RepoFile.
        path = file.path.removeprefix(f"{self._url.folder}/" if self._url.folder else "")
        if file.lfs is not None:
            return StoredObject(path, file.lfs.size, file.lfs.sha256, f"sha256:{file.lfs.sha256}")
        return StoredObject(path, file.size, file.blob_id, f"git:{file.blob_id}")

    def fetch(self, item: StoredObject, target: Path, on_bytes: Callable[[int], None], stop: threading.Event) -> None:
        """Write an object to a file; a part that is there already is not read again. The library keeps the part of a file that
        it has read, and goes on from there.
        """
        from huggingface_hub.errors import RemoteEntryNotFoundError

        if target.is_file() and target.stat().st_size == item.size:
            return
        url, folder = self._url, target.with_suffix(".hub")
        name = f"{url.folder}/{item.path}" if url.folder else item.path

        class Progress:
            """Counts bytes, and ends a download when the server stops; in place of a progress bar."""

            def __init__(self, *_args: object, **_options: object) -> None: ...

            def __enter__(self) -> Progress:
                return self

            def __exit__(self, *_error: object) -> None: ...

            def update(self, count: float | None = 1) -> None:
                on_bytes(max(int(count or 0), 0))
                if stop.is_set():
                    raise Stopped

        bar: Any = Progress
        download = partial(
            self._api.hf_hub_download, url.bucket, name, revision=self._commit, local_dir=folder, tqdm_class=bar
        )
        try:
            file = self._retried(download, stop, item.path)
        except RemoteEntryNotFoundError as error:
            raise ObjectChanged(item.path) from error
        os.replace(file, target)
        shutil.rmtree(folder, ignore_errors=True)

    def _retried(self, request: Callable[[], T], stop: threading.Event, path: str = "") -> T:
        """Run a request, again if it was throttled or got no answer.

        Raises:
            RemoteEntryNotFoundError: there is no such file.
            StoreError: any other error.
            Stopped: the server stops.
        """
        from huggingface_hub.errors import RemoteEntryNotFoundError

        for pause_s in (*_PAUSES_S, None):
            try:
                return request()
            except (Stopped, StoreError):
                raise
            except Exception as error:  # of the Hub, and of the client of HTTP
                if path and isinstance(error, RemoteEntryNotFoundError):
                    raise
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # of the file
                if pause_s is None or not _is_temporary(error):
                    raise self._described(error, path) from None
                if stop.wait(pause_s):
                    raise Stopped from None
        raise AssertionError

    def _described(self, error: Exception, path: str = "") -> StoreError:
        from huggingface_hub.errors import (
            GatedRepoError,
            RemoteEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        url = self._url
        if isinstance(error, RevisionNotFoundError):
            return StoreError(f"{url} has no revision '{url.revision}': name a branch, tag or commit after '@'")
        if isinstance(error, RemoteEntryNotFoundError):
            return StoreError(f"{url} has no folder '{url.folder}': check the path after the revision")
        if isinstance(error, GatedRepoError | RepositoryNotFoundError):
            cure = "check the name; a private or gated repository needs HF_TOKEN, or `hf auth login`"
            return StoreError(f"{url} does not exist or refuses access: {cure}")
        place = f"{url}{'/' if path else ''}{path}"
        return StoreError(f"{place} cannot be read ({short_text(error)}): check the network and HF_ENDPOINT")


def _is_temporary(error: BaseException) -> bool:
    """True for throttling, errors of the Hub's servers, and requests without an answer."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError):  # of a download without an answer of the Hub
        return error.__cause__ is None or _is_temporary(error.__cause__)
    if isinstance(error, HfHubHTTPError):
        status = getattr(error.response, "status_code", 500)
        return status == 429 or status >= 500
    return "Timeout" in type(error).__name__ or any("Transport" in kind.__name__ for kind in type(error).__mro__)
