from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from headrace.config import manifest
from headrace.config.digests import onnx_digest
from headrace.config.machine import Machine
from headrace.config.manifest import (
    MAX_STAMP_BYTES,
    STAMP_FILE,
    BatchTiming,
    Stamp,
    artefact_name,
    choose,
    choose_from_folder,
    read_stamps,
    write_stamp,
)
from headrace.core.errors import ConfigError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.waiting import on_threads

CPU = Machine("onnxruntime", "1.31", "cpu", "avx512_vnni")
GPU = Machine("tensorrt", "10.6.0", "NVIDIA H200", "9.0", 550)
ONNX, CONFIG, SPEC = "a" * 64, "b" * 64, "c" * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "repository" / "digits" / "1"
    path.mkdir(parents=True)
    return path


def _stamp(folder: Path, machine: Machine = CPU, content: bytes = b"engine", key: str = "d" * 64) -> Stamp:
    """A stamp with its artefact in the folder."""
    name = artefact_name(key, ".plan" if machine.target == "tensorrt" else ".onnx")
    (folder / name).write_bytes(content)
    return Stamp(
        key=key,
        artefact=name,
        artefact_sha256=onnx_digest(folder / name),
        size_bytes=len(content),
        onnx_sha256=ONNX,
        config_digest=CONFIG,
        spec_digest=SPEC,
        precision="int8",
        requested="best",
        overridden=False,
        machine=machine,
        accuracy={"samples": 96, "data": "calibration/", "top1_agreement": 0.97, "accuracy": None},
        kept=("/conv1/Conv",),
        timings=(BatchTiming(1, 50.5, 60.0, 19801.0),),
        seconds=1.5,
        built_with={"onnx": "1.23.2"},
    )


def test_a_stamp_round_trips(folder: Path) -> None:
    stamp = _stamp(folder)
    write_stamp(folder, stamp)
    assert read_stamps(folder) == [stamp]
    document = json.loads((folder / STAMP_FILE).read_text())
    assert document["format"] == 1
    # Fields that earlier versions do not have are left out at their defaults.
    absent = {"requested", "sparse_weights", "version_compatible", "plugins"}
    assert set(document["builds"][0]) == {one.name for one in fields(Stamp)} - absent | {"asked"}
    assert Stamp.from_json(stamp.to_json()) == stamp


def test_engines_of_earlier_versions_with_sparse_kernels_are_read(folder: Path) -> None:
    document = {**_stamp(folder, GPU).to_json(), "sparse_weights": True}
    write_stamp(folder, Stamp.from_json(document))
    (stamp,) = read_stamps(folder)
    assert stamp.sparse_weights
    assert stamp.to_json() == document


def test_a_machine_has_one_stamp(folder: Path) -> None:
    cpu, gpu = _stamp(folder), _stamp(folder, GPU)
    write_stamp(folder, cpu)
    write_stamp(folder, gpu)
    newer = replace(cpu, precision="fp16")
    write_stamp(folder, newer)
    assert sorted(read_stamps(folder), key=str) == sorted([gpu, newer], key=str)


def test_stamping_the_same_again_touches_nothing(folder: Path) -> None:
    write_stamp(folder, _stamp(folder))
    before = (folder / STAMP_FILE).stat()
    write_stamp(folder, _stamp(folder))
    after = (folder / STAMP_FILE).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_builders_for_different_machines_lose_nothing(folder: Path) -> None:
    stamp = _stamp(folder)

    def build(first: int) -> None:
        for version in range(first, first + 8):
            write_stamp(folder, replace(stamp, machine=replace(CPU, version=str(version))))

    on_threads(build, (0, 8, 16))
    assert {one.machine.version for one in read_stamps(folder)} == {str(version) for version in range(24)}
    assert {path.name for path in folder.iterdir()} == {STAMP_FILE, stamp.artefact}


