"""Compiled kernels in files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from headrace.runtimes.cuda.kernels.code_files import CodeFiles

KEY = ("NVRTC 13.0", "--gpu-architecture=sm_90", "source")


def test_code_is_read_by_what_it_was_compiled_from(tmp_path: Path) -> None:
    files = CodeFiles(tmp_path / "kernels")
    assert files.read(KEY) is None
    files.write(KEY, b"code")
    assert CodeFiles(tmp_path / "kernels").read(KEY) == b"code"
    for position in range(3):
        other = [*KEY]
        other[position] += "1"
        assert files.read(other) is None
    assert files.read(("NVRTC 13.0", "--gpu-architecture=sm_90source")) is None
    assert stat.S_IMODE((tmp_path / "kernels").stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", ["shorter", "other", "empty", "digest alone"])
def test_a_damaged_file_counts_as_missing(tmp_path: Path, damage: str) -> None:
    files = CodeFiles(tmp_path)
    files.write(KEY, b"machine code")
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    contents = {"shorter": content[:-1], "other": content[:-1] + b"E", "empty": b"", "digest alone": content[:32]}
    path.write_bytes(contents[damage])
    assert files.read(KEY) is None
    files.write(KEY, b"machine code")
    assert files.read(KEY) == b"machine code"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    files = CodeFiles(tmp_path / "file" / "kernels")
    files.write(KEY, b"code")
    assert files.read(KEY) is None


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: Path) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", refuse)
    CodeFiles(tmp_path).write(KEY, b"code")
    assert not list(tmp_path.iterdir())
