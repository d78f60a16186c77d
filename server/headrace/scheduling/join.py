"""An oversized request: several parts in the queue, one answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

from headrace.core.completion import Completion, Outcome
from headrace.core.errors import HeadraceError, ModelFailed
from headrace.core.request import InferResponse
from headrace.core.tensor import Array
from headrace.scheduling.batch import join


class Joint:
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

    def arrive(self, index: int, outcome: Outcome) -> None:
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

    __slots__ = ("_index", "_joint")

    def __init__(self, joint: Joint, index: int) -> None:
        super().__init__()
        self._joint = joint
        self._index = index

    @property
    def done(self) -> bool:
        """True once the part or the whole is settled."""
        return super().done or self._joint.whole.done

    def notify(self) -> None:
        """Tell the joint."""
        if self.outcome is not None:
            self._joint.arrive(self._index, self.outcome)
