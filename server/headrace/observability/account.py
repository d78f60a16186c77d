"""What became of one request, for who traces and logs it."""

from __future__ import annotations

from typing import NamedTuple

from headrace.core.request import BatchTimes
from headrace.core.trace_context import TraceContext

OK = "ok"


class Account(NamedTuple):
    """One request from its arrival to its answer; times are monotonic nanoseconds, 0 for what it did not come to.

    Attributes:
        protocol: http or grpc.
        model: as it was asked for, or the version's own name.
        version: "" if it is not known.
        status: of the answer, an HTTP status or the name of a gRPC code.
        received_ns: when the whole request had arrived.
        ended_ns: when its answer was ready to be sent.
        queued_ns: when it was handed to the queue.
        done_ns: when the event loop had its outcome.
        request_id: the caller's own, "" if there is none.
        client: who asks, "" for nobody in particular.
        rows: of the request, 0 if it was not read so far.
        context: the caller's trace.
        reason: "ok", or the error's word in the metrics.
        error: its text, "" for none.
        times: of its batch; None for an error, and for a request that was cut into several.
        batch_rows, closed: as in `InferResponse`, whose tensors an account must not keep.
    """

    protocol: str
    model: str
    version: str
    status: str
    received_ns: int
    ended_ns: int
    queued_ns: int = 0
    done_ns: int = 0
    request_id: str = ""
    client: str = ""
    rows: int = 0
    context: TraceContext | None = None
    reason: str = OK
    error: str = ""
    times: BatchTimes | None = None
    batch_rows: int = 0
    closed: str = ""

    @property
    def batch_id(self) -> str:
        """The same for all members of a batch, and for no others of its version; "" if it was in none, or in several."""
        return "" if self.times is None else f"{self.times.assembled_ns:x}"


class Phase(NamedTuple):
    """A stretch of a request's time."""

    name: str
    begin_ns: int
    end_ns: int


def phases(account: Account) -> list[Phase]:
    """Where its time went; they follow one another, and add up to the whole where it was answered.

        decode   the request was read and held against the model
        queue    it waited for its batch to be closed
        copy     the batch's rows were gathered
        compute  the model ran, for the whole batch
        split    the batch's rows were handed to its members
        wake     until the event loop took them up
        encode   the answer was written

    Of a request that was cut into several, or that failed behind the door, `wait` stands for all from queue to wake.
    """
    if not account.queued_ns:
        return []
    found = [Phase("decode", account.received_ns, account.queued_ns)]
    done_ns = account.done_ns or account.ended_ns
    times = account.times
    if times is None:
        found.append(Phase("wait", account.queued_ns, done_ns))
    else:
        begin_ns = account.queued_ns
        for name, end_ns in zip(("queue", "copy", "compute", "split", "wake"), (*times, done_ns), strict=True):
            found.append(Phase(name, begin_ns, max(end_ns, begin_ns)))
            begin_ns = max(end_ns, begin_ns)
    if account.done_ns:
        found.append(Phase("encode", account.done_ns, account.ended_ns))
    return found
