"""Reference cycles that only the garbage collector frees, and objects that they hold."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def leaked_frames() -> Iterator[list[str]]:
    """Yield a list; at the end of the block it has the names of functions whose frames are in reference cycles."""
    result: list[str] = []
    gc.collect()
    gc.disable()
    try:
        yield result
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        result += [each.f_code.co_qualname for each in gc.garbage if isinstance(each, FrameType)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.collect()
