"""Problems of `sequence_batching` by itself and with other fields; control inputs as inputs of the model."""

from __future__ import annotations

import pytest
from headrace.core.sequence_config import control_inputs

from tests.support.models import read_config_text

INPUT = 'input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'


def messages(text: str) -> str:
    _, findings = read_config_text(f"max_batch_size: 4\n{INPUT}{text}", "m/config.pbtxt")
    return "\n".join(f"{finding.message} | {finding.cure}" for finding in findings)


def control(kind: str, rest: str, name: str = "c") -> str:
    return f'control_input [ {{ name: "{name}" control [ {{ kind: CONTROL_SEQUENCE_{kind} {rest} }} ] }} ]'


@pytest.mark.parametrize(
    ("text", "message"),
    [
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
        ("model_transaction_policy { decoupled: true }", "model_transaction_policy"),
        ('parameters { key: "headrace.slo.p99_ms" value: { string_value: "5" } }', "slo"),
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
