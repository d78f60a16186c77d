"""Models with sequences for tests: a Python accumulator, and ONNX models that return their control tensors or have states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from loadtest.onnx_models import onnx_model
from tests.support.models import add_model
from tests.support.python_models import add_python_model

# OUTPUT is the sum since START, PADDING makes a request large.
# A value of 1000 kills the process, 1001 is refused, 1002 raises, 1003 waits for the file "go".
ACCUMULATOR = """
import os
import pathlib
import time
import numpy as np
import triton_python_backend_utils as pb_utils

GO = pathlib.Path(__file__).parent / "go"

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            value, start, end, ready, corrid = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0, 0]
                for name in ("INPUT", "START", "END", "READY", "CORRID")
            )
            corrid = corrid.decode() if isinstance(corrid, bytes) else int(corrid)
            assert corrid == request.correlation_id() and ready == 1
            assert request.flags() == (
                pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START * int(start)
                + pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END * int(end)
            )
            assert "headrace" not in request.parameters()
            if value == 1000:
                os.kill(os.getpid(), 9)
            if value == 1001:
                error = pb_utils.TritonError("refused by the model", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            if value == 1002:
                raise ValueError("a failing request")
            while value == 1003 and not GO.exists():
                time.sleep(0.01)
            if start:
                self.sums[corrid] = 0
            self.sums[corrid] += int(value)
            total = self.sums[corrid]
            if end:
                del self.sums[corrid]
            outputs = [
                pb_utils.Tensor("OUTPUT", np.array([[total]], np.int32)),
                pb_utils.Tensor("PROCESS", np.array([[os.getpid()]], np.int64)),
                pb_utils.Tensor("BATCH", np.array([[len(requests)]], np.int32)),
            ]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""


def controls(id_type: str = "TYPE_UINT64") -> str:
    """Return the control inputs START, END, READY (INT32) and CORRID as text of a configuration."""
    flags = ", ".join(
        f'{{ name: "{kind}" control [ {{ kind: CONTROL_SEQUENCE_{kind} int32_false_true: [ 0, 1 ] }} ] }}'
        for kind in ("START", "END", "READY")
    )
    corrid = f'{{ name: "CORRID" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: {id_type} }} ] }}'
    return f"control_input [ {flags}, {corrid} ]"


def accumulator_config(
    strategy: str = "oldest { max_candidate_sequences: 4 }",
    id_type: str = "TYPE_UINT64",
    idle_us: int = 3_600_000_000,
    count: int = 1,
    batch: int = 4,
) -> str:
    """Return the configuration of the accumulator."""
    return f"""
backend: "python"
max_batch_size: {batch}
input [ {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }},
        {{ name: "PADDING" data_type: TYPE_UINT8 dims: [ -1 ] optional: true }} ]
output [ {{ name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }}, {{ name: "PROCESS" data_type: TYPE_INT64 dims: [ 1 ] }},
         {{ name: "BATCH" data_type: TYPE_INT32 dims: [ 1 ] }} ]
instance_group [ {{ count: {count} kind: KIND_CPU }} ]
sequence_batching {{ max_sequence_idle_microseconds: {idle_us} {strategy} {controls(id_type)} }}
"""


def add_accumulator(repository: Path, name: str, **options: object) -> Path:
    """Write an accumulator, and return its folder; options as in `accumulator_config`."""
    return add_python_model(repository, name, ACCUMULATOR, accumulator_config(**options))  # type: ignore[arg-type]


def echo_controls(
    flag_type: int = TensorProto.INT32, id_type: int = TensorProto.UINT64, batched: bool = True
) -> onnx.ModelProto:
    """Y = X; S, E, R and C are START, END, READY and CORRID; ROW is the row. All (batch, 1), or (1)."""
    shape: tuple[str | int, ...] = ("batch", 1) if batched else (1,)
    names = {"START": "S", "END": "E", "READY": "R", "CORRID": "C", "X": "Y"}
    nodes = [helper.make_node("Identity", [source], [target]) for source, target in names.items()]
    types = {"START": flag_type, "END": flag_type, "READY": flag_type, "CORRID": id_type, "X": TensorProto.FLOAT}
    inputs = {name: (types[name], shape) for name in types}
    outputs = {target: (types[source], shape) for source, target in names.items()}
    if batched:
        nodes += [
            helper.make_node("Mul", ["X", "zero"], ["zeros"]),
            helper.make_node("Add", ["zeros", "one"], ["ones"]),
            helper.make_node("CumSum", ["ones", "axis"], ["ROW"], exclusive=1),
        ]
        outputs["ROW"] = (TensorProto.FLOAT, shape)
    weights = {"zero": np.float32(0), "one": np.float32(1), "axis": np.int64(0)} if batched else {}
    return onnx_model(nodes, inputs, outputs, {name: np.asarray(value) for name, value in weights.items()})


def add_echo(repository: Path, name: str, strategy: str, batch: int = 4, idle_us: int = 3_600_000_000) -> Path:
    """Write the ONNX model, and return its folder; its outputs depend on the row."""
    config = f"""
parameters {{ key: "headrace.proof" value {{ string_value: "warn" }} }}
max_batch_size: {batch}
sequence_batching {{ max_sequence_idle_microseconds: {idle_us} {strategy} {controls()} }}
"""
    return add_model(repository, name, echo_controls(batched=batch > 0), config=config)


def state_sums(batched: bool = True, fails: bool = False, free: bool = True) -> onnx.ModelProto:
    """Y is the sum of all X of a sequence, by the state SUM_IN, SUM_OUT. All are FP32 (batch, 1), or (1).

    Args:
        batched: with a dimension of rows.
        fails: with an input FAIL, INT64 of the shape of X, which fails the run unless it is 0.
        free: with the state HISTORY_IN, HISTORY_OUT (batch, any size), to which each X is appended, and TOTAL, the sum of it.
    """
    rows: tuple[str | int, ...] = ("batch",) if batched else ()
    kind = TensorProto.FLOAT
    inputs = {"X": (kind, (*rows, 1)), "SUM_IN": (kind, (*rows, 1))}
    outputs = {"Y": (kind, (*rows, 1)), "SUM_OUT": (kind, (*rows, 1))}
    constants: dict[str, np.ndarray] = {}
    nodes = [
        helper.make_node("Add", ["X", "SUM_IN"], ["sum"]),
        helper.make_node("Identity", ["sum"], ["SUM_OUT"]),
        helper.make_node("Add", ["sum", "added"] if fails else ["X", "SUM_IN"], ["Y"]),
    ]
    if fails:
        inputs["FAIL"] = TensorProto.INT64, (*rows, 1)
        constants["nothing"] = np.zeros(1, np.float32)
        nodes.insert(2, helper.make_node("Gather", ["nothing", "FAIL"], ["added"]))
    if free:
        axis = len(rows)
        inputs["HISTORY_IN"] = kind, (*rows, "before")
        outputs |= {"HISTORY_OUT": (kind, (*rows, "after")), "TOTAL": (kind, (*rows, 1))}
        constants["axis"] = np.array([axis])
        nodes += [
            helper.make_node("Concat", ["HISTORY_IN", "X"], ["HISTORY_OUT"], axis=axis),
            helper.make_node("ReduceSum", ["HISTORY_OUT", "axis"], ["TOTAL"]),
        ]
    return onnx_model(nodes, inputs, outputs, constants)


def states(sum_options: str = "", history_options: str = "", free: bool = True) -> str:
    """Return the states of `state_sums` as text of a configuration, with further options of each."""
    history = (
        ', { input_name: "HISTORY_IN" output_name: "HISTORY_OUT" data_type: TYPE_FP32 dims: [ -1 ] '
        + history_options
        + "}"
    )
    total = f'{{ input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_FP32 dims: [ 1 ] {sum_options} }}'
    return f"state [ {total}{history if free else ''} ]"


def add_state_sums(
    repository: Path,
    name: str,
    strategy: str,
    batch: int = 4,
    idle_us: int = 3_600_000_000,
    sum_options: str = "",
    history_options: str = "",
    outputs: str = "",
    fails: bool = True,
) -> Path:
    """Write the ONNX model with states, and return its folder; options as in `states`."""
    config = f"""
max_batch_size: {batch}
{outputs}
sequence_batching {{
  max_sequence_idle_microseconds: {idle_us} {strategy} {states(sum_options, history_options)}
}}
"""
    return add_model(repository, name, state_sums(batch > 0, fails), config=config)
