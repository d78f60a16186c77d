"""Signatures of ONNX files with random faults in bytes and structure: a result or a finding, in bounded time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.config.onnx_model import external_files, read_signature
from headrace.core.errors import ConfigError
from onnx import TensorProto, helper, numpy_helper

from loadtest.onnx_models import onnx_model
from tests.support.examples import examples
from tests.support.models import affine

FP32, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
X, Y = {"X": (INT64, ("N", 4))}, {"Y": (INT64, ("N", 4))}
# The longest time for one of these small files; the slowest takes some ms.
LIMIT_S = 5.0


def division() -> onnx.ModelProto:
    nodes = [helper.make_node("Div", ["X", "by"], ["Q"]), helper.make_node("Mod", ["Q", "by"], ["Y"])]
    return onnx_model(nodes, X, Y, {"by": np.array([1, 2, 3, 4])})


def branch() -> onnx.ModelProto:
    def graph(operator: str) -> onnx.GraphProto:
        info = helper.make_tensor_value_info("Z", INT64, ("N", 4))
        constant = helper.make_node("Constant", [], ["two"], value=numpy_helper.from_array(np.array(2)))
        return helper.make_graph([constant, helper.make_node(operator, ["X", "two"], ["Z"])], operator, [], [info])

    node = helper.make_node("If", ["C"], ["Y"], then_branch=graph("Div"), else_branch=graph("Mul"))
    return onnx_model([node], {**X, "C": (BOOL, (1,))}, Y)


def function() -> onnx.ModelProto:
    inner = [helper.make_node("Cast", ["a"], ["f"], to=FP32), helper.make_node("Cast", ["f"], ["c"], to=INT64)]
    outer = [helper.make_node("inner", ["a"], ["c"], domain="local"), helper.make_node("Div", ["c", "a"], ["b"])]
    model = onnx_model([helper.make_node("Identity", ["X"], ["Y"])], X, Y)
    model.graph.node[0].CopyFrom(helper.make_node("outer", ["X"], ["Y"], domain="local"))
    opsets = [*model.opset_import, helper.make_opsetid("local", 1)]
    model.opset_import.append(opsets[-1])
    for name, nodes, output in (("inner", inner, "c"), ("outer", outer, "b")):
        model.functions.append(helper.make_function("local", name, ["a"], [output], nodes, opsets))
    return model


def einsum() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Einsum", ["X", "W"], ["E"], equation="bi,ij->bj"),
        helper.make_node("Softmax", ["E"], ["Y"]),
    ]
    floats = {"X": (FP32, ("N", 4))}, {"Y": (FP32, ("N", 4))}
    return onnx_model(nodes, *floats, {"W": np.ones((4, 4), np.float32)})


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "affine": affine, "division": division, "branch": branch, "function": function, "einsum": einsum
}  # fmt: skip
NUMBERS = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 16, 2**31 - 1, 2**62, 2**63 - 1)


def messages(message: Any) -> Iterator[Any]:
    """A message and all messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for each in value if field.is_repeated else [value]:
                yield from messages(each)


def change_structure(model: onnx.ModelProto, choice: random.Random) -> None:
    """Change one field of one message: another value, none, or elements that are left out, repeated or moved."""
    message = choice.choice(list(messages(model)))
    field = choice.choice(message.DESCRIPTOR.fields)
    value = getattr(message, field.name)
    strings = sorted({str(name) for node in model.graph.node for name in (*node.input, *node.output, node.op_type)})
    if field.is_repeated and value and choice.random() < 0.8:
        index = choice.randrange(len(value))
        kept = [*value[:index], *(value[index] for _ in range(choice.choice((0, 0, 2, 3)))), *value[index + 1 :]]
        choice.shuffle(kept)
        kept = [
            type(each).FromString(each.SerializeToString()) if hasattr(each, "DESCRIPTOR") else each for each in kept
        ]
        message.ClearField(field.name)
        getattr(message, field.name).extend(kept)
    elif field.type == field.TYPE_MESSAGE:
        same = [each for each in messages(model) if each.DESCRIPTOR is field.message_type]
        other = choice.choice(same).__deepcopy__() if same else None
        if field.is_repeated:
            value.extend([other] if other is not None else [])
        elif other is not None and choice.random() < 0.6:
            value.CopyFrom(other)
        else:
            message.ClearField(field.name)
    else:
        is_text = field.type in (field.TYPE_STRING, field.TYPE_BYTES)
        new: Any = choice.choice([*strings, "", "é", "x" * 300]) if is_text else choice.choice(NUMBERS)
        if field.type == field.TYPE_BYTES:
            new = new.encode()
        if field.type == field.TYPE_ENUM:
            new = choice.choice([each.number for each in field.enum_type.values])
        elif field.type == field.TYPE_INT32:
            new %= 1 << 31
        elif field.type == field.TYPE_UINT64:
            new %= 1 << 64
        if field.is_repeated:
            value.append(new)
        else:
            setattr(message, field.name, new)


def change_bytes(content: bytes, choice: random.Random) -> bytes:
    """Change, cut, repeat or insert bytes in one place."""
    first, last = sorted(choice.randrange(len(content) + 1) for _ in range(2))
    last = min(last, first + choice.choice((1, 2, 8, 1000)))
    middle = choice.choice((b"", choice.randbytes(last - first), content[first:last] * 2, b"\xff" * (last - first)))
    return content[:first] + middle + content[last:]


def hostile(name: str, seed: int) -> bytes:
    """A file with up to four faults."""
    choice = random.Random(f"{name} {seed}")
    model = MODELS[name]()
    for _ in range(choice.randrange(4)):
        change_structure(model, choice)
    content = model.SerializeToString()
    return change_bytes(content, choice) if choice.random() < 0.5 else content


@pytest.mark.parametrize("name", MODELS)
def test_a_file_with_faults_has_a_signature_or_a_finding(tmp_path: Path, name: str) -> None:
    results = {True: 0, False: 0}
    for seed in range(40 + examples(260)):
        path = tmp_path / f"{seed}.onnx"
        path.write_bytes(hostile(name, seed))
        start_s = time.monotonic()
        try:
            read_signature(path, f"seed {seed}")
            external_files(path, f"seed {seed}")
            results[True] += 1
        except ConfigError as error:
            assert all(finding.message for finding in error.findings)
            results[False] += 1
        assert time.monotonic() - start_s < LIMIT_S, seed
    assert all(results.values()), results


@pytest.mark.parametrize("location", ["x" * 300, "x/" * 3000, "é" * 200, "model.onnx/x"])
def test_a_location_that_can_be_no_file_is_a_finding(tmp_path: Path, location: str) -> None:
    model = affine()
    tensor = model.graph.initializer[0]
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    for read in (read_signature, external_files):
        with pytest.raises(ConfigError, match="does not exist"):
            read(path, "model.onnx")


def test_a_chain_of_many_functions_is_read(tmp_path: Path) -> None:
    model = function()
    model.functions[1].node[0].op_type = "inner-0"
    for number in range(3000):
        model.functions.append(model.functions[0])
        model.functions[-1].name = f"inner-{number}"
        call = helper.make_node(f"inner-{number + 1}", ["a"], ["c"], domain="local")
        if number < 2999:
            model.functions[-1].node[0].CopyFrom(call)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    start_s = time.monotonic()
    assert read_signature(path, "model.onnx").trap
    assert time.monotonic() - start_s < LIMIT_S
