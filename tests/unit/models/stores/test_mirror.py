"""A mirror of a store in memory: what is downloaded, what appears in the repository and when, what survives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from headrace.config.files import folder_bytes
from headrace.core.store_url import parse_store_url
from headrace.models.stores.base import Stopped, StoreError
from headrace.models.stores.cache import open_mirrors
from headrace.models.stores.mirror import Mirror
from headrace.models.stores.unit_records import RECORD

from tests.support.memory_store import MemoryStore

URL = parse_store_url("s3://bucket/models")


class Mirrored:
    """A mirror of a store in memory; `reopen` is the next server."""

    def __init__(self, cache: Path, bound_bytes: int = 1 << 20) -> None:
        self.store = MemoryStore()
        self.cache = cache
        self.bound_bytes = bound_bytes
        self.stop = threading.Event()
        self._context = open_mirrors([URL], str(cache))
        self.reopen(is_first=True)

    def reopen(self, is_first: bool = False) -> None:
        if not is_first:
            self.close()
        self._context = open_mirrors([URL], str(self.cache))
        (self.repository,) = self._context.__enter__()
        self.mirror = Mirror(URL, self.repository, self.bound_bytes, self.stop, lambda _url: self.store)

    def close(self) -> None:
        self._context.__exit__(None, None, None)

    def files(self) -> dict[str, bytes]:
        """Served files, without records."""
        paths = [path for path in self.repository.rglob("*") if path.is_file() and path.name != RECORD]
        return {path.relative_to(self.repository).as_posix(): path.read_bytes() for path in paths}

    def sync(self) -> dict[str, bytes]:
        self.store.fetched.clear()
        self.mirror.sync()
        self.mirror.apply()
        return self.files()

    def fetched(self) -> list[str]:
        return sorted(path for path, _ in self.store.fetched)


@pytest.fixture
def mirrored(tmp_path: Path) -> Iterator[Mirrored]:
    result = Mirrored(tmp_path / "cache")
    result.store.objects = {
        "a/config.yaml": b"name: a\n",
        "a/warmup/x": b"123",
        "a/1/model.onnx": b"one",
        "a/1/weights/w.bin": b"weights",
        "b/1/model.onnx": b"b",
    }
    yield result
    result.close()


def test_the_repository_has_the_objects(mirrored: Mirrored) -> None:
    assert mirrored.sync() == mirrored.store.objects
    assert mirrored.mirror.sync() is False
    assert mirrored.mirror.apply() is False


def test_only_changed_objects_are_read(mirrored: Mirrored) -> None:
    mirrored.sync()
    mirrored.store.objects |= {"a/1/model.onnx": b"new", "b/2/model.onnx": b"two"}
    del mirrored.store.objects["a/warmup/x"]
    assert mirrored.sync() == mirrored.store.objects
    assert mirrored.fetched() == ["a/1/model.onnx", "b/2/model.onnx"]


def test_nothing_appears_before_apply(mirrored: Mirrored) -> None:
    mirrored.sync()
    before = mirrored.files()
    mirrored.store.objects |= {"a/1/model.onnx": b"new", "c/1/model.onnx": b"c"}
    assert mirrored.mirror.sync() is True
    assert mirrored.files() == before
    assert mirrored.mirror.apply() is True
    assert mirrored.files() == mirrored.store.objects


def test_folders_of_unchanged_versions_stay_the_same(mirrored: Mirrored) -> None:
    mirrored.sync()
    inode = (mirrored.repository / "b" / "1").stat().st_ino
    (mirrored.repository / "b" / "1" / "model.fp16.engine").write_bytes(b"built here")
    mirrored.store.objects |= {"b/config.yaml": b"name: b\n", "a/1/model.onnx": b"new"}
    assert mirrored.sync()["b/1/model.fp16.engine"] == b"built here"
    assert (mirrored.repository / "b" / "1").stat().st_ino == inode


def test_removed_versions_and_models_disappear_and_come_back_without_a_download(mirrored: Mirrored) -> None:
    mirrored.sync()
    model = mirrored.store.objects.pop("b/1/model.onnx")
    assert mirrored.sync() == mirrored.store.objects
    assert not (mirrored.repository / "b").exists()
    mirrored.store.objects["b/1/model.onnx"] = model
    assert mirrored.sync() == mirrored.store.objects
    assert mirrored.fetched() == []


def test_a_version_of_a_pipeline_may_be_empty(mirrored: Mirrored) -> None:
    mirrored.store.objects |= {"p/config.yaml": b"ensemble", "p/1": b""}
    mirrored.sync()
    assert (mirrored.repository / "p" / "1").is_dir()
    mirrored.reopen()
    mirrored.sync()
    assert mirrored.fetched() == []


def test_a_change_in_the_middle_of_a_download_repeats_the_version(mirrored: Mirrored) -> None:
    new = {"a/1/model.onnx": b"two", "a/1/weights/w.bin": b"WEIGHTS"}
    seen: list[dict[str, bytes]] = []

    def replace(path: str) -> None:
        if path == "a/1/weights/w.bin" and new.keys() & mirrored.store.objects.keys():
            mirrored.store.objects |= new
            seen.append(mirrored.files())

    mirrored.store.on_fetch = replace
    assert mirrored.sync() == mirrored.store.objects
    assert mirrored.files()["a/1/model.onnx"] == b"two"
    assert seen[0] == {}


def test_a_file_replaced_after_it_was_read_is_noticed(mirrored: Mirrored) -> None:
    """The listing after the downloads differs from the one before: the version is read again before it appears."""
    mirrored.sync()
    mirrored.store.objects |= {"a/1/model.onnx": b"mixed", "a/1/weights/w.bin": b"w2"}
    replaced = False

    def replace(path: str) -> None:
        nonlocal replaced
        if path == "b/1/extra" and not replaced:
            replaced = True
            mirrored.store.objects["a/1/model.onnx"] = b"whole"

    mirrored.store.objects["b/1/extra"] = b"later"
    mirrored.store.on_fetch = replace
    files = mirrored.sync()
    assert (files["a/1/model.onnx"], files["a/1/weights/w.bin"]) == (b"whole", b"w2")


def test_a_repository_that_never_rests_is_an_error_and_stays_as_it_was(mirrored: Mirrored) -> None:
    before = mirrored.sync()
    count = 0

    def replace(path: str) -> None:
        nonlocal count
        count += 1
        mirrored.store.objects["a/1/model.onnx"] = b"%d" % count

    mirrored.store.objects["a/1/model.onnx"] = b"0"
    mirrored.store.on_fetch = replace
    with pytest.raises(StoreError, match="keeps changing while it is downloaded"):
        mirrored.mirror.sync()
    mirrored.mirror.apply()
    assert mirrored.files() == before


def test_a_cut_download_goes_on_where_it_ended(mirrored: Mirrored) -> None:
    mirrored.store.objects = {"a/1/model.onnx": bytes(range(200))}
    mirrored.store.cut_after = 120
    with pytest.raises(StoreError, match="cut"):
        mirrored.mirror.sync()
    mirrored.mirror.apply()
    assert mirrored.files() == {}
    mirrored.reopen()  # also by the next server
    assert mirrored.sync() == mirrored.store.objects
    assert mirrored.store.fetched == [("a/1/model.onnx", 120)]


def test_one_broken_object_holds_back_its_version_only(mirrored: Mirrored) -> None:
    mirrored.store.has_digests = True
    before = mirrored.sync()
    mirrored.store.objects |= {"a/2/model.onnx": b"broken", "a/1/model.onnx": b"new", "c/1/model.onnx": b"c"}
    mirrored.store.broken = {"a/2/model.onnx"}
    with pytest.raises(StoreError, match=r"s3://bucket/models/a/2/model\.onnx does not match its md5"):
        mirrored.mirror.sync()
    mirrored.mirror.apply()
    expected = {**before, "a/1/model.onnx": b"new", "c/1/model.onnx": b"c"}
    assert mirrored.files() == expected
    mirrored.store.broken = set()
    assert mirrored.sync() == mirrored.store.objects


def test_versions_wait_for_the_configuration_of_their_model(mirrored: Mirrored) -> None:
    mirrored.store.has_digests = True
    before = mirrored.sync()
    mirrored.store.objects |= {"a/config.yaml": b"version_policy", "a/2/model.onnx": b"two"}
    mirrored.store.broken = {"a/config.yaml"}
    with pytest.raises(StoreError, match=r"config\.yaml does not match"):
        mirrored.mirror.sync()
    mirrored.mirror.apply()
    assert mirrored.files() == before


def test_uncertain_digests_that_never_match_are_etags_of_encrypted_objects(mirrored: Mirrored) -> None:
    mirrored.store.has_digests, mirrored.store.are_certain = True, False
    mirrored.store.objects = {"a/1/model.onnx": b"content"}
    mirrored.store.broken = {"a/1/model.onnx"}
    assert mirrored.sync() == {"a/1/model.onnx": bytes(byte ^ 1 for byte in b"content")}
    assert len(mirrored.store.fetched) == 2  # read twice alike


def test_the_next_server_reads_nothing_again(mirrored: Mirrored) -> None:
    mirrored.sync()
    mirrored.reopen()
    assert mirrored.sync() == mirrored.store.objects
    assert mirrored.fetched() == []


def test_files_that_were_changed_by_hand_are_read_again(mirrored: Mirrored) -> None:
    mirrored.sync()
    (mirrored.repository / "a" / "1" / "model.onnx").write_bytes(b"by hand")
    (mirrored.repository / "b" / "1" / RECORD).write_text("{")
    (mirrored.repository / "stranger").mkdir()
    mirrored.reopen()
    assert mirrored.sync() == mirrored.store.objects
    assert {"a/1/model.onnx", "b/1/model.onnx"} <= set(mirrored.fetched())


def test_an_interrupted_apply_is_finished_by_the_next_server(mirrored: Mirrored) -> None:
    mirrored.sync()
    mirrored.store.objects["a/1/model.onnx"] = b"new"
    mirrored.mirror.sync()  # and the server is killed before `apply`
    mirrored.reopen()
    assert mirrored.sync() == mirrored.store.objects
    assert mirrored.fetched() == []


def test_unused_versions_are_evicted_for_new_ones(mirrored: Mirrored) -> None:
    mirrored.bound_bytes = 40_000
    mirrored.reopen()
    for number in range(6):
        mirrored.store.objects["a/1/model.onnx"] = b"%d" % number * 10_000
        assert mirrored.sync() == mirrored.store.objects
        assert folder_bytes(mirrored.cache) < 45_000
    assert folder_bytes(mirrored.cache) > 20_000  # the last replaced one stays


def test_what_is_served_is_never_evicted(mirrored: Mirrored) -> None:
    mirrored.bound_bytes = 30_000
    mirrored.reopen()
    mirrored.store.objects["a/1/model.onnx"] = b"1" * 20_000
    before = mirrored.sync()
    mirrored.store.objects["a/2/model.onnx"] = b"2" * 20_000
    with pytest.raises(StoreError, match="raise --repository-cache-bytes"):
        mirrored.mirror.sync()
    mirrored.mirror.apply()
    assert mirrored.files() == before


def test_stop_ends_a_download(mirrored: Mirrored) -> None:
    mirrored.store.on_fetch = lambda _path: mirrored.stop.set()
    with pytest.raises(Stopped):
        mirrored.mirror.sync()


def test_an_unreadable_store_leaves_the_repository(mirrored: Mirrored) -> None:
    before = mirrored.sync()
    mirrored.store.error = StoreError("away")
    with pytest.raises(StoreError, match="away"):
        mirrored.mirror.sync()
    assert mirrored.mirror.apply() is False
    mirrored.store.error, mirrored.store.objects = None, {}
    with pytest.raises(StoreError, match="has no objects"):
        mirrored.mirror.sync()
    assert mirrored.mirror.apply() is False
    assert mirrored.files() == before
