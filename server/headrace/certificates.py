"""When a certificate expires. Python's own TLS tells that of a peer only, so its file is read here.

A certificate is nested values, each a tag, a length and content (DER, X.690); of the fields only the validity is looked at, which
RFC 5280, section 4.1 puts in fifth place, or fourth without a version.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

_END = "-----END CERTIFICATE-----"
_VERSION = 0xA0
_UTC_TIME, _GENERALIZED_TIME = 0x17, 0x18


def certificate_expiry_s(path: str) -> float | None:
    """When the first certificate in a PEM file expires, in seconds since 1970; None if that cannot be read."""
    try:
        first, end, _ = Path(path).read_text("ascii", "replace").partition(_END)
        begin = first.index("-----BEGIN CERTIFICATE-----")
        return _not_after(ssl.PEM_cert_to_DER_cert(first[begin:] + end)).timestamp()
    except (OSError, ValueError, IndexError):
        return None


def _not_after(certificate: bytes) -> datetime:
    """Raises ValueError or IndexError if it is no certificate."""
    (_, whole), *_ = _values(certificate)
    (_, signed), *_ = _values(whole)
    fields = list(_values(signed))
    _, validity = fields[4 if fields[0][0] == _VERSION else 3]
    _, (tag, text) = _values(validity)
    digits = text.decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year: 50 and later are of the last century
        digits = ("19" if int(digits[:2]) >= 50 else "20") + digits
    elif tag != _GENERALIZED_TIME:
        raise ValueError("no time")
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _values(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each value, one after the other."""
    at = 0
    while at < len(content):
        tag, length = content[at], content[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(content[at : at + size], "big")
            at += size
        yield tag, content[at : at + length]
        at += length
