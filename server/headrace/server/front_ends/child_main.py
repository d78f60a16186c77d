"""Program of the child processes, which the supervisor forks."""

from __future__ import annotations

import logging
import signal
import socket

from headrace.core.errors import Unavailable
from headrace.core.heap import use_one_arena
from headrace.runtimes.processes.child_process import ends_with_parent
from headrace.server import settings
from headrace.server.front_ends.channel import receive_start
from headrace.server.front_ends.process_names import set_process_name
from headrace.server.program import configure_logging


def run(sock: socket.socket) -> int:
    """Run the process that the first message on the channel describes.

    Args:
        sock: end of the channel.

    Returns:
        The exit status.
    """
    # Ctrl-C and the stop of a service reach all processes of the group: the supervisor stops this one. Handlers, unlike ignored
    # signals, are not inherited by the processes of models.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    try:
        start = receive_start(sock)
    except EOFError:
        return 1
    if not ends_with_parent(start.parent):
        return 1
    set_process_name(start.name)
    settings.disable_ort_telemetry()
    if not settings.configures_malloc():
        use_one_arena()
    try:
        configure_logging(start.settings.log_format, start.name if start.number else "")
    except Unavailable as error:
        logging.getLogger("headrace").error("%s", error)
        return 1
    if start.number:
        from headrace.server.front_ends.front_end import FrontEndProcess

        return FrontEndProcess(start, sock).run()
    from headrace.server.front_ends.engine_process import EngineProcess

    return EngineProcess(start, sock).run()
