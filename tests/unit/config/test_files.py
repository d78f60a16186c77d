from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from headrace.config import files
from headrace.config.files import is_temporary, locked, locked_folder, temporary_name, write_durably


def test_a_lock_excludes_threads_and_reports_waiting(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    waited, entered = threading.Event(), threading.Event()

    def second() -> None:
        with locked(path, waited.set):
            entered.set()

    with locked(path):
        thread = threading.Thread(target=second)
        thread.start()
        assert waited.wait(60)
        assert not entered.is_set()
        with pytest.raises(BlockingIOError), locked(path, block=False):
            pass
    thread.join(60)
    assert entered.is_set()


def test_a_waiter_for_a_removed_lock_file_locks_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    waited = threading.Event()
    seen: list[bool] = []

    def second() -> None:
        with locked(path, waited.set) as descriptor:
            seen.append(os.fstat(descriptor).st_ino == path.stat().st_ino)

    with locked(path):
        thread = threading.Thread(target=second)
        thread.start()
        assert waited.wait(60)
        path.unlink()
    thread.join(60)
    assert seen == [True]


def test_a_folder_is_locked_without_a_trace(tmp_path: Path) -> None:
    entered = threading.Event()

    def second() -> None:
        with locked_folder(tmp_path):
            entered.set()

    with locked_folder(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.05)
        assert list(tmp_path.iterdir()) == []
    thread.join(60)
    assert entered.is_set()


def test_a_lock_file_replaces_the_folder_where_folders_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.fcntl.flock

    def as_nfs(descriptor: int, operation: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(descriptor, operation)

    monkeypatch.setattr(files.fcntl, "flock", as_nfs)
    with locked_folder(tmp_path):
        (lock,) = tmp_path.iterdir()
        assert lock.name.startswith(".")
        with pytest.raises(BlockingIOError), locked(lock, block=False):
            pass


def test_a_file_that_cannot_be_written_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_durably(path, b"old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_durably(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_only_headrace_temporary_files_are_recognized() -> None:
    assert is_temporary(temporary_name(Path("x/build.json")).name)
    assert not any(is_temporary(name) for name in ("model.onnx", ".notes.tmp", ".a.b.tmp", "a.1.00000000.tmp"))
