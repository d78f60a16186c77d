"""Checksums of models: what is written, what is refused, and that the tool `sha256sum` reads and writes them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from headrace.core.errors import ConfigError
from headrace.models.integrity import checksums as module
from headrace.models.integrity.checksums import (
    CHECKSUMS,
    MAX_CHECKSUMS_BYTES,
    MAX_FINDINGS,
    SIGNATURE,
    check_files,
    list_files,
    parse_checksums,
    read_bounded,
    write_checksums,
)

DIGEST = hashlib.sha256(b"").hexdigest()
FILES = {"1/model.onnx": b"weights", "1/data/w.bin": b"more", "config.yaml": b"name: m\n", "labels.txt": b"a\nb\n"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model with `FILES` and their checksums."""
    folder = tmp_path / "repository" / "m"
    for path, content in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    write_checksums(folder)
    return folder


def check(folder: Path) -> None:
    """Compare the files as a load does."""
    content = read_bounded(folder / CHECKSUMS, folder.parent, MAX_CHECKSUMS_BYTES)
    assert content is not None
    check_files(folder, folder.parent, parse_checksums(content, folder.name))


def reasons(folder: Path) -> str:
    """Return the text with which the files are refused."""
    with pytest.raises(ConfigError) as refused:
        check(folder)
    return str(refused.value)


def test_a_model_as_it_was_written_is_accepted(model: Path) -> None:
    check(model)
    assert (model / CHECKSUMS).read_text().splitlines() == [
        f"{hashlib.sha256(content).hexdigest()}  {path}" for path, content in sorted(FILES.items())
    ]


def test_hidden_files_and_caches_of_python_are_no_part_of_a_model(model: Path) -> None:
    (model / "1" / "__pycache__").mkdir()
    (model / "1" / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"x")
    (model / ".headrace-source.json").write_text("{}")
    check(model)
    assert list_files(model, model.parent) == set(FILES)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_the_tool_sha256sum_reads_and_writes_the_same_file(model: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", CHECKSUMS], cwd=model, check=True, capture_output=True)
    command = "find . -type f ! -name 'SHA256SUMS*' -exec sha256sum {} + > SHA256SUMS"
    subprocess.run(command, shell=True, cwd=model, check=True)
    assert "./1/model.onnx" in (model / CHECKSUMS).read_text()
    check(model)


@pytest.mark.parametrize("path", FILES)
def test_a_changed_byte_is_refused_with_both_digests(model: Path, path: str) -> None:
    (model / path).write_bytes(b"X" + FILES[path][1:])
    found = hashlib.sha256(b"X" + FILES[path][1:]).hexdigest()
    expected = hashlib.sha256(FILES[path]).hexdigest()
    assert f"m/{path}: error: has SHA-256 {found}, SHA256SUMS lists {expected}" in reasons(model)


def _truncate(model: Path) -> None:
    (model / "1" / "model.onnx").write_bytes(FILES["1/model.onnx"][:-1])


def _swap(model: Path) -> None:
    (model / "1" / "model.onnx").rename(model / "x")
    (model / "1" / "data" / "w.bin").rename(model / "1" / "model.onnx")
    (model / "x").rename(model / "1" / "data" / "w.bin")


def _remove(model: Path) -> None:
    (model / "labels.txt").unlink()


def _add(model: Path) -> None:
    (model / "1" / "custom_op.so").write_bytes(b"x")


def _rename_case(model: Path) -> None:
    (model / "1" / "model.onnx").rename(model / "1" / "Model.onnx")


def _folder_for_file(model: Path) -> None:
    (model / "labels.txt").unlink()
    (model / "labels.txt").mkdir()


def _pipe(model: Path) -> None:
    (model / "labels.txt").unlink()
    os.mkfifo(model / "labels.txt")


def _link_out(model: Path) -> None:
    outside = model.parent.parent / "outside"
    outside.write_bytes(FILES["1/model.onnx"])
    (model / "1" / "model.onnx").unlink()
    (model / "1" / "model.onnx").symlink_to(outside)


def _link_folder_out(model: Path) -> None:
    outside = model.parent.parent / "outside"
    (model / "1").rename(outside)
    (model / "1").symlink_to(outside)


def _circle(model: Path) -> None:
    (model / "1" / "again").symlink_to(model / "1")


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (_truncate, "m/1/model.onnx: error: has SHA-256"),
        (_swap, "m/1/data/w.bin: error: has SHA-256"),
        (_remove, "m/labels.txt: error: is missing: SHA256SUMS lists it"),
        (_add, "m/1/custom_op.so: error: is not listed in SHA256SUMS"),
        (_rename_case, "m/1/Model.onnx: error: is not listed"),
        (_folder_for_file, "m/labels.txt: error: cannot be read: it is not a regular file"),
        (_pipe, "m/labels.txt: error: cannot be read: it is not a regular file"),
        (_link_out, "m/1/model.onnx: error: is a link that leads out of the repository"),
        (_link_folder_out, "m/1: error: is a link that leads out of the repository"),
        (_circle, "is nested in more than 16 folders"),
    ],
)
def test_every_other_change_of_the_files_is_refused(model: Path, attack: Callable[[Path], None], reason: str) -> None:
    attack(model)
    assert reason in reasons(model)


