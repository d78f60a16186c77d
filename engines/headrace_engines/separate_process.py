"""Calls of libraries that may end the process, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from headrace_engines.errors import BuildError
from headrace_engines.progress import Report


class EndedError(BuildError):
    """The process of a call ended before the call did."""


def call_apart(function: Callable[..., None], *arguments: Any, report: Report) -> None:
    """Call a function of a module in a new process, with the arguments and a `Report`.

    Arguments and the exception that the function raises are pickled. The process writes nothing to the terminal, and ends with
    the call, also if the call is interrupted.

    Raises:
        EndedError: the process ended by a signal, or without an answer.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, function, arguments), daemon=True)
    with receiver:
        try:
            with sender:
                process.start()
            with suppress(EOFError):
                while True:
                    message = receiver.recv()
                    if message is None:
                        return
                    if isinstance(message, BaseException):
                        raise message
                    report(*message)
            process.join()
        finally:
            process.kill()
            process.join()
    code = process.exitcode or 0
    how = f"by signal {-code}" if code < 0 else f"with status {code}"
    raise EndedError(f"the process that called {function.__name__} ended {how}")


def _run(sender: Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # Ctrl-C reaches the caller too, who ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    try:
        function(*arguments, lambda share, note: sender.send((share, note)))
        sender.send(None)
    except Exception as error:
        sender.send(error)
