"""gzip and deflate, both ways, within limits."""

from __future__ import annotations

import zlib

from server.core.errors import BadRequest
from server.core.limits import Door

# zlib's window argument: 31 = gzip, 47 = gzip or zlib by their header.
_GZIP_WINDOW = 31
_ZLIB_WINDOW = 15
_EITHER_WINDOW = 47
# Less than this may come of any number of bytes: small bodies of zeros are no attack.
_FREE_BYTES = 1 << 20
_LEVEL = 1  # tensors compress badly: the cheapest level loses little


def decompress(body: bytes, encoding: str, door: Door) -> bytes:
    """Undo a Content-Encoding.

    Args:
        body: as it came.
        encoding: of the header, lower case.
        door: with the limits of the result; a bomb is refused when it passes one, not after.

    Raises:
        BadRequest: unknown encoding, corrupt or truncated data, or something behind them.
        TooLarge: the result would pass a limit; counted.
    """
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise BadRequest(f"Content-Encoding {encoding[:32]!r} is not known here; gzip, deflate and identity are")
    limits = door.limits
    by_ratio = max(_FREE_BYTES, len(body) * limits.max_unpack_ratio)
    most = min(limits.max_body_bytes, by_ratio)
    stream = zlib.decompressobj(_EITHER_WINDOW)
    try:
        plain = stream.decompress(body, most + 1)
    except zlib.error as error:
        raise BadRequest(f"the body is not valid {encoding}: {error}") from error
    if len(plain) > most:
        if most < limits.max_body_bytes:
            text = f"the body unpacks to more than {limits.max_unpack_ratio} times its size: send it as it is"
            raise door.too_large("max_unpack_ratio", text)
        raise door.too_large("max_body_bytes", f"the body is larger than {most} bytes when unpacked")
    if not stream.eof:
        raise BadRequest(f"the body's {encoding} data end too early")
    if stream.unused_data:
        raise BadRequest(f"{len(stream.unused_data)} bytes stand behind the body's {encoding} data")
    return plain


def choose(accepted: str) -> str:
    """The encoding to answer with for an Accept-Encoding header, "" for none."""
    for part in accepted.lower().split(","):
        name, _, quality = part.strip().partition(";")
        if name in ("gzip", "deflate") and quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000"):
            return name
    return ""


def compress(body: bytes, encoding: str) -> bytes:
    """Apply a Content-Encoding that `choose` gave."""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_WINDOW if encoding == "gzip" else _ZLIB_WINDOW)
    return stream.compress(body) + stream.flush()
