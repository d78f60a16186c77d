"""Which instances run, where the configuration says so and where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import read_model_folder
from headrace.config.triton_json import to_triton_json
from headrace.models.version_policies import handle_policy
from onnx import TensorProto

from tests.support.onnx_models import identity_model, write_model

SIXTEEN = {"x": (TensorProto.FLOAT, ["b", 16])}
GPU = "backend: tensorrt\n"


def read(repository: Path, config: str) -> ModelConfig:
    write_model(repository / "m", identity_model(SIXTEEN, {"y": SIXTEEN["x"]}), config=config)
    (repository / "m" / "1" / "model.plan").touch()
    return read_model_folder(repository / "m", repository).config


@pytest.mark.parametrize(
    ("config", "kind", "count"),
    [
        ("backend: onnxruntime\n", "KIND_AUTO", 1),
        (GPU, "KIND_GPU", 2),
        (GPU + "max_batch_size: 8\n", "KIND_GPU", 2),
        (GPU + "max_batch_size: 0\n", "KIND_GPU", 1),
        (GPU + "isolation: process\n", "KIND_GPU", 1),
        (GPU + "instance_group: [{}]\n", "KIND_AUTO", 1),
        (GPU + "instance_group: [{gpus: [0]}]\n", "KIND_AUTO", 1),
        (GPU + "instance_group: [{kind: gpu, count: 3}]\n", "KIND_GPU", 3),
    ],
)
def test_configured_instances_are_used_and_defaults_depend_on_the_backend(
    tmp_path: Path, config: str, kind: str, count: int
) -> None:
    result = read(tmp_path, config)
    assert [(group.name, group.kind, group.count) for group in result.instance_group] == [("m_0", kind, count)]
    (shown,) = to_triton_json(result)["instance_group"]  # type: ignore[misc]
    assert (shown["kind"], shown["count"]) == (kind, count)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (GPU, 1),
        (GPU + "instance_group: [{kind: gpu, count: 3}]\n", 1),
        (GPU + "instance_group: [{kind: gpu, count: 3}, {count: 2}]\n", 2),
        ("backend: onnxruntime\ninstance_group: [{kind: gpu, count: 3}]\n", 3),
    ],
)
def test_the_gpu_instance_count_does_not_apply_to_the_cpu_fallback(tmp_path: Path, config: str, count: int) -> None:
    assert handle_policy(read(tmp_path, config)).instances == count


@pytest.mark.parametrize("decoupled", ["true", "false"])
def test_a_decoupled_model_shares_its_queue_between_clients(decoupled: str) -> None:
    """A client with many open streams must not delay the others."""
    config = ModelConfig.model_validate(
        {"name": "m", "model_transaction_policy": {"decoupled": decoupled == "true"}, "backend": "python"}
    )
    assert (handle_policy(config).sharing is not None) == (decoupled == "true")
