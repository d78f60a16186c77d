"""Table of HTTP statuses and gRPC codes by error class, and retry delays.

For clients that retry: 503 means that this server cannot serve the request now (overloaded, loading, draining), but another
replica may. 429 means that the client has exceeded its own quota. 504 means that the request's deadline has passed. Other 4xx
statuses mean that the same request fails again, except for ABORTED.
"""

from __future__ import annotations

import math

from headrace.core import errors

# Most specific class first. gRPC codes are names, so that this module does not import grpc.
STATUS: tuple[tuple[type[errors.HeadraceError], int, str], ...] = (
    (errors.TooLarge, 413, "RESOURCE_EXHAUSTED"),
    (errors.Aborted, 409, "ABORTED"),
    (errors.Conflict, 409, "ALREADY_EXISTS"),
    (errors.BadRequest, 400, "INVALID_ARGUMENT"),
    (errors.Unauthenticated, 401, "UNAUTHENTICATED"),
    (errors.Forbidden, 403, "PERMISSION_DENIED"),
    (errors.NotFound, 404, "NOT_FOUND"),
    (errors.Overloaded, 503, "UNAVAILABLE"),
    (errors.WouldMiss, 503, "UNAVAILABLE"),
    (errors.QueueTimeout, 503, "UNAVAILABLE"),
    (errors.Unavailable, 503, "UNAVAILABLE"),
    (errors.QuotaExceeded, 429, "RESOURCE_EXHAUSTED"),
    (errors.DeadlineExceeded, 504, "DEADLINE_EXCEEDED"),
    (errors.Cancelled, 499, "CANCELLED"),
    (errors.Unsupported, 400, "UNIMPLEMENTED"),
    (errors.BatchLost, 500, "INTERNAL"),
    (errors.ModelFailed, 500, "INTERNAL"),
    (errors.ConfigError, 400, "INVALID_ARGUMENT"),
    (errors.HeadraceError, 500, "INTERNAL"),
)


def http_status(error: errors.HeadraceError) -> int:
    """Return the HTTP status of an error."""
    return _statuses(type(error))[0]


def grpc_code(error: errors.HeadraceError) -> str:
    """Return the name of the gRPC code of an error, e.g. "NOT_FOUND"."""
    return _statuses(type(error))[1]


_BY_CLASS: dict[type[errors.HeadraceError], tuple[int, str]] = {}


def _statuses(error: type[errors.HeadraceError]) -> tuple[int, str]:
    statuses = _BY_CLASS.get(error)
    if statuses is None:
        statuses = next((status, code) for kind, status, code in STATUS if issubclass(error, kind))
        _BY_CLASS[error] = statuses
    return statuses


def retry_delay_s(error: errors.HeadraceError) -> float | None:
    """Return the retry delay of an error in seconds; None if a retry cannot succeed."""
    return error.retry_after_s if isinstance(error, errors.Unavailable | errors.QuotaExceeded) else None


def retry_after_s(error: errors.HeadraceError) -> int | None:
    """Return the retry delay in whole seconds, at least 1, for the header Retry-After; None if a retry cannot succeed."""
    delay_s = retry_delay_s(error)
    return None if delay_s is None else max(math.ceil(delay_s), 1)


def retry_after_ms(error: errors.HeadraceError) -> int | None:
    """Return the retry delay in whole milliseconds; None if a retry cannot succeed."""
    delay_s = retry_delay_s(error)
    return None if delay_s is None else math.ceil(delay_s * 1000)
