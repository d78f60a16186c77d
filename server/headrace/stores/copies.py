"""Copies of repositories in stores for commands that read a repository once, without serving it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from headrace.config.documents import refuse
from headrace.core.store_url import StoreUrl
from headrace.stores.base import StoreError
from headrace.stores.cache import open_mirrors
from headrace.stores.mirror import Mirror
from headrace.stores.opening import open_store


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
