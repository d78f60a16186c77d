"""Repositories on a Hub of this machine, through huggingface_hub."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from headrace.core.store_url import parse_store_url
from headrace.models.stores import hub as hub_module
from headrace.models.stores.base import Stopped, StoreError
from headrace.models.stores.cache import open_mirrors
from headrace.models.stores.hub import HubStore
from headrace.models.stores.mirror import Mirror
from headrace.models.stores.unit_records import RECORD

from tests.support.store_servers import HubServer, StoreHandler, answering, serve_http

WEIGHTS = os.urandom(300_000)
FILES = {"net/1/model.onnx": WEIGHTS, "net/config.yaml": b"name: net\n", "README.md": b"text"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    server = HubServer("org/models")
    server.lfs = {"net/1/model.onnx"}
    server.commit(FILES)
    with server.serve() as port:
        use_hub(monkeypatch, port)
        monkeypatch.setattr(hub_module, "_PAUSES_S", (0.01, 0.01))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("HF_TOKEN", "hf_a-token-of-this-test")
        yield server


def use_hub(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """As HF_ENDPOINT does, which the library reads when it is imported."""
    endpoint = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def read(text: str, cache: Path) -> dict[str, bytes]:
    """Files of a repository that mirrors the URL."""
    url = parse_store_url(text)
    with open_mirrors([url], str(cache)) as folders:
        (folder,) = folders
        mirror = Mirror(url, folder, 1 << 30, threading.Event(), HubStore)
        mirror.sync()
        mirror.apply()
        paths = [path for path in folder.rglob("*") if path.is_file() and path.name != RECORD]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def expected(*paths: str) -> dict[str, bytes]:
    return {path: FILES[path] for path in paths}


def test_the_branch_main_is_mirrored(hub: HubServer, tmp_path: Path) -> None:
    assert read("hf://org/models", tmp_path) == expected("net/1/model.onnx", "net/config.yaml")
    assert sorted(hub.reads) == ["net/1/model.onnx", "net/config.yaml"]


def test_only_changed_files_of_the_next_commit_are_read(hub: HubServer, tmp_path: Path) -> None:
    read("hf://org/models", tmp_path)
    hub.reads.clear()
    hub.commit({**FILES, "net/config.yaml": b"name: net\nmax_batch_size: 4\n", "net/2/model.onnx": b"two"})
    files = read("hf://org/models", tmp_path)
    assert files["net/2/model.onnx"] == b"two"
    assert sorted(hub.reads) == ["net/2/model.onnx", "net/config.yaml"]


def test_a_commit_is_a_revision_and_a_folder_may_be_one_model(hub: HubServer, tmp_path: Path) -> None:
    first = hub.commit(FILES)
    hub.commit({"net/1/model.onnx": b"later"})
    assert read(f"hf://org/models@{first}", tmp_path)["net/1/model.onnx"] == WEIGHTS
    assert read("hf://org/models/net", tmp_path) == {"net/1/model.onnx": b"later"}


def test_cut_connections_and_throttling_are_no_errors(hub: HubServer, tmp_path: Path) -> None:
    hub.cuts, hub.slow_downs = 1, 2
    assert read("hf://org/models", tmp_path) == expected("net/1/model.onnx", "net/config.yaml")
    assert (hub.cuts, hub.slow_downs) == (0, 0)


def test_a_commit_in_the_middle_of_a_download_is_not_mixed(hub: HubServer, tmp_path: Path) -> None:
    new = {"net/1/model.onnx": b"new model", "net/1/model.onnx.data": b"new weights", "net/config.yaml": b"name: net\n"}
    hub.commit({**new, "net/1/model.onnx": b"old model", "net/1/model.onnx.data": b"old weights"})
    hub.before_file = lambda: hub.commit(new)
    assert read("hf://org/models", tmp_path) == new


def test_files_are_compared_with_their_digests(hub: HubServer, tmp_path: Path) -> None:
    for path, algorithm in (("net/1/model.onnx", "sha256"), ("net/config.yaml", "git")):
        hub.corrupt = {path}
        with pytest.raises(StoreError, match=f"{path} does not match its {algorithm}"):
            read("hf://org/models", tmp_path / algorithm)


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("hf://org/other", "hf://org/other@main does not exist or refuses access"),
        ("hf://org/models@nothing", "has no revision 'nothing'"),
        ("hf://org/models/nothing", "has no folder 'nothing'"),
    ],
)
def test_what_is_missing_is_named(hub: HubServer, tmp_path: Path, url: str, part: str) -> None:
    with pytest.raises(StoreError, match=part):
        read(url, tmp_path)


def test_the_token_is_sent_and_never_shown(hub: HubServer, tmp_path: Path) -> None:
    hub.token = "hf_a-token-of-this-test"
    assert read("hf://org/models", tmp_path)
    hub.token = "hf_another"
    with pytest.raises(StoreError, match="HF_TOKEN") as refused:
        read("hf://org/models", tmp_path)
    assert "hf_a" not in str(refused.value)


def test_a_hub_without_an_answer_is_named(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, 1)
    with pytest.raises(StoreError, match="check the network and HF_ENDPOINT"):
        read("hf://org/models", tmp_path)


def test_pages_of_another_host_get_no_token(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = hub.answer
    seen: list[str] = []

    def answer_other(handler: StoreHandler) -> None:
        seen.append(handler.path)
        handler.send(200, b"[]")

    with serve_http(answering(answer_other), "127.0.0.2") as port:

        def answer_tree(handler: StoreHandler) -> None:
            if "/tree/" in handler.path:
                link = f'<http://127.0.0.2:{port}/next>; rel="next"'
                handler.send(200, b"[]", {"Link": link, "Content-Type": "application/json"})
            else:
                answer(handler)

        monkeypatch.setattr(hub, "answer", answer_tree)
        with pytest.raises(StoreError, match=r"redirects to the host 127\.0\.0\.2, which is refused"):
            read("hf://org/models", tmp_path)
    assert seen == []


def test_files_of_another_host_are_read_without_the_token(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = hub.answer
    tokens: list[str | None] = []

    def answer_other(handler: StoreHandler) -> None:
        tokens.append(handler.headers.get("Authorization"))
        handler.send(200, WEIGHTS)

    with serve_http(answering(answer_other), "127.0.0.2") as port:

        def redirect(handler: StoreHandler) -> None:
            if handler.path.endswith("model.onnx"):
                digest = hashlib.sha256(WEIGHTS).hexdigest()
                headers = {"Location": f"http://127.0.0.2:{port}/file", "X-Linked-Etag": f'"{digest}"'}
                commit = handler.path.split("/resolve/")[1].partition("/")[0]
                handler.send(302, b"", {**headers, "X-Linked-Size": str(len(WEIGHTS)), "X-Repo-Commit": commit})
            else:
                answer(handler)

        monkeypatch.setattr(hub, "answer", redirect)
        assert read("hf://org/models", tmp_path)["net/1/model.onnx"] == WEIGHTS
    assert tokens == [None]


@pytest.mark.parametrize("stops", [False, True])
def test_a_listing_without_an_end_is_bounded(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    monkeypatch.setattr(hub_module, "_MAX_PAGES", 20)
    answer = hub.answer
    stop = threading.Event()

    def repeat(handler: StoreHandler) -> None:
        if "/tree/" in handler.path:
            link = f'<http://{handler.headers["Host"]}{handler.path}>; rel="next"'
            handler.send(200, b"[]", {"Link": link, "Content-Type": "application/json"})
            if stops:
                stop.set()
        else:
            answer(handler)

    monkeypatch.setattr(hub, "answer", repeat)
    expected_error, text = (Stopped, "^$") if stops else (StoreError, "a listing of more than 20 pages")
    with pytest.raises(expected_error, match=text):
        HubStore(parse_store_url("hf://org/models")).list_objects(stop)
