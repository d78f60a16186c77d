"""The ONNX Runtime backend: every datatype, thread counts, and refused inputs against failures."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from headrace.core.errors import ConfigError
from headrace.runtimes.onnxruntime import OnnxRuntimeBackend, session_options

from tests.support.models import add_model, identity
from tests.support.waiting import until

CORES = len(os.sched_getaffinity(0))


def load(folder: Path, model: object, instances: int = 1, **parameters: str):  # type: ignore[no-untyped-def]
    add_model(folder, "m", model)  # type: ignore[arg-type]
    return OnnxRuntimeBackend().load(folder / "m" / "1" / "model.onnx", instances, parameters)


@pytest.mark.parametrize("instances", [1, 2, CORES, CORES + 3])
def test_instances_share_the_cores(tmp_path: Path, instances: int) -> None:
    options = session_options(instances, {}, tmp_path / "m" / "1" / "model.onnx")
    assert options.intra_op_num_threads == max(1, CORES // instances)
    assert options.intra_op_num_threads * instances <= max(CORES, instances)


def test_instances_of_one_core_share_a_session(tmp_path: Path) -> None:
    model = load(tmp_path, identity(), instances=3, intra_op_thread_count="1")
    assert model.execution(0)._session is model.execution(2)._session
    model = load(tmp_path, identity(), instances=2, intra_op_thread_count="2")
    assert model.execution(0)._session is not model.execution(1)._session


@pytest.mark.parametrize(
    ("name", "value"),
    [("intra_op_thread_count", "many"), ("intra_op_thread_count", "9999"), ("optimization_level", "7")],
)
def test_wrong_parameters_are_named(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load(tmp_path, identity(), **{name: value})


def test_a_file_that_is_no_model_is_an_error_without_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.onnx") as refused:
        load(tmp_path, b"nonsense")
    assert str(tmp_path) not in str(refused.value)


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_memory_of_large_batches_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datatype: str) -> None:
    """Of a model of texts, the thread that returns it failed: ONNX Runtime's binding takes no texts without elements."""
    trims: list[bool] = []
    monkeypatch.setattr("headrace.runtimes.onnxruntime._IDLE_S", 0.05)
    monkeypatch.setattr("headrace.runtimes.onnxruntime.trim_heap", lambda: trims.append(True))
    folder = add_model(tmp_path, "m", identity(datatype))
    loaded = OnnxRuntimeBackend().load(folder / "1" / "model.onnx", 1, {})
    execution = loaded.execution(0)
    batch = np.full((1, 300_000), b"a", object) if datatype == "BYTES" else np.ones((1, 300_000), np.float32)
    outputs = execution.run({"X": batch})
    del outputs
    until(lambda: bool(trims))
    execution.close()
    loaded.close()
