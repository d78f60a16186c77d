"""Log formatters: JSON, one object a line, or text in which no client can forge a line."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


# Attribute of a log record with a mapping of further fields of its JSON line: `logger.info(message, extra={FIELDS: {...}})`.
FIELDS = "headrace_fields"


def log_uncaught() -> None:
    """Log Python warnings and uncaught exceptions of every thread instead of printing them to standard error."""
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    sys.unraisablehook = _log_unraisable


def iso8601(seconds: float) -> str:
    """Format seconds since 1970 as ISO 8601 in UTC with microseconds: 2026-11-22T10:31:50.123456Z."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line.

    Fields: time (ISO 8601, UTC), level, logger, message, those of the record's `FIELDS`, and exception (the traceback).
    JSON escapes control characters, so that text from clients cannot forge a line.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, object] = {
            "time": iso8601(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, FIELDS, None)
        if isinstance(fields, Mapping):
            line |= {name: value for name, value in fields.items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """The message, and the traceback where there is one, with everything escaped that could forge a line or steer a terminal.

    Messages hold what clients send: names, ids, headers. A newline in one would write a line of its own, an escape sequence
    would move the cursor, a right-to-left mark would swap what one reads (CVE-2024-0095). A traceback keeps its lines, but each
    is indented: what an exception says cannot stand where a message stands.

    Attributes:
        iso8601: how `time_text` writes times; switched by `LogSettings`.
    """

    def __init__(self) -> None:
        super().__init__("%(message)s")
        self.iso8601 = False

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The message on one line."""
        return escape(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802
        """The traceback, indented."""
        return "\n".join("  " + escape(line) for line in super().formatException(ei).split("\n"))

    def time_text(self, moment: datetime) -> str:
        """The time of a line: local, or in UTC after ISO 8601.

        Args:
            moment: local time if it knows no zone.
        """
        if self.iso8601:
            return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return moment.strftime("[%x %X]")


class LineFormatter(TextFormatter):
    """Formats a record for a file or a pipe: time, level and message on one line, however long."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The message behind its time and level."""
        time_text = self.time_text(datetime.fromtimestamp(record.created))
        return f"{time_text} {record.levelname:<8} {super().formatMessage(record)}"


def escape(text: str) -> str:
    r"""The text with every character that does not print as a Python escape ("\n", "\x1b", "\u202e")."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


_uncaught = logging.getLogger("headrace.uncaught")


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    _uncaught.critical("uncaught exception", exc_info=(kind, error, traceback))


def _log_uncaught_in_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_type is SystemExit:
        return
    name = failed.thread.name if failed.thread is not None else "unknown"
    error = failed.exc_value if failed.exc_value is not None else failed.exc_type()
    _uncaught.critical("uncaught exception in thread %s", name, exc_info=(failed.exc_type, error, failed.exc_traceback))


def _log_unraisable(failed: sys.UnraisableHookArgs) -> None:
    error = failed.exc_value if failed.exc_value is not None else failed.exc_type()
    message = failed.err_msg or "exception ignored in"
    _uncaught.error("%s %r", message, failed.object, exc_info=(failed.exc_type, error, failed.exc_traceback))
