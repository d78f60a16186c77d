"""`python -m tests.support.scaled_server serve ...`: a server with `--front-ends auto`, whose number of front ends a test sets.

The file that `WANTED` names has the number; without one the engine process serves alone. The server may have up to `MOST`,
whatever this machine has. `LEAVE_S` is the time in which front ends give up their connections, in seconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.__main__ import main
from headrace.server.front_ends import process_count, supervisor
from headrace.server.front_ends.scaling import Scaling

WANTED, LEAVE_S = "SCALED_SERVER_WANTED", "SCALED_SERVER_LEAVE_S"
COMMAND = (sys.executable, "-m", "tests.support.scaled_server")
MOST = 3


def decide(_scaling: Scaling, _engine: float, _front_ends: Sequence[float], *_load: float) -> int:
    """Return the number in the file."""
    file = os.environ.get(WANTED)
    return int(Path(file).read_text() or 0) if file else 0


if __name__ == "__main__":
    process_count.choose_front_ends = lambda *_args, **_limits: process_count.FrontEndChoice(MOST, "for a test")
    Scaling.decide = decide  # type: ignore[method-assign]
    supervisor._LEAVE_S = float(os.environ.get(LEAVE_S, supervisor._LEAVE_S))
    sys.exit(main())
