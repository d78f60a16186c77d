"""Observer that records calls of front ends, for their tests."""

from __future__ import annotations

from headrace.core.telemetry import TraceContext
from headrace.observability.access_log import AccessRecord
from headrace.observability.counters import Recorder
from headrace.observability.tracing import SamplingDecision, TraceSelection


class AccessRecorder:
    """Stands for a `headrace.observability.tracing.RequestObserver`; chooses every request while it is active.

    Attributes:
        active: as the front ends see it.
        answers, failures: their records.
        contexts: (model, trace context) of each sampling decision.
        untraced: failures of requests that were not chosen.
    """

    def __init__(self, active: bool = False) -> None:
        self.active = active
        self.answers: list[AccessRecord] = []
        self.failures: list[AccessRecord] = []
        self.contexts: list[tuple[str, TraceContext | None]] = []
        self.untraced = 0

    def sample(self, model: str, context: TraceContext | None) -> SamplingDecision | None:
        assert self.active, "called while the observer is inactive"
        self.contexts.append((model, context))
        return SamplingDecision(TraceSelection("0" * 31 + "1"), True)

    def record_success(self, sampling: SamplingDecision, record: AccessRecord, recorder: Recorder) -> None:
        assert sampling.log
        self.answers.append(record)

    def record_failure(self, sampling: SamplingDecision | None, record: AccessRecord) -> None:
        self.untraced += sampling is None
        self.failures.append(record)
