"""A model with a tensor of every datatype, its requests and responses, and the check of what a codec decodes."""

from __future__ import annotations

import numpy as np
from headrace.core.request import InferRequest
from headrace.core.tensor import BY_NAME, BYTES, DATATYPES, Array, ModelSpec, TensorSpec
from hypothesis import strategies as st

NAMES = [datatype.name for datatype in DATATYPES]


def echo(batch: int = 4) -> ModelSpec:
    """One input and one output of every datatype, all optional, (-1, -1)."""
    shape = (-1, -1) if batch else (-1,)
    inputs = {name: TensorSpec(name, BY_NAME[name], shape, optional=True) for name in NAMES}
    outputs = {name: TensorSpec(name, BY_NAME[name], shape) for name in NAMES}
    return ModelSpec("echo", "1", "test", inputs, outputs, batch)


SPEC, FLAT_SPEC = echo(), echo(0)


def some_output(name: str, spec: ModelSpec) -> Array:
    shape = (1, 2) if spec.max_batch_size else (2,)
    array: Array = np.full(shape, b"x" if name == "BYTES" else 1, BY_NAME[name].dtype)
    return array


def check_decoded(spec: ModelSpec, first: InferRequest, second: InferRequest) -> None:
    """Two decoded requests of the same bytes are equal and fit the model."""
    assert first.inputs.keys() == second.inputs.keys()
    assert (first.rows, first.shape_key, first.deadline_ns) == (second.rows, second.shape_key, second.deadline_ns)
    for name, array in first.inputs.items():
        assert array.dtype == spec.inputs[name].datatype.dtype
        assert array.ndim == len(spec.inputs[name].shape)
        assert array.shape == second.inputs[name].shape
        assert not spec.max_batch_size or array.shape[0] == first.rows


@st.composite
def good_inputs(draw: st.DrawFn) -> dict[str, Array]:
    """Tensors of some of the datatypes, (rows, columns)."""
    rows = draw(st.integers(1, 4))
    arrays: dict[str, Array] = {}
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)):
        columns = draw(st.integers(1, 3))
        datatype = BY_NAME[name]
        if datatype is BYTES:
            items = draw(st.lists(st.binary(max_size=5), min_size=rows * columns, max_size=rows * columns))
            array: Array = np.empty(rows * columns, dtype=object)
            array[:] = items
        else:
            size = rows * columns * datatype.size_bytes
            raw = draw(st.binary(min_size=size, max_size=size))
            array = np.frombuffer(raw, np.uint8).copy() & 1 if name == "BOOL" else np.frombuffer(raw, datatype.dtype)
            array = array.view(datatype.dtype)
        arrays[name] = array.reshape(rows, columns)
    return arrays
