"""Control inputs compared with those of an ONNX file, and the policy of a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from headrace.config.model_folder import read_model_folder
from headrace.core.errors import ConfigError
from headrace.repository.loader import handle_policy
from onnx import TensorProto

from tests.support.models import add_model
from tests.support.sequence_models import controls, echo_controls


def read(folder: Path, strategy: str = "direct { }", batch: int = 4, **options: int) -> object:
    config = f"max_batch_size: {batch}\nsequence_batching {{ {strategy} {controls()} }}"
    add_model(folder, "m", echo_controls(**options), config=config)
    return read_model_folder(folder / "m", folder).config


def test_the_inputs_of_clients_are_completed_without_controls(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert [tensor.name for tensor in config.input] == ["X"]  # type: ignore[attr-defined]
    assert config.dynamic_batching is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flag_type": TensorProto.FLOAT}, 'control_input "START" has the type TYPE_INT32, the model has'),
        ({"id_type": TensorProto.INT64}, 'control_input "CORRID" has the type TYPE_UINT64'),
        ({"batched": False, "batch": 4}, "max_batch_size needs a free first dimension|has the shape"),
        ({"batched": True, "batch": 0}, r"has the shape \[-1, 1\] in the model"),
    ],
)
def test_differences_from_the_model(options: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **options)


def test_a_control_that_the_model_lacks(tmp_path: Path) -> None:
    other = 'control_input [ { name: "no" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ]'
    add_model(tmp_path, "m", echo_controls(), config=f"max_batch_size: 4 sequence_batching {{ {other} }}")
    with pytest.raises(ConfigError, match='control_input "no" is not an input of the model'):
        read_model_folder(tmp_path / "m", tmp_path)


def test_policy_of_direct(tmp_path: Path) -> None:
    strategy = "direct { max_queue_delay_microseconds: 5 minimum_slot_utilization: 0.5 }"
    policy = handle_policy(read(tmp_path, strategy)).sequences  # type: ignore[arg-type]
    assert policy is not None
    assert (policy.is_direct, policy.slots, policy.max_rows) == (True, 4, 4)
    assert (policy.idle_ns, policy.max_delay_ns, policy.min_utilization) == (10**9, 5000, 0.5)
    assert [(each.name, each.kind, each.false, each.true) for each in policy.controls] == [
        ("START", "START", 0, 1),
        ("END", "END", 0, 1),
        ("READY", "READY", 0, 1),
        ("CORRID", "CORRID", 0, 1),
    ]


def test_policy_of_oldest(tmp_path: Path) -> None:
    strategy = (
        "max_sequence_idle_microseconds: 7 oldest { max_candidate_sequences: 9 preferred_batch_size: [ 3, 2 ] "
        "max_queue_delay_microseconds: 6 }"
    )
    policy = handle_policy(read(tmp_path, strategy)).sequences  # type: ignore[arg-type]
    assert policy is not None
    assert (policy.is_direct, policy.slots, policy.max_rows, policy.preferred_rows) == (False, 9, 4, (2, 3))
    assert (policy.idle_ns, policy.max_delay_ns) == (7000, 6000)
