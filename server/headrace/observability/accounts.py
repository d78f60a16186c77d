"""Where the front ends tell of requests: decides which are worth it, and hands them to traces, exemplars and the request log."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from headrace.core.trace_context import TraceContext
from headrace.observability.account import Account
from headrace.observability.redaction import Pseudonyms
from headrace.observability.request_log import RequestLog
from headrace.observability.traces import Pick, Tracer


class Exemplars(Protocol):
    """Keeps examples of a version's durations; see `headrace.observability.recorder.Recorder`."""

    def exemplar(self, total_ns: int, trace_id: str) -> None:
        """A request that took `total_ns` from arrival to answer was traced."""


class Choice(NamedTuple):
    """What a request was chosen for.

    Attributes:
        trace: how it is traced, None if it is not.
        log: it is logged whatever becomes of it.
    """

    trace: Pick | None
    log: bool


class Accounts:
    """The one place that the front ends know.

    Everything is called on the event loop unless it says otherwise, `close` by who ends it.

    Args:
        tracer: decides what is traced.
        log: of requests.
        secret_clients: what names clients is a secret: they go under pseudonyms.
    """

    def __init__(self, tracer: Tracer, log: RequestLog, secret_clients: bool = False) -> None:
        self._tracer = tracer
        self._log = log
        self._pseudonyms = Pseudonyms() if secret_clients else None

    @property
    def active(self) -> bool:
        """Some request might be chosen: all that one looks at while nothing is traced or logged."""
        return self._tracer.active or self._log.active

    def choose(self, model: str, context: TraceContext | None) -> Choice | None:
        """Called once for each request on its way to the queue, while `active`.

        Args:
            model: the version's model.
            context: the caller's trace.

        Returns:
            What it was chosen for, None for nothing.
        """
        trace = self._tracer.pick(model, context) if self._tracer.active else None
        log = self._log.active and self._log.wants(trace is not None)
        return Choice(trace, log) if log or trace is not None else None

    def answered(self, choice: Choice, account: Account, exemplars: Exemplars) -> None:
        """A request that was chosen has its answer."""
        trace = choice.trace
        if trace is not None and trace.trace_id and account.times is not None:
            exemplars.exemplar(account.times.split_ns - account.received_ns, trace.trace_id)
        self._tell(choice, account)

    def failed(self, choice: Choice | None, account: Account) -> None:
        """A request, chosen or not, got an error.

        One that never came to the queue is traced if its caller's trace is sampled.
        """
        if choice is None and account.context is not None and account.context.sampled and self._tracer.active:
            choice = Choice(self._tracer.pick(account.model, account.context), False)
        trace, log = choice or Choice(None, False)
        log = log or self._log.wants_error(account.ended_ns)
        if log or trace is not None:
            self._tell(Choice(trace, log), account)

    def close(self) -> None:
        """Write and send what waits."""
        self._tracer.close()
        self._log.close()

    def client_name(self, client: str) -> str:
        """What a client is called to whoever reads of it; from any thread."""
        return client if self._pseudonyms is None else self._pseudonyms.name(client)

    def _tell(self, choice: Choice, account: Account) -> None:
        if self._pseudonyms is not None:
            account = account._replace(client=self.client_name(account.client))
        trace_id = ""
        if choice.trace is not None:
            trace_id = choice.trace.trace_id
            self._tracer.record(choice.trace, account)
        if choice.log:
            self._log.put(account, trace_id)
