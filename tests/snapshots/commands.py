"""Runs the console command many times in forks of one process, which imports its modules once.

`Commands` is the end of the tests. The process behind it reads a JSON list of words a line, and writes status and output a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from tests.support.fork_server import MODULES, ROOT, WITHOUT_THREADS

# Wider than any help text: how a version of argparse breaks lines does not matter.
COLUMNS = "5000"


class Commands:
    """`headrace` in an empty folder, without settings from outside.

    Args:
        folder: its current folder and home.

    Attributes:
        folder: see above.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        env = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        env |= {
            "COLUMNS": COLUMNS,
            "NO_COLOR": "1",
            "PYTHON_COLORS": "0",
            "TERM": "dumb",
            "HOME": str(folder),
        } | WITHOUT_THREADS
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.snapshots.commands", folder],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command and return its status and output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(words), file=self._process.stdin, flush=True)
        return subprocess.CompletedProcess(words, *json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=100)


def _serve() -> None:
    from headrace import __main__ as server
    from headrace.server import settings
    from headrace_engines import __main__ as builder

    def execute(program: str, words: list[str]) -> NoReturn:
        """Run the builder as `os.execv` would start it."""
        assert (program, words[:4]) == (sys.executable, [sys.executable, "-P", "-m", "headrace_engines"])
        sys.exit(builder.main(words[4:]))

    os.execv = execute  # type: ignore[assignment]
    settings.disable_ort_telemetry()  # a thread of ONNX Runtime
    for module in (*MODULES, *(module for module, _ in builder.COMMANDS.values())):
        import_module(module, "headrace_engines")
    os.chdir(sys.argv[1])
    for line in sys.stdin:
        assert len(os.listdir("/proc/self/task")) == 1, "a thread at a fork"
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            pid = os.fork()
            if pid == 0:
                words = json.loads(line)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                sys.argv = ["headrace", *words]
                try:
                    status = server.main(words)
                except SystemExit as end:
                    status = end.code
                sys.stdout.flush()
                os._exit(status or 0)  # without the end of the interpreter, which takes longer than most commands
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            texts = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (output, errors)]
        print(json.dumps([status, *texts]), flush=True)


if __name__ == "__main__":
    _serve()
