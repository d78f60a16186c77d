"""Fingerprints of a model's folder: included and skipped files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headrace.models.folders import (
    ABSENT,
    ScanCache,
    fingerprint_model,
    fingerprint_version,
    fingerprint_versions,
    without_builds,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "m"
    (path / "1" / "data").mkdir(parents=True)
    (path / "warmup").mkdir()
    (path / "initial_state").mkdir()
    (path / "notes").mkdir()
    for file in (
        "config.pbtxt",
        "1/model.onnx",
        "1/data/weights",
        "warmup/x",
        "initial_state/x",
        "notes/readme",
        ".hidden",
    ):
        (path / file).write_text(file)
    return path


def rewrite(path: Path) -> None:
    path.write_text("something longer than before")


def replace(path: Path) -> None:
    """Another file of the same size and time under the name."""
    state = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(state.st_atime_ns, state.st_mtime_ns))
    other.rename(path)


def touch(path: Path) -> None:
    os.utime(path, ns=(0, 1))


@pytest.mark.parametrize("change", [rewrite, replace, touch, Path.unlink])
@pytest.mark.parametrize("file", ["1/model.onnx", "1/data/weights"])
def test_every_change_below_a_version_shows(folder: Path, file: str, change: Callable[[Path], None]) -> None:
    version, model = fingerprint_version(folder / "1"), fingerprint_model(folder)
    assert fingerprint_version(folder / "1") == version
    change(folder / file)
    assert fingerprint_version(folder / "1") != version
    assert fingerprint_model(folder) != model


@pytest.mark.parametrize("file", ["config.pbtxt", "warmup/x", "initial_state/x"])
def test_a_change_beside_the_versions_shows_in_the_model_alone(folder: Path, file: str) -> None:
    versions, model = fingerprint_versions(folder), fingerprint_model(folder)
    rewrite(folder / file)
    assert fingerprint_versions(folder) == versions
    assert fingerprint_model(folder) != model


@pytest.mark.parametrize("file", ["notes/readme", ".hidden"])
def test_files_that_are_not_part_of_a_model_are_skipped(folder: Path, file: str) -> None:
    model = fingerprint_model(folder)
    rewrite(folder / file)
    assert fingerprint_model(folder) == model


def test_a_new_version_shows_even_while_it_is_empty(folder: Path) -> None:
    model = fingerprint_model(folder)
    (folder / "2").mkdir()
    assert fingerprint_model(folder) != model
    assert set(fingerprint_versions(folder)) == {"1", "2"}


def test_a_version_replaced_by_an_equal_one_shows(folder: Path) -> None:
    version = fingerprint_version(folder / "1")
    (folder / "1").rename(folder.parent / "old")
    (folder / "1").mkdir()
    for name in ("model.onnx", "data"):
        (folder.parent / "old" / name).rename(folder / "1" / name)
    assert fingerprint_version(folder / "1") != version


def test_a_linked_version_has_the_fingerprint_of_its_target(folder: Path) -> None:
    (folder / "1").rename(folder.parent / "a")
    (folder.parent / "b").mkdir()
    (folder / "1").symlink_to(folder.parent / "a")
    before = fingerprint_model(folder)
    (folder / "1").unlink()
    (folder / "1").symlink_to(folder.parent / "b")
    assert fingerprint_model(folder) != before


def test_vanishing_files_count_as_missing(folder: Path, tmp_path: Path) -> None:
    assert fingerprint_model(tmp_path / "nowhere") == ABSENT
    assert fingerprint_version(folder / "9") == ABSENT
    (folder / "1" / "dangling").symlink_to(tmp_path / "nowhere")
    (folder / "1" / "data" / "loop").symlink_to(folder / "1")
    assert fingerprint_model(folder) != ABSENT, "neither a dangling link nor a circle stops it"


def test_files_of_builders_do_not_change_the_fingerprint(folder: Path) -> None:
    before = fingerprint_version(folder / "1")
    built = (
        "build.json",
        "recipe.json",
        "model.0123456789ab.onnx",
        "model.0123456789ab.plan",
        "model.0123456789ab.onnx.data",
    )
    for name in (*built, ".model.0123456789ab.onnx.17.tmp"):
        (folder / "1" / name).write_text("built")
    after = fingerprint_version(folder / "1")
    assert {entry[0] for entry in after} - {entry[0] for entry in before} == set(built)
    assert without_builds(after, "model.onnx") == without_builds(before, "model.onnx") == before
    assert len(without_builds(after, "model.0123456789ab.plan")) == len(before) + 1
    (folder / "1" / "model.012345.onnx").write_text("a model")
    assert without_builds(fingerprint_version(folder / "1"), "model.onnx") != before


def age(folder: Path) -> None:
    """Make all folders old enough for the cache."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            os.utime(path, ns=(10**18, 10**18))


def listings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    listed: list[str] = []
    scandir = os.scandir

    def count(path: str) -> Any:
        listed.append(str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", count)
    return listed


def add(path: Path) -> None:
    path.with_name("added").write_text("x")


def add_folder(path: Path) -> None:
    path.with_name("added").mkdir()
    (path.with_name("added") / "file").write_text("x")


@pytest.mark.parametrize("change", [rewrite, replace, touch, Path.unlink, add, add_folder])
@pytest.mark.parametrize("file", ["config.pbtxt", "1/model.onnx", "1/data/weights", "warmup/x", "notes/readme"])
def test_a_cached_fingerprint_shows_every_change(folder: Path, file: str, change: Callable[[Path], None]) -> None:
    cache = ScanCache()
    age(folder)
    assert cache.fingerprint(folder) == cache.fingerprint(folder) == fingerprint_model(folder)
    change(folder / file)
    assert cache.fingerprint(folder) == fingerprint_model(folder)


def test_unchanged_folders_are_not_listed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ScanCache()
    age(folder)
    assert cache.check_folder(folder) is None
    fingerprint = cache.fingerprint(folder)
    listed = listings(monkeypatch)
    assert cache.check_folder(folder) is None
    assert cache.fingerprint(folder) == fingerprint
    assert not listed
    cache.keep(())
    assert cache.fingerprint(folder) == fingerprint
    assert listed


def test_a_folder_that_changed_just_now_is_listed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ScanCache()
    cache.fingerprint(folder)
    listed = listings(monkeypatch)
    cache.fingerprint(folder)
    assert listed


def test_a_link_shows_its_target_once_that_exists(folder: Path, tmp_path: Path) -> None:
    (folder / "1" / "labels").symlink_to(tmp_path / "labels")
    cache = ScanCache()
    age(folder)
    before = cache.fingerprint(folder)
    (tmp_path / "labels").write_text("x")
    assert cache.fingerprint(folder) == fingerprint_model(folder) != before


def test_a_model_that_is_emptied_is_skipped(folder: Path, tmp_path: Path) -> None:
    cache = ScanCache()
    age(folder)
    assert cache.check_folder(folder) is None
    folder.rename(tmp_path / "elsewhere")
    folder.mkdir()
    skipped = cache.check_folder(folder)
    assert skipped is not None
    assert skipped.reason == "it is empty"
