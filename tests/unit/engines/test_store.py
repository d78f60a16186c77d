from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from headrace.config.machine import Machine
from headrace_engines import store as store_errors
from headrace_engines import store as store_module
from headrace_engines.errors import BuildError
from headrace_engines.store import ENTRY_FILE, Store, StoreEntry


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


KEY = Store.key({"model": "a"})


def _add(store: Store, key: str = KEY, content: bytes = b"engine", **facts: Any) -> StoreEntry:
    with store.building(key), store.scratch() as scratch:
        artefact = scratch / "model.plan"
        artefact.write_bytes(content)
        return store.add(key, artefact, facts)


def _nothing_but(store: Store, *keys: str) -> bool:
    """True if the store holds these entries, sound, and no trace of anything else."""
    left = {path.relative_to(store.root).parts[0] for path in store.root.rglob("*") if path.is_file()}
    return left == set(keys) and all(store.find(key) for key in keys)


def test_the_key_is_that_of_the_parts_in_any_order() -> None:
    parts = {"onnx": "a", "machine": {"device": "cpu", "version": "1"}}
    same = {"machine": {"version": "1", "device": "cpu"}, "onnx": "a"}
    assert Store.key(parts) == Store.key(same)
    assert len(Store.key(parts)) == 64
    others = [{**parts, "onnx": "b"}, {"onnx": "a"}, {**parts, "machine": {"device": "cpu", "version": "2"}}]
    assert len({Store.key(one) for one in [parts, *others]}) == 4


def test_added_entries_are_visible_to_every_store(store: Store) -> None:
    assert store.find(KEY) is None
    assert not store.root.exists(), "looking writes nothing"
    entry = _add(store, kept=("a", "b"), precision="int8", seconds=0.5)
    assert entry.facts == {
        "kept": ["a", "b"],
        "precision": "int8",
        "seconds": 0.5,
        "artefact_sha256": entry.sha256,
        "size_bytes": 6,
    }
    assert entry.path.read_bytes() == b"engine"
    assert entry.path.name == f"model.{KEY[:12]}.plan"
    assert entry.path.stat().st_mode & 0o222 == 0
    assert store.find(KEY) == Store(store.root).find(KEY) == entry
    assert _nothing_but(store, KEY)


def test_a_file_from_elsewhere_is_copied(store: Store, tmp_path: Path) -> None:
    artefact = tmp_path / "x.plan"
    artefact.write_bytes(b"mine")
    assert store.add(KEY, artefact, {}).path.read_bytes() == b"mine"
    assert artefact.read_bytes() == b"mine"


def test_building_anew_replaces(store: Store) -> None:
    _add(store, content=b"old")
    _add(store, content=b"newer")
    result = store.find(KEY)
    assert result is not None
    assert result.path.read_bytes() == b"newer"
    assert _nothing_but(store, KEY)


def _truncate(entry: StoreEntry) -> None:
    _write(entry.path, b"eng")


def _flip(entry: StoreEntry) -> None:
    _write(entry.path, b"enginE")


def _write(path: Path, content: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _flip,
        lambda entry: entry.path.unlink(),
        lambda entry: (entry.path.unlink(), entry.path.symlink_to("/etc/passwd")),
        lambda entry: entry.path.with_name(ENTRY_FILE).unlink(),
        lambda entry: entry.path.with_name(ENTRY_FILE).write_bytes(b'{"format": 1, "artef'),
        lambda entry: entry.path.with_name(ENTRY_FILE).write_bytes(b"[" * 100_000),
        lambda entry: entry.path.with_name(ENTRY_FILE).write_bytes(b" " * (5 << 20)),
        lambda entry: entry.path.with_name(ENTRY_FILE).write_text(
            entry.path.with_name(ENTRY_FILE).read_text().replace(entry.path.name, "../../x.plan")
        ),
        lambda entry: (shutil.rmtree(entry.path.parent), entry.path.parent.write_bytes(b"")),
    ],
    ids=["short", "flipped", "gone", "link", "no stamp", "half a stamp", "deep", "huge", "other name", "no folder"],
)
def test_a_damaged_entry_is_a_miss_and_is_replaced(store: Store, damage: Any) -> None:
    entry = _add(store)
    damage(entry)
    again = Store(store.root)
    assert again.find(KEY) is None
    assert _add(again).path.read_bytes() == b"engine"
    assert _nothing_but(again, KEY)


def test_an_artefact_is_read_once_and_again_when_it_changes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = _add(store)
    read: list[str] = []
    real = store_module.artefact_problem

    def spy(path: Path, size_bytes: int, sha256: str) -> str:
        read.append(sha256)
        return real(path, size_bytes, sha256)

    monkeypatch.setattr(store_module, "artefact_problem", spy)
    assert store.find(KEY) == store.find(KEY) == entry
    _flip(entry)
    os.utime(entry.path, ns=(0, 1))
    assert store.find(KEY) is None
    assert read == [entry.sha256, "", entry.sha256]


def test_finding_counts_as_use(store: Store) -> None:
    entry = _add(store)
    os.utime(entry.path.with_name(ENTRY_FILE), (1000, 1000))
    assert store.read(KEY).used_s == 1000
    assert store.find(KEY) is not None
    assert store.read(KEY).used_s > time.time() - 60


