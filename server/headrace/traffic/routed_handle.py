"""A version that a traffic split has selected: `RoutedHandle` counts its answers and errors, and copies its requests."""

from __future__ import annotations

from typing import Protocol

from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import HeadraceError, Unavailable
from headrace.core.request import InferRequest, InferResponse, ModelLoad
from headrace.inference.status import http_status
from headrace.scheduling.version_handle import VersionHandle
from headrace.traffic.figures import VersionFigures
from headrace.traffic.shadow import ShadowJob

# Cancelled requests have 499.
_FIRST_SERVER_ERROR = 500


class RoutedRequests(Protocol):
    """Traffic of a model; see `headrace.traffic.split.TrafficSplit`."""

    def copy_for_shadow(self, routed: RoutedHandle, request: InferRequest, /) -> ShadowJob | None:
        """Copy a request that has started if a shadow request is due; None for none."""

    def on_answer(
        self, routed: RoutedHandle, received_ns: int, job: ShadowJob | None, response: InferResponse, /
    ) -> None:
        """Count an answer, before it is written."""

    def on_error(self, routed: RoutedHandle, was_answered: bool, /) -> None:
        """Count an error of the server."""


class RoutedCompletion(LoopCompletion):
    """Completion of a routed request: settled with the outcome of the version's own completion.

    Args:
        mailbox: of the event loop.
        inner: completion of the version.
        handle: that has started it.
        received_ns: monotonic arrival of the request.
        job: copy of the request, None for none.
    """

    __slots__ = ("_handle", "_inner", "_job", "_received_ns")

    def __init__(
        self, mailbox: Mailbox, inner: LoopCompletion, handle: RoutedHandle, received_ns: int, job: ShadowJob | None
    ) -> None:
        super().__init__(mailbox)
        self._inner: LoopCompletion | None = inner
        self._handle, self._received_ns, self._job = handle, received_ns, job
        if inner.woken:  # the request ran on the event loop
            self._take()
        else:
            inner.then(self._take)

    def _take(self) -> None:
        """Count the outcome of the version, and settle with it."""
        inner, job = self._inner, self._job
        self._inner = self._job = None
        if inner is None or self.is_settled:
            return
        outcome = inner.outcome or Unavailable("the request was withdrawn")
        if isinstance(outcome, InferResponse):
            self._handle.split.on_answer(self._handle, self._received_ns, job, outcome)
        self.settle_now(outcome)

    def finish(self) -> None:
        """Abandon the version's request if the caller has ended this one."""
        super().finish()
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.abandon()


class RoutedHandle:
    """A leased version, for `headrace.inference.service`; implements `Handle`. Ownership: the event loop.

    Args:
        split: that has selected the version.
        target: version number, or "model:NAME" for a version of another model.
        handle: of the version.
        mailbox: of the event loop.
        figures: of the version.

    Attributes:
        split, target, handle, figures: see Args.
        spec, recorder: of the version.
    """

    __slots__ = ("__weakref__", "_mailbox", "figures", "handle", "recorder", "spec", "split", "target")

    def __init__(
        self, split: RoutedRequests, target: str, handle: VersionHandle, mailbox: Mailbox, figures: VersionFigures
    ) -> None:
        self.split, self.target, self.handle, self._mailbox, self.figures = split, target, handle, mailbox, figures
        self.spec, self.recorder = handle.spec, handle.recorder

    @property
    def has_cache(self) -> bool:
        """See `Handle`."""
        return self.handle.has_cache

    def admit(self) -> None:
        """See `Handle`."""
        self.handle.admit()

    def check_load(self, received_ns: int, deadline_ns: int, client: str) -> None:
        """See `Handle`."""
        self.handle.check_load(received_ns, deadline_ns, client)

    def infer(self, request: InferRequest) -> LoopCompletion:
        """Start a request, and copy it for the shadow if it is due; raises as `VersionHandle.infer`."""
        inner = self.handle.infer(request)
        job = self.split.copy_for_shadow(self, request)  # the version computes meanwhile
        return RoutedCompletion(self._mailbox, inner, self, request.received_ns, job)

    def load(self, by_level: bool = True) -> ModelLoad:
        """See `Handle`."""
        return self.handle.load(by_level)

    def queue_load(self, now_ns: int) -> tuple[int, int]:
        """See `Handle`."""
        return self.handle.queue_load(now_ns)

    def record_failure(self, error: HeadraceError, received_ns: int, answered: InferResponse | None = None) -> None:
        """Count a failed request, as an error of the version if the server is at fault."""
        self.handle.record_failure(error, received_ns, answered)
        if http_status(error) >= _FIRST_SERVER_ERROR:
            self.split.on_error(self, answered is not None)

    def release(self) -> None:
        """See `Handle`."""
        self.handle.release()
