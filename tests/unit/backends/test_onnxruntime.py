"""The ONNX Runtime backend: every datatype, thread counts, and refused inputs against failures."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from headrace.backends.base import InputRefused
from headrace.backends.onnxruntime import OnnxRuntimeBackend, session_options
from headrace.core.errors import ConfigError
from headrace.core.tensor import BY_NAME, DATATYPES

from tests.support.models import add_model, identity, table_lookup
from tests.support.waiting import until

CORES = len(os.sched_getaffinity(0))


def load(folder: Path, model: object, instances: int = 1, **parameters: str):  # type: ignore[no-untyped-def]
    add_model(folder, "m", model)  # type: ignore[arg-type]
    return OnnxRuntimeBackend().load(folder / "m" / "1" / "model.onnx", instances, parameters)


@pytest.mark.parametrize("datatype", [datatype.name for datatype in DATATYPES])
def test_every_datatype_is_supported(tmp_path: Path, datatype: str) -> None:
    execution = load(tmp_path, identity(datatype)).execution(0)
    kind = BY_NAME[datatype].dtype
    values = [b"", "Grüße".encode(), b"a\0b", b"x"] if datatype == "BYTES" else [0, 1, 1, 0]
    x = np.empty((2, 2), kind)
    x.reshape(-1)[:] = values
    y = execution.run({"X": x})["Y"]
    assert y.dtype == kind
    assert y.tolist() == x.tolist()
    assert not np.may_share_memory(x, y)


def test_text_that_is_not_utf8_is_the_caller_s_fault(tmp_path: Path) -> None:
    x = np.array([[b"\xff"]], dtype=object)
    with pytest.raises(InputRefused, match=r"'X'.*UTF-8"):
        load(tmp_path, identity("BYTES")).execution(0).run({"X": x})


def test_values_that_the_model_refuses_are_the_caller_s_fault(tmp_path: Path) -> None:
    execution = load(tmp_path, table_lookup()).execution(0)
    with pytest.raises(InputRefused) as refused:
        execution.run({"X": np.array([[9]])})
    assert str(tmp_path) not in str(refused.value)
    assert execution.run({"X": np.array([[3]])})["Y"].tolist() == [[30]]


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
    monkeypatch.setattr("headrace.backends.onnxruntime._IDLE_S", 0.05)
    monkeypatch.setattr("headrace.backends.onnxruntime.trim_heap", lambda: trims.append(True))
    folder = add_model(tmp_path, "m", identity(datatype))
    loaded = OnnxRuntimeBackend().load(folder / "1" / "model.onnx", 1, {})
    execution = loaded.execution(0)
    batch = np.full((1, 300_000), b"a", object) if datatype == "BYTES" else np.ones((1, 300_000), np.float32)
    outputs = execution.run({"X": batch})
    del outputs
    until(lambda: bool(trims))
    execution.close()
    loaded.close()
