"""How a gRPC call ends when its method raises: code, text and trailing metadata, for every engine alike."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import HeadraceError
from headrace.grpc.details import DETAILS_TRAILER, details
from headrace.grpc.infer import fault
from headrace.inference.status import grpc_code, retry_after_s
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


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a call that failed.

    Attributes:
        code: the name of the gRPC code.
        text: for `grpc-message`; no lone surrogates, and not too long for a header.
        metadata: trailing, e.g. (("retry-after", "1"),); bytes where the name ends in "-bin".
    """

    code: str
    text: str
    metadata: tuple[tuple[str, str | bytes], ...] = ()


def failure(error: Exception) -> Failure:
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
        return Failure(code, text)
    return Failure(code, text, (("retry-after", str(retry_after_s(told))), (DETAILS_TRAILER, more)))
