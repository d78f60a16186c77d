from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from headrace.config.machine import Machine
from headrace.config.manifest import STAMP_FILE, Stamp, choose_from_folder, read_stamps, write_stamp
from headrace.core.errors import ConfigError
from headrace_engines import store as publishing
from headrace_engines.errors import BuildError
from headrace_engines.store import Store, StoreEntry, publish

from tests.support.engine_projects import stamp_of
from tests.support.waiting import on_threads

ROOT = Path(__file__).parents[3]
CPU = Machine("onnxruntime", "1.31", "cpu", "avx2")
GPU = Machine("tensorrt", "10.6.0", "NVIDIA H200", "9.0", 550)
ONNX, CONFIG = "a" * 64, "b" * 64


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "repository" / "m" / "1"
    path.mkdir(parents=True)
    (path / "model.onnx").write_bytes(b"the source")
    (path / "notes.txt").write_bytes(b"somebody's own")
    return path


def _entry(store: Store, name: str, suffix: str = ".plan") -> StoreEntry:
    key = store.key({"name": name})
    with store.building(key), store.scratch() as scratch:
        (scratch / f"x{suffix}").write_bytes(name.encode() * 1000)
        return store.add(key, scratch / f"x{suffix}", {})


def _stamp(entry: StoreEntry, machine: Machine = CPU) -> Stamp:
    return stamp_of(entry, machine, (ONNX, CONFIG))


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"model.onnx", "notes.txt"}


def test_an_engine_is_published_as_the_file_in_the_store(store: Store, folder: Path) -> None:
    entry = _entry(store, "a")
    publish(entry.path, folder, _stamp(entry))
    choice = choose_from_folder(folder, ONNX, CONFIG, CPU)
    assert choice.path == folder / entry.path.name
    assert choice.path.samefile(entry.path)
    assert _names(folder) == {entry.path.name, STAMP_FILE}
    assert (folder / "model.onnx").read_bytes() == b"the source"


def test_files_without_a_stamp_are_removed(store: Store, folder: Path) -> None:
    old, new, gpu = _entry(store, "old", ".onnx"), _entry(store, "new", ".onnx"), _entry(store, "gpu")
    (folder / f".{old.path.name}.4711.0123abcd.tmp").write_bytes(b"half of a killed builder's")
    (folder / "model.0123456789ab.onnx").write_bytes(b"nobody's")
    publish(gpu.path, folder, _stamp(gpu, GPU))
    publish(old.path, folder, _stamp(old))
    publish(new.path, folder, _stamp(new))
    assert _names(folder) == {new.path.name, gpu.path.name, STAMP_FILE}
    assert {stamp.machine for stamp in read_stamps(folder)} == {CPU, GPU}
    assert store.find(old.key) is not None, "the store keeps it"
    assert (folder / "notes.txt").exists()


