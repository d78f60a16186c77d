"""S3, Google Cloud Storage and Azure Blob Storage through obstore: requests run in Rust, without the interpreter's lock."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from headrace.core.store_url import StoreUrl
from headrace.models.stores.base import ObjectChanged, Stopped, StoredObject, StoreError, short_text
from headrace.models.stores.redirects import RedirectGuard

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

# A request reads at most so many bytes: its timeout does not depend on the size of the object.
_PART_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 300
_READ_TIMEOUT_S = 30
# obstore retries throttled and failed requests with random pauses of up to 10 s; a download goes on where it was cut.
_RETRIES = 8
_ATTEMPTS = 6
_MAX_OBJECTS = 100_000
# Maximum time for the next 1,000 objects of a listing. A page may be empty and name a next one, which may be the same.
_LISTING_S = 300
# Longest time in which a request notices that the server stops.
_POLL_S = 0.1
_STATUS = re.compile(r"status code: (\d{3})")
_MD5 = re.compile(r"[0-9a-f]{32}")

_PROVIDERS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_PROFILE (with boto3 installed) or the role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or the service account of the machine",
    "az": "AZURE_STORAGE_ACCOUNT_KEY, AZURE_CLIENT_ID or the managed identity of the machine",
}

T = TypeVar("T")


class ObjectStore:
    """Reads a bucket or container.

    Args:
        url: of the repository.
        hosts: see `RedirectGuard`.

    Raises:
        StoreError: the provider's settings in the environment are invalid.
    """

    def __init__(self, url: StoreUrl, hosts: Collection[str]) -> None:
        self._url = url
        self._guard = RedirectGuard(url, hosts)
        self._store = _open(url, self._guard.client_options)

    def list_objects(self, stop: threading.Event) -> Sequence[StoredObject]:
        """Return all objects below the URL."""
        from obstore.exceptions import BaseError

        self._guard.reset()
        try:
            return self._run(self._list(), stop)
        except BaseError as error:
            raise self._described(error) from None

    async def _list(self) -> Sequence[StoredObject]:
        import obstore

        objects: dict[str, StoredObject] = {}
        pages = aiter(obstore.list(self._store, chunk_size=1000))
        while True:
            try:
                chunk = [self._stored(item) for item in await asyncio.wait_for(anext(pages), _LISTING_S)]
            except StopAsyncIteration:
                return list(objects.values())
            except TimeoutError:
                cure = "check the endpoint: does the listing go on for ever?"
                raise StoreError(f"{self._url} lists no objects for {_LISTING_S} s: {cure}") from None
            for item in chunk:
                if item.path in objects:
                    cure = "check the endpoint: its listing repeats"
                    raise StoreError(f"{self._url} lists the object {item.path[:128]!r} twice: {cure}")
                objects[item.path] = item
            if len(objects) > _MAX_OBJECTS:
                raise StoreError(f"{self._url} has more than {_MAX_OBJECTS} objects, the maximum: name a folder in it")

    def _run(self, requests: Coroutine[Any, Any, T], stop: threading.Event) -> T:
        """Run requests to their end; cancel them when the server stops or a redirect was refused."""

        async def watch() -> T:
            task = asyncio.ensure_future(requests)
            try:
                while not task.done():
                    await asyncio.wait((task,), timeout=_POLL_S)
                    if stop.is_set():
                        raise Stopped
                    if host := self._guard.refused_host:
                        cure = "name the host that serves the objects as the endpoint, e.g. AWS_ENDPOINT_URL"
                        raise StoreError(f"{self._url} redirects to the host {host}, which is refused: {cure}")
                return task.result()
            finally:
                task.cancel()

        return asyncio.run(watch())

    def _stored(self, item: Any) -> StoredObject:
        # `item` is an ObjectMeta. Without an ETag a change shows in the time.
        etag = _unquoted(item["e_tag"]) or item["last_modified"].isoformat()
        digest = f"md5:{etag}" if _MD5.fullmatch(etag) and self._url.scheme in ("s3", "gs") else ""
        modified_s = int(item["last_modified"].timestamp())
        return StoredObject(item["path"], item["size"], etag, digest, is_digest_certain=False, modified_s=modified_s)

    def fetch(self, item: StoredObject, target: Path, on_bytes: Callable[[int], None], stop: threading.Event) -> None:
        """Write an object to a file; a part that is there already is not read again."""
        from obstore.exceptions import BaseError, NotFoundError, PreconditionError

        failures = 0
        with open(target, "ab") as file:
            if _written_bytes(file) > item.size:
                file.truncate(0)
            while (offset := _written_bytes(file)) < item.size:
                try:
                    self._run(self._read_part(item, file.write, offset, on_bytes), stop)
                except (NotFoundError, PreconditionError) as error:
                    raise ObjectChanged(item.path) from error
                except (BaseError, OSError) as error:
                    if isinstance(error, OSError) and error.errno is not None:
                        raise  # of the file
                    failures = 1 if _written_bytes(file) > offset else failures + 1
                    if failures >= _ATTEMPTS:
                        raise self._described(error, item.path) from None
                    if stop.wait(0.1 * 2**failures):
                        raise Stopped from None
            os.fsync(file.fileno())

    async def _read_part(
        self, item: StoredObject, write: Callable[[Any], object], offset: int, on_bytes: Callable[[int], None]
    ) -> None:
        import obstore

        options: Any = {"range": (offset, min(offset + _PART_BYTES, item.size))}
        result = await obstore.get_async(self._store, item.path, options=options)
        # The ETag of the response, not If-Match: listings of Azure have it without the quotes that If-Match needs.
        if not self._is_listed(item, result.meta):
            raise ObjectChanged(item.path)
        async for chunk in result.stream(min_chunk_size=_CHUNK_BYTES):
            write(memoryview(chunk))
            on_bytes(len(chunk))

    def _is_listed(self, item: StoredObject, meta: Any) -> bool:
        """True if the metadata of a response are those of the listing."""
        if meta["size"] != item.size:
            return False
        # Google's ETags of composite objects differ between listing and response.
        is_same_time = self._url.scheme == "gs" and int(meta["last_modified"].timestamp()) == item.modified_s
        return is_same_time or _unquoted(meta["e_tag"]) in ("", item.etag)

    def _described(self, error: BaseException, path: str = "") -> StoreError:
        from obstore.exceptions import NotFoundError, PermissionDeniedError, UnauthenticatedError

        place = f"{self._url}{'/' if path else ''}{path}"
        match = _STATUS.search(str(error))
        status = "" if match is None else match[1]
        if isinstance(error, NotFoundError) or status == "404":
            return StoreError(f"{place} does not exist: check the name of the bucket, and region and endpoint")
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in ("401", "403"):
            cure = f"check the credentials: {_PROVIDERS[self._url.scheme]}"
            return StoreError(f"{place} refuses access ({short_text(error)}): {cure}")
        cure = "check the network, the endpoint and the credentials"
        return StoreError(f"{place} cannot be read ({short_text(error)}): {cure}")


def _unquoted(etag: str | None) -> str:
    return (etag or "").removeprefix("W/").strip('"')


def _written_bytes(file: BinaryIO) -> int:
    file.flush()
    return os.fstat(file.fileno()).st_size


def _open(url: StoreUrl, guard: Mapping[str, str]) -> S3Store | GCSStore | AzureStore:
    from obstore.exceptions import BaseError
    from obstore.store import AzureStore, GCSStore, S3Store

    options: Any = {
        # HTTP serves test servers and gateways on the same host; the endpoints of the providers are HTTPS.
        "client_options": {
            "allow_http": True,
            "timeout": timedelta(seconds=_TIMEOUT_S),
            "read_timeout": timedelta(seconds=_READ_TIMEOUT_S),
            **guard,
        },
        "retry_config": {
            "max_retries": _RETRIES,
            "retry_timeout": timedelta(seconds=120),
            "backoff": {"init_backoff": timedelta(seconds=0.25), "max_backoff": timedelta(seconds=10), "base": 3},
        },
    }
    prefix = url.folder or None
    try:
        if url.scheme == "az":
            return AzureStore(url.bucket, prefix=prefix, account_name=url.account, **options)
        if url.scheme == "gs":
            return GCSStore(url.bucket, prefix=prefix, **options)
        return S3Store(url.bucket, prefix=prefix, credential_provider=_aws_credentials(), **options)
    except (BaseError, ValueError) as error:
        cure = f"check the provider's settings in the environment: {_PROVIDERS[url.scheme]}"
        raise StoreError(f"{url} cannot be opened ({short_text(error)}): {cure}") from None


def _aws_credentials() -> Any:
    """Return AWS's own chain with profiles and SSO if boto3 is installed and finds credentials; None for that of obstore."""
    if find_spec("boto3") is None:
        return None
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider()
    except ValueError:  # no credentials: obstore names what it tried
        return None
