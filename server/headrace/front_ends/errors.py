"""Errors on the data stream: an error of the engine is raised again in the front end, with its class and all it has."""

from __future__ import annotations

import logging

from headrace.core import errors
from headrace.core.errors import HeadraceError, ModelFailed, QuotaExceeded, Unavailable
from headrace.front_ends.frames import ErrorRecord
from headrace.inference.service import internal_error

logger = logging.getLogger("headrace.engine")


def _classes(kind: type[HeadraceError]) -> dict[str, type[HeadraceError]]:
    found = {kind.reason: kind}
    for each in kind.__subclasses__():
        found |= _classes(each)
    return found


_CLASSES = {reason: kind for reason, kind in _classes(HeadraceError).items() if kind is not errors.ConfigError}


def describe_error(error: BaseException) -> ErrorRecord:
    """Return the record of an error. Any other exception is logged, and becomes ModelFailed with a reference."""
    failure = error if isinstance(error, HeadraceError) else internal_error(error, logger)
    return ErrorRecord(
        failure.reason,
        str(failure),
        failure.retry_after_s if isinstance(failure, Unavailable | QuotaExceeded) else 0.0,
        failure.client if isinstance(failure, QuotaExceeded) else "",
        failure.reference if isinstance(failure, ModelFailed) else "",
        tuple(failure.steps),
        failure.can_retry if isinstance(failure, Unavailable) else True,
    )


def restore_error(record: ErrorRecord) -> HeadraceError:
    """Return the error of a record; one of an unknown class is a HeadraceError."""
    kind = _CLASSES.get(record.reason, HeadraceError)
    error: HeadraceError
    if issubclass(kind, QuotaExceeded):
        error = kind(record.message, record.retry_after_s, record.client)
    elif issubclass(kind, Unavailable):
        error = kind(record.message, record.retry_after_s, record.can_retry)
    elif issubclass(kind, ModelFailed):
        error = kind(record.message, record.reference)
    else:
        error = kind(record.message)
    if record.steps:
        error.steps = record.steps
    return error
