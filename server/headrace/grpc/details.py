"""What a failed call says besides its code and text: `google.rpc.Status` in the trailer `grpc-status-details-bin`, with RetryInfo
and QuotaFailure (google/rpc/status.proto, error_details.proto), which gRPC's clients know how to read.

Three small messages of strings and numbers: written by hand, they need no package of generated code.
"""

from __future__ import annotations

from headrace.core.clock import NS_PER_S
from headrace.core.errors import HeadraceError, QuotaExceeded
from headrace.grpc.codec import varint
from headrace.inference.status import retry_delay_s

DETAILS_TRAILER = "grpc-status-details-bin"
_TYPE = "type.googleapis.com/google.rpc."
# Of the text, which `grpc-message` has in full: clients bound all trailers together.
_MAX_TEXT = 256
_ANYBODY = "clients without a name"


def details(error: HeadraceError, code: int, text: str) -> bytes | None:
    """A serialized google.rpc.Status, None where there is nothing to add.

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