@pytest.mark.parametrize("links", [True, False])
def test_publishing_again_touches_nothing(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    entry = _entry(store, "a")
    if not links:
        monkeypatch.setattr(publishing.os, "link", _failing(errno.EXDEV))
    publish(entry.path, folder, _stamp(entry))
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
    publish(entry.path, folder, _stamp(entry))
    assert before == {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_the_engine_is_copied_if_linking_fails(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    entry = _entry(store, "a")
    monkeypatch.setattr(publishing.os, "link", _failing(number))
    publish(entry.path, folder, _stamp(entry))
    published = folder / entry.path.name
    assert published.read_bytes() == entry.path.read_bytes()
    assert not published.samefile(entry.path)
    assert published.stat().st_mode == entry.path.stat().st_mode
    assert _names(folder) == {entry.path.name, STAMP_FILE}


def _failing(number: int) -> Any:
    def fail(*names: Any, **_: Any) -> Any:
        raise OSError(number, os.strerror(number), *([str(names[0])] if names else []))

    return fail


def test_a_full_disk_is_reported_with_the_needed_bytes(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = _entry(store, "a" * 200)
    monkeypatch.setattr(publishing.os, "link", _failing(errno.EXDEV))
    monkeypatch.setattr(publishing, "free_bytes", lambda _folder: entry.size_bytes - 1)
    with pytest.raises(BuildError, match=r"the disk is full \(200 kB are needed, .*stays in the store"):
        publish(entry.path, folder, _stamp(entry))
    assert _names(folder) == set()
    assert store.find(entry.key) is not None


@pytest.mark.parametrize("step", ["add_stamp", "sync", "_link_or_copy", "locked_folder"])
@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_read_only_repository_is_unchanged(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int
) -> None:
    old, new = _entry(store, "old"), _entry(store, "new")
    publish(old.path, folder, _stamp(old))
    with monkeypatch.context() as patch:
        patch.setattr(publishing, step, _failing(number))
        with pytest.raises(BuildError, match="stays in the store"):
            publish(new.path, folder, _stamp(new))
    assert _names(folder) == {old.path.name, STAMP_FILE}
    assert choose_from_folder(folder, ONNX, CONFIG, CPU).path == folder / old.path.name
    assert store.find(new.key) is not None


def test_a_removed_artefact_or_folder_is_reported(store: Store, folder: Path) -> None:
    entry = _entry(store, "a")
    with pytest.raises(BuildError, match="absent has changed meanwhile"):
        publish(entry.path, folder.with_name("absent"), _stamp(entry))
    store.remove(entry.key)
    with pytest.raises(BuildError, match="the store has changed meanwhile"):
        publish(entry.path, folder, _stamp(entry))
    assert _names(folder) == set()


def test_a_damaged_engine_and_a_stamp_of_another_are_not_published(store: Store, folder: Path) -> None:
    entry = _entry(store, "a")
    with pytest.raises(BuildError):
        publish(entry.path, folder, replace(_stamp(entry), size_bytes=-1))
    entry.path.chmod(0o644)
    entry.path.write_bytes(b"b" * entry.size_bytes)
    with pytest.raises(BuildError, match=r"damaged.*--rebuild"):
        publish(entry.path, folder, _stamp(entry))
    assert _names(folder) == set()


def test_a_published_file_that_was_changed_is_put_right(store: Store, folder: Path) -> None:
    entry = _entry(store, "a")
    (folder / entry.path.name).symlink_to("/etc/passwd")
    publish(entry.path, folder, _stamp(entry))
    assert choose_from_folder(folder, ONNX, CONFIG, CPU).path is not None
    assert Path("/etc/passwd").exists()


def test_builders_for_two_machines_publish_at_once(store: Store, folder: Path) -> None:
    entries = {machine: _entry(store, machine.device) for machine in (CPU, GPU)}

    def build(machine: Machine) -> None:
        for _ in range(10):
            publish(entries[machine].path, folder, _stamp(entries[machine], machine))

    on_threads(build, entries)
    assert {stamp.machine: stamp.artefact for stamp in read_stamps(folder)} == {
        machine: entry.path.name for machine, entry in entries.items()
    }
    assert _names(folder) == {*(entry.path.name for entry in entries.values()), STAMP_FILE}


READER = """
import sys
from pathlib import Path
from headrace.config.manifest import Machine
from headrace.config.manifest import choose_from_folder


folder, machine = Path(sys.argv[1]), Machine("onnxruntime", "1.31", "cpu", "avx2")
seen, looks = set(), 0
print("reads", flush=True)
while not (folder / "enough").exists():
    choice = choose_from_folder(folder, "a" * 64, "b" * 64, machine)
    looks += 1
    if choice.stamp is None:
        sys.exit(f"look {looks}: {choice.reason}")
    seen.add(choice.stamp.artefact)
print(looks, len(seen))
"""


def test_a_reader_always_finds_a_whole_engine_while_others_are_published(store: Store, folder: Path) -> None:
    entries = [_entry(store, "a" * 50), _entry(store, "b" * 50)]
    publish(entries[0].path, folder, _stamp(entries[0]))
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == "reads\n"
    for number in range(1, 101):
        publish(entries[number % 2].path, folder, _stamp(entries[number % 2]))
    (folder / "enough").touch()
    output, error = reader.communicate(timeout=30)
    assert reader.returncode == 0, error
    looks, seen = map(int, output.split())
    assert looks > 20
    assert seen == 2


def test_a_stamp_of_a_folder_that_is_full_of_them_is_refused(store: Store, folder: Path) -> None:
    entry = _entry(store, "a")
    write_stamp(folder, replace(_stamp(_entry(store, "gpu"), GPU), kept=("x" * 900_000,)))
    with pytest.raises(BuildError, match="larger than"):
        publish(entry.path, folder, replace(_stamp(entry), kept=("x" * 900_000,)))
    with pytest.raises(ConfigError, match="larger than"):
        write_stamp(folder, replace(_stamp(entry), kept=("x" * 900_000,)))
    assert _names(folder) == {STAMP_FILE}
