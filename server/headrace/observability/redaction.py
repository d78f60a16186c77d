"""Secrets that clients put where they do not belong, kept out of what is written."""

from __future__ import annotations

import os
import re
from hashlib import blake2b

_HIDDEN = "[redacted]"
_WORDS = "api[-_]?key|apikey|authorization|cookie|credential|passwd|password|private[-_]?key|secret|session|token"
_SECRET_NAME = re.compile(rf"{_WORDS}|(?:^|[-_])(?:auth|key|pass)(?:$|[-_])", re.IGNORECASE)
# key=value and "key": "value"; Bearer and Basic; passwords in URLs; keys in PEM; JSON web tokens.
_ASSIGNED = re.compile(
    r"([\w-]*(?:" + _WORDS + r")[\w-]*[\"']?\s*[=:]\s*[\"']?(?:(?:bearer|basic)\s+)?)[^\s\"',;&})]+", re.IGNORECASE
)
_SCHEME = re.compile(r"\b(bearer|basic)(\s+)[A-Za-z0-9._~+/=-]{4,}", re.IGNORECASE)
_URL = re.compile(r"(\w://[^\s/:@]*:)[^\s/@]+@")
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_JWT = re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*")


def redact(text: str) -> str:
    """The text with what looks like a secret taken out."""
    if not text:
        return text
    text = _PEM.sub(_HIDDEN, text)
    text = _JWT.sub(_HIDDEN, text)
    text = _ASSIGNED.sub(rf"\1{_HIDDEN}", text)
    text = _SCHEME.sub(rf"\1\2{_HIDDEN}", text)
    return _URL.sub(rf"\1{_HIDDEN}@", text)


def is_secret(header: str) -> bool:
    """True if a header of that name carries a secret, by its name."""
    return _SECRET_NAME.search(header) is not None


class Pseudonyms:
    """Names for secrets: the same one for the same secret while the process lives, and of no use to anybody else."""

    def __init__(self) -> None:
        self._key = os.urandom(16)

    def name(self, secret: str) -> str:
        """Twelve hexadecimal digits behind "secret-"; "" for ""."""
        return secret and f"secret-{blake2b(secret.encode(), digest_size=6, key=self._key).hexdigest()}"
