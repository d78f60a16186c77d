"""Errors on the data stream: an error of the engine is raised again in the front end, with its class and all it has."""

from __future__ import annotations

import logging

from headrace.core import errors
from headrace.core.errors import HeadraceError
from headrace.server.front_ends.frames import ErrorRecord
from headrace.wire.requests.service import internal_error

logger = logging.getLogger("headrace.inference")


def _classes(kind: type[HeadraceError]) -> dict[str, type[HeadraceError]]:
    found = {kind.reason: kind}
    for each in kind.__subclasses__():
        found |= _classes(each)
    return found


_CLASSES = {reason: kind for reason, kind in _classes(HeadraceError).items() if kind is not errors.ConfigError}


_DETAILS = ("retry_after_s", "can_retry", "client", "reference")
"""Attributes of errors besides their message and steps."""


def describe_error(error: BaseException) -> ErrorRecord:
    """Return the record of an error. Any other exception is logged, and becomes ModelFailed with a reference."""
    failure = error if isinstance(error, HeadraceError) else internal_error(error, logger)
    details = {name: getattr(failure, name) for name in _DETAILS if hasattr(failure, name)}
    return ErrorRecord(failure.reason, str(failure), details, tuple(failure.steps))


def restore_error(record: ErrorRecord) -> HeadraceError:
    """Return the error of a record; one of an unknown class is a HeadraceError."""
    error = _CLASSES.get(record.reason, HeadraceError)(record.message)
    for name, value in record.details.items():
        setattr(error, name, value)
    if record.steps:
        error.steps = record.steps
    return error
