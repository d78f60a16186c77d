"""The thread that compares stores, and the control thread with repositories in stores."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from headrace.core.completion import Mailbox
from headrace.core.errors import ConfigError, HeadraceError, Unavailable
from headrace.core.store_url import StoreUrl, parse_store_url
from headrace.models.control_policy import ControlPolicy, ModelSelection
from headrace.models.loader import Loader
from headrace.models.reconciler import Reconciler
from headrace.models.registry import Registry, State
from headrace.models.stores.base import StoreError
from headrace.models.stores.cache import open_mirrors
from headrace.models.stores.mirror import Mirror
from headrace.models.stores.sync import RepositoryStores
from headrace.observability.labelled_counter import STORE_BYTES, STORE_SYNCS

from tests.support.memory_store import MemoryStore
from tests.support.models import affine
from tests.support.waiting import until


def model(seed: int) -> bytes:
    return affine(seed=seed).SerializeToString()


@contextmanager
def opened(
    cache: Path, *stores: MemoryStore, interval_s: float | None = None
) -> Iterator[tuple[RepositoryStores, list[Path]]]:
    """Mirrors of stores in memory; the first has the URL s3://bucket-0/models."""
    urls = [parse_store_url(f"s3://bucket-{number}/models") for number in range(len(stores))]
    by_url: dict[StoreUrl, MemoryStore] = dict(zip(urls, stores, strict=True))
    stop = threading.Event()
    with open_mirrors(urls, str(cache)) as folders:
        mirrors = [
            Mirror(url, folder, 1 << 30, stop, by_url.__getitem__) for folder, url in folders.items() if url is not None
        ]
        yield RepositoryStores(mirrors, interval_s, stop), list(folders)
        stop.set()


def counts(url: str) -> dict[str, int]:
    return {values[1]: count for values, count in STORE_SYNCS.items() if values[0] == url}


def test_a_failed_comparison_is_logged_once_and_recovers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.stores")
    store = MemoryStore()
    store.objects = {"a/1/model.onnx": b"one"}
    with opened(tmp_path, store, interval_s=0.01) as (stores, (folder,)):
        url = stores.status()[0].url
        stores.load_initial()
        assert (folder / "a" / "1" / "model.onnx").read_bytes() == b"one"
        assert dict(STORE_BYTES.items())[(url,)] == 3
        stores.start()
        until(lambda: counts(url)["unchanged"] >= 1)
        store.error = StoreError("the store is away")
        until(lambda: counts(url)["failed"] >= 3)
        assert stores.status()[0].error == "the store is away"
        assert stores.status()[0].compared_ns > 0
        store.error = None
        store.objects["a/2/model.onnx"] = b"two"
        until(lambda: stores.status()[0].error == "")
        until(lambda: counts(url)["changed"] >= 2)
        stores.apply()
        assert (folder / "a" / "2" / "model.onnx").read_bytes() == b"two"
        stores.stop()
        stores.join(30)
    messages = [record.getMessage() for record in caplog.records]
    assert sum("what is loaded stays in service" in message for message in messages) == 1
    assert sum("can be read again" in message for message in messages) == 1


def test_a_fault_of_a_library_does_not_end_the_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    store.objects = {"a/1/model.onnx": b"one"}
    with opened(tmp_path, store, interval_s=0.01) as (stores, _):
        stores.load_initial()
        store.error = RuntimeError("a secret detail")  # type: ignore[assignment]
        stores.start()
        until(lambda: stores.status()[0].error)
        assert "secret" not in stores.status()[0].error
        store.error = None
        until(lambda: not stores.status()[0].error)
        stores.stop()
        stores.join(30)


def test_a_store_that_cannot_be_read_at_start_is_an_error(tmp_path: Path) -> None:
    store = MemoryStore()
    store.error = StoreError("s3://bucket-0/models does not exist: check the name")
    with (
        opened(tmp_path, store) as (stores, _),
        pytest.raises(ConfigError, match="s3://bucket-0/models does not exist"),
    ):
        stores.load_initial()


