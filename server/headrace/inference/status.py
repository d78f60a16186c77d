"""The one table from our errors to HTTP statuses and gRPC codes.

The order of meaning, for whoever retries: 503 = this server cannot now (overloaded, loading, draining), another replica may;
429 is kept for a client over its own quota; 504 = the request's own deadline; 4xx = do not send it again as it is.
"""

from __future__ import annotations

import math

from headrace.core import errors

# Most specific first; gRPC codes by name, so that this table needs no gRPC.
STATUS: tuple[tuple[type[errors.HeadraceError], int, str], ...] = (
    (errors.TooLarge, 413, "RESOURCE_EXHAUSTED"),
    (errors.Conflict, 409, "ALREADY_EXISTS"),
    (errors.BadRequest, 400, "INVALID_ARGUMENT"),
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
    (errors.ModelFailed, 500, "INTERNAL"),
    (errors.ConfigError, 400, "INVALID_ARGUMENT"),
    (errors.HeadraceError, 500, "INTERNAL"),
)


def http_status(error: errors.HeadraceError) -> int:
    """The HTTP status of an error."""
    return next(status for kind, status, _ in STATUS if isinstance(error, kind))


def grpc_code(error: errors.HeadraceError) -> str:
    """The name of the gRPC code of an error."""
    return next(code for kind, _, code in STATUS if isinstance(error, kind))


def retry_delay_s(error: errors.HeadraceError) -> float | None:
    """When to come back, in seconds; None where coming back makes no sense."""
    return error.retry_after_s if isinstance(error, errors.Unavailable | errors.QuotaExceeded) else None


def retry_after_s(error: errors.HeadraceError) -> int | None:
    """The same in whole seconds, at least 1: a Retry-After header cannot say less."""
    delay_s = retry_delay_s(error)
    return None if delay_s is None else max(math.ceil(delay_s), 1)


def retry_after_ms(error: errors.HeadraceError) -> int | None:
    """The same in whole milliseconds, which is fine enough for queues."""
    delay_s = retry_delay_s(error)
    return None if delay_s is None else math.ceil(delay_s * 1000)
