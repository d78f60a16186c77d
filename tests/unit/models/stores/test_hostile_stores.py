"""Object stores whose listings never end, and that redirect to other hosts: real servers on this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from headrace.core.store_url import parse_store_url
from headrace.models.stores import object_store
from headrace.models.stores.base import Stopped, StoredObject, StoreError
from headrace.models.stores.object_store import ObjectStore
from headrace.server.settings import store_hosts

from tests.support.store_servers import StoreHandler, answering, s3_environment, serve_http
from tests.support.waiting import until

TOKEN = "a-session-token-of-this-test"
OTHER_HOST = "127.0.0.2"
ITEM = "<Contents><Key>models/net/{}</Key>"
ITEM += "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>e</ETag><Size>4</Size></Contents>"
PAGE = "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>same</NextContinuationToken>{}</ListBucketResult>"


class Requests:
    """Answers all requests with one function, and keeps their headers and paths."""

    def __init__(self, answer: Callable[[StoreHandler, int], None]) -> None:
        self._answer = answer
        self.seen: list[tuple[str, dict[str, str]]] = []

    def handler(self) -> type[StoreHandler]:
        def answer(handler: StoreHandler) -> None:
            self.seen.append((handler.path, dict(handler.headers)))
            self._answer(handler, len(self.seen))

        return answering(answer)

    @contextmanager
    def serve(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
        """Serve until the context ends; yields a store that reads here."""
        with serve_http(self.handler()) as port:
            use_environment(monkeypatch, port)
            yield ObjectStore(parse_store_url("s3://bucket/models"), store_hosts())


def use_environment(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for proxy in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
        monkeypatch.delenv(proxy.lower(), raising=False)
    for name, value in {**s3_environment(port), "AWS_SESSION_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)


def page(items: Callable[[int], str], handler: StoreHandler, number: int) -> None:
    handler.send(200, PAGE.format(items(number)).encode(), {"Content-Type": "application/xml"})


def test_a_listing_whose_token_repeats_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(partial(page, lambda _number: "".join(map(ITEM.format, range(300)))))
    with requests.serve(monkeypatch) as store, pytest.raises(StoreError, match="lists the object 'net/0' twice"):
        store.list_objects(threading.Event())


def test_empty_pages_without_an_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_LISTING_S", 0.3)
    requests = Requests(partial(page, lambda _number: ""))
    with requests.serve(monkeypatch) as store:
        with pytest.raises(StoreError, match=r"lists no objects for 0\.3 s: check the endpoint"):
            store.list_objects(threading.Event())
        assert_ended(requests)


@pytest.mark.parametrize("items", [lambda _number: "", lambda number: ITEM.format(f"{number}/model.onnx")])
def test_the_end_of_the_server_ends_a_listing(monkeypatch: pytest.MonkeyPatch, items: Callable[[int], str]) -> None:
    requests = Requests(partial(page, items))
    stop, errors = threading.Event(), []

    def read(store: ObjectStore) -> None:
        with pytest.raises(Stopped):
            store.list_objects(stop)
        errors.append(None)

    with requests.serve(monkeypatch) as store:
        thread = threading.Thread(target=read, args=(store,), daemon=True)
        thread.start()
        until(lambda: len(requests.seen) > 3)
        stop.set()
        until(lambda: not thread.is_alive(), timeout_s=5)
        assert errors
        assert_ended(requests)


def assert_ended(requests: Requests) -> None:
    """Wait until no request of the listing is left."""
    counts: list[int] = []
    until(lambda: counts.append(len(requests.seen)) or counts[-3:-2] == counts[-1:])


@contextmanager
def other_host() -> Iterator[tuple[str, Requests]]:
    """Serve on another host; yields its address."""
    requests = Requests(lambda handler, _number: handler.send(404))
    with serve_http(requests.handler(), OTHER_HOST) as port:
        yield f"{OTHER_HOST}:{port}", requests


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("path", ["", "net/1/model.onnx"])
def test_redirects_to_other_hosts_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str, status: int, path: str
) -> None:
    with ExitStack() as stack:
        address, others = stack.enter_context(other_host())
        location = {"Location": f"{scheme}://{address}/bucket?list-type=2"}
        redirect = Requests(lambda handler, _number: handler.send(status, b"", location))
        store = stack.enter_context(redirect.serve(monkeypatch))
        read = partial(store.list_objects, threading.Event())
        if path:
            item = StoredObject(path, 4, "e")
            read = partial(store.fetch, item, tmp_path / "file", lambda _count: None, threading.Event())
        with pytest.raises(StoreError, match=rf"redirects to the host {OTHER_HOST}, which is refused"):
            read()
        assert others.seen == []
        assert any(TOKEN in str(headers) for _, headers in redirect.seen)


def test_redirects_on_the_same_host_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    last = f"<ListBucketResult>{ITEM.format('1/model.onnx')}</ListBucketResult>".encode()

    def answer(handler: StoreHandler, number: int) -> None:
        if number == 1:
            handler.send(307, b"", {"Location": "/other?list-type=2"})
        else:
            handler.send(200, last, {"Content-Type": "application/xml"})

    with Requests(answer).serve(monkeypatch) as store:
        assert [item.path for item in store.list_objects(threading.Event())] == ["net/1/model.onnx"]


def test_the_thread_of_the_guard_ends_with_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    use_environment(monkeypatch, 1)
    store: Any = ObjectStore(parse_store_url("s3://bucket/models"), store_hosts())
    (guard,) = (thread for thread in set(threading.enumerate()) - before if thread.name == "redirects")
    del store
    until(lambda: not guard.is_alive())


def test_hosts_are_those_of_the_variables_of_the_providers(tmp_path: Path) -> None:
    account = tmp_path / "account.json"
    account.write_text('{"token_uri": "https://tokens.example/token"}')
    hosts = store_hosts({
        "AWS_ENDPOINT_URL": "http://[::1]:9000",
        "AWS_ENDPOINT_URL_STS": "https://sts.example:8443/path",
        "AWS_REGION": "eu-west-1",
        "GOOGLE_APPLICATION_CREDENTIALS": str(account),
        "GCE_METADATA_HOST": "metadata.example",
        "HTTPS_PROXY": "http://proxy.example",
    })  # fmt: skip
    assert set(hosts) == {
        "::1", "sts.example", "tokens.example", "metadata.example", "sts.amazonaws.com", "s3.eu-west-1.amazonaws.com",
        "sts.eu-west-1.amazonaws.com", "s3.eu-west-1.amazonaws.com.cn", "sts.eu-west-1.amazonaws.com.cn",
    }  # fmt: skip
