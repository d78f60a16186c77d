"""`python -m tests.support.threadless_server FILE serve ...`: a Headrace that cannot start threads.

FILE has the number of threads that the process may still start; the server may start any number while there is no such file.
RLIMIT_NPROC would do the same, but it does not bind root.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from headrace.__main__ import main

_START = threading.Thread.start


def limit_threads(path: Path) -> None:
    """Let threads start as the file says."""

    def start(thread: threading.Thread) -> None:
        if path.exists():
            remaining = int(path.read_text())
            if not remaining:
                raise RuntimeError("can't start new thread")
            path.write_text(str(remaining - 1))
        _START(thread)

    threading.Thread.start = start  # type: ignore[method-assign]


if __name__ == "__main__":
    limit_threads(Path(sys.argv.pop(1)))
    sys.exit(main())
