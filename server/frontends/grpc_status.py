"""How a gRPC call ends when its method raises: code, text and trailing metadata, for every engine alike."""

from __future__ import annotations

from dataclasses import dataclass

from server.core.errors import HeadraceError
from server.frontends.grpc_infer import fault
from server.frontends.status import grpc_code, retry_after_s

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
        metadata: trailing, e.g. (("retry-after", "1"),).
    """

    code: str
    text: str
    metadata: tuple[tuple[str, str], ...] = ()


def failure(error: Exception) -> Failure:
    """What the caller is told of an exception; one that is no HeadraceError is a fault of ours and is logged.

    To be called while the exception is handled.
    """
    told = error if isinstance(error, HeadraceError) else fault()
    text = str(told).encode("utf-8", "replace").decode()
    limit = _MAX_ASCII if text.isascii() and text.isprintable() else _MAX_OTHER
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    seconds = retry_after_s(told)
    return Failure(grpc_code(told), text, () if seconds is None else (("retry-after", str(seconds)),))
