"""`python -m tests.support.build_walk WORDS ...`: the packages that one command of the builder enters, as a reader would.

A package is entered by a call from another package to a function or class that is called for the first time. An entry of a
package that was entered before is a return: the reader has been there and has left. Imports, functions of the server's packages
and of `headrace_reports` do not count: the floors below are read on their own.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import FrameType

ENGINES = f"{Path(__file__).resolve().parents[2] / 'engines'}{os.sep}"


def package(frame: FrameType | None) -> str:
    """Return the folder of a frame's file below `engines`; "" for any other file."""
    file = "" if frame is None else frame.f_code.co_filename
    return os.path.dirname(file.removeprefix(ENGINES)) if file.startswith(ENGINES) else ""


class Walk:
    """Records the first calls of functions and classes."""

    def __init__(self) -> None:
        self.called: set[tuple[str, str]] = set()
        self.entered: set[str] = set()
        self.returns: list[str] = []
        self.climbs: list[str] = []

    def record(self, frame: FrameType, event: str, _argument: object) -> None:
        """Profile function of `sys.setprofile`."""
        code, callee = frame.f_code, package(frame)
        name = code.co_qualname.partition(".")[0]
        if event != "call" or not callee or name.startswith("<") or (code.co_filename, name) in self.called:
            return
        caller = frame.f_back
        while caller is not None and not package(caller):
            if caller.f_code.co_filename.startswith("<frozen importlib"):
                return
            caller = caller.f_back
        self.called.add((code.co_filename, name))
        if package(caller) == callee:
            return
        text = f"{package(caller) or 'start'} -> {callee}/{os.path.basename(code.co_filename)} {name}"
        if callee in self.entered:
            self.returns.append(text)
        self.entered.add(callee)
        if callee.endswith("commands") and package(caller).count("/"):
            self.climbs.append(text)


def main() -> int:
    """Run the command and print the walk; returns the status of the command."""
    from headrace_engines.__main__ import main as run

    walk = Walk()
    threading.setprofile(walk.record)
    sys.setprofile(walk.record)
    try:
        status = run(sys.argv[1:])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    print("", *(f"return {text}" for text in walk.returns), *(f"climb {text}" for text in walk.climbs), sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
