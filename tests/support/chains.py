"""Three small ONNX models in a row, and their ensemble."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from loadtest.onnx_models import onnx_model

NAMES = ("first", "second", "third")


def write_chain(folder: Path) -> None:
    """Write the models and their ensemble `chain`: X and Y, FP32 (batch, 16)."""
    fields = (
        'max_batch_size: 8 dynamic_batching {} parameters { key: "intra_op_thread_count" value { string_value: "1" } }'
    )
    for index, name in enumerate(NAMES):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1/model.onnx").write_bytes(_layer(index))
        (folder / name / "config.pbtxt").write_text(fields)
    steps, tensor = [], "X"
    for index, name in enumerate(NAMES):
        written = "Y" if index == len(NAMES) - 1 else f"t{index}"
        steps.append(
            f'{{ model_name: "{name}" model_version: -1 input_map {{ key: "X" value: "{tensor}" }} '
            f'output_map {{ key: "Y" value: "{written}" }} }}'
        )
        tensor = written
    (folder / "chain/1").mkdir(parents=True)
    tensors = [
        f'{side} [ {{ name: "{name}" data_type: TYPE_FP32 dims: [16] }} ]'
        for side, name in (("input", "X"), ("output", "Y"))
    ]
    config = [
        'platform: "ensemble"',
        "max_batch_size: 8",
        *tensors,
        f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}",
    ]
    (folder / "chain/config.pbtxt").write_text("\n".join(config))


def _layer(seed: int) -> bytes:
    """Y = tanh(X W), with seeded weights."""
    weights = {"W": (np.random.default_rng(seed).standard_normal((16, 16)) / 4).astype(np.float32)}
    nodes = [helper.make_node("MatMul", ["X", "W"], ["M"]), helper.make_node("Tanh", ["M"], ["Y"])]
    fp32 = TensorProto.FLOAT
    model = onnx_model(nodes, {"X": (fp32, ("batch", 16))}, {"Y": (fp32, ("batch", 16))}, weights)
    content: bytes = model.SerializeToString()
    return content
