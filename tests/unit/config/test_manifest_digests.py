from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.config.digests import config_digest, onnx_digest
from headrace.config.model_config import ModelConfig
from headrace.core.errors import ConfigError
from onnx import TensorProto, helper, numpy_helper


def _save(path: Path, locations: dict[str, str]) -> None:
    """A model whose weights, by name, are stored in the given files, "" for the model itself."""
    weights = []
    for name, location in locations.items():
        tensor = numpy_helper.from_array(np.full(4, 2.0, np.float32), name)
        if location:
            onnx.external_data_helper.set_external_data(tensor, location, offset=0, length=16)
            (path.parent / location).parent.mkdir(exist_ok=True)
            (path.parent / location).write_bytes(tensor.raw_data)
            tensor.ClearField("raw_data")
        weights.append(tensor)
    graph = helper.make_graph(
        [helper.make_node("Sum", list(locations), ["Y"])],
        "graph",
        [],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [4])],
        weights,
    )
    path.write_bytes(helper.make_model(graph).SerializeToString())


def test_a_file_without_external_tensors_has_its_plain_digest(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    _save(path, {"location": ""})
    (tmp_path / "model.onnx.data").write_bytes(b"no tensor names this file")
    assert onnx_digest(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    plan = tmp_path / "model.plan"
    plan.write_bytes(b"location")
    assert onnx_digest(plan) == hashlib.sha256(b"location").hexdigest()


@pytest.mark.parametrize("location", ["model.onnx.data", "weights.bin", "sub/weights.bin"])
def test_every_file_that_the_model_names_counts(tmp_path: Path, location: str) -> None:
    path = tmp_path / "model.onnx"
    _save(path, {"a": "first.bin", "b": location, "c": ""})
    before = onnx_digest(path)
    assert before == onnx_digest(path)
    (tmp_path / location).write_bytes(bytes(16))
    changed = onnx_digest(path)
    (tmp_path / location).unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        onnx_digest(path)
    assert len({before, changed, hashlib.sha256(path.read_bytes()).hexdigest()}) == 3


def test_the_key_is_read_across_two_blocks(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    _save(path, {"a": "first.bin"})
    model = onnx.load(path, load_external_data=False)
    # The documentation comes before the graph on the wire: it moves the key to the end of the first block.
    model.doc_string = "x" * (1 << 19)
    offset = model.SerializeToString().find(b"location")
    model.doc_string += "x" * ((1 << 20) - 4 - offset)
    whole = model.SerializeToString()
    assert (1 << 20) - 8 < whole.find(b"location") < 1 << 20
    path.write_bytes(whole)
    assert onnx_digest(path) != hashlib.sha256(whole).hexdigest()


def test_files_elsewhere_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "1"
    folder.mkdir()
    _save(folder / "model.onnx", {"a": "../secret"})
    with pytest.raises(ConfigError, match="not in the model's folder"):
        onnx_digest(folder / "model.onnx")


def test_unreadable_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        onnx_digest(tmp_path / "model.onnx")
    with pytest.raises(ConfigError, match="cannot be read"):
        onnx_digest(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"location, but no model")
    with pytest.raises(ConfigError, match="no ONNX model"):
        onnx_digest(tmp_path / "model.onnx")


BASE: dict[str, Any] = {
    "name": "m",
    "backend": "onnxruntime",
    "max_batch_size": 8,
    "input": [{"name": "X", "data_type": "fp32", "dims": [3, 8, 8]}],
    "output": [{"name": "Y", "data_type": "fp32", "dims": [10]}],
    "optimization": {"precision": "int8"},
}


@pytest.mark.parametrize(
    "change",
    [
        {"max_batch_size": 4},
        {"optimization": {"precision": "fp16"}},
        {"optimization": {"precision": "int8", "workspace_mb": 64}},
        {"optimization": {"precision": "int8", "profiles": [{"batch": [1, 2, 4]}]}},
        {"optimization": {"precision": "int8", "calibration": {"method": "mse"}}},
        {"optimization": {"precision": "int8", "accuracy": {"max_drop": 0.005}}},
        {"optimization": {"execution_accelerators": {"gpu_execution_accelerator": [{"name": "tensorrt"}]}}},
        {"input": [{"name": "Z", "data_type": "fp32", "dims": [3, 8, 8]}]},
        {"input": [{"name": "X", "data_type": "fp16", "dims": [3, 8, 8]}]},
        {"input": [{"name": "X", "data_type": "fp32", "dims": [3, 8, 4]}]},
        {"input": [{"name": "X", "data_type": "fp32", "dims": [3, 8, 8], "reshape": {"shape": [192]}}]},
        {"preprocess": {"mean": 127.0}},
    ],
    ids=str,
)
def test_build_inputs_change_the_digest(change: dict[str, Any]) -> None:
    assert config_digest(ModelConfig.model_validate({**BASE, **change})) != config_digest(
        ModelConfig.model_validate(BASE)
    )


@pytest.mark.parametrize(
    "change",
    [
        {"instance_group": [{"count": 2}]},
        {"dynamic_batching": {"preferred_batch_size": [4]}},
        {"slo": {"p99_ms": 5.0}},
        {"rate_limits": {"default": {"requests_per_s": 5.0}}, "fair_sharing": {}, "priority_aging_microseconds": 5},
        {"build_on_load": True},
        {"gpu_memory_budget": "2GiB", "keep_loaded": True},
        {"isolation": "process", "isolation_timeout_s": 5.0, "isolation_memory_limit": "1GiB"},
        {"optimization": {"precision": "int8", "priority": "max"}},
        {"optimization": {"precision": "INT8", "calibration": {"method": "entropy"}, "accuracy": {}}},
        {"metric_tags": {"a": "b"}},
        {"postprocess": {"softmax": True}},
    ],
    ids=str,
)
def test_how_a_model_is_served_does_not_change_the_digest(change: dict[str, Any]) -> None:
    assert config_digest(ModelConfig.model_validate({**BASE, **change})) == config_digest(
        ModelConfig.model_validate(BASE)
    )


def test_the_image_preparation_mode_does_not_change_the_digest() -> None:
    options = {"crop": [8, 8], "mean": 127.0}
    by_server = {**options, "by": "server", "source": [300, 300]}
    assert config_digest(ModelConfig.model_validate({**BASE, "preprocess": options})) == config_digest(
        ModelConfig.model_validate({**BASE, "preprocess": by_server})
    )


def test_the_digest_is_stable() -> None:
    # Of a release before: a field that is new, and at its default, must not make every engine stale.
    config = ModelConfig.model_validate({**BASE, "preprocess": {"mean": 127.0}})
    assert config_digest(config) == "094cec0b81b62b51000ece321b6ab89ca45b874652088bb1af49f7c45890babd"
