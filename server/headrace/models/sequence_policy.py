"""Translates `sequence_batching` of a configuration into the rules of the scheduler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headrace_model.protocol import MAX_MEMBERS

from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import INITIAL_STATE_FOLDER
from headrace.config.sequence_config import DEFAULT_IDLE_US, ControlInput, DirectStrategy, SequenceState
from headrace.core.clock import NS_PER_US
from headrace.core.sequence_state import StateTensor
from headrace.core.tensor import BY_CONFIG_NAME
from headrace.inference.scheduling.policy import ControlTensor, SequencePolicy
from headrace.models.data_files import read_values, zeros


def sequence_policy(config: ModelConfig, max_rows: int) -> SequencePolicy | None:
    """Return the rules of a model with sequences; None for any other. All states are zeros at START: see `state_tensors`.

    Args:
        config: complete configuration.
        max_rows: most rows of a batch.
    """
    sequences = config.sequence_batching
    if sequences is None:
        return None
    direct, oldest = sequences.direct or DirectStrategy(), sequences.oldest
    idle_us = sequences.max_sequence_idle_microseconds or DEFAULT_IDLE_US
    strategy = direct if oldest is None else oldest
    return SequencePolicy(
        slots=max_rows if oldest is None else oldest.max_candidate_sequences,
        is_direct=oldest is None,
        max_rows=min(max_rows, MAX_MEMBERS) if config.kind == "python" else max_rows,
        idle_ns=idle_us * NS_PER_US,
        max_delay_ns=strategy.max_queue_delay_microseconds * NS_PER_US,
        preferred_rows=() if oldest is None else tuple(sorted(oldest.preferred_batch_size)),
        min_utilization=direct.minimum_slot_utilization if oldest is None else 0.0,
        controls=tuple(_control_tensor(part) for part in sequences.control_input),
        states=tuple(_state_tensor(part, config) for part in sequences.state),
        is_iterative=sequences.iterative_sequence,
    )


def state_tensors(config: ModelConfig, folder: Path) -> tuple[StateTensor, ...]:
    """Return the states of a model, with the initial values of the files in its folder.

    Args:
        config: complete configuration.
        folder: the model's folder.

    Raises:
        ConfigError: a file cannot be read, or has changed since `initial_state_problems` checked it.
    """
    states = []
    for part in () if config.sequence_batching is None else config.sequence_batching.state:
        state, dims = _state_tensor(part, config), part.initial_dims
        file = part.initial_state[0].data_file if part.initial_state else ""
        if file:
            state = replace(
                state, initial=read_values(folder / INITIAL_STATE_FOLDER / file, state.datatype, dims, dims)
            )
        states.append(state)
    return tuple(states)


def _state_tensor(part: SequenceState, config: ModelConfig) -> StateTensor:
    datatype = BY_CONFIG_NAME[part.data_type]
    is_output = any(tensor.name == part.output_name for tensor in config.output)
    initial = zeros(datatype, part.initial_dims)
    return StateTensor(part.input_name, part.output_name, datatype, part.dims, initial, is_output)


def _control_tensor(part: ControlInput) -> ControlTensor:
    control = part.control[0]
    false, true = next(iter(control.values.values()), (0, 1))
    kind = control.kind.removeprefix("CONTROL_SEQUENCE_")
    return ControlTensor(part.name, kind, BY_CONFIG_NAME[control.tensor_type], false, true)
