"""Translates `sequence_batching` of a configuration into the rules of the scheduler."""

from __future__ import annotations

from headrace_model.protocol import MAX_MEMBERS

from headrace.core.clock import NS_PER_US
from headrace.core.model_config import ModelConfig
from headrace.core.sequence_config import DEFAULT_IDLE_US, ControlInput, DirectStrategy
from headrace.core.tensor import BY_CONFIG_NAME
from headrace.scheduling.policy import ControlTensor, SequencePolicy


def sequence_policy(config: ModelConfig, max_rows: int) -> SequencePolicy | None:
    """Return the rules of a model with sequences; None for any other.

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
    )


def _control_tensor(part: ControlInput) -> ControlTensor:
    control = part.control[0]
    false, true = next(iter(control.values.values()), (0, 1))
    kind = control.kind.removeprefix("CONTROL_SEQUENCE_")
    return ControlTensor(part.name, kind, BY_CONFIG_NAME[control.tensor_type], false, true)
