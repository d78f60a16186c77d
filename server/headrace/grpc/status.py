"""How a gRPC call ends when its method raises: code, text and trailing metadata, for every engine alike."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.clock import NS_PER_S
from headrace.core.errors import HeadraceError, QuotaExceeded
from headrace.grpc.codec import varint
from headrace.grpc.infer import fault
from headrace.inference.status import grpc_code, retry_after_s, retry_delay_s
from headrace.observability.tally import ERRORS

CODES = {
    "OK": 0,
    "CANCELLED": 1,
    "UNKNOWN": 2,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "ALREADY_EXISTS": 6,
    "PERMISSION_DENIED": 7,
    "RESOURCE_EXHAUSTED": 8,
    "FAILED_PRECONDITION": 9,
    "ABORTED": 10,
    "OUT_OF_RANGE": 11,
    "UNIMPLEMENTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "DATA_LOSS": 15,
    "UNAUTHENTICATED": 16,
}
# Trailers travel as a header block, which clients bound to 8 KiB by default; anything but printable ASCII is
# percent-encoded there, a character beyond ASCII as up to four bytes of three characters each.
_MAX_ASCII = 2048
_MAX_OTHER = 512
DETAILS_TRAILER = "grpc-status-details-bin"
_TYPE = "type.googleapis.com/google.rpc."
# Of the text, which `grpc-message` has in full: clients bound all trailers together.
_MAX_TEXT = 256
_ANYBODY = "clients without a name"


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """The end of a call that failed.

    Attributes:
        code: the name of the gRPC code.
        text: for `grpc-message`; no lone surrogates, and not too long for a header.
        metadata: trailing, e.g. (("retry-after", "1"),); bytes where the name ends in "-bin".
    """

    code: str
    text: str
    metadata: tuple[tuple[str, str | bytes], ...] = ()


def error_status(error: Exception) -> ErrorStatus:
    """What the caller is told of an exception; one that is no HeadraceError is a fault of ours and is logged.

    Counts the error. To be called while the exception is handled.
    """
    told = error if isinstance(error, HeadraceError) else fault()
    text = str(told).encode("utf-8", "replace").decode()
    ERRORS.count("grpc", told.reason)
    limit = _MAX_ASCII if text.isascii() and text.isprintable() else _MAX_OTHER
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    code = grpc_code(told)
    more = details(told, CODES[code], text)
    if more is None:
        return ErrorStatus(code, text)
    return ErrorStatus(code, text, (("retry-after", str(retry_after_s(told))), (DETAILS_TRAILER, more)))


def details(error: HeadraceError, code: int, text: str) -> bytes | None:
    """A serialized google.rpc.Status, None where there is nothing to add.

    With RetryInfo and QuotaFailure (google/rpc/status.proto, error_details.proto), which gRPC's clients know how to read. Three
    small messages of strings and numbers: written by hand, they need no package of generated code.

    Args:
        error: why the call failed.
        code: the number of its gRPC code.
        text: as in `grpc-message`.
    """
    delay_s = retry_delay_s(error)
    if delay_s is None:
        return None
    told = text[:_MAX_TEXT].encode()
    seconds, nanos = divmod(round(delay_s * NS_PER_S), NS_PER_S)
    duration = _number(1, seconds) + _number(2, nanos)
    found = [_any("RetryInfo", _field(1, duration))]
    if isinstance(error, QuotaExceeded):
        violation = _field(1, f"client:{error.client or _ANYBODY}".encode()) + _field(2, told)
        found.append(_any("QuotaFailure", _field(1, violation)))
    return _number(1, code) + _field(2, told) + b"".join(_field(3, message) for message in found)


def _any(name: str, message: bytes) -> bytes:
    return _field(1, (_TYPE + name).encode()) + _field(2, message)


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    """A varint field; 0 is left out."""
    return varint(number << 3) + varint(value) if value else b""
