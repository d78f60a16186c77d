"""Every error that Headrace raises on purpose, in one tree.

    HeadraceError
    |- BadRequest            the request is invalid: the message has the value, the place and the expected value
    |  |- TooLarge           the request exceeds a limit
    |  |- Conflict           the name is in use
    |  |  |- Aborted         a later change has ended what the request began
    |- Unauthenticated       the request has no valid key
    |- Forbidden             the feature is not enabled on this server, or not allowed to this key
    |- NotFound              no such model, version or route
    |- Unavailable           valid request, but not ready or draining
    |  |- Overloaded         the queue is full; retry after `retry_after_s`
    |  |- WouldMiss          rejected on arrival: it would miss its deadline or the model's objective
    |  |- QueueTimeout       exceeded the timeout of the model's queue policy
    |- QuotaExceeded         the client exceeded its quota; retry after `retry_after_s`
    |- DeadlineExceeded      the deadline of the request has passed
    |- Cancelled             the caller has disconnected or cancelled the request
    |- Unsupported           the protocol has it, this server or machine does not
    |- ModelFailed           the model failed; the log has the cause under `reference`
    |  |- BatchLost          the model's process ended while it ran the batch
    |- ConfigError           a model's configuration is invalid: file, line, cure

One table maps the tree to HTTP statuses and gRPC codes (`headrace/wire/requests/status.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class HeadraceError(Exception):
    """Root of the tree. Its message may be shown to the caller.

    Attributes:
        reason: one word for the metrics, distinct for each class.
        steps: `headrace.core.request.PipelineStepTimes` of the steps of a pipeline request that ended before it; () for others.
    """

    reason = "error"
    steps: tuple[Any, ...] = ()

    def prefix(self, text: str) -> None:
        """Prepend a text to the message."""
        self.args = (f"{text}{self}",)


class BadRequest(HeadraceError):
    """The request is invalid."""

    reason = "bad_request"


class TooLarge(BadRequest):
    """The request exceeds a limit."""

    reason = "too_large"


class Conflict(BadRequest):
    """The request conflicts with the state of the server: a name is in use."""

    reason = "conflict"


class Aborted(Conflict):
    """A later change has ended what the request began, such as an unload a load: the same request may succeed now."""

    reason = "aborted"


class Unauthenticated(HeadraceError):
    """The request has no valid key, token or client certificate."""

    reason = "unauthenticated"


class Forbidden(HeadraceError):
    """The feature is not enabled on this server, or not allowed to the caller; the message names the option or the scope."""

    reason = "forbidden"


class NotFound(HeadraceError):
    """The named model, version or route does not exist."""

    reason = "not_found"


class Unavailable(HeadraceError):
    """The request may be valid, but cannot be served now.

    Args:
        message: text for the caller.
        retry_after_s: delay in seconds before a retry.
        can_retry: False if the same request fails again at any time.
    """

    reason = "unavailable"

    def __init__(self, message: str, retry_after_s: float = 1.0, can_retry: bool = True) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.can_retry = can_retry


class Overloaded(Unavailable):
    """A bounded queue is full."""

    reason = "overloaded"


class WouldMiss(Unavailable):
    """The predicted completion is after the request's deadline or the model's objective."""

    reason = "would_miss"


class QueueTimeout(Unavailable):
    """The request exceeded the timeout of the model's queue policy."""

    reason = "queue_timeout"


class QuotaExceeded(HeadraceError):
    """A client exceeded its quota; other clients are served.

    Args:
        message: text for the caller.
        retry_after_s: delay in seconds before a retry.
        client: name of the client; "" for clients without a name.
    """

    reason = "quota"

    def __init__(self, message: str, retry_after_s: float = 1.0, client: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.client = client


class DeadlineExceeded(HeadraceError):
    """The deadline of the request has passed."""

    reason = "deadline"


class Cancelled(HeadraceError):
    """The caller has disconnected or cancelled the request."""

    reason = "cancelled"


class Unsupported(HeadraceError):
    """The protocol has this feature, this server or machine does not."""

    reason = "unsupported"


class ModelFailed(HeadraceError):
    """The model failed while it ran.

    Args:
        message: text for the caller, without the backend's message, which may hold paths.
        reference: id of the log line with the cause.
    """

    reason = "model_failed"

    def __init__(self, message: str, reference: str = "") -> None:
        super().__init__(message)
        self.reference = reference


class BatchLost(ModelFailed):
    """The process of the model ended while it ran the batch. The requests of the batch are not run again."""

    reason = "process_died"


@dataclass(frozen=True, slots=True)
class Finding:
    """One error or warning in a model's folder.

    Attributes:
        path: path of the file, relative to the repository.
        line: 1-based line in that file, None if unknown.
        message: description of the error.
        cure: the correction to make.
        fatal: True for an error (the model cannot be served), False for a warning.
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
    """A model's configuration is invalid.

    Args:
        findings: all errors, not only the first.
    """

    reason = "config"

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("; ".join(str(finding) for finding in findings))
        self.findings = findings


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and of its contexts, once it is reported.

    The frames hold the body of the request, and through its completion the error: a reference cycle. Only the garbage collector
    frees it, which runs rarely in a server.
    """
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__context__


_CODES = """OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED RESOURCE_EXHAUSTED
FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE DATA_LOSS UNAUTHENTICATED"""
# google.rpc.Code. Not from grpcio, which the server does not import.
GRPC_CODES = {name: number for number, name in enumerate(_CODES.split())}
