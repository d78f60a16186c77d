"""Configurations and files in a load request."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from headrace.config.documents import Document
from headrace.core.errors import BadRequest, TooLarge, Unavailable
from headrace.models import uploads
from headrace.models.uploads import PrivateFolder, check_files

LABELLED = Document("config", {"output": [{"name": "Y", "label_filename": "names/labels.txt"}, "no output"]})
MODEL = {"1/model.onnx": b"x"}


@pytest.mark.parametrize(
    "path",
    [
        "2/model.onnx",
        "1/model.onnx/model.onnx2",
        "1/a/b/weights.bin",
        "warmup/x",
        "initial_state/x",
        "names/labels.txt",
    ],
)
def test_files_of_a_model_are_accepted(path: str) -> None:
    check_files({"3/model.onnx": b"", path: b""}, LABELLED)


@pytest.mark.parametrize(
    "path",
    [
        "", "/", ".", "..", "/etc/passwd", "../x", "1/../../x", "1/..", "1/../1/x", "1\\x", "1/x\0y", "1/x\ny", "1/\x1b[31m",
        "1/\ud800", "1//x", "1/./x", "1/x/", "./1/x", "1", "01/x", "0/x", "-1/x", "\u0661/x", "99999999999999999999/x",
        "model.onnx", "config.pbtxt", "config.yaml", "labels.txt", "names", "other/labels.txt", "warmup", "~/x", "$(id)/x",
        "initial_state",
        "1/" + "x" * 300, "1/" + "é" * 150, "1/" + "a/" * 20 + "x", "C:/x", "//host/share",
    ],
)  # fmt: skip
def test_every_other_path_is_refused(path: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check_files(MODEL | {path: b""}, LABELLED)
    str(refused.value).encode("ascii")  # can be sent back and logged
    assert str(refused.value).isprintable()


def test_a_file_cannot_be_a_folder_too() -> None:
    with pytest.raises(BadRequest, match="file:1/a"):
        check_files({"1/a": b"", "1/a/b/c": b""}, LABELLED)


def test_files_without_a_version_are_refused() -> None:
    with pytest.raises(BadRequest, match="no version"):
        check_files({"warmup/x": b""}, LABELLED)


def test_too_many_and_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TooLarge):
        check_files({f"1/{number}": b"" for number in range(uploads.MAX_FILES + 1)}, LABELLED)
    monkeypatch.setattr(uploads, "MAX_BYTES", 10)
    with pytest.raises(TooLarge):
        check_files({"1/a": bytes(6), "1/b": bytes(5)}, LABELLED)


def test_a_private_folder_is_unreadable_to_others_and_removed_with_its_last_user() -> None:
    private = PrivateFolder("m", {"1/model.onnx": b"abc", "1/deep/er/x": b""})
    assert stat.S_IMODE(private.repository.stat().st_mode) == 0o700
    assert (private.path / "1" / "model.onnx").read_bytes() == b"abc"
    assert private.path.parent == private.repository
    private.acquire()
    private.release()
    assert private.path.is_dir()
    private.release()
    assert not private.repository.exists()


def test_files_that_cannot_be_stored_leave_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(Unavailable) as refused:
        PrivateFolder("m", {"1/a": b"", "1/a/b": b""})
    assert str(tmp_path) not in str(refused.value)
    assert list(tmp_path.iterdir()) == []
