"""Queue entries of requests: one for each request, or one for each part of a request larger than a batch.

`PartJoiner` combines the outputs of the parts into one response. `Sequencer` returns responses in the order of arrival
(`preserve_ordering`), in whatever order instances finish.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from headrace.core.completion import Completion, Outcome, settle_all
from headrace.core.errors import BadRequest, HeadraceError, ModelFailed, TooLarge
from headrace.core.request import InferRequest, InferResponse
from headrace.core.tensor import Array, ModelSpec
from headrace.scheduling.executor import OutputMismatch
from headrace.scheduling.queue import Entry


class EntryFactory:
    """Makes entries, and has them answered in order where that is wanted; from any thread.

    Args:
        spec: what callers may send.
        max_rows: rows in the largest batch.
        split: cut a request larger than a batch into parts, or refuse it.
        max_parts: entries that the queue holds.
        levels: number of priority levels, 1 if there are none.
        default_level: 1-based level of a request that names none.
        remove: gives an entry's place in the queue back.
        sequencer: keeps the answers in order; None: they need not be.
        objective_ns: how long after its arrival a request should be answered, 0 if nothing is promised.

    Attributes:
        mismatch: what the model returned that has put an end to splitting; None while requests may be split.
    """

    def __init__(
        self,
        spec: ModelSpec,
        max_rows: int,
        split: bool,
        max_parts: int,
        levels: int,
        default_level: int,
        remove: Callable[[Entry], None],
        sequencer: Sequencer | None,
        objective_ns: int = 0,
    ) -> None:
        self._spec = spec
        self._max_rows = max_rows
        self._split = split
        self._max_parts = max_parts
        self._levels = levels
        self._default_level = default_level
        self._remove = remove
        self._sequencer = sequencer
        self._objective_ns = objective_ns
        self.mismatch: OutputMismatch | None = None

    def entries(self, request: InferRequest, completion: Completion, now_ns: int) -> list[Entry]:
        """The entries of a request, whose answer goes to `completion`.

        Raises:
            BadRequest: more rows than a batch holds, and the model does not split.
            TooLarge: more rows than the queue holds.
            ModelFailed: more rows than a batch holds, and the model has returned outputs that cannot be joined.
        """
        level = 0 if self._levels == 1 else self._level(request)
        if request.rows <= self._max_rows:
            entry = Entry(request, completion, level, now_ns, self._objective_ns)
            entry.remove = self._remove
            completion.after = entry.on_settled
            entries = [entry]
        else:
            entries = self._parts(request, completion, level, now_ns)
        if self._sequencer is not None:
            _sequence(self._sequencer, [entry.completion for entry in entries])
        return entries

    def _level(self, request: InferRequest) -> int:
        # Triton's rule: 0 and numbers beyond the lowest level mean the default.
        return (request.priority if 0 < request.priority <= self._levels else self._default_level) - 1

    def _parts(self, request: InferRequest, whole: Completion, level: int, now_ns: int) -> list[Entry]:
        max_rows = self._max_rows
        # The CPU may run fewer rows together than a request may have.
        allowed = max(max_rows, self._spec.max_batch_size)
        if self._spec.max_batch_size == 0 or (not self._split and request.rows > allowed):
            raise BadRequest(
                f"the request has {request.rows} rows, model '{self._spec.name}' takes at most {allowed} and does not split "
                "larger requests: send fewer rows at once, or write oversize: split in its configuration if rows are independent"
            )
        if self.mismatch is not None:
            raise ModelFailed(
                f"the request has {request.rows} rows, model '{self._spec.name}' takes at most {max_rows} in one execution, and "
                f"larger requests are no longer split: {self.mismatch}"
            )
        if request.rows > max_rows * self._max_parts:
            raise TooLarge(
                f"the request has {request.rows} rows, which is more than the whole queue of model '{self._spec.name}' holds"
            )
        pieces = cut(request.inputs, request.rows, max_rows)
        joiner = PartJoiner(whole, len(pieces), lambda: self.mismatch)
        entries: list[Entry] = []
        for index, inputs in enumerate(pieces):
            part = InferRequest(
                inputs=inputs,
                rows=min(max_rows, request.rows - index * max_rows),
                shape_key=request.shape_key,
                received_ns=request.received_ns,
                deadline_ns=request.deadline_ns,
                client=request.client,
                size_bytes=request.size_bytes // len(pieces),
            )
            entry = Entry(part, PartCompletion(joiner, index), level, now_ns, self._objective_ns)
            entry.remove = self._remove
            entry.counts_as_request = index == len(pieces) - 1
            entries.append(entry)

        def remove_all() -> None:
            for entry in entries:
                entry.on_settled()

        whole.after = remove_all
        return entries


def _sequence(sequencer: Sequencer, completions: list[Completion]) -> None:
    for completion in completions:
        before = completion.after

        def after(before: Callable[[], None] | None = before) -> None:
            if before is not None:
                before()
            sequencer.release()

        completion.after = after
    sequencer.admit(completions)


def cut(inputs: dict[str, Array], rows: int, max_rows: int) -> list[dict[str, Array]]:
    """The parts of an oversized request as views: full batches, and a rest that others may join."""
    return [
        {name: array[start : start + max_rows] for name, array in inputs.items()} for start in range(0, rows, max_rows)
    ]


def join(parts: list[dict[str, Array]]) -> dict[str, Array]:
    """The outputs of the parts of one request, one below the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class PartJoiner:
    """Collects the outcomes of the parts and settles the whole: with all rows, or with the first error.

    Args:
        whole: what the caller waits for.
        parts: how many parts there are.
        refusal: why the parts must not be joined any more; None while they may be.
    """

    def __init__(
        self, whole: Completion, parts: int, refusal: Callable[[], HeadraceError | None] = lambda: None
    ) -> None:
        self.whole = whole
        self._refusal = refusal
        self._lock = threading.Lock()
        self._outputs: list[dict[str, Array]] = [{} for _ in range(parts)]
        self._missing = parts

    def settle_part(self, index: int, outcome: Outcome) -> None:
        """Part `index` is settled."""
        if isinstance(outcome, Exception):
            self.whole.settle(outcome)
            return
        with self._lock:
            self._outputs[index] = outcome.outputs
            self._missing -= 1
            complete = self._missing == 0
        if complete:
            self.whole.settle(self._joined())

    def _joined(self) -> Outcome:
        refusal = self._refusal()
        if refusal is not None:
            return refusal
        try:
            return InferResponse(join(self._outputs))
        except HeadraceError as error:
            return error
        except (ValueError, MemoryError) as error:
            return ModelFailed(f"the parts of the request do not fit together: {error}")


