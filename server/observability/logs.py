"""How log lines look: as JSON, one object a line, or as text in which no client can forge a line."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from types import TracebackType

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class JsonFormatter(logging.Formatter):
    """time (seconds since 1970), level, logger, message, and the traceback where there is one.

    JSON's own escaping keeps control characters of a client's text from forging lines.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


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


def escape(text: str) -> str:
    r"""The text with every character that does not print as a Python escape ("\n", "\x1b", "\u202e")."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
