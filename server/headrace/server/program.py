"""Begin and end of the programs of the server: where their log goes, and their exit."""

from __future__ import annotations

import logging
import sys
from typing import NoReturn

from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from headrace.observability.logs import JsonFormatter, LineFormatter, ProcessName, TextFormatter, log_uncaught


def configure_logging(log_format: str, process: str = "") -> None:
    """Log to standard error, one line an event, as JSON or text; only a terminal shows text coloured and folded.

    Args:
        log_format: "json" or "text".
        process: name of this process in each line, "" for none.
    """
    # Imported only where a log is written: `health` must start fast.
    from headrace.observability.output import LineLimits, QueuedStream, queue_standard_streams

    queue = queue_standard_streams()
    formatter: logging.Formatter
    if log_format == "text" and sys.stderr.isatty():
        formatter = text_formatter = TextFormatter()
        handler: logging.Handler = RichHandler(
            console=Console(stderr=True),
            show_path=False,
            markup=False,
            log_time_format=lambda moment: Text(text_formatter.time_text(moment)),
        )
    else:
        formatter = JsonFormatter() if log_format == "json" else LineFormatter()
        handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    if process:
        handler.addFilter(ProcessName(process))
    limits = LineLimits(queue.call_later)
    handler.addFilter(limits)
    queue.before_end(limits.report)
    if isinstance(sys.stderr, QueuedStream):
        sys.stderr.dropped_line = lambda lines: handler.format(_dropped_lines(lines)) + "\n"
    logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(message)s", force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    log_uncaught()


def _dropped_lines(lines: int) -> logging.LogRecord:
    message = "%d lines of the log were dropped: standard error was not read in time"
    return logging.LogRecord("headrace", logging.WARNING, "", 0, message, (lines,), None)


def end_process(status: int) -> NoReturn:
    """End this process with an exit status.

    Threads of obstore run until the process ends. One that takes the interpreter while that shuts down calls `abort` (PyO3, pull
    request 4874), so a process that has loaded obstore ends right after its exit handlers.
    """
    if "obstore" in sys.modules:
        leave(status)
    sys.exit(status)


def leave(status: int) -> NoReturn:
    """End this process right after its exit handlers, without the interpreter's shutdown."""
    from headrace_model.process import exit_process, run_exit_handlers

    run_exit_handlers()
    exit_process(status)