def test_without_a_stamp_or_with_a_demo_models_there_are_none(folder: Path) -> None:
    assert read_stamps(folder) == []
    assert read_stamps(folder / "absent") == []
    (folder / STAMP_FILE).write_text('{"model": "digits", "recipe": "1746", "size_bytes": 5}')
    assert read_stamps(folder) == []
    write_stamp(folder, _stamp(folder))
    assert len(read_stamps(folder)) == 1
    assert json.loads((folder / "recipe.json").read_text())["recipe"] == "1746"


CORRUPT: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "half": (b'{"format": 1, "builds": [{"key": "aa', "truncated"),
    "not UTF-8": (b'{"format": 1, "\xff": 2}', "not JSON"),
    "deep": (b"[" * 100_000, "not JSON"),
    "list": (b"[]", "not a JSON object"),
    "number": (b"1", "not a JSON object"),
    "no format": (b"{}", "format None, this version reads 1"),
    "newer": (b'{"format": 2, "builds": []}', "format 2, this version reads 1"),
    "odd format": (b'{"format": ["x"], "builds": []}', "this version reads 1"),
    "no builds": (b'{"format": 1}', "no list of builds"),
    "odd builds": (b'{"format": 1, "builds": {"a": 1}}', "no list of builds"),
    "odd build": (b'{"format": 1, "builds": [7]}', "build 1"),
    "nan": (b'{"format": 1, "builds": [], "x": NaN}', "not JSON"),
    "long number": (b'{"format": ' + b"1" * 10_000 + b"}", "not JSON"),
    "huge": (b" " * (MAX_STAMP_BYTES + 1), "larger than"),
}


