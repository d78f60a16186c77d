"""Latency tables in a folder: round trips, damaged files, and a read-only folder."""

from __future__ import annotations

import json
import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest
from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import read_model_folder
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.models import warmup
from headrace.models.warmup import NO_LATENCIES, LatencyFile, LatencyStore, StoredLatencies
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models import add_model, affine

CONFIG = "max_batch_size: 8\ndynamic_batching { }\n"


def config(folder: Path, text: str = CONFIG) -> ModelConfig:
    return read_model_folder(add_model(folder, "m", affine(), config=text), folder).config


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


def profile(*tables: tuple[int, dict[int, list[int]]]) -> LatencyTable:
    written = LatencyTable()
    for instances, times_ns in tables:
        written.seed(times_ns, instances)
    return written


def stored_in(folder: Path, key: str) -> LatencyFile:
    return LatencyFile(LatencyStore(folder), folder / f"{key}.json", "m", "here")


@pytest.fixture
def latency_file(tmp_path: Path) -> LatencyFile:
    return LatencyStore(tmp_path / "a" / "b").file_for(config(tmp_path), "0" * 64, "onnxruntime", 2)


def test_saved_tables_round_trip(latency_file: LatencyFile) -> None:
    assert latency_file.read() == NO_LATENCIES
    latency_file.write(profile((1, {1: [100, 90, 110], 8: [400]}), (2, {1: [150]})), 95)
    assert latency_file.read() == StoredLatencies({1: {1: [100, 90, 110], 8: [400]}, 2: {1: [150]}}, 95)
    seen = profile((1, {1: [100]}))
    for path in range(100):
        seen.observe(1, 1000 + path * 37 % 100)
    latency_file.write(seen, 0)
    assert latency_file.read() == StoredLatencies(seen.times(32), 0)
    assert len(latency_file.read().times_ns[1][1]) == 32
    latency_file.write(LatencyTable(), 0)
    assert latency_file.read().times_ns, "nothing known is not worth a file"


def test_the_key_contains_everything_that_affects_the_latency(
    tmp_path: Path, latency_file: LatencyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, mine = latency_file.store, config(tmp_path / "mine")
    assert store.file_for(mine, "0" * 64, "onnxruntime", 2) == latency_file
    policies = config(tmp_path / "p", "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 100 }\n")
    assert store.file_for(policies, "0" * 64, "onnxruntime", 2).path == latency_file.path, (
        "how requests wait changes no batch"
    )
    others = [
        store.file_for(mine, "1" * 64, "onnxruntime", 2),
        store.file_for(mine, "0" * 64, "onnxruntime", 1),
        store.file_for(
            config(tmp_path / "i", CONFIG + parameter("headrace.isolation", "process")), "0" * 64, "onnxruntime", 2
        ),
        store.file_for(
            config(tmp_path / "t", CONFIG + parameter("intra_op_thread_count", "1")), "0" * 64, "onnxruntime", 2
        ),
    ]
    monkeypatch.setattr(warmup, "usable_cores", lambda: 99)
    others.append(store.file_for(mine, "0" * 64, "onnxruntime", 2))
    assert len({latency_file.path, *(other.path for other in others)}) == 6


@given(st.data())
def test_a_broken_file_counts_as_none(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    latency_file = stored_in(tmp_path_factory.mktemp("store"), "key")
    latency_file.write(profile((1, {1: [100], 8: [400, 500]}), (2, {4: [300]})), 5)
    path = latency_file.path
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    broken = data.draw(
        st.sampled_from([content[:at], content[:at] + data.draw(st.binary(max_size=8)) + content[at + 1 :]])
    )
    path.write_bytes(broken)
    result = latency_file.read()  # raises nothing, and what it gives can be seeded
    for instances, times_ns in result.times_ns.items():
        LatencyTable().seed(times_ns, instances)


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"format": 2, "times_ns": {}},
        {"format": 1, "times_ns": {"1": {"1": [5]}}},
        {"format": 1, "idle_ns": -1, "times_ns": {"1": {"1": [5]}}},
        {"format": 1, "idle_ns": 0, "times_ns": []},
        {"format": 1, "idle_ns": 0, "times_ns": {"1": []}},
        {"format": 1, "idle_ns": 0, "times_ns": {"0": {"1": [5]}}},
        {"format": 1, "idle_ns": 0, "times_ns": {"1": {"-1": [5]}}},
        {"format": 1, "idle_ns": 0, "times_ns": {"1": {"+1": [5]}}},
        {"format": 1, "idle_ns": 0, "times_ns": {"1_0": {"1": [5]}}},
        {"format": 1, "idle_ns": 0, "times_ns": {"1": {"1": []}}},
        {"format": 1, "idle_ns": 0, "times_ns": {"1": {"1": [0]}}},
        {"format": 1, "idle_ns": 0, "times_ns": {"1": {"1": [1.5]}}},
        {"format": 1, "idle_ns": 0, "times_ns": {"1": {"1": [True]}}},
        {"format": 1, "idle_ns": 0, "times_ns": {"1": {"1": [10**14]}}},
        {"format": 1, "idle_ns": 0, "times_ns": {"1" * 20: {"1": [1]}}},
    ],
)
def test_invalid_files_are_reported_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, document: Any
) -> None:
    caplog.set_level(logging.INFO, "headrace.warmup")
    (tmp_path / "key.json").write_text(json.dumps(document))
    assert stored_in(tmp_path, "key").read() == NO_LATENCIES
    assert "key.json is not used" in caplog.text


def test_an_unwritable_folder_is_reported_once(latency_file: LatencyFile, caplog: pytest.LogCaptureFixture) -> None:
    folder = latency_file.store.folder
    folder.parent.mkdir()
    folder.write_text("a file where the folder should be")
    for _ in range(3):
        latency_file.write(profile((1, {1: [100]})), 0)
        assert latency_file.read() == NO_LATENCIES
    assert [record.levelname for record in caplog.records if "--state-dir" in record.message] == ["WARNING"]


def test_the_least_recently_used_files_are_removed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_MAX_FILES", 4)
    some = profile((1, {1: [100]}))
    keys = [f"{number:02}" for number in range(4)]
    for age, key in enumerate(random.Random(1).sample(keys, 4)):
        stored_in(tmp_path, key).write(some, 0)
        os.utime(tmp_path / f"{key}.json", (1000 + age, 1000 + age))
    oldest = min(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime)
    stored_in(tmp_path, oldest.stem).read()
    second = min(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime)
    stored_in(tmp_path, "new").write(some, 0)
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 4
    assert {oldest.name, "new.json"} <= left
    assert second.name not in left
