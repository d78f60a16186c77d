"""Every error Headrace raises on purpose, in one tree.

    HeadraceError
    |- BadRequest            the request is wrong: what, where, what was expected
    |  |- TooLarge           ... or over a limit
    |  |- Conflict           ... or at odds with what is there
    |- Forbidden             the operator has not switched this on
    |- NotFound              no such model, version or route
    |- Unavailable           right request, wrong moment: not ready, draining
    |  |- Overloaded         the queue is full; come back after `retry_after_s`
    |  |- WouldMiss          it would be answered too late: its deadline, or the model's objective; refused at once
    |  |- QueueTimeout       waited longer than the model's queue policy allows
    |- QuotaExceeded         one client asks for more than it is allowed; come back after `retry_after_s`
    |- DeadlineExceeded      the request's own deadline passed
    |- Cancelled             the caller went away
    |- Unsupported           known, but not to be had here
    |- ModelFailed           the model itself failed; the cause is in the log under `reference`
    |- ConfigError           a model's configuration is wrong: file, line, cure

The front ends translate the tree to HTTP statuses and gRPC codes in one table (`frontends/status.py`); nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass


class HeadraceError(Exception):
    """The root: its text is safe to show to the caller.

    Attributes:
        reason: one word for the metrics; each class has its own.
    """

    reason = "error"

    def prefix(self, text: str) -> None:
        """Put a text in front of the message."""
        self.args = (f"{text}{self}",)


class BadRequest(HeadraceError):
    """The caller sent something that cannot be served as it is."""

    reason = "bad_request"


class TooLarge(BadRequest):
    """The caller sent more than a limit allows."""

    reason = "too_large"


class Conflict(BadRequest):
    """The request is at odds with what is there: a name that is taken."""

    reason = "conflict"


class Forbidden(HeadraceError):
    """The operator of the server has not switched this on; the message tells the option."""

    reason = "forbidden"


class NotFound(HeadraceError):
    """What the caller named does not exist here."""

    reason = "not_found"


class Unavailable(HeadraceError):
    """The request may be right, but cannot be served now.

    Args:
        message: what the caller reads.
        retry_after_s: when it makes sense to come back, in seconds.
    """

    reason = "unavailable"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(Unavailable):
    """A bounded queue is full."""

    reason = "overloaded"


class WouldMiss(Unavailable):
    """By all that is known, the answer would come after the request's deadline or the model's objective."""

    reason = "would_miss"


class QueueTimeout(Unavailable):
    """The request waited longer than the model's queue policy allows."""

    reason = "queue_timeout"


class QuotaExceeded(HeadraceError):
    """One client asks for more than it is allowed; others are served.

    Args:
        message: what the caller reads.
        retry_after_s: when the client may ask again, in seconds.
        client: whose quota it is; "" for all who give no name.
    """

    reason = "quota"

    def __init__(self, message: str, retry_after_s: float = 1.0, client: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.client = client


class DeadlineExceeded(HeadraceError):
    """The deadline that the request itself carried has passed."""

    reason = "deadline"


class Cancelled(HeadraceError):
    """Nobody waits for the answer any more."""

    reason = "cancelled"


class Unsupported(HeadraceError):
    """The protocol knows it, this server (or this machine) does not offer it."""

    reason = "unsupported"


class ModelFailed(HeadraceError):
    """The model raised while it ran.

    Args:
        message: what the caller reads; never the backend's own text, which may hold paths.
        reference: the id under which the log has the cause.
    """

    reason = "model_failed"

    def __init__(self, message: str, reference: str = "") -> None:
        super().__init__(message)
        self.reference = reference


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong (or doubtful) in a model's folder.

    Attributes:
        path: the file, relative to where the repository was named.
        line: 1-based line in that file, or None where no line can be told.
        message: what is wrong.
        cure: what to write or do instead.
        fatal: True if the model cannot be served with it.
    """

    path: str
    line: int | None
    message: str
    cure: str = ""
    fatal: bool = True

    def __str__(self) -> str:
        where = self.path if self.line is None else f"{self.path}:{self.line}"
        cure = f" ({self.cure})" if self.cure else ""
        return f"{where}: {'error' if self.fatal else 'warning'}: {self.message}{cure}"


class ConfigError(HeadraceError):
    """A model's configuration cannot be used.

    Args:
        findings: every problem found, not only the first.
    """

    reason = "config"

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("; ".join(str(finding) for finding in findings))
        self.findings = findings


def forget_frames(error: BaseException) -> None:
    """Let go of the frames that an error and those before it have come through, once it has been told.

    They hold the body of the request, and by way of its completion the error itself: a ring that only the garbage collector
    finds, which runs rarely in a server.
    """
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__context__