def test_a_link_within_the_repository_is_the_file_that_it_names(model: Path) -> None:
    (model / "1" / "model.onnx").rename(model.parent / "shared.onnx")
    (model / "1" / "model.onnx").symlink_to(model.parent / "shared.onnx")
    check(model)


def test_an_error_lists_a_bounded_number_of_files(model: Path) -> None:
    for number in range(3 * MAX_FINDINGS):
        (model / "1" / f"extra-{number:02}").write_bytes(b"")
    assert reasons(model).count("is not listed") == MAX_FINDINGS


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"{DIGEST}  ../other/1/model.onnx", "leads out of the model's folder"),
        (f"{DIGEST}  1/../../other/x", "leads out of the model's folder"),
        (f"{DIGEST}  /etc/passwd", "leads out of the model's folder"),
        (f"{DIGEST}  1\\model.onnx", "leads out of the model's folder"),
        (f"{DIGEST}  1/x\0y", "leads out of the model's folder"),
        (f"{DIGEST}  1//x", "is not a plain relative path"),
        (f"{DIGEST}  1/./x", "is not a plain relative path"),
        (f"{DIGEST}  ././x", "is not a plain relative path"),
        (f"{DIGEST}  1/\x1b[31m", "is not a plain relative path"),
        (f"{DIGEST}  1/x\r", "is not a plain relative path"),
        (f"{DIGEST}  " + "a/" * 20 + "x", "has more than 16 parts"),
        (f"{DIGEST}  a\n{'0' * 64}  a", "lists 'a' twice"),
        (f"{DIGEST}  a\n{DIGEST} *./a", "lists 'a' twice"),
        (f"{DIGEST}  {CHECKSUMS}", "lists SHA256SUMS itself"),
        (f"{DIGEST}  ./{SIGNATURE}", "lists SHA256SUMS.minisig itself"),
        (f"{DIGEST[:-1]}  a", "is not a line of sha256sum"),
        (f"{DIGEST} a", "is not a line of sha256sum"),
        (f"SHA256 (a) = {DIGEST}", "is not a line of sha256sum"),
        (f"\\{DIGEST}  a\\nb", "is not a line of sha256sum"),
        ("", "lists no file"),
        ("# nothing", "lists no file"),
    ],
)
def test_every_other_line_is_refused(line: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_checksums(f"{line}\n".encode(), "m")
    assert reason in str(refused.value)
    assert str(refused.value).isprintable()


def test_lines_that_sha256sum_accepts_are_accepted() -> None:
    text = f"# of a release\n{DIGEST.upper()}  a b\n\n{DIGEST} *./1/c"
    assert parse_checksums(text.encode(), "m") == {"a b": DIGEST, "1/c": DIGEST}


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="is not UTF-8"):
        parse_checksums(f"{DIGEST}  \udcff".encode("utf-8", "surrogateescape"), "m")


def test_a_huge_file_is_refused_before_it_is_parsed(model: Path) -> None:
    with (model / CHECKSUMS).open("r+b") as stream:
        stream.truncate(1 << 40)  # without data on the disk
    with pytest.raises(ConfigError, match=f"has more than {MAX_CHECKSUMS_BYTES} bytes"):
        read_bounded(model / CHECKSUMS, model.parent, MAX_CHECKSUMS_BYTES)


@pytest.mark.parametrize("target", ["outside", "nothing"])
def test_checksums_behind_a_link_out_of_the_repository_are_refused(model: Path, target: str) -> None:
    (model / CHECKSUMS).rename(model.parent.parent / "outside")
    (model / CHECKSUMS).symlink_to(model.parent.parent / target)
    with pytest.raises(ConfigError, match="leads out of the repository"):
        read_bounded(model / CHECKSUMS, model.parent, MAX_CHECKSUMS_BYTES)


def test_checksums_that_are_a_pipe_do_not_block(model: Path) -> None:
    (model / CHECKSUMS).unlink()
    os.mkfifo(model / CHECKSUMS)
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_bounded(model / CHECKSUMS, model.parent, MAX_CHECKSUMS_BYTES)


def test_writing_again_removes_the_signature_of_the_former_content(model: Path) -> None:
    (model / SIGNATURE).write_text("old")
    write_checksums(model)
    assert not (model / SIGNATURE).exists()


def test_a_model_without_files_or_with_a_name_that_lines_cannot_have_is_not_written(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "1" / "a\nb").write_bytes(b"")
    with pytest.raises(ConfigError, match="rename the file"):
        write_checksums(model)
    (model / "1" / "a\nb").unlink()
    monkeypatch.setattr(module, "MAX_CHECKSUMS_BYTES", 100)
    with pytest.raises(ConfigError, match="move samples and other data out"):
        write_checksums(model)
    (model.parent / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no files"):
        write_checksums(model.parent / "empty")
