"""Names of the processes in `ps`. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

_PR_SET_NAME = 15
# Index of `arg_start` and `arg_end` in /proc/PID/stat behind the name of the command (proc(5), fields 48 and 49).
_ARG_START, _ARG_END = 45, 46


def set_process_name(name: str) -> None:
    """Show a name in `ps` and `top`: "headrace: engine". A no-op if the system does not allow it.

    `ps` reads the command line from the memory of the process, which is written here. Python has copied it at its start. `top`
    shows the first 15 bytes.
    """
    title = f"headrace: {name}".encode()
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text("latin-1").rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        if end - start > len(title):
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, title, len(title))
    short = name.replace("front end ", "fe")
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"headrace {short}".encode()[:15])
