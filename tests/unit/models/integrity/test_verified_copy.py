"""Verified copies of models: what was compared is what is read later."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
from headrace.config.files import create_process_folder
from headrace.core.errors import ConfigError
from headrace.models.integrity import checksums
from headrace.models.integrity.checksums import CHECKSUMS, write_checksums
from headrace.models.integrity.verified_copy import ModelVerifier, open_verifier


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model with checksums."""
    folder = tmp_path / "repository" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(b"weights")
    (folder / "2").mkdir()
    (folder / "config.yaml").write_text("name: m\n")
    write_checksums(folder)
    return folder


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state folder that does not exist yet."""
    return tmp_path / "state"


def test_a_copy_has_the_listed_files_and_empty_versions_only(model: Path, state: Path) -> None:
    (model / "1" / ".hidden").write_text("x")
    (model / "1" / "__pycache__").mkdir()
    (model / "1" / "__pycache__" / "model.pyc").write_text("x")
    (model / "1" / "model.onnx").chmod(0o755)
    copy = open_verifier("", state).copy(model, model.parent, None)
    assert copy is not None
    assert {path.relative_to(copy.path).as_posix() for path in copy.path.rglob("*")} == {
        "1", "1/model.onnx", "2", "config.yaml"
    }  # fmt: skip
    assert copy.path.name == "m"
    assert os.access(copy.path / "1" / "model.onnx", os.X_OK)
    assert stat.S_IMODE(copy.path.parent.parent.stat().st_mode) == 0o700
    copy.release()
    assert list(state.iterdir()) == []


def test_a_model_without_checksums_is_not_copied(model: Path, state: Path) -> None:
    (model / CHECKSUMS).unlink()
    verifier = open_verifier("", state)
    assert verifier.copy(model, model.parent, None) is None
    assert verifier.check(model, model.parent) is None
    assert not state.exists()


def test_a_refused_model_leaves_no_copy(model: Path, state: Path) -> None:
    (model / "1" / "model.onnx").write_bytes(b"Weights")
    with pytest.raises(ConfigError, match="has SHA-256"):
        open_verifier("", state).copy(model, model.parent, None)
    assert list(state.iterdir()) == []


def test_a_file_that_changes_behind_the_check_does_not_reach_the_copy(
    model: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = checksums.digest_file

    def replace_afterwards(path: Path, *args: object) -> str:
        digest = read(path, *args)  # type: ignore[arg-type]
        if path.is_relative_to(model):
            path.write_bytes(b"replaced")
        return digest

    monkeypatch.setattr("headrace.models.integrity.verified_copy.digest_file", replace_afterwards)
    copy = open_verifier("", state).copy(model, model.parent, None)
    assert copy is not None
    assert (model / "1" / "model.onnx").read_bytes() == b"replaced"
    assert (copy.path / "1" / "model.onnx").read_bytes() == b"weights"
    copy.release()


def test_a_file_that_grows_while_it_is_read_ends_and_is_refused(
    model: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "_BLOCK_BYTES", 1)
    file = model / "1" / "model.onnx"
    verifier = open_verifier("", state)
    opened = checksums.open_regular_file

    def growing(path: Path) -> object:
        stream = opened(path)
        if path == file:

            class Growing:
                def fileno(self) -> int:
                    return stream.fileno()

                def read(self, count: int) -> bytes:
                    with file.open("ab") as end:
                        end.write(b"more")
                    return stream.read(count)

                def __enter__(self) -> Growing:
                    return self

                def __exit__(self, *_error: object) -> None:
                    stream.close()

            return Growing()
        return stream

    monkeypatch.setattr(checksums, "open_regular_file", growing)
    with pytest.raises(ConfigError, match=r"m/1/model\.onnx: error: has SHA-256"):
        verifier.copy(model, model.parent, None)
    assert file.stat().st_size < 100


def test_the_same_checksums_give_the_present_copy_if_the_files_are_right(model: Path, state: Path) -> None:
    verifier = open_verifier("", state)
    first = verifier.copy(model, model.parent, None)
    assert first is not None
    again = verifier.copy(model, model.parent, first)
    assert again is first
    first.release()
    assert first.path.is_dir()
    (model / "config.yaml").write_text("name: x\n")
    with pytest.raises(ConfigError, match=r"m/config\.yaml"):
        verifier.copy(model, model.parent, first)
    write_checksums(model)
    second = verifier.copy(model, model.parent, first)
    assert second is not None
    assert second is not first
    first.release()
    assert not first.path.exists()
    assert (second.path / "config.yaml").read_text() == "name: x\n"
    second.release()
    assert list(state.iterdir()) == []


def test_a_full_disk_is_named_before_and_while_it_is_written(
    model: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", ("total", "used", "free"))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: usage(10, 5, 5))
        with pytest.raises(ConfigError, match=r"needs 15 bytes, 5 are free in .*state"):
            open_verifier("", state).copy(model, model.parent, None)

    def full(_path: Path, write: Callable[[bytes], object]) -> str:
        write(b"x")
        raise AssertionError("the error of the disk must end the copy")

    def fail(_stream: object, _block: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("headrace.models.integrity.verified_copy.digest_file", full)
        patch.setattr("headrace.models.integrity.verified_copy.write_block", fail)
        with pytest.raises(ConfigError, match="verified copy cannot be written: No space left on device"):
            open_verifier("", state).copy(model, model.parent, None)
    assert list(state.iterdir()) == []


def test_a_state_folder_that_cannot_be_used_is_replaced(model: Path, tmp_path: Path) -> None:
    # A state folder that is a file: the folder of temporary files is used.
    blocked = tmp_path / "file"
    blocked.write_text("")
    copy = open_verifier("", blocked).copy(model, model.parent, None)
    assert copy is not None
    copy.release()
    with pytest.raises(ConfigError, match="verified copy cannot be written"):
        ModelVerifier(None, [blocked]).copy(model, model.parent, None)


def test_copies_of_a_killed_server_are_removed_by_the_next_one(model: Path, state: Path) -> None:
    stale, descriptor = create_process_folder(state, "headrace-verified-")
    live, live_descriptor = create_process_folder(state, "headrace-verified-")
    os.close(descriptor)  # as the end of its process does
    copy = open_verifier("", state).copy(model, model.parent, None)
    assert copy is not None
    assert not stale.exists()
    assert live.exists()
    copy.release()
    os.close(live_descriptor)
