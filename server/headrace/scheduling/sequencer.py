"""Answers in the order in which the requests came (`preserve_ordering`), however the instances overtake each other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from headrace.core.completion import Completion, Outcome, settle_all


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
