"""Serving policy of a model version: batching, queue limits, priority levels, quotas. Built from its configuration, immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headrace.core.quota import Quota
from headrace.core.sequence_state import StateTensor
from headrace.core.tensor import Datatype, PaddedInputs


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Batching rules.

    Attributes:
        max_rows: most rows of a batch, at least 1.
        preferred_rows: batch sizes that close a batch at once, ascending.
        max_delay_ns: longest time that an idle instance leaves the oldest request queued to form a larger batch.
        merge: False runs every request alone.
        objective_ns: latency objective from arrival to response, 0 for none.
    """

    max_rows: int = 1
    preferred_rows: tuple[int, ...] = ()
    max_delay_ns: int = 0
    merge: bool = True
    objective_ns: int = 0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the queue.

    Attributes:
        max_count: queued requests.
        max_size_bytes: memory of queued requests.
        level_counts: queued requests by priority level (from 0), for levels with a separate bound.
    """

    max_count: int = 4096
    max_size_bytes: int = 1 << 30
    level_counts: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LevelPolicy:
    """Queue policy of one priority level; each value replaces that of the model.

    Attributes:
        max_count: queued requests of the level, 0 for the bound in `QueueLimits`.
        queue_timeout_ns: longest queue time, 0 for no limit.
        demote_on_timeout: serve a request last after its timeout instead of rejecting it.
        timeout_override: a request's timeout may shorten the queue's.
    """

    max_count: int = 0
    queue_timeout_ns: int = 0
    demote_on_timeout: bool = False
    timeout_override: bool = False


@dataclass(frozen=True, slots=True)
class Sharing:
    """Weighted fair sharing between clients within a priority level, measured in rows.

    Attributes:
        weights: weight by client.
        default_weight: weight of every other client.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    default_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Quotas of clients.

    Attributes:
        clients: quota by client.
        default: quota of every other client; None for no limit.
    """

    clients: Mapping[str, Quota] = field(default_factory=dict)
    default: Quota | None = None


@dataclass(frozen=True, slots=True)
class ComputedInput:
    """An input of the model that is computed from the shapes of the requests of a batch (Triton's `batch_input`).

    Attributes:
        names: names of the model's inputs that receive the values.
        kind: Triton's name, e.g. "BATCH_ELEMENT_COUNT".
        datatype: FP32 or INT32.
        source: input of the requests whose shapes are used.
    """

    names: tuple[str, ...]
    kind: str
    datatype: Datatype
    source: str


@dataclass(frozen=True, slots=True)
class RaggedPolicy:
    """Batches of requests whose inputs have different shapes, as Triton defines them.

    Attributes:
        inputs: names of the inputs whose elements are joined to one dimension.
        computed: inputs that are computed from the shapes of the requests.
        scattered: names of outputs that are split by the shapes of an input, by output; the values are the inputs.
    """

    inputs: frozenset[str]
    computed: tuple[ComputedInput, ...] = ()
    scattered: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PaddingPolicy:
    """Batches of requests of different length, whose inputs are padded.

    Attributes:
        values: padding value by input name.
        inputs: names, axis and multiple.
    """

    values: Mapping[str, float]
    inputs: PaddedInputs


@dataclass(frozen=True, slots=True)
class ControlTensor:
    """An input of the model by which the server describes the sequence of each row.

    Attributes:
        name: name of the model's input, of shape (rows, 1), or (1,) without a batch dimension.
        kind: "START", "END", "READY" or "CORRID".
        datatype: its datatype.
        false, true: its values, except for "CORRID", whose value is the correlation id.
    """

    name: str
    kind: str
    datatype: Datatype
    false: float = 0
    true: float = 1


@dataclass(frozen=True, slots=True)
class SequencePolicy:
    """Rules of a model whose requests belong to sequences.

    Attributes:
        slots: sequences that have a slot on one instance at a time.
        is_direct: a sequence has a row of the batch for itself; False: batches have the oldest requests.
        max_rows: most requests of a batch.
        idle_ns: time without a request after which a sequence ends.
        max_delay_ns: longest time that a batch waits for more sequences.
        preferred_rows: batch sizes that run at once, of the strategy "oldest".
        min_utilization: share of the slots, 0 to 1, from which a batch of the strategy "direct" does not wait.
        controls: inputs that the server fills.
        states: states that the server keeps.
        is_iterative: each request is a sequence, and the model may schedule it again.
    """

    slots: int
    is_direct: bool = True
    max_rows: int = 1
    idle_ns: int = 1_000_000_000
    max_delay_ns: int = 0
    preferred_rows: tuple[int, ...] = ()
    min_utilization: float = 0.0
    controls: tuple[ControlTensor, ...] = ()
    states: tuple[StateTensor, ...] = ()
    is_iterative: bool = False


@dataclass(frozen=True, slots=True)
class HandlePolicy:
    """Serving policy of a model version.

    Attributes:
        batch: batching rules.
        limits: bounds of the queue.
        max_wait_ns: longest predicted time in the queue of a request without a due time, 0 for no limit.
        instances: number of instances.
        split_oversized: split a request with more rows than a batch; False rejects it.
        preserve_ordering: return responses in the order of arrival.
        levels: number of priority levels, at least 1.
        default_level: 1-based level of requests without a priority.
        queue_policy: policy of the levels that are not in `level_policies`; its `max_count` is not used.
        fill_threads: threads that copy the rows of a large batch, for each instance that overlaps batches.
        level_policies: policies by 1-based level, for levels that differ.
        aging_ns: queue time after which a request counts as of the next higher level, 0 for no aging.
        sharing: fair sharing between clients; None serves requests regardless of their client.
        rate_limits: quotas of clients; None for no limits.
        inline_bound_ns: a lone request of a model that runs on any thread runs on the event loop if the 95th percentile of its
            compute time does not exceed this; 0: never.
        by_member: the executions run the requests of a batch as a list (`headrace.runtimes.members.MemberExecution`).
        reads_ids: the model gets the ids of requests, so its responses may depend on them.
        ragged: batches of requests of different shapes; None if the requests of a batch have equal shapes.
        padding: batches of requests of different length; None if the requests of a batch have equal lengths.
        sequences: rules of a model whose requests belong to sequences; None for any other.
    """

    batch: BatchPolicy = field(default_factory=BatchPolicy)
    limits: QueueLimits = field(default_factory=QueueLimits)
    instances: int = 1
    split_oversized: bool = True
    preserve_ordering: bool = False
    levels: int = 1
    default_level: int = 1
    queue_policy: LevelPolicy = field(default_factory=LevelPolicy)
    fill_threads: int = 1
    level_policies: Mapping[int, LevelPolicy] = field(default_factory=dict)
    aging_ns: int = 0
    sharing: Sharing | None = None
    rate_limits: RateLimits | None = None
    inline_bound_ns: int = 0
    by_member: bool = False
    reads_ids: bool = False
    ragged: RaggedPolicy | None = None
    padding: PaddingPolicy | None = None
    max_wait_ns: int = 0
    sequences: SequencePolicy | None = None

    @property
    def queue_limits(self) -> QueueLimits:
        """`limits`, with the bounds of priority levels added."""
        counts = {
            level - 1: level_policy.max_count
            for level, level_policy in self.level_policies.items()
            if level_policy.max_count
        }
        return replace(self.limits, level_counts=counts) if counts else self.limits
