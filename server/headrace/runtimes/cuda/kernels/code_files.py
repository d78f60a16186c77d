"""Compiled kernels in files, so that the next process need not compile them again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

_DIGEST_BYTES = 32


class CodeFiles:
    """Compiled code by what it was compiled from.

    A file's name is the SHA-256 of the compiler's version, its options and the source; the file has the SHA-256 of the code, then
    the code. A damaged file counts as missing. Code from these files runs on the GPU: the folder belongs to its user alone.

    Args:
        folder: is created with the first file, with access for its owner only.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, key: Sequence[str]) -> Path:
        return self._folder / f"{hashlib.sha256(chr(0).join(key).encode()).hexdigest()}.bin"

    def read(self, key: Sequence[str]) -> bytes | None:
        """Return the code of a key; None if there is no undamaged file."""
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return code if code and hashlib.sha256(code).digest() == digest else None

    def write(self, key: Sequence[str], code: bytes) -> None:
        """Store the code of a key; a full or read-only disk is no error."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=self._folder)
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(hashlib.sha256(code).digest() + code)
                os.replace(name, self._path(key))
            except OSError:
                os.unlink(name)
                raise