@pytest.mark.parametrize(("content", "message"), CORRUPT.values(), ids=CORRUPT)
def test_a_corrupt_file_is_reported_with_a_remedy_and_replaced(folder: Path, content: bytes, message: str) -> None:
    (folder / STAMP_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_stamps(folder)
    (finding,) = caught.value.findings
    assert finding.path.startswith("digits/1/build.json")
    assert "headrace build" in finding.cure
    choice = choose_from_folder(folder, ONNX, CONFIG, CPU)
    assert choice.stamp is None
    assert message in choice.reason
    write_stamp(folder, _stamp(folder))
    assert len(read_stamps(folder)) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir(),
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("elsewhere.json"),
    ],
    ids=["folder", "pipe", "link", "dangling link"],
)
def test_only_a_plain_file_is_read(folder: Path, make: Callable[[Path], None]) -> None:
    make(folder / STAMP_FILE)
    with pytest.raises(ConfigError, match=r"is not a file|is a folder|is a link"):
        read_stamps(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"key": "D" * 64},
        {"key": "e" * 64},
        {"key": "d" * 64 + "\n"},
        {"artefact": "../../../etc/passwd"},
        {"artefact": "model.onnx"},
        {"artefact": "model.dddddddddddd.onnx/x"},
        {"artefact": "model.dddddddddddd.so"},
        {"artefact": ""},
        {"artefact_sha256": ""},
        {"size_bytes": -1},
        {"size_bytes": 6.0},
        {"size_bytes": "6"},
        {"size_bytes": True},
        {"machine": None},
        {"machine": {"target": "onnxruntime"}},
        {"accuracy": {"top1": [1]}},
        {"forced": "yes"},
        {"refusal": "a sentence"},
        {"kept": [1]},
        {"timings": [{"rows": 1}]},
        {"seconds": 1e999},
        {"seconds": -1},
        {"precision": "\ud800"},
        {"surprise": 1},
    ],
    ids=str,
)
def test_a_stamp_with_a_wrong_field_is_refused(folder: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Stamp.from_json({**_stamp(folder).to_json(), **change})


@pytest.mark.parametrize("missing", ["key", "artefact", "machine", "overridden"])
def test_a_stamp_without_a_field_is_refused(folder: Path, missing: str) -> None:
    document = _stamp(folder).to_json()
    del document[missing]
    with pytest.raises(ConfigError, match=missing):
        Stamp.from_json(document)


def test_a_stamp_that_would_not_be_read_is_not_written(folder: Path) -> None:
    write_stamp(folder, _stamp(folder))
    before = (folder / STAMP_FILE).read_bytes()
    for wrong in (replace(_stamp(folder), artefact="../x"), replace(_stamp(folder), size_bytes=-1)):
        with pytest.raises(ConfigError):
            write_stamp(folder, wrong)
    with pytest.raises(ConfigError, match="larger than"):
        write_stamp(folder, replace(_stamp(folder), kept=("x" * MAX_STAMP_BYTES,)))
    assert (folder / STAMP_FILE).read_bytes() == before


def test_non_finite_numbers_are_written_as_null(folder: Path) -> None:
    stamp = replace(_stamp(folder), accuracy={"max_abs": math.inf, "cosine": math.nan, "samples": 3})
    write_stamp(folder, stamp)
    assert read_stamps(folder)[0].accuracy == {"max_abs": None, "cosine": None, "samples": 3}


def test_an_unwritable_folder_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = _stamp(folder)

    def full(_path: Path, _content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(manifest, "write_durably", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_stamp(folder, stamp)
    with pytest.raises(ConfigError, match="No such file"):
        write_stamp(folder / "absent", stamp)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(value=JSON)
def test_any_json_is_a_stamp_or_refused(value: Any) -> None:
    with pytest.raises(ConfigError):
        Stamp.from_json(value)


GOOD = Stamp(
    "d" * 64, "model.dddddddddddd.plan", ONNX, 1, ONNX, CONFIG, SPEC, "int8", "int8", False, GPU, {"cosine": 1.0}
).to_json()


@given(field=st.sampled_from(sorted(GOOD)), value=JSON, inside=st.booleans())
def test_any_value_in_any_field_round_trips_or_is_refused(field: str, value: Any, inside: bool) -> None:
    if inside and isinstance(GOOD[field], dict):
        value = {**GOOD[field], "version": value}
    try:
        stamp = Stamp.from_json({**GOOD, field: value})
    except ConfigError:
        return
    assert Stamp.from_json(stamp.to_json()) == stamp
    assert artefact_name(stamp.key, Path(stamp.artefact).suffix) == stamp.artefact
    json.dumps(stamp.to_json(), allow_nan=False)


@settings(max_examples=examples(60))
@given(content=st.binary(max_size=64) | JSON.map(lambda value: json.dumps({"format": 1, "builds": value}).encode()))
def test_any_file_is_read_or_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("version")
    (folder / STAMP_FILE).write_bytes(content)
    try:
        assert read_stamps(folder) == []
    except ConfigError as error:
        assert str(error)


def test_matching_artefacts_are_served(folder: Path) -> None:
    stamp = _stamp(folder)
    for stamps in ([stamp], [_stamp(folder, GPU), stamp]):
        choice = choose(stamps, folder, ONNX, CONFIG, CPU)
        assert (choice.stamp, choice.path, choice.reason) == (stamp, folder / stamp.artefact, "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"onnx_sha256": SPEC}, "another model.onnx"),
        ({"config_digest": SPEC}, r"another configuration \(precision best\)"),
        ({"machine": GPU}, "built for NVIDIA H200 9.0 with TensorRT 10.6.0, driver 550; this is cpu avx512_vnni"),
        ({"machine": replace(CPU, version="1.30")}, "built for cpu avx512_vnni with ONNX Runtime 1.30; this is"),
        ({"size_bytes": 7}, "has been changed: it has 6 bytes, 7 were built"),
        ({"artefact_sha256": SPEC}, "has been changed"),
        ({"artefact": "model.eeeeeeeeeeee.onnx"}, "model.eeeeeeeeeeee.onnx is missing"),
    ],
    ids=str,
)
def test_mismatched_artefacts_are_reported(folder: Path, change: dict[str, Any], reason: str) -> None:
    choice = choose([replace(_stamp(folder), **change)], folder, ONNX, CONFIG, CPU)
    assert (choice.stamp, choice.path) == (None, None)
    assert re.search(reason, choice.reason)


@pytest.mark.parametrize(
    ("change", "serves"),
    [
        ({}, True),
        ({"version": "10.9.0"}, True),
        ({"version": "10.6.1"}, True),
        ({"version": "10.14.0"}, True),
        # Only later versions have the code of earlier ones.
        ({"version": "10.5.0"}, False),
        ({"version": "9.9.0"}, False),
        ({"version": "11.0.0"}, False),
        ({"version": "unknown"}, False),
        ({"version": "10.9.0", "driver": 580}, False),
        ({"version": "10.9.0", "capability": "8.9"}, False),
        ({"version": "10.9.0", "device": "NVIDIA H100"}, False),
    ],
    ids=str,
)
def test_version_compatible_engines_serve_with_later_versions(
    folder: Path, change: dict[str, Any], serves: bool
) -> None:
    here = replace(GPU, **change)
    stamp = replace(_stamp(folder, GPU), version_compatible=True)
    assert (choose([stamp], folder, ONNX, CONFIG, here).stamp == stamp) is serves
    # Other engines need the very version.
    assert (choose([_stamp(folder, GPU)], folder, ONNX, CONFIG, here).stamp is not None) is (here == GPU)


def test_the_engine_of_the_very_version_goes_before_a_compatible_one(folder: Path) -> None:
    here = replace(GPU, version="10.9.0")
    old = replace(_stamp(folder, replace(GPU, version="10.4.0"), key="a" * 64), version_compatible=True)
    compatible = replace(_stamp(folder, GPU, key="b" * 64), version_compatible=True)
    own = _stamp(folder, here, key="c" * 64)
    assert choose([old, compatible], folder, ONNX, CONFIG, here).stamp == compatible
    assert choose([old, compatible, own], folder, ONNX, CONFIG, here).stamp == own


def test_version_compatible_engines_say_so_in_the_stamp(folder: Path) -> None:
    stamp = replace(_stamp(folder, GPU), version_compatible=True)
    write_stamp(folder, stamp)
    assert json.loads((folder / STAMP_FILE).read_text())["builds"][0]["version_compatible"] is True
    assert read_stamps(folder) == [stamp]


def test_missing_builds_are_reported(folder: Path) -> None:
    assert choose_from_folder(folder, ONNX, CONFIG, CPU).reason == "no engine is built"


def test_an_artefact_that_is_a_link_is_not_served(folder: Path, tmp_path: Path) -> None:
    stamp = _stamp(folder)
    (folder / stamp.artefact).rename(tmp_path / "elsewhere")
    (folder / stamp.artefact).symlink_to(tmp_path / "elsewhere")
    assert "is a link" in choose([stamp], folder, ONNX, CONFIG, CPU).reason


def test_an_artefact_changed_in_place_is_not_served(folder: Path) -> None:
    stamp = _stamp(folder)
    (folder / stamp.artefact).write_bytes(b"enginE")
    assert choose([stamp], folder, ONNX, CONFIG, CPU).stamp is None


def test_a_reader_of_a_replaced_artefact_reads_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = _stamp(folder), _stamp(folder, content=b"new", key="e" * 64)
    write_stamp(folder, old)
    real = manifest.read_stamps

    def publish_after_the_first_look(path: Path) -> list[Stamp]:
        result = real(path)
        if result == [old]:
            monkeypatch.setattr(manifest, "read_stamps", real)
            write_stamp(path, new)
            (path / old.artefact).unlink()
        return result

    monkeypatch.setattr(manifest, "read_stamps", publish_after_the_first_look)
    assert choose_from_folder(folder, ONNX, CONFIG, CPU).stamp == new
