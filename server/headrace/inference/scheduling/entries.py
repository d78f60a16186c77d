"""Queue entries of requests: one for each request, or one for each part of a request larger than a batch.

`PartJoiner` combines the outputs of the parts into one response. `Sequencer` returns responses in the order of arrival
(`preserve_ordering`), in whatever order instances finish.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass
from types import MappingProxyType

import numpy as np

from headrace.core.completion import Completion, Outcome, settle_all
from headrace.core.errors import BadRequest, HeadraceError, ModelFailed, TooLarge
from headrace.core.request import InferRequest, InferResponse
from headrace.core.tensor import Array, ModelSpec
from headrace.inference.scheduling.output_check import OutputMismatch
from headrace.inference.scheduling.policy import HandlePolicy
from headrace.inference.scheduling.queue import Entry
from headrace.runtimes.members import BatchMember

Undelivered = Callable[[int, int], object]
"""Counts requests that were counted as answered and have failed: their number, and their time in nanoseconds, summed."""

_NO_SHAPES: Mapping[str, tuple[int, ...]] = MappingProxyType({})


@dataclass(eq=False, repr=False)
class EntryFactory:
    """Creates queue entries and registers them with the sequencer; any thread may call.

    Attributes:
        spec: tensor specs of the model.
        policy: serving policy; one request has at most as many entries as the queue holds.
        remove: removes a settled entry from the queue.
        sequencer: orders the responses; None returns them as they complete.
        undelivered: counts requests that a batch has counted as answered although their clients get an error, and their time.
        queue_key: returns the queue's key for the shape key of a request; None to use it as it is.
        mismatch: output mismatch of the model that ended splitting; None while requests may be split.
    """

    spec: ModelSpec
    policy: HandlePolicy
    remove: Callable[[Entry], None]
    sequencer: Sequencer | None
    undelivered: Undelivered
    queue_key: Callable[[object], object] | None = None

    def __post_init__(self) -> None:
        self._max_rows, self._objective_ns = self.policy.batch.max_rows, self.policy.batch.objective_ns
        self.mismatch: OutputMismatch | None = None
        has_steps = self.policy.levels > 1 or self.policy.by_member
        # Of every request that fits into a batch, the entry is made in the same way.
        self._is_plain = not has_steps and self.queue_key is None and self.sequencer is None

    def entries(self, request: InferRequest, completion: Completion, now_ns: int) -> list[Entry]:
        """Create the entries of a request; its outcome settles `completion`.

        Args:
            request: the request.
            completion: completion of the whole request.
            now_ns: monotonic time of arrival.

        Raises:
            BadRequest: the request has more rows than a batch, and the model does not split.
            TooLarge: the request has more rows than the queue holds.
            ModelFailed: the request has more rows than a batch, and the model has returned outputs that cannot be joined.
        """
        if self._is_plain and request.rows <= self._max_rows:
            entry = Entry(request, completion, 0, now_ns, self._objective_ns)
            entry.remove = self.remove
            completion.after = entry.on_settled
            return [entry]
        level = 0 if self.policy.levels == 1 else self._level(request)
        if request.rows <= self._max_rows:
            entry = Entry(request, completion, level, now_ns, self._objective_ns)
            entry.remove = self.remove
            if self.policy.by_member:
                entry.member = member_of(request, completion, self.spec.decoupled)
            if self.queue_key is not None:
                entry.shape_key = self.queue_key(request.shape_key)
            completion.after = entry.on_settled
            entries = [entry]
        else:
            entries = self._parts(request, completion, level, now_ns)
        if self.sequencer is not None:
            _sequence(self.sequencer, [entry.completion for entry in entries], request.received_ns)
        return entries

    def _level(self, request: InferRequest) -> int:
        # Triton's rule: 0 and numbers beyond the lowest level select the default.
        policy = self.policy
        return (request.priority if 0 < request.priority <= policy.levels else policy.default_level) - 1

    def _parts(self, request: InferRequest, whole: Completion, level: int, now_ns: int) -> list[Entry]:
        max_rows = self._max_rows
        # On a CPU the largest batch may have fewer rows than max_batch_size, the most that one request may have.
        allowed = max(max_rows, self.spec.max_batch_size)
        is_split = self.policy.split_oversized and not self.spec.decoupled
        if self.spec.max_batch_size == 0 or self.spec.decoupled or (not is_split and request.rows > allowed):
            raise BadRequest(
                f"the request has {request.rows} rows, model '{self.spec.name}' accepts at most {allowed}: send fewer rows in "
                "one request, or set oversize: split in the model configuration if rows are independent"
            )
        if self.mismatch is not None:
            raise ModelFailed(
                f"the request has {request.rows} rows, model '{self.spec.name}' runs at most {max_rows} in one execution, and "
                f"larger requests are no longer split because its outputs are wrong: send fewer rows, or fix the model: "
                f"{self.mismatch}"
            )
        queue_rows = max_rows * self.policy.limits.max_count
        if request.rows > queue_rows:
            raise TooLarge(
                f"the request has {request.rows} rows, the queue of model '{self.spec.name}' holds at most "
                f"{queue_rows}: send several smaller requests"
            )
        parts = split_request(request, max_rows)
        joiner = PartJoiner(whole, len(parts), lambda: self.mismatch, self.undelivered, request.received_ns)
        entries: list[Entry] = []
        for index, part in enumerate(parts):
            entry = Entry(part, PartCompletion(joiner, index), level, now_ns, self._objective_ns)
            entry.remove = self.remove
            if self.policy.by_member:
                entry.member = member_of(part, entry.completion)
            if self.queue_key is not None:
                entry.shape_key = self.queue_key(part.shape_key)
            entry.counts_as_request = index == len(parts) - 1
            entries.append(entry)

        def after() -> None:
            for entry in entries:
                entry.on_settled()
            if not isinstance(whole.outcome, InferResponse):
                joiner.fail()

        whole.after = after
        return entries


def member_of(request: InferRequest, completion: Completion, decoupled: bool = False) -> BatchMember:
    """Return a request as a member of its batch; `decoupled`: it has any number of responses."""
    return BatchMember(
        request.rows,
        request.id,
        request.parameters,
        request.outputs,
        request.deadline_ns,
        request.priority,
        _NO_SHAPES,
        completion,
        request.client,
        request.call,
        responses=request.responses if decoupled else None,
        has_headers=request.has_headers,
    )


def _sequence(sequencer: Sequencer, completions: list[Completion], received_ns: int) -> None:
    for completion in completions:
        before = completion.after

        def after(before: Callable[[], None] | None = before) -> None:
            if before is not None:
                before()
            sequencer.release()

        completion.after = after
    sequencer.admit(completions, received_ns)


def split_request(request: InferRequest, max_rows: int) -> list[InferRequest]:
    """Split a request into parts of at most `max_rows` rows; their inputs of shape (rows, ...) are views.

    Other requests may share a batch with the last part. Every attribute but inputs, rows, size and resident outputs is that of
    the request.
    """
    starts = range(0, request.rows, max_rows)
    return [
        request.replace(
            inputs={name: array[start : start + max_rows] for name, array in request.inputs.items()},
            rows=min(max_rows, request.rows - start),
            size_bytes=request.size_bytes // len(starts),
            resident_outputs=frozenset(),  # the outputs of the parts are joined in host memory
        )
        for start in starts
    ]


@dataclass(eq=False, repr=False)
class PartJoiner:
    """Collects the outcomes of parts and settles the whole request with all rows or with the first error.

    Attributes:
        whole: completion of the whole request.
        parts: number of parts.
        refusal: returns an error if parts of this model can no longer be joined, else None.
        undelivered: see `EntryFactory`. The batch of the last part counts the request as answered, also if it fails.
        received_ns: monotonic time of arrival of the request.
    """

    whole: Completion
    parts: InitVar[int]
    refusal: Callable[[], HeadraceError | None]
    undelivered: Undelivered
    received_ns: int

    def __post_init__(self, parts: int) -> None:
        self._counted: InferResponse | None = None  # of the last part
        self._failed = False  # the whole has ended without a response
        self._lock = threading.Lock()
        self._outputs: list[dict[str, Array]] = [{} for _ in range(parts)]
        self._missing = parts

    def settle_part(self, index: int, outcome: Outcome) -> None:
        """Record the outcome of part `index`."""
        if isinstance(outcome, Exception):
            self.whole.settle(outcome)
            return
        with self._lock:
            self._outputs[index] = outcome.outputs
            self._missing -= 1
            complete = self._missing == 0
            if index == len(self._outputs) - 1:
                self._counted = outcome
            undelivered = self._counted if self._failed else None
            self._failed = self._failed and undelivered is None
        if undelivered is not None:
            self.undelivered(1, undelivered.duration_ns(self.received_ns))
        if complete:
            self.whole.settle(self._joined())

    def fail(self) -> None:
        """Record that the whole request has ended without a response; once."""
        with self._lock:
            undelivered = self._counted
            self._failed = undelivered is None
        if undelivered is not None:
            self.undelivered(1, undelivered.duration_ns(self.received_ns))

    def _joined(self) -> Outcome:
        refusal = self.refusal()
        if refusal is not None:
            return refusal
        try:
            parts, times = self._outputs, None if self._counted is None else self._counted.times
            outputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            return InferResponse(outputs, done_ns=0 if times is None else times.split_ns)
        except HeadraceError as error:
            return error
        except (ValueError, MemoryError) as error:
            return ModelFailed(
                f"the outputs of a split request cannot be joined: {error}; send fewer rows in one request"
            )


class PartCompletion(Completion):
    """Completion of one part; done as soon as the whole request is."""

    __slots__ = ("_index", "_joiner")

    def __init__(self, joiner: PartJoiner, index: int) -> None:
        super().__init__()
        self._joiner = joiner
        self._index = index

    @property
    def is_settled(self) -> bool:
        """True once the part or the whole is settled."""
        return super().is_settled or self._joiner.whole.is_settled

    def notify(self) -> None:
        """Pass the outcome to the joiner."""
        if self.outcome is not None:
            self._joiner.settle_part(self._index, self.outcome)


class Sequencer:
    """Delays outcomes until those of all earlier requests are settled.

    One thread releases at a time, and also releases outcomes that other threads deliver meanwhile. A request that was settled
    otherwise (cancelled, past its deadline) does not delay the others.

    Ownership: `_lock` guards every attribute.

    Args:
        undelivered: see `EntryFactory`. A batch counts a request as answered once its outcome is stored here.
    """

    def __init__(self, undelivered: Undelivered) -> None:
        self._undelivered = undelivered
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Completion, int]] = deque()  # with the arrival of the request
        self._outcomes: dict[Completion, Outcome] = {}
        self._releasing = False

    def admit(self, completions: Iterable[Completion], received_ns: int) -> None:
        """Append a request, or its parts, to the order; `received_ns` is the monotonic time of its arrival."""
        with self._lock:
            self._waiting.extend((completion, received_ns) for completion in completions)

    def deliver(
        self, pairs: Iterable[tuple[Completion, Outcome]], count: Callable[[list[Completion]], object] | None = None
    ) -> list[Completion]:
        """Store the outcomes of a batch and settle those whose earlier requests are settled; see `settle_all`."""
        lost: list[Completion] = []
        try:
            with self._lock:  # also while they are counted: no other thread releases them before
                for completion, outcome in pairs:
                    if completion.is_settled:
                        lost.append(completion)  # no longer waiting, so its outcome would stay here
                    else:
                        self._outcomes[completion] = outcome
                if count is not None:
                    count(lost)
        finally:
            self.release()
        return lost

    def release(self) -> None:
        """Settle all requests at the front whose outcome is stored, in order."""
        with self._lock:
            if self._releasing:
                return
            self._releasing = True
        while True:
            with self._lock:
                ready = self._ready()
                if not ready:
                    self._releasing = False
                    return
            lost = settle_all([(completion, outcome) for completion, outcome, _ in ready])
            if lost:
                times_ns = [
                    outcome.duration_ns(received_ns)
                    for completion, outcome, received_ns in ready
                    # `PartJoiner` counts the responses of parts.
                    if completion in lost
                    and isinstance(outcome, InferResponse)
                    and not isinstance(completion, PartCompletion)
                ]
                self._undelivered(len(times_ns), sum(times_ns))

    def _ready(self) -> list[tuple[Completion, Outcome, int]]:
        ready: list[tuple[Completion, Outcome, int]] = []
        while self._waiting:
            completion, received_ns = self._waiting[0]
            outcome = self._outcomes.pop(completion, None)
            if outcome is not None:
                ready.append((completion, outcome, received_ns))
            elif not completion.is_settled:
                break
            self._waiting.popleft()
        return ready
