"""Specs and policies of a version, read from its configuration."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from headrace.config.machine import usable_cores
from headrace.config.model_config import DEFAULT_QUEUE_WAIT_US, DynamicBatching, FairSharing, ModelConfig, QueuePolicy
from headrace.config.model_config import RateLimits as ConfiguredLimits
from headrace.config.model_folder import ModelFolder
from headrace.config.ragged_rules import is_ragged
from headrace.core.clock import NS_PER_MS, NS_PER_US
from headrace.core.quota import Quota
from headrace.core.tensor import BY_CONFIG_NAME, ModelSpec, PaddedInputs, TensorSpec
from headrace.inference.scheduling.policy import (
    BatchPolicy,
    ComputedInput,
    HandlePolicy,
    LevelPolicy,
    PaddingPolicy,
    QueueLimits,
    RaggedPolicy,
    RateLimits,
    Sharing,
)
from headrace.models.accounted_model import cpu_batch_size
from headrace.models.sequence_policy import sequence_policy

# More threads copy no faster: see headrace.inference.scheduling.filler.
_MAX_FILL_THREADS = 4


def model_spec(folder: ModelFolder, version: int) -> ModelSpec:
    """Return the input and output specs of a version as clients see them."""
    config = folder.config
    batch = (-1,) if config.max_batch_size else ()
    inputs = {
        tensor.name: TensorSpec(
            tensor.name, BY_CONFIG_NAME[tensor.data_type], (*batch, *tensor.dims), optional=tensor.optional
        )
        for tensor in config.served_input
    }
    outputs = {
        tensor.name: TensorSpec(
            tensor.name,
            BY_CONFIG_NAME[tensor.data_type],
            (*batch, *tensor.dims),
            labels=folder.labels.get(tensor.name, ()),
        )
        for tensor in config.served_output
    }
    ragged, padding = ragged_policy(config), padding_policy(config)
    return ModelSpec(
        config.name,
        str(version),
        config.platform,
        inputs,
        outputs,
        config.max_batch_size,
        ragged=frozenset() if ragged is None else ragged.inputs,
        padded=None if padding is None else padding.inputs,
        decoupled=config.is_decoupled,
        first_response_ms=() if config.model_metrics is None else config.model_metrics.first_response_ms,
    )


def ragged_policy(config: ModelConfig) -> RaggedPolicy | None:
    """Return how requests of different shapes share a batch; None if they do not.

    Python models receive requests one by one, in their own shapes: nothing is joined for them.
    """
    if config.kind not in ("onnx", "plan") or not is_ragged(config):
        return None
    return RaggedPolicy(
        frozenset(tensor.name for tensor in config.input if tensor.allow_ragged_batch),
        tuple(
            ComputedInput(part.target_name, part.kind, BY_CONFIG_NAME[part.data_type], part.source_input[0])
            for part in config.batch_input
        ),
        {name: part.source_input[0] for part in config.batch_output for name in part.target_name},
    )


def padding_policy(config: ModelConfig) -> PaddingPolicy | None:
    """Return how requests of different length share a batch; None if they do not."""
    pad = config.pad
    if pad is None or config.kind not in ("onnx", "plan"):
        return None
    longest = [
        profile.shapes[name][2][pad.axis - 1]
        for profile in config.optimization.profiles
        for name in pad.values
        if name in profile.shapes and 0 < pad.axis <= len(profile.shapes[name][2])
    ]
    inputs = PaddedInputs(frozenset(pad.values), pad.axis, pad.multiple_of, max(longest, default=0))
    return PaddingPolicy(dict(pad.values), inputs)


def handle_policy(config: ModelConfig, on_gpu: bool = False) -> HandlePolicy:
    """Translate a configuration into the policies of its handle.

    Args:
        config: complete configuration.
        on_gpu: True if GPUs run the model, False if the CPU does.
    """
    batching = config.dynamic_batching
    merge, sharing = batching is not None and config.max_batch_size > 0, config.fair_sharing
    if (
        config.is_decoupled and config.sequence_batching is None
    ):  # the queue of a client with many open requests does not delay the others
        sharing = sharing or FairSharing()
    batching = batching or DynamicBatching()
    levels = max(batching.priority_levels, 1)
    max_rows = max(config.max_batch_size if on_gpu else cpu_batch_size(config), 1)
    return HandlePolicy(
        batch=BatchPolicy(
            max_rows=max_rows,
            preferred_rows=tuple(sorted(rows for rows in batching.preferred_batch_size if rows <= max_rows)),
            max_delay_ns=batching.max_queue_delay_microseconds * NS_PER_US,
            merge=merge,
            objective_ns=int((config.slo.p99_ms or 0) * NS_PER_MS),
        ),
        limits=_limits(batching),
        max_wait_ns=_max_wait_us(config, batching) * NS_PER_US,
        instances=_instances(config),
        split_oversized=config.oversize == "split",
        preserve_ordering=batching.preserve_ordering,
        levels=levels,
        default_level=max(batching.default_priority_level, 1),
        queue_policy=_level_policy(batching.default_queue_policy),
        fill_threads=max(1, min(_MAX_FILL_THREADS, usable_cores() // 2)),
        level_policies={level: _level_policy(queue) for level, queue in _queue_policies(batching).items()},
        aging_ns=config.priority_aging_microseconds * NS_PER_US if levels > 1 else 0,
        sharing=None if sharing is None else Sharing(dict(sharing.weights), sharing.default_weight),
        rate_limits=_rate_limits(config.rate_limits),
        ragged=ragged_policy(config),
        padding=padding_policy(config),
        sequences=sequence_policy(config, max_rows),
    )


def _queue_policies(batching: DynamicBatching) -> dict[int, QueuePolicy]:
    """Return the queue policy of every 1-based priority level; empty without priority levels."""
    policies, levels = batching.priority_queue_policy, range(1, batching.priority_levels + 1)
    return {level: policies.get(level, batching.default_queue_policy) for level in levels}


def _limits(batching: DynamicBatching) -> QueueLimits:
    """Return the queue limits: with limits for each level, the sum of them."""
    default = QueueLimits()
    sizes = [queue.max_queue_size for queue in _queues(batching)]
    return replace(default, max_count=sum(sizes) if all(sizes) else max(default.max_count, sum(sizes)))


def _queues(batching: DynamicBatching) -> Collection[QueuePolicy]:
    return _queue_policies(batching).values() or (batching.default_queue_policy,)


def _max_wait_us(config: ModelConfig, batching: DynamicBatching) -> int:
    """Return the longest predicted time in the queue; 0 if the configuration bounds the queue by size or timeout."""
    if config.max_queue_wait_microseconds is not None:
        return config.max_queue_wait_microseconds
    is_bounded = all(queue.max_queue_size or queue.default_timeout_microseconds for queue in _queues(batching))
    return 0 if is_bounded else DEFAULT_QUEUE_WAIT_US


def _level_policy(queue: QueuePolicy) -> LevelPolicy:
    return LevelPolicy(
        max_count=queue.max_queue_size,
        queue_timeout_ns=queue.default_timeout_microseconds * NS_PER_US,
        demote_on_timeout=queue.timeout_action == "DELAY",
        timeout_override=queue.allow_timeout_override,
    )


def _rate_limits(config: ConfiguredLimits | None) -> RateLimits | None:
    if config is None:
        return None
    quotas = {client: Quota(limit.requests_per_s, limit.burst_size) for client, limit in config.clients.items()}
    default = config.default
    return RateLimits(quotas, None if default is None else Quota(default.requests_per_s, default.burst_size))


def _instances(config: ModelConfig) -> int:
    """Return the number of CPU instances; groups for GPUs do not count if the CPU serves in their place."""
    off_gpu = [group for group in config.instance_group if config.backend != "tensorrt" or group.kind != "KIND_GPU"]
    return sum(group.count for group in off_gpu) or 1
