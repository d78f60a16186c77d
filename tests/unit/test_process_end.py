"""Ends a process of a command, with libraries whose threads outlive it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, types
from headrace.server.program import end_process

class Kept:
    def __del__(self):
        print("shutdown")

kept = Kept()
atexit.register(print, "exit handler")
sys.modules.update(dict.fromkeys(sys.argv[1:], types.ModuleType("obstore")))
end_process(3)
"""


@pytest.mark.parametrize(("modules", "lines"), [([], ["exit handler", "shutdown"]), (["obstore"], ["exit handler"])])
def test_threads_of_obstore_meet_no_shutdown_of_the_interpreter(modules: list[str], lines: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *modules], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()) == (3, lines)
