"""What is left for the garbage collector: rings of objects that hold each other, and what hangs on them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def leaked_frames() -> Iterator[list[str]]:
    """Names of the functions whose frames were left behind in rings by what runs inside; told when it is over."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += [each.f_code.co_qualname for each in gc.garbage if isinstance(each, FrameType)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.collect()
