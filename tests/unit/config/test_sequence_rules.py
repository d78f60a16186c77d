"""Control inputs compared with those of an ONNX file, and the policy of a configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import read_model_folder
from headrace.core.errors import ConfigError
from headrace.models.sequence_policy import state_tensors
from headrace.models.version_policies import handle_policy
from headrace.models.warmup import MAX_RANDOM_BYTES, sizes
from onnx import TensorProto

from tests.support.models import add_model
from tests.support.python_models import add_python_model
from tests.support.sequence_models import (
    accumulator_config,
    add_state_sums,
    controls,
    echo_controls,
    state_sums,
    states,
)


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


SUM = 'state [ { input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]'


def read_states(folder: Path, batch: int = 4, **options: str) -> ModelConfig:
    add_state_sums(folder, "m", "direct { }", batch=batch, fails=False, **options)  # type: ignore[arg-type]
    return read_model_folder(folder / "m", folder).config


def refused(folder: Path, **options: str) -> str:
    with pytest.raises(ConfigError) as error:
        read_states(folder, **options)
    return str(error.value)


@pytest.mark.parametrize("batch", [4, 0])
def test_states_are_not_tensors_of_clients(batch: int, tmp_path: Path) -> None:
    config = read_states(tmp_path, batch)
    assert [tensor.name for tensor in config.served_input] == ["X"]
    assert [tensor.name for tensor in config.served_output] == ["Y", "TOTAL"]
    listed = 'output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "SUM_OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]'
    config = read_states(tmp_path, batch, outputs=listed)
    assert [tensor.name for tensor in config.served_output] == ["Y", "SUM_OUT"]
    policy = handle_policy(config).sequences
    assert policy is not None
    assert [(each.output_name, each.is_output) for each in policy.states] == [("SUM_OUT", True), ("HISTORY_OUT", False)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SUM.replace("SUM_IN", "no"), 'state "no" is not an input of the model'),
        (SUM.replace("SUM_OUT", "no"), 'state "no" is not an output of the model'),
        (SUM.replace("FP32", "INT32"), 'state "SUM_IN" has the type TYPE_INT32, the model has'),
        (
            SUM.replace("[ 1 ]", "[ 2 ]"),
            r'state "SUM_OUT" has dims \[2\], the model has \[1\] behind the batch dimension',
        ),
        (SUM.replace("[ 1 ]", "[ -1 ]"), r'state "SUM_IN" has dims \[-1\], the model has \[1\]'),
        (SUM.replace("[ 1 ]", "[ 1, 1 ]"), r"has dims \[1, 1\], the model has \[1\]"),
    ],
)
def test_differences_of_states_from_the_model(text: str, message: str, tmp_path: Path) -> None:
    add_model(tmp_path, "m", state_sums(free=False), config=f"max_batch_size: 4 sequence_batching {{ {text} }}")
    with pytest.raises(ConfigError, match=message):
        read_model_folder(tmp_path / "m", tmp_path)


def test_a_model_whose_outputs_are_all_states(tmp_path: Path) -> None:
    text = SUM.replace("SUM_OUT", "Y") + SUM.replace("SUM_IN", "X")
    add_model(tmp_path, "m", state_sums(free=False), config=f"max_batch_size: 4 sequence_batching {{ {text} }}")
    with pytest.raises(ConfigError, match="all outputs of the model are states, which clients do not get"):
        read_model_folder(tmp_path / "m", tmp_path)


def test_states_of_a_model_without_free_rows(tmp_path: Path) -> None:
    config = f"max_batch_size: 4 sequence_batching {{ {states(free=False)} }}"
    add_model(tmp_path, "m", state_sums(batched=False, free=False), config=config)
    with pytest.raises(ConfigError, match="max_batch_size needs a free first dimension"):
        read_model_folder(tmp_path / "m", tmp_path)


def test_states_of_a_python_model(tmp_path: Path) -> None:
    config = accumulator_config().replace("sequence_batching {", f"sequence_batching {{ {SUM}")
    add_python_model(tmp_path, "m", "", config)
    with pytest.raises(ConfigError, match='state is for ONNX and TensorRT models, and the backend is "python"'):
        read_model_folder(tmp_path / "m", tmp_path)


def initial(dims: str, file: str) -> str:
    return f'initial_state {{ data_type: TYPE_FP32 dims: [ {dims} ] data_file: "{file}" name: "first" }}'


def test_initial_states_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "initial_state"
    folder.mkdir(parents=True)
    np.array([5, 6], np.float32).tofile(folder / "history")
    config = read_states(tmp_path, history_options=initial("2", "history"))
    total, history = state_tensors(config, tmp_path / "m")
    assert (total.initial.tolist(), history.initial.tolist(), history.dims) == ([0], [5, 6], (-1,))
    assert read_model_folder(tmp_path / "m", tmp_path).findings == ()  # the folder is not taken for a version
    assert "m/initial_state/history has 8 bytes, one row takes 12" in refused(
        tmp_path, history_options=initial("3", "history")
    )
    np.zeros(1, np.float32).tofile(folder / "history")  # changed after the check
    with pytest.raises(ConfigError, match="has 1 elements, one row takes 2"):
        state_tensors(config, tmp_path / "m")


def test_states_count_among_the_inputs_of_a_measurement(tmp_path: Path) -> None:
    config = read_states(tmp_path, batch=64)
    assert sizes(config)[-1] == 64
    assert config.sequence_batching is not None
    (total, history) = config.sequence_batching.state
    large = total.model_copy(update={"dims": (MAX_RANDOM_BYTES // 4 // 8,)})
    sequences = config.sequence_batching.model_copy(update={"state": (large, history)})
    assert sizes(config.model_copy(update={"sequence_batching": sequences}))[-1] == 4


def test_refused_files_of_initial_states(tmp_path: Path) -> None:
    folder, outside = tmp_path / "repository", tmp_path / "outside"
    outside.write_bytes(b"1234")
    (folder / "m" / "initial_state").mkdir(parents=True)
    (folder / "m" / "initial_state" / "link").symlink_to(outside)
    for file, message in (
        ("no", "m/initial_state/no is missing"),
        ("link", "m/initial_state/link is a link that leads out of the repository"),
        ("../1/model.onnx", "leads out of the model's folder"),
        ("/etc/passwd", "leads out of the model's folder"),
    ):
        assert message in refused(folder, sum_options=initial("1", file))
    dims = "initial_state { data_type: TYPE_FP32 dims: [ 999999999999 ] zero_data: true }"
    assert "has more than 1073741824 bytes at START" in refused(folder, history_options=dims)
