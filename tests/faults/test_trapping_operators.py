"""Operators that end their process for some values of a request: a model with them runs in a process of its own."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from headrace.config.onnx_model import read_signature
from onnx import TensorProto, defs, helper, numpy_helper

from loadtest.onnx_models import onnx_model
from tests.support import models
from tests.support.serving import serving

OPSET = 20
WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
# Operators with graphs of their own; Loop runs as often as a request says.
WITH_GRAPHS = {"If", "Loop", "Scan", "SequenceMap"}
TRAPPING = {"Div", "Mod"}
MAX_RUNS = 120


def operators() -> list[str]:
    """Names of the operators of the default domain that a graph of this operator set may have."""
    names = {schema.name for schema in defs.get_all_schemas() if schema.domain == "" and schema.since_version <= OPSET}
    return sorted(names - WITH_GRAPHS - {"Constant"})


def division(op: str, datatype: int, divisor: int | None = None) -> onnx.ModelProto:
    """Y = A op B of (batch, 2) numbers; B is an input, or a constant."""
    kind = (datatype, ("batch", 2))
    inputs = {"A": kind} if divisor is not None else {"A": kind, "B": kind}
    constants = {} if divisor is None else {"B": np.array([divisor], helper.tensor_dtype_to_np_dtype(datatype))}
    return onnx_model([helper.make_node(op, ["A", "B"], ["Y"])], inputs, {"Y": kind}, constants)


def cases(op: str) -> Iterator[tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]]:
    """Models of one node for each choice of types and ranks, with the extremes of their types, alone and in a batch."""
    schema = defs.get_schema(op, OPSET, "")
    allowed = {each.type_param_str: list(each.allowed_type_strs) for each in schema.type_constraints}
    attributes = {}
    for attribute in schema.attributes.values():
        if attribute.required:
            examples = {"FLOAT": 1.0, "INT": 1, "STRING": "ab->ab", "INTS": [1], "FLOATS": [1.0]}
            attributes[attribute.name] = 6 if attribute.name == "to" else examples.get(attribute.type.name, 1)
    for count in range(max(schema.min_input, 1), min(len(schema.inputs), schema.min_input + 2) + 1):
        formals = schema.inputs[:count]
        variables = sorted({formal.type_str for formal in formals})
        choices = [
            [name for kind in allowed.get(each, [each]) if (name := kind[7:-1]) in (*WHOLE, "float")]
            for each in variables
        ]
        for types, rank in itertools.product(itertools.product(*choices), (0, 1, 2)):
            names = dict(zip(variables, types, strict=True))
            dtypes = [np.dtype("float32" if names[f.type_str] == "float" else names[f.type_str]) for f in formals]
            kinds = [helper.np_dtype_to_tensor_dtype(dtype) for dtype in dtypes]
            inputs = [helper.make_tensor_value_info(f"x{i}", kind, ["n"] * rank) for i, kind in enumerate(kinds)]
            outputs = [f"y{index}" for index in range(max(schema.min_output, 1))]
            node = helper.make_node(op, [each.name for each in inputs], outputs, **attributes)
            graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name=name) for name in outputs])
            pools = [extremes(dtype) for dtype in dtypes]
            values = list(itertools.islice(itertools.product(*pools), MAX_RUNS))
            feeds = [
                {
                    f"x{i}": np.full((size,) * rank, value, dtype)
                    for i, (value, dtype) in enumerate(zip(row, dtypes, strict=True))
                }
                for size in (1, 3)
                for row in values
            ]
            yield helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9), feeds


def extremes(dtype: np.dtype) -> list[float]:
    if dtype.kind == "f":
        return [0.0, float("inf"), float("nan"), -3e38]
    limits = np.iinfo(dtype)
    return [limits.min, limits.max, 0, 1, *([-1] if limits.min < 0 else [])]


def run_child(names: list[str]) -> None:
    """Run operators one after the other; the name of each is printed before it runs."""
    import resource

    import onnxruntime as ort

    resource.setrlimit(
        resource.RLIMIT_AS, (6 << 30, 6 << 30)
    )  # shapes of extremes are refused, or fail to be allocated
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    for name in names:
        print(name, flush=True)
        for model, feeds in cases(name):
            try:
                session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
            except Exception as error:  # no implementation for these types, or attributes that the node needs
                print(name, type(error).__name__, file=sys.stderr)
                continue
            for feed in feeds:
                try:
                    session.run(None, feed)
                except Exception as error:  # refused values
                    print(name, type(error).__name__, file=sys.stderr)


@pytest.mark.slow
def test_only_known_operators_end_their_process() -> None:
    waiting, ended = operators(), {}
    while waiting:
        command = [sys.executable, "-m", "tests.faults.test_trapping_operators", *waiting]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            assert child.stdout is not None
            names = child.stdout.read().split()
        if child.returncode == 0:
            break
        ended[names[-1]] = child.returncode
        waiting = waiting[waiting.index(names[-1]) + 1 :]
    assert "Div" in ended
    assert set(ended) <= TRAPPING, ended


@pytest.mark.parametrize("op", sorted(TRAPPING))
@pytest.mark.parametrize("datatype", [TensorProto.INT32, TensorProto.INT64])
def test_a_division_ends_no_server(op: str, datatype: int, tmp_path: Path) -> None:
    models.add_model(tmp_path, "division", division(op, datatype))
    models.add_model(tmp_path, "neighbour", models.affine(seed=1))
    name, smallest = ("INT32", -(2**31)) if datatype == TensorProto.INT32 else ("INT64", -(2**63))

    def body(divisor: int) -> bytes:
        values = {"A": [smallest, 6], "B": [divisor, 3]}
        tensors = [{"name": key, "datatype": name, "shape": [1, 2], "data": data} for key, data in values.items()]
        return json.dumps({"inputs": tensors}).encode()

    x = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}).encode()
    with serving(tmp_path, tmp_path) as server:
        before = server.request("POST", "/v2/models/neighbour/infer", x)
        for _ in range(2):
            assert server.request("POST", "/v2/models/division/infer", body(-1))[0] in (500, 503)
            assert server.request("POST", "/v2/models/neighbour/infer", x)[::2] == before[::2]
        status, _, answer = server.request("POST", "/v2/models/division/infer", body(2))
        assert status == 200, answer
        expected = [smallest // 2, 2] if op == "Div" else [0, 0]
        assert json.loads(answer)["outputs"][0]["data"] == expected
        config = json.loads(server.request("GET", "/v2/models/division/config")[2])
        assert config["parameters"]["headrace.isolation"]["string_value"] == "process"


@pytest.mark.parametrize(
    ("model", "traps"),
    [
        (division("Div", TensorProto.INT64), True),
        (division("Mod", TensorProto.INT32), True),
        (division("Div", TensorProto.INT64, -1), True),
        (division("Div", TensorProto.INT64, 3), False),
        (division("Div", TensorProto.FLOAT), False),
        (division("Div", TensorProto.UINT32), False),
    ],
)
def test_nodes_that_may_end_their_process_are_found(model: onnx.ModelProto, traps: bool, tmp_path: Path) -> None:
    file = models.add_model(tmp_path, "division", model) / "1" / "model.onnx"
    assert bool(read_signature(file, "model.onnx").trap) == traps


def test_types_follow_the_operators(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["A"], ["shape"]),
        helper.make_node("Constant", [], ["two"], value=numpy_helper.from_array(np.array([2], np.int64))),
        helper.make_node("Div", ["shape", "two"], ["half"]),
        helper.make_node("Cast", ["A"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Sqrt", ["float"], ["root"]),
        helper.make_node("Div", ["root", "float"], ["Y"]),
    ]
    kind = (TensorProto.INT64, ("batch", 2))
    model = onnx_model(nodes, {"A": kind}, {"Y": (TensorProto.FLOAT, ("batch", 2)), "half": (TensorProto.INT64, (2,))})
    file = models.add_model(tmp_path, "types", model) / "1" / "model.onnx"
    assert read_signature(file, "model.onnx").trap == ""


if __name__ == "__main__":
    run_child(sys.argv[1:])
