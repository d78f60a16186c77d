"""Status of a failed gRPC call: code, text and trailing metadata."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from headrace.core.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from headrace.core.errors import GRPC_CODES, HeadraceError, QuotaExceeded, TooLarge, Unavailable
from headrace.observability.labelled_counter import ERRORS
from headrace.wire.grpc.large_contents import varint
from headrace.wire.requests.service import internal_error
from headrace.wire.requests.status import grpc_code, retry_after_ms, retry_after_s, retry_delay_s

logger = logging.getLogger("headrace.grpc")

# Trailers travel as a header block, which clients bound to 8 KiB by default; anything but printable ASCII is
# percent-encoded there, a character beyond ASCII as up to four bytes of three characters each.
_MAX_ASCII = 2048
_MAX_OTHER = 512
DETAILS_TRAILER = "grpc-status-details-bin"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"
"""Trailer that overrides the backoff of a client's retry policy (gRFC A6).

Milliseconds before the retry; a negative number forbids it."""
_NO_RETRY = "-1"
# A longer wait inside the client's library is hidden from its caller, which reads the delay in `retry-after` instead.
_MAX_PUSHBACK_MS = 60_000
_TYPE = "type.googleapis.com/google.rpc."
# Characters of the text in the details; `grpc-message` has all of it. Clients limit the size of all trailers together.
_MAX_TEXT = 256
_ANONYMOUS = "clients without a name"


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """Status of a failed call.

    Attributes:
        code: name of the gRPC code, such as "NOT_FOUND".
        text: for `grpc-message`; without lone surrogates, and short enough for a header.
        metadata: trailing metadata such as (("retry-after", "1"),); values are bytes for names that end in "-bin".
    """

    code: str
    text: str
    metadata: tuple[tuple[str, str | bytes], ...] = ()


class StatusError(Exception):
    """Failure of a call that another process has counted and described.

    Args:
        status: of the call.
    """

    def __init__(self, status: ErrorStatus) -> None:
        super().__init__(status.text)
        self.status = status


def error_status(error: Exception, deadline_ns: int = 0) -> ErrorStatus:
    """Status of an exception. Counts it, and logs it if it is not a HeadraceError; call it in the exception handler.

    A `StatusError` has its status, and is not counted again.

    Args:
        error: the exception that is being handled.
        deadline_ns: monotonic deadline of the call, 0 for none. It bounds all attempts of the call together.

    Returns:
        Its status; that of an internal error with a reference to the log if it is not a HeadraceError.
    """
    if isinstance(error, StatusError):
        return error.status
    reported = error if isinstance(error, HeadraceError) else internal_error(error, logger)
    text = str(reported).encode("utf-8", "replace").decode()
    ERRORS.count("grpc", reported.reason)
    limit = _MAX_ASCII if text.isascii() and text.isprintable() else _MAX_OTHER
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    code = grpc_code(reported)
    pushback = _pushback(reported, deadline_ns)
    metadata: tuple[tuple[str, str | bytes], ...] = () if pushback is None else ((PUSHBACK_TRAILER, pushback),)
    details = _status_details(reported, GRPC_CODES[code], text)
    if details is not None:
        metadata = (("retry-after", str(retry_after_s(reported))), *metadata, (DETAILS_TRAILER, details))
    return ErrorStatus(code, text, metadata)


def _pushback(error: HeadraceError, deadline_ns: int) -> str | None:
    """Return the value of `PUSHBACK_TRAILER`; None to leave the retry to the client's policy.

    A retry is refused if it fails again for certain, would start after the call's deadline, or is more than a minute away.

    Args:
        error: of the call.
        deadline_ns: as in `error_status`.
    """
    if isinstance(error, TooLarge):
        return _NO_RETRY  # has the code of an exceeded quota, which clients retry
    delay_ms = retry_after_ms(error)
    if delay_ms is None:
        return None
    is_final = isinstance(error, Unavailable) and not error.can_retry
    is_late = deadline_ns != 0 and monotonic_ns() + delay_ms * NS_PER_MS >= deadline_ns
    return _NO_RETRY if is_final or is_late or delay_ms > _MAX_PUSHBACK_MS else str(delay_ms)


def _status_details(error: HeadraceError, code: int, text: str) -> bytes | None:
    """Serialize google.rpc.Status with RetryInfo and QuotaFailure, which gRPC clients can read; None without a retry delay.

    Follows google/rpc/status.proto and error_details.proto. These three small messages are encoded by hand, which saves a
    dependency with generated code.

    Args:
        error: of the call.
        code: number of its gRPC code.
        text: as in `grpc-message`.
    """
    delay_s = retry_delay_s(error)
    if delay_s is None:
        return None
    message = text[:_MAX_TEXT].encode()
    seconds, nanos = divmod(round(delay_s * NS_PER_S), NS_PER_S)
    duration = _number(1, seconds) + _number(2, nanos)
    entries = [_any("RetryInfo", _field(1, duration))]
    if isinstance(error, QuotaExceeded):
        violation = _field(1, f"client:{error.client or _ANONYMOUS}".encode()) + _field(2, message)
        entries.append(_any("QuotaFailure", _field(1, violation)))
    return _number(1, code) + _field(2, message) + b"".join(_field(3, entry) for entry in entries)


def _any(name: str, message: bytes) -> bytes:
    """Encode a google.protobuf.Any of a google.rpc message."""
    return _field(1, (_TYPE + name).encode()) + _field(2, message)


def _field(number: int, content: bytes) -> bytes:
    """Encode a length-delimited field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    """Encode a varint field; 0 is omitted."""
    return varint(number << 3) + varint(value) if value else b""