async def test_requests_that_wait_at_the_end_get_an_error(tmp_path: Path) -> None:
    store = MemoryStore()
    store.objects = {"a/1/model.onnx": b"one"}
    entered, leave = threading.Event(), threading.Event()

    def hold(_path: str) -> None:
        entered.set()
        leave.wait(60)

    with opened(tmp_path, store) as (stores, _):
        with pytest.raises(Unavailable):
            await stores.refresh()  # not started
        stores.load_initial()
        store.objects["a/2/model.onnx"] = b"two"
        store.on_fetch = hold
        stores.start()
        first = asyncio.ensure_future(stores.refresh())
        await asyncio.to_thread(entered.wait, 60)
        second = asyncio.ensure_future(stores.refresh())
        await asyncio.sleep(0)
        stores.stop()
        leave.set()
        results = await asyncio.gather(first, second, return_exceptions=True)
        assert any(isinstance(result, Unavailable) for result in results)
        with pytest.raises(Unavailable):
            await stores.refresh()
        await asyncio.to_thread(stores.join, 30)


@contextmanager
def reconciled(
    cache: Path,
    store: MemoryStore,
    control: ControlPolicy,
    names: frozenset[str] | None,
    loop: asyncio.AbstractEventLoop,
) -> Iterator[tuple[Registry, Reconciler]]:
    registry, loaded = Registry(), threading.Event()
    interval_s = control.poll_interval_s if control.mode == "poll" else None
    with opened(cache, store, interval_s=interval_s) as (stores, folders):
        loader = Loader(Mailbox(loop), profile_s=0)
        reconciler = Reconciler(
            ModelSelection(folders, names), loader, registry, lambda _: loaded.set(), control, stores=stores
        )
        reconciler.start()
        assert loaded.wait(60)
        try:
            yield registry, reconciler
        finally:
            assert reconciler.stop(30)


def versions(registry: Registry) -> set[tuple[str, str]]:
    return {(name, number) for name, number, _ in registry.sources()}


async def test_a_load_request_reads_the_store_or_says_why_not(tmp_path: Path) -> None:
    store = MemoryStore()
    store.objects = {"a/1/model.onnx": model(1)}
    control = ControlPolicy("explicit")

    names = frozenset({"a"})
    with reconciled(tmp_path, store, control, names, asyncio.get_running_loop()) as (registry, reconciler):
        store.objects |= {"a/2/model.onnx": model(2), "b/1/model.onnx": model(3)}
        await reconciler.load("b", None, {})
        assert versions(registry) == {("a", "1"), ("b", "1")}
        await reconciler.load("a", None, {})
        assert versions(registry) == {("a", "2"), ("b", "1")}
        store.error = StoreError("the store is away")
        for name in ("a", "c"):
            with pytest.raises(Unavailable, match="the store is away"):
                await reconciler.load(name, None, {})
        assert registry.state("a", "2") is State.READY
        store.error = None
        with pytest.raises(HeadraceError, match="no model repository has a folder 'c'"):
            await reconciler.load("c", None, {})


async def test_a_download_is_compared_with_its_checksums_before_it_is_loaded(tmp_path: Path) -> None:
    def checksums(content: bytes) -> bytes:
        return f"{hashlib.sha256(content).hexdigest()}  1/model.onnx\n".encode()

    store = MemoryStore()
    store.objects = {"a/1/model.onnx": model(1), "a/SHA256SUMS": checksums(model(1))}
    control = ControlPolicy("explicit")

    names = frozenset({"a"})
    with reconciled(tmp_path, store, control, names, asyncio.get_running_loop()) as (registry, reconciler):
        first = registry.serving("a", "")
        assert first is not None
        store.objects["a/1/model.onnx"] = model(2)
        with pytest.raises(ConfigError, match="SHA256SUMS lists"):
            await reconciler.load("a", None, {})
        assert registry.serving("a", "") is first
        store.objects["a/SHA256SUMS"] = checksums(model(2))
        await reconciler.load("a", None, {})
        assert registry.serving("a", "") not in (None, first)
