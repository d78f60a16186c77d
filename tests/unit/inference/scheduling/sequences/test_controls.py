"""Control tensors by kind and datatype, and the ids that they can hold."""

from __future__ import annotations

import numpy as np
import pytest
from headrace.core.completion import ThreadCompletion
from headrace.core.errors import BadRequest
from headrace.core.request import InferRequest
from headrace.core.tensor import BY_NAME
from headrace.inference.scheduling.policy import ControlTensor
from headrace.inference.scheduling.sequences.controls import ControlledExecution, check_correlation_id, control_rows
from headrace.inference.scheduling.sequences.live_sequence import SequenceEntry
from headrace.runtimes.base import Execution


def entry(correlation_id: int | str, start: bool = False, end: bool = False) -> SequenceEntry:
    request = InferRequest(inputs={}, rows=1, shape_key=None, received_ns=0)
    return SequenceEntry(request, ThreadCompletion(), 0, correlation_id, start, end)


ROWS = [entry(5, start=True), None, entry(7, end=True)]


@pytest.mark.parametrize(
    ("kind", "datatype", "pair", "expected"),
    [
        ("START", "INT32", (0, 1), [1, 0, 0]),
        ("END", "FP32", (-1.5, 2.5), [-1.5, -1.5, 2.5]),
        ("READY", "BOOL", (False, True), [True, False, True]),
        ("READY", "INT32", (1, 0), [0, 1, 0]),
        ("CORRID", "UINT64", (0, 1), [5, 0, 7]),
        ("CORRID", "INT32", (0, 1), [5, 0, 7]),
    ],
)
def test_values(kind: str, datatype: str, pair: tuple[float, float], expected: list[float]) -> None:
    control = ControlTensor("c", kind, BY_NAME[datatype], *pair)
    values = control_rows(control, ROWS, batched=True)
    assert values.dtype == BY_NAME[datatype].dtype
    assert values.tolist() == [[value] for value in expected]


def test_without_a_batch_dimension() -> None:
    control = ControlTensor("c", "START", BY_NAME["INT32"])
    assert control_rows(control, ROWS[:1], batched=False).tolist() == [1]


def test_text_ids() -> None:
    control = ControlTensor("c", "CORRID", BY_NAME["BYTES"])
    assert control_rows(control, [entry("ä"), None], batched=True).tolist() == [["ä".encode()], [b""]]


@pytest.mark.parametrize("datatype", ["UINT64", "INT64", "UINT32", "INT32"])
def test_the_largest_id_of_a_datatype(datatype: str) -> None:
    controls = [ControlTensor("c", "CORRID", BY_NAME[datatype])]
    largest = int(np.iinfo(datatype.lower()).max)
    check_correlation_id(controls, largest, "m")
    values = control_rows(controls[0], [entry(largest)], batched=True)
    assert values[0, 0] == largest
    with pytest.raises(BadRequest, match=f"send at most {largest}"):
        check_correlation_id(controls, largest + 1, "m")
    with pytest.raises(BadRequest, match="send a number"):
        check_correlation_id(controls, "1", "m")


def test_an_id_of_any_type_without_a_control() -> None:
    check_correlation_id([ControlTensor("c", "START", BY_NAME["INT32"])], "a", "m")
    check_correlation_id([], 2**64 - 1, "m")


class Echo(Execution):
    """Returns its inputs."""

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return inputs

    def close(self) -> None:
        pass


def test_runs_without_controls_get_rows_that_are_not_ready() -> None:
    controls = [ControlTensor("r", "READY", BY_NAME["INT32"], 0, 1), ControlTensor("c", "CORRID", BY_NAME["UINT64"])]
    execution = ControlledExecution(Echo(), controls, batched=True)
    outputs = execution.run({"x": np.zeros((3, 2))})
    assert (outputs["r"].tolist(), outputs["c"].tolist()) == ([[0]] * 3, [[0]] * 3)
    own = {"x": np.zeros((1, 2)), "r": np.ones((1, 1)), "c": np.ones((1, 1))}
    assert execution.run(own) is own
    assert execution.batch_arrays(own, 1) == {}
    with pytest.raises(TypeError, match="call run"):
        execution.run_members(own, [])