@pytest.mark.parametrize("key", ["", "..", "../x", "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_invalid_keys_are_refused(store: Store, key: str) -> None:
    with pytest.raises(ValueError, match="must be 64 hex digits"):
        store.find(key)


def test_an_artefact_is_one_file_of_a_known_kind(store: Store, tmp_path: Path) -> None:
    artefact = tmp_path / "model.onnx"
    artefact.write_bytes(b"x")
    (tmp_path / "model.onnx.data").write_bytes(b"x")
    with pytest.raises(BuildError, match="2 GB"):
        store.add(KEY, artefact, {})
    with pytest.raises(ValueError, match=r"\.onnx or \.plan"):
        store.add(KEY, tmp_path / "model.engine", {})
    assert store.keys() == []


def test_timing_caches_are_separate_for_each_machine(store: Store) -> None:
    h200 = Machine("tensorrt", "10.6.0", "NVIDIA H200", "9.0", 550)
    others = [
        Machine("tensorrt", "10.7.0", "NVIDIA H200", "9.0", 550),
        Machine("tensorrt", "10.6.0", "NVIDIA H100/../x", "9.0", 550),
        Machine("tensorrt", "10.6.0", "NVIDIA H200", "9.0", 570),
    ]
    paths = {store.timing_cache(machine) for machine in [h200, *others]}
    assert len(paths) == 4
    assert {path.parent for path in paths} == {store.root / "timing"}
    assert store.tables.is_dir()
    assert store.keys() == []


# Building


def test_a_second_builder_waits_and_reuses_the_entry_of_the_first(store: Store) -> None:
    notes: list[str] = []
    result: list[StoreEntry | None] = []
    waits = threading.Event()

    def second() -> None:
        other = Store(store.root)
        with other.building(KEY, lambda text: (notes.append(text), waits.set())):
            result.append(other.find(KEY))

    with store.building(KEY):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(60)
        entry = _add(store)
    thread.join(60)
    assert result == [entry]
    assert notes == [f"waits for another builder of the same engine (process {os.getpid()})"]
    assert _nothing_but(store, KEY)


def test_builders_of_different_engines_do_not_wait(store: Store) -> None:
    with store.building(KEY), Store(store.root).building(Store.key({"model": "b"}), pytest.fail):
        pass


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_an_aborted_builder_leaves_no_files(store: Store, error: BaseException) -> None:
    def build() -> None:
        with store.building(KEY), store.scratch() as scratch:
            (scratch / "half").write_bytes(b"x")
            raise error

    with pytest.raises(type(error)):
        build()
    assert _nothing_but(store)
    assert _add(store)


def _no_space(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, r"the disk is full \(.* are free\): make room.*--cache"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EFBIG, "ulimit -f"),
    ],
)
def test_a_full_disk_is_reported_with_a_remedy(store: Store, number: int, message: str) -> None:
    with pytest.raises(BuildError, match=message) as caught, store.scratch():
        raise OSError(number, os.strerror(number))
    assert str(store.root) in str(caught.value)
    assert _nothing_but(store)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_read_only_store_is_reported_with_a_remedy(store: Store, number: int) -> None:
    message = r"half cannot be written \(.*\): check its permissions.*--cache"
    with pytest.raises(BuildError, match=message), store.scratch() as scratch:
        raise OSError(number, os.strerror(number), str(scratch / "half"))


def test_other_errors_propagate_unchanged(store: Store, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), store.scratch():
        (tmp_path / "calibration").read_bytes()
    with pytest.raises(ZeroDivisionError), store.scratch():
        _ = 1 / 0


def test_a_library_that_stumbles_over_a_full_disk_is_understood(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_errors, "free_bytes", lambda _folder: 4096)
    with pytest.raises(BuildError, match=r"the disk is full \(4\.1 kB are free\)"), store.scratch():
        raise RuntimeError("basic_ios::clear: iostream error")


@pytest.mark.parametrize("step", ["sync", "write_durably", "onnx_digest"])
def test_no_step_of_adding_leaves_half_an_entry(store: Store, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(store_module, step, _no_space)
        with pytest.raises(BuildError, match="the disk is full"):
            _add(store)
    assert _nothing_but(store)
    assert _add(store)


def test_an_impossible_store_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for index in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        store = Store(index)
        assert (store.find(KEY), store.keys()) == (None, [])
        with pytest.raises(BuildError, match="--cache"), store.building(KEY):
            pass
    with pytest.raises(BuildError, match="--cache"):
        Store(Path("~unknown-account/x"))


def test_removal_counts_files_without_other_links(store: Store, tmp_path: Path) -> None:
    entry = _add(store, content=bytes(5000))
    stamp_bytes = entry.path.with_name(ENTRY_FILE).stat().st_size
    assert store.remove(KEY, dry_run=True) == 5000 + stamp_bytes
    os.link(entry.path, tmp_path / "published.plan")
    assert store.remove(KEY, dry_run=True) == stamp_bytes
    assert store.find(KEY) is not None
    assert store.remove(KEY) == stamp_bytes
    assert store.keys() == []
    assert (tmp_path / "published.plan").stat().st_size == 5000


def test_entries_being_built_are_not_removed(store: Store) -> None:
    _add(store)
    with store.building(KEY):
        assert Store(store.root).remove(KEY) is None
        assert store.find(KEY) is not None
    assert Store(store.root).remove(KEY) is not None


def test_facts_are_stored_as_plain_data(store: Store) -> None:
    entry = _add(store, accuracy={"max_abs": float("inf")})
    assert entry.facts["accuracy"] == {"max_abs": float("inf")}
    assert json.loads(entry.path.with_name(ENTRY_FILE).read_text())["key"] == KEY
