"""Entry point of the process of a Python model instance; started by path, in any interpreter from Python 3.8 on.

    PYTHON -s .../headrace_model/__main__.py PARENT_PID CONTROL_FD BATCHES_FD RESPONSES_FD [CALLS_FD]

Loads the package `headrace_model` from its own folder, without that folder's parent on `sys.path`: the server's packages must not
be importable in the interpreter of a model.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1


def _load_package() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
    spec = importlib.util.spec_from_file_location(
        "headrace_model", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError("headrace_model")
    package = importlib.util.module_from_spec(spec)
    sys.modules["headrace_model"] = package
    spec.loader.exec_module(package)


def _ignore(number: int) -> None:
    """Ignore a signal in this process, not in those that the model's code starts: `multiprocessing` ends them by SIGTERM."""
    process = os.getpid()

    def handle(_number: int, _frame: object) -> None:
        if os.getpid() != process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(number, handle)


def main() -> None:
    """Run the process."""
    # Ctrl-C and a service's SIGTERM reach this process as well, but the server ends it after the last response.
    _ignore(signal.SIGINT)
    _ignore(signal.SIGTERM)
    # A model that hangs in native code would not notice that the server was killed and its sockets closed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent, *descriptors = (int(word) for word in sys.argv[1:])
    if os.getppid() != parent:
        return
    faulthandler.enable()
    # The server sends SIGUSR1 before it kills a process that hangs: its stacks go to the log.
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # not for processes that the model starts
    _load_package()
    from headrace_model import child
    from headrace_model.channel import Frames, Messages
    from headrace_model.process import exit_process, run_exit_handlers

    child.stream_lines()
    control, batches, responses, *calls = descriptors
    status = child.run(
        Frames(socket.socket(fileno=batches)),
        Messages(socket.socket(fileno=control)),
        calls[0] if calls else None,
        responses,
    )
    run_exit_handlers()
    exit_process(status)


if __name__ == "__main__":
    main()
