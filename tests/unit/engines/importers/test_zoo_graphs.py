"""The nine classic graphs that come with the ONNX package, all exported with a batch of 1 and constant weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from headrace.config.onnx_model import read_signature
from headrace_engines.errors import BuildError
from headrace_engines.importers.onnx_batch import free_batch
from headrace_engines.importers.onnx_proof import prove
from headrace_engines.importers.random_weights import weights_of
from onnx import helper, numpy_helper

from tests.support.examples import MORE_EXAMPLES

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NAMES = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19", "zfnet512",
)  # fmt: skip
# Nodes that hold the batch.
RESHAPES = {"densenet121": 0, "shufflenet": 33, "squeezenet": 0}


def zoo_model(name: str) -> onnx.ModelProto:
    path = LIGHT / f"light_{name}.onnx"
    if not path.exists():
        pytest.skip("this version of the ONNX package comes without the light models")
    return onnx.load(path)


@pytest.mark.parametrize("name", NAMES)
def test_the_batch_is_freed(name: str, tmp_path: Path) -> None:
    freed = free_batch(zoo_model(name))
    assert freed.batch_size == 1
    assert len(freed.changes) == RESHAPES.get(name, 1)
    onnx.save(freed.model, tmp_path / "model.onnx")
    assert read_signature(tmp_path / "model.onnx", "model.onnx").rows.independent


def narrow(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give the fully connected layers of 4,096 outputs 64 of them: they have most of the weights."""
    for tensor in model.graph.initializer:
        sizes = numpy_helper.to_array(tensor)
        if tensor.name.endswith("__SHAPE") and 4096 in sizes:
            tensor.CopyFrom(numpy_helper.from_array(np.where(sizes == 4096, 64, sizes), tensor.name))
    return model


# The others have large images between their layers, or hundreds of layers.
QUICK = ("inception_v1", "shufflenet", "squeezenet")
SLOW = ("bvlc_alexnet",)
PROVEN = [
    *QUICK,
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    *(pytest.param(name, marks=MORE_EXAMPLES) for name in NAMES if name not in QUICK + SLOW),
]


@pytest.mark.parametrize("name", PROVEN)
def test_batches_have_the_values_of_single_runs(name: str) -> None:
    model = narrow(zoo_model(name))
    freed = free_batch(model).model
    proof = prove(model, freed)
    # All weights are random: those made by nodes, and those of the file.
    assert proof.weights == sum(values.size > 1 for values in weights_of(freed).values())
    assert proof.max_error < 1e-3


@pytest.mark.parametrize("order", [[2, 1, 0, 3, 4], [1, 0, 2, 3, 4]])
def test_a_shuffle_that_moves_the_batch_fails_the_proof(order: list[int]) -> None:
    model = zoo_model("shufflenet")
    freed = free_batch(model).model
    node = next(node for node in freed.graph.node if node.op_type == "Transpose")
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("perm", order))
    with pytest.raises(BuildError, match=f"(not free: .*{node.name}|fails on samples)"):
        prove(model, freed)


@pytest.mark.parametrize("order", [[2, 0, 1, 3, 4], [1, 0, 2, 3, 4]])
def test_a_shuffle_that_moves_a_batch_of_one(order: list[int]) -> None:
    """Channels before the batch are refused; groups before it are not: one target further up makes them a part of the batch."""
    model = zoo_model("shufflenet")
    node = next(node for node in model.graph.node if node.op_type == "Transpose")
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("perm", order))
    if order[0] == 2:
        with pytest.raises(BuildError, match=r"cannot be freed: .* node .n[0-9]+"):
            free_batch(model)
    else:
        freed = free_batch(model)
        assert freed.changes[0] == "Reshape node 'n7': [1, 4, 28, 56, 56] is [1, -1, 28, 56, 56] now"
        assert prove(model, freed.model).max_error < 1e-3
