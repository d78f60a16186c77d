"""Content encodings gzip and deflate: decompression within limits, negotiation, compression."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from functools import lru_cache

from headrace.core.errors import BadRequest
from headrace.core.limits import ClientLimits
from headrace.wire.requests.tensor_codec import BodyBytes

# zlib's window argument: 31 = gzip, 47 = gzip or zlib by their header.
_GZIP_WINDOW = 31
_ZLIB_WINDOW = 15
_EITHER_WINDOW = 47
# Bytes that are read or written in one step: zlib copies what it writes at once while it holds the interpreter lock.
_STEP_BYTES = 1 << 20
# Of a gzip member after the first: zlib copies what follows the end of a member in its step.
_MEMBER_STEP_BYTES = 1 << 16
_GZIP_MAGIC = b"\x1f\x8b"
# Members of a body: so many, and one more for each of so many bytes. Each costs microseconds and a copy.
_MAX_MEMBERS, _MEMBER_BYTES = 100, 4096
# The ratio limit does not apply below this size: a small body of zeros is no decompression bomb.
_FREE_BYTES = 1 << 20
# Larger compressed bodies are decompressed on a codec thread: they may become 200 times larger.
MAX_INLINE_BYTES = 8192
# Smaller responses are sent uncompressed, if the client accepts that.
MIN_COMPRESSED_BYTES = 1024
_OFFERED = ("gzip", "deflate")
_WEIGHT = re.compile(r"q=(?:0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)")
_LEVEL = 1  # tensors compress badly: the cheapest level loses little


def decompress(body: bytes | memoryview | BodyBytes, encoding: str, client_limits: ClientLimits) -> bytes:
    """Decompress a body, in steps: other threads run between two of them.

    Args:
        body: as received.
        encoding: value of Content-Encoding in lower case; "" and "identity" return the body unchanged. "x-gzip" is gzip, which
            may have several members (RFC 9110, section 8.4.1.3; RFC 1952, section 2.2).
        client_limits: `max_body_bytes` and `max_unpack_ratio`. Decompression stops at the limit, so that a decompression bomb
            never fills memory; violations are counted.

    Returns:
        The decompressed body.

    Raises:
        BadRequest: the encoding is unknown, or the data are corrupt, truncated or followed by other bytes.
        TooLarge: the result exceeds a limit.
    """
    if encoding in ("", "identity"):
        return bytes(body)
    encoding = "gzip" if encoding == "x-gzip" else encoding
    if encoding not in ("gzip", "deflate"):
        raise BadRequest(f"Content-Encoding {encoding[:32]!r} is not supported: send gzip, deflate or identity")
    limits = client_limits.limits
    by_ratio = max(_FREE_BYTES, len(body) * limits.max_unpack_ratio)
    max_bytes = min(limits.max_body_bytes, by_ratio)
    rest, size = memoryview(body), 0  # type: ignore[arg-type]
    members: list[bytes] = []
    while size <= max_bytes:
        stream = zlib.decompressobj(_EITHER_WINDOW)
        step = _MEMBER_STEP_BYTES if members else _STEP_BYTES
        try:
            decompressed, unused_bytes = _decompress(stream, rest, max_bytes + 1 - size, step)
        except zlib.error as error:
            raise BadRequest(f"the body is not valid {encoding}: {error}") from error
        members.append(decompressed)
        size += len(decompressed)
        rest = rest[len(rest) - unused_bytes :]
        if encoding == "deflate" or not stream.eof or bytes(rest[:2]) != _GZIP_MAGIC:
            break
        if len(members) > _MAX_MEMBERS + len(body) // _MEMBER_BYTES:
            raise BadRequest(f"the body has more than {len(members)} members of gzip: send fewer, larger ones")
    if size > max_bytes:
        if max_bytes < limits.max_body_bytes:
            text = f"the body decompresses to more than {limits.max_unpack_ratio} times its size: send it uncompressed"
            raise client_limits.too_large("max_unpack_ratio", text)
        raise client_limits.too_large("max_body_bytes", f"the body is larger than {max_bytes} bytes when decompressed")
    if not stream.eof:
        raise BadRequest(f"the {encoding} data of the body are truncated: send the complete stream")
    if unused_bytes:
        raise BadRequest(f"{unused_bytes} bytes follow the {encoding} data of the body: send one stream")
    return members[0] if len(members) == 1 else b"".join(members)


def _decompress(stream: zlib._Decompress, body: memoryview, max_bytes: int, step: int) -> tuple[bytes, int]:
    """Return at most `max_bytes` of the decompressed body, and the number of bytes that follow the compressed data."""
    if len(body) <= step:
        return stream.decompress(body, max_bytes), len(stream.unused_data)
    parts: list[bytes] = []
    end = 0
    while end < len(body) and max_bytes > 0 and not stream.eof:
        begin, end = end, min(end + step, len(body))
        rest: bytes | memoryview = body[begin:end]
        while (rest or end == len(body)) and max_bytes > 0 and not stream.eof:
            part = stream.decompress(rest, min(max_bytes, _STEP_BYTES))
            if not rest and not part:
                break
            rest = stream.unconsumed_tail
            parts.append(part)
            max_bytes -= len(part)
    # A large join runs without the interpreter lock, as the decompression does.
    return b"".join(parts), len(stream.unused_data) + len(body) - end if stream.eof else 0


def select_encoding(accepted: str, size_bytes: int = MIN_COMPRESSED_BYTES) -> str:
    """Select the content encoding of a response (RFC 9110, section 12.5.3).

    Args:
        accepted: value of Accept-Encoding; several headers are joined by commas.
        size_bytes: of the response body; a small one is compressed only if the client refuses identity.

    Returns:
        "gzip" or "deflate", the one with the highest weight. "" for no compression: the client prefers identity, the response
        is small, or the client accepts neither encoding.
    """
    encoding, required = _preferred(accepted)
    return encoding if required or size_bytes >= MIN_COMPRESSED_BYTES else ""


@lru_cache(maxsize=64)
def _preferred(accepted: str) -> tuple[str, bool]:
    """Return the preferred encoding of a header ("" for identity), and True if the header refuses identity."""
    weights: dict[str, float] = {}
    for part in accepted.lower().split(","):
        name, *parameters = (text.strip() for text in part.split(";"))
        weight = "".join(next((text for text in parameters if text.startswith("q")), "q=1").split())
        if _WEIGHT.fullmatch(weight):
            weights[name] = float(weight[2:])
    best = max((name for name in weights if name in _OFFERED), key=weights.__getitem__, default="")
    identity = weights.get("identity", weights.get("*"))  # None: not in the header, accepted as a fallback
    required = identity == 0
    if best and weights[best] and (identity is None or weights[best] >= identity):
        return best, required
    if required and weights.get("*", 0):
        return next((name for name in _OFFERED if name not in weights), ""), True
    return "", required


def compress(parts: Sequence[bytes | memoryview], encoding: str) -> bytes:
    """Compress a body in parts with the encoding that `select_encoding` has returned, "gzip" or "deflate"."""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_WINDOW if encoding == "gzip" else _ZLIB_WINDOW)
    compressed = [stream.compress(part) for part in parts]
    return b"".join((*compressed, stream.flush()))
