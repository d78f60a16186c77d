"""gzip and deflate, both ways, within limits."""

from __future__ import annotations

import re
import zlib
from functools import lru_cache

from headrace.core.errors import BadRequest
from headrace.core.limits import ClientLimits

# zlib's window argument: 31 = gzip, 47 = gzip or zlib by their header.
_GZIP_WINDOW = 31
_ZLIB_WINDOW = 15
_EITHER_WINDOW = 47
# Less than this may come of any number of bytes: small bodies of zeros are no attack.
_FREE_BYTES = 1 << 20
# Smaller answers are sent as they are, unless the client refuses that.
MIN_COMPRESSED_BYTES = 1024
_OFFERED = ("gzip", "deflate")
_WEIGHT = re.compile(r"q=(?:0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)")
_LEVEL = 1  # tensors compress badly: the cheapest level loses little


def decompress(body: bytes, encoding: str, client_limits: ClientLimits) -> bytes:
    """Undo a Content-Encoding.

    Args:
        body: as it came.
        encoding: of the header, lower case.
        client_limits: with the limits of the result; a bomb is refused when it passes one, not after.

    Raises:
        BadRequest: unknown encoding, corrupt or truncated data, or something behind them.
        TooLarge: the result would pass a limit; counted.
    """
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise BadRequest(f"Content-Encoding {encoding[:32]!r} is not known here; gzip, deflate and identity are")
    limits = client_limits.limits
    by_ratio = max(_FREE_BYTES, len(body) * limits.max_unpack_ratio)
    max_bytes = min(limits.max_body_bytes, by_ratio)
    stream = zlib.decompressobj(_EITHER_WINDOW)
    try:
        decompressed = stream.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise BadRequest(f"the body is not valid {encoding}: {error}") from error
    if len(decompressed) > max_bytes:
        if max_bytes < limits.max_body_bytes:
            text = f"the body unpacks to more than {limits.max_unpack_ratio} times its size: send it as it is"
            raise client_limits.too_large("max_unpack_ratio", text)
        raise client_limits.too_large("max_body_bytes", f"the body is larger than {max_bytes} bytes when unpacked")
    if not stream.eof:
        raise BadRequest(f"the body's {encoding} data end too early")
    if stream.unused_data:
        raise BadRequest(f"{len(stream.unused_data)} bytes stand behind the body's {encoding} data")
    return decompressed


def select_encoding(accepted: str, size_bytes: int = MIN_COMPRESSED_BYTES) -> str:
    """Select the encoding of an answer (RFC 9110, section 12.5.3).

    Args:
        accepted: the header Accept-Encoding; several joined by commas.
        size_bytes: of the answer; small ones are compressed only for a client that refuses identity.

    Returns:
        gzip or deflate, of those in the header the one that it weighs highest; "" for none: the client prefers identity, the
        answer is small, or the client accepts nothing that is offered.
    """
    encoding, required = _preferred(accepted)
    return encoding if required or size_bytes >= MIN_COMPRESSED_BYTES else ""


@lru_cache(maxsize=64)
def _preferred(accepted: str) -> tuple[str, bool]:
    """The encoding that a header prefers, "" for identity, and whether it refuses identity."""
    weights: dict[str, float] = {}
    for part in accepted.lower().split(","):
        name, *parameters = (text.strip() for text in part.split(";"))
        weight = "".join(next((text for text in parameters if text.startswith("q")), "q=1").split())
        if _WEIGHT.fullmatch(weight):
            weights[name] = float(weight[2:])
    best = max((name for name in weights if name in _OFFERED), key=weights.__getitem__, default="")
    identity = weights.get("identity", weights.get("*"))  # None: not mentioned, accepted as the last resort
    required = identity == 0
    if best and weights[best] and (identity is None or weights[best] >= identity):
        return best, required
    if required and weights.get("*", 0):
        return next((name for name in _OFFERED if name not in weights), ""), True
    return "", required


def compress(body: bytes, encoding: str) -> bytes:
    """Apply a Content-Encoding that `select_encoding` gave."""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_WINDOW if encoding == "gzip" else _ZLIB_WINDOW)
    return stream.compress(body) + stream.flush()
