"""Lines that a child process prints, read from its pipe without blocking."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import IO


class OutputLines:
    """Reads a pipe by lines.

    Args:
        pipe: standard output of a process; owned.
        on_line: called with each line, without its end.
        max_line_bytes: a longer line without an end is passed on in parts of about this size.
    """

    def __init__(self, pipe: IO[bytes], on_line: Callable[[str], None], max_line_bytes: int = 8192) -> None:
        self._pipe = pipe
        self._on_line = on_line
        self._max_line_bytes = max_line_bytes
        self._rest = b""
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._pipe.fileno()

    def read(self) -> bool:
        """Read available output; return False if there is none."""
        try:
            data = self._pipe.read(1 << 16)
        except OSError:
            return False
        if not data:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._max_line_bytes:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._pass_on(line)
        return True

    def drain(self) -> None:
        """Read the rest of the pipe, also a last line without an end."""
        while self.read():
            pass
        if self._rest:
            self._pass_on(self._rest)
            self._rest = b""

    def close(self) -> None:
        """Close the pipe, and forget the callback: it may hold the reader, whose sockets would stay open in a reference cycle."""
        self._pipe.close()
        self._on_line = _ignore

    def _pass_on(self, line: bytes) -> None:
        self._on_line(line[: self._max_line_bytes].decode("utf-8", "replace").rstrip())


def _ignore(_line: str) -> None:
    pass