class PartCompletion(Completion):
    """The answer slot of one part; done as soon as the whole is."""

    __slots__ = ("_index", "_joiner")

    def __init__(self, joiner: PartJoiner, index: int) -> None:
        super().__init__()
        self._joiner = joiner
        self._index = index

    @property
    def done(self) -> bool:
        """True once the part or the whole is settled."""
        return super().done or self._joiner.whole.done

    def notify(self) -> None:
        """Tell the joint."""
        if self.outcome is not None:
            self._joiner.settle_part(self._index, self.outcome)


class Sequencer:
    """Holds outcomes back until those of all earlier requests are out.

    One thread releases at a time; whoever comes meanwhile leaves its outcomes to it. A request that was settled otherwise
    (its caller left, its deadline passed) holds nobody up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Completion] = deque()
        self._outcomes: dict[Completion, Outcome] = {}
        self._releasing = False

    def admit(self, completions: Iterable[Completion]) -> None:
        """The next requests in order."""
        with self._lock:
            self._waiting.extend(completions)

    def deliver(self, pairs: Iterable[tuple[Completion, Outcome]]) -> None:
        """Take the outcomes of a batch and release what is in turn (who is taken is not known yet)."""
        with self._lock:
            self._outcomes.update(pairs)
        self.release()

    def release(self) -> None:
        """Settle, in order, all requests at the front whose outcome is known."""
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
            settle_all(ready)

    def _ready(self) -> list[tuple[Completion, Outcome]]:
        ready: list[tuple[Completion, Outcome]] = []
        while self._waiting:
            completion = self._waiting[0]
            outcome = self._outcomes.pop(completion, None)
            if outcome is not None:
                ready.append((completion, outcome))
            elif not completion.done:
                break
            self._waiting.popleft()
        return ready
