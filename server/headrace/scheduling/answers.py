"""What becomes of a batch: every member's answer or error, and the count of it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable

from headrace.core.completion import Completion, Outcome
from headrace.core.errors import HeadraceError, ModelFailed
from headrace.core.request import BatchTimes, InferResponse
from headrace.core.tensor import Array
from headrace.observability.recorder import Recorder
from headrace.scheduling.batch import split
from headrace.scheduling.batching import CloseReason
from headrace.scheduling.outlook import Outlook
from headrace.scheduling.output_check import OutputCheck, OutputMismatch
from headrace.scheduling.profile import Profile
from headrace.scheduling.queue import Entry

logger = logging.getLogger("headrace.instance")

Deliver = Callable[[Iterable[tuple[Completion, Outcome]]], object]


class Answers:
    """Settles the members of batches and counts what was done; from any thread.

    Args:
        recorder: counts.
        deliver: settles answers; gives the number that still had a taker, if it knows.
        report: told how long an instance was busy with a batch, nanoseconds.
        check: of the model's outputs.
        profile: learns how long batches compute; a new one if absent.
        outlook: learns what became of its predictions; None: there are none.
        on_mismatch: called when the model returned outputs that are not those of the rows sent, before any answer.

    Attributes:
        profile: as above.
        at_work: the runners that have a batch under way; each takes itself out.
    """

    def __init__(
        self,
        recorder: Recorder,
        deliver: Deliver,
        report: Callable[[int], None],
        check: OutputCheck,
        profile: Profile | None = None,
        outlook: Outlook | None = None,
        on_mismatch: Callable[[OutputMismatch], object] = lambda _error: None,
    ) -> None:
        self._recorder = recorder
        self._deliver = deliver
        self._report = report
        self._check = check
        self._on_mismatch = on_mismatch
        self._outlook = outlook
        self.profile = profile or Profile()
        self.at_work: set[object] = set()

    def begin(self, runner: object) -> None:
        """A runner has taken a batch."""
        self.at_work.add(runner)
        if self._outlook is not None:
            self._outlook.changed = True

    def split(self, outputs: dict[str, Array], entries: list[Entry]) -> list[dict[str, Array]]:
        """Check the outputs of a batch and cut them into every entry's rows; see `headrace.scheduling.batch.split`.

        Raises:
            OutputMismatch: they are not the outputs of the rows sent.
        """
        return split(outputs, entries, self._check)

    def settle(
        self,
        entries: list[Entry],
        reason: CloseReason,
        times: BatchTimes,
        results: list[dict[str, Array]],
        busy_ns: int,
        instances: int = 1,
    ) -> None:
        """A batch was run: give every member its rows.

        Args:
            entries: the members.
            reason: why the batch was closed.
            times: its stations.
            results: outputs by name for each member.
            busy_ns: how long the instance was kept by it.
            instances: at work when it was begun, its own included.
        """
        batch_rows = rows = sum([entry.rows for entry in entries])
        closed = reason.value
        pairs: list[tuple[Completion, Outcome]] = [
            (entry.completion, InferResponse(outputs, times, batch_rows, closed))
            for entry, outputs in zip(entries, results, strict=True)
        ]
        taken = self._deliver(pairs)
        answered = entries
        if taken != len(answered):  # some callers left while the batch ran: theirs is no success
            answered = [
                entry
                for entry, (completion, outcome) in zip(answered, pairs, strict=True)
                if completion.outcome is outcome or completion.outcome is None
            ]
            rows = sum([entry.rows for entry in answered])
        leading = [entry for entry in answered if entry.leads]
        self._recorder.batch(
            rows,
            batch_rows,
            closed,
            times,
            [times.taken_ns - entry.enqueued_ns for entry in leading],
            [times.split_ns - entry.received_ns for entry in leading],
            busy_ns,
            entries[0].shape_key,
        )
        self._report(busy_ns)
        # Behind another batch in the air it computed no longer than it kept the instance from the next.
        compute_ns = min(times.computed_ns - times.assembled_ns, busy_ns)
        self.profile.observe(batch_rows, compute_ns, instances)
        outlook = self._outlook
        if outlook is not None:
            outlook.changed = True
            if outlook.promises:
                outlook.ran(batch_rows, self.profile.estimate_ns(batch_rows, instances), busy_ns)
                outlook.learn(leading, times.split_ns)

    def failed(self, entries: list[Entry], reason: CloseReason, error: Exception) -> list[Entry]:
        """A batch raised. The error belongs to one that was alone; of several, one may have spoilt it for the others.

        Returns:
            The members that should be run again, each on its own.
        """
        self._recorder.failed_batch(reason.value)
        if self._outlook is not None:
            self._outlook.changed = True
        if isinstance(error, OutputMismatch):
            self._on_mismatch(error)
        if len(entries) > 1:
            logger.debug("a batch of %d failed as a whole: running its members singly", len(entries))
            return [entry for entry in entries if not entry.completion.done]
        if isinstance(error, HeadraceError):
            failure: HeadraceError = error
        else:
            reference = uuid.uuid4().hex[:12]
            logger.error("request failed in the model (reference %s)", reference, exc_info=error)
            failure = ModelFailed(
                f"the model failed on this request; the server's log has the cause ({reference})", reference
            )
        self.give_up(entries, failure)
        return []

    def give_up(self, entries: Iterable[Entry], error: Exception) -> None:
        """Answer all of `entries` with an error."""
        self._deliver([(entry.completion, error) for entry in entries])
