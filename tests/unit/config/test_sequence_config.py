"""Problems of `sequence_batching` by itself and with other fields; control inputs as inputs of the model."""

from __future__ import annotations

import pytest
from headrace.config.sequence_config import control_inputs
from headrace.config.tensor_config import ModelOutput

from tests.support.iterative_models import counter_config
from tests.support.models import read_config_text

INPUT = 'input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'


def messages(text: str) -> str:
    _, findings = read_config_text(f"max_batch_size: 4\n{INPUT}{text}", "m/config.pbtxt")
    return "\n".join(f"{finding.message} | {finding.cure}" for finding in findings)


def control(kind: str, rest: str, name: str = "c") -> str:
    return f'control_input [ {{ name: "{name}" control [ {{ kind: CONTROL_SEQUENCE_{kind} {rest} }} ] }} ]'


def state(
    rest: str = "", input_name: str = "i", output_name: str = "o", fields: str = "data_type: TYPE_FP32 dims: [ 2, -1 ]"
) -> str:
    return f'state [ {{ input_name: "{input_name}" output_name: "{output_name}" {fields} {rest} }} ]'


def initial(rest: str) -> str:
    return state(f"initial_state {{ {rest} }}")


ZERO = "data_type: TYPE_FP32 dims: [ 2, 3 ] zero_data: true"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (state(fields="dims: [ 1 ]"), 'state "i" has no data_type'),
        (state(input_name="x"), 'state "x" is an input that requests have | remove it from input'),
        (state() + state(output_name="p"), 'input_name "i" of a state is the tensor of another state or control_input'),
        (state() + state(input_name="j"), 'output_name "o" of a state is the tensor of another state'),
        (
            control("START", "int32_false_true: [ 0, 1 ]", "i") + state(),
            'input_name "i" of a state is the tensor of another',
        ),
        (state("use_growable_memory: true"), "use_growable_memory without use_same_buffer_for_input_output"),
        (state(2 * f"initial_state {{ {ZERO} }} "), "has 2 initial states, one is allowed"),
        (initial(ZERO.replace("zero_data: true", "")), "initial_state has no data | write exactly one of"),
        (initial(ZERO.replace("FP32", "FP16")), "initial_state is TYPE_FP16, its state is TYPE_FP32"),
        (initial(ZERO.replace("2, 3", "2, -1")), "dims [2, -1] of initial_state leave a size open"),
        (
            initial(ZERO.replace("2, 3", "3, 3")),
            "dims [3, 3] of initial_state do not match those of the state: [2, -1]",
        ),
        (initial(ZERO.replace("2, 3", "2")), "dims [2] of initial_state do not match"),
        (control("START", ""), "has no pairs of values, one is allowed"),
        (control("END", "int32_false_true: [ 0, 1 ] fp32_false_true: [ 0, 1 ]"), "has 2 pairs of values"),
        (control("READY", "int32_false_true: [ 0 ]"), "has 1 values | write two"),
        (
            control("START", "bool_false_true: [ false, true ] data_type: TYPE_INT32"),
            "data_type is for CONTROL_SEQUENCE_CORRID",
        ),
        (control("CORRID", ""), "has the data type none | write one of TYPE_UINT64"),
        (control("CORRID", "data_type: TYPE_FP32"), "has the data type TYPE_FP32"),
        (control("CORRID", "data_type: TYPE_INT32 int32_false_true: [ 0, 1 ]"), "has values for false and true"),
        (control("START", "int32_false_true: [ 0, 1 ]", "x"), "is an input that requests have | remove it from input"),
        (2 * (control("START", "int32_false_true: [ 0, 1 ]") + " "), "is listed twice"),
        ('control_input [ { name: "c" } ]', "has no controls, one is allowed"),
        ("oldest { preferred_batch_size: [ 8 ] }", "preferred_batch_size 8 is more than max_batch_size 4"),
        ("direct { minimum_slot_utilization: 2 }", "minimum_slot_utilization"),
    ],
)
def test_problems(text: str, message: str) -> None:
    assert message in messages(f"sequence_batching {{ {text} }}")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("response_cache { enable: true }", "response_cache"),
        ('parameters { key: "headrace.fair_sharing" value: { string_value: "{}" } }', "fair_sharing"),
    ],
)
def test_fields_that_do_not_go_with_sequences(text: str, field: str) -> None:
    assert f"{field} does not go with sequence_batching | remove one of them" in messages(
        f"sequence_batching {{ }} {text}"
    )


def test_both_strategies_in_yaml() -> None:
    text = "sequence_batching: {direct: {}, oldest: {}}"
    _, findings = read_config_text(text, "m/config.yaml")
    assert "direct and oldest are two strategies" in findings[0].message
    _, findings = read_config_text("max_batch_size: 2\nsequence_batching: {}\ndynamic_batching: {}", "m/config.yaml")
    assert "dynamic_batching does not go with sequence_batching" in findings[0].message


def test_control_inputs_are_inputs_of_the_model() -> None:
    text = " ".join(
        [
            control("START", "fp32_false_true: [ 0, 1 ]", "s"),
            control("END", "bool_false_true: [ false, true ]", "e"),
            control("READY", "int32_false_true: [ 0, 1 ]", "r"),
            control("CORRID", "data_type: TYPE_STRING", "c"),
        ]
    )
    config, findings = read_config_text(f"max_batch_size: 4 {INPUT} sequence_batching {{ {text} }}", "m/config.pbtxt")
    assert findings == []
    assert config is not None
    types = {"s": "TYPE_FP32", "e": "TYPE_BOOL", "r": "TYPE_INT32", "c": "TYPE_STRING"}
    assert {each.name: each.data_type for each in control_inputs(config.sequence_batching)} == types
    assert [each.name for each in config.model_input] == ["x", *types]
    assert [each.name for each in config.served_input] == ["x"]


def test_states_are_tensors_of_the_model() -> None:
    text = f"{state('use_same_buffer_for_input_output: true use_growable_memory: true')}"
    config, findings = read_config_text(f"max_batch_size: 4 {INPUT} sequence_batching {{ {text} }}", "m/config.pbtxt")
    assert findings == []
    assert config is not None
    assert [each.name for each in config.model_input] == ["x", "i"]
    assert [each.name for each in config.served_input] == ["x"]
    assert [each.name for each in config.model_output] == ["o"]
    assert config.output == ()
    sequences = config.sequence_batching
    assert sequences is not None
    assert sequences.state[0].initial_dims == (2, 1)
    named = config.model_copy(update={"output": (ModelOutput(name="o"),)})
    assert [each.name for each in named.model_output] == ["o"]


def test_an_initial_state_in_yaml() -> None:
    text = """
max_batch_size: 2
input: [{name: x, data_type: fp32, dims: [1]}]
sequence_batching:
  state:
    - {input_name: i, output_name: o, data_type: fp32, dims: [-1],
       initial_state: [{data_type: fp32, dims: [3], data_file: f}]}
"""
    config, findings = read_config_text(text, "m/config.yaml")
    assert findings == []
    assert config is not None
    assert config.sequence_batching is not None
    assert config.sequence_batching.state[0].initial_dims == (3,)
    _, findings = read_config_text(text.replace("data_file: f", "data_file: f, zero_data: true"), "m/config.yaml")
    assert "initial_state has two kinds of data" in findings[0].message


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_an_iterative_python_model(is_decoupled: bool) -> None:
    config, findings = read_config_text(counter_config(is_decoupled=is_decoupled), "m/config.pbtxt")
    assert config is not None, findings
    assert (config.is_iterative, config.is_decoupled, findings) == (True, is_decoupled, [])
