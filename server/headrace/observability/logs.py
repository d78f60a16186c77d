"""Log formatters, Triton's log settings, and redaction of secrets."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from types import TracebackType
from typing import Literal

from headrace.core.errors import BadRequest, Forbidden
from headrace.core.response_bodies import LogSettingsResponse

_HIDDEN = "[redacted]"
_WORDS = "api[-_]?key|apikey|authorization|cookie|credential|passwd|password|private[-_]?key|secret|session|token"
_SECRET_NAME = re.compile(rf"{_WORDS}|(?:^|[-_])(?:auth|key|pass)(?:$|[-_])", re.IGNORECASE)
# key=value and "key": "value"; Bearer and Basic; passwords in URLs; keys in PEM; JSON web tokens.
_ASSIGNED = re.compile(
    r"([\w-]*(?:" + _WORDS + r")[\w-]*[\"']?\s*[=:]\s*[\"']?(?:(?:bearer|basic)\s+)?)[^\s\"',;&})]+", re.IGNORECASE
)
_SCHEME = re.compile(r"\b(bearer|basic)(\s+)[A-Za-z0-9._~+/=-]{4,}", re.IGNORECASE)
_URL = re.compile(r"(\w://[^\s/:@]*:)[^\s/@]+@")
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_JWT = re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*")


def redact(text: str) -> str:
    """Replace everything in a text that looks like a secret."""
    if not text:
        return text
    text = _PEM.sub(_HIDDEN, text)
    text = _JWT.sub(_HIDDEN, text)
    text = _ASSIGNED.sub(rf"\1{_HIDDEN}", text)
    text = _SCHEME.sub(rf"\1\2{_HIDDEN}", text)
    return _URL.sub(rf"\1{_HIDDEN}@", text)


def is_secret(header: str) -> bool:
    """Return True if the name of a header says that its value is a secret."""
    return _SECRET_NAME.search(header) is not None


class Pseudonyms:
    """Pseudonyms for secrets: stable for the lifetime of the process, keyed hashes that reveal nothing about the secret."""

    def __init__(self) -> None:
        self._key = os.urandom(16)

    def name(self, secret: str) -> str:
        """Return "secret-" and twelve hexadecimal digits; "" for ""."""
        return secret and f"secret-{blake2b(secret.encode(), digest_size=6, key=self._key).hexdigest()}"


_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


# Attribute of a log record: a mapping of further fields of its JSON line, `logger.info(message, extra={FIELDS: {...}})`.
FIELDS = "headrace_fields"
# Logger of the audit log, which clients cannot switch off.
AUDIT_LOGGER = "headrace.audit"


def log_uncaught() -> None:
    """Log Python warnings and uncaught exceptions of every thread instead of printing them to standard error."""
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    sys.unraisablehook = _log_unraisable


def iso8601(seconds: float) -> str:
    """Format seconds since 1970 as ISO 8601 in UTC with microseconds: 2026-11-22T10:31:50.123456Z."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# Attribute of a log record: name of its process, if the server has several.
_PROCESS = "headrace_process"


class ProcessName(logging.Filter):
    """Adds the name of this process to all records: a field of JSON lines, the begin of the text of others.

    Args:
        process: its name, such as "front end 1".
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True."""
        setattr(record, _PROCESS, self._process)
        return True


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line.

    Fields: time (ISO 8601, UTC), level, logger, message, those of the record's `FIELDS`, and exception (the traceback).
    JSON escapes control characters, so that text from clients cannot forge a line.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": iso8601(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        process = getattr(record, _PROCESS, "")
        if process:
            line["process"] = process
        fields = getattr(record, FIELDS, None)
        if isinstance(fields, Mapping):
            line |= {name: value for name, value in fields.items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Formats the message and the traceback; escapes everything that could forge a line or control a terminal.

    Messages contain text from clients: names, ids, headers. A newline in it would start a line, an escape sequence would move
    the cursor, a right-to-left mark would reorder the text (CVE-2024-0095). A traceback keeps its lines, each indented, so that
    the text of an exception cannot look like a message.

    Attributes:
        iso8601: write times in UTC; set by `LogSettings`.
    """

    def __init__(self) -> None:
        super().__init__("%(message)s")
        self.iso8601 = False

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the message on one line."""
        process = getattr(record, _PROCESS, "")
        return escape(f"{process}: {super().formatMessage(record)}" if process else super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802
        """Return the traceback, indented."""
        return "\n".join("  " + escape(line) for line in super().formatException(ei).split("\n"))

    def time_text(self, moment: datetime) -> str:
        """Format the time of a line as ISO 8601: local time with its offset, or UTC.

        Args:
            moment: local time if it has no time zone.
        """
        if self.iso8601:
            return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return moment.astimezone().isoformat(timespec="seconds")


class LineFormatter(TextFormatter):
    """Formats a record for a file or a pipe: time, level and message on one line, however long."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return time, level and message."""
        time_text = self.time_text(datetime.fromtimestamp(record.created))
        return f"{time_text} {record.levelname:<8} {super().formatMessage(record)}"


def escape(text: str) -> str:
    r"""Replace every unprintable character by its Python escape ("\n", "\x1b", "\u202e")."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


_uncaught = logging.getLogger("headrace.uncaught")


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    _uncaught.critical("uncaught exception", exc_info=(kind, error, traceback))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit:
        return
    name = args.thread.name if args.thread is not None else "unknown"
    error = args.exc_value if args.exc_value is not None else args.exc_type()
    _uncaught.critical("uncaught exception in thread %s", name, exc_info=(args.exc_type, error, args.exc_traceback))


def _log_unraisable(args: sys.UnraisableHookArgs) -> None:
    error = args.exc_value if args.exc_value is not None else args.exc_type()
    message = args.err_msg or "exception ignored in"
    _uncaught.error("%s %r", message, args.object, exc_info=(args.exc_type, error, args.exc_traceback))


_MAX_VERBOSE_LEVEL = 2**31 - 1
_SWITCHES: Mapping[str, Literal["errors", "warnings", "infos"]] = {
    "log_error": "errors",
    "log_warning": "warnings",
    "log_info": "infos",
}
_FORMATS = ("default", "ISO8601")


class LogSettings:
    """Log settings that clients can change, under Triton's names.

    The three switches filter all records of the handlers, those of libraries included. The verbose level changes only our own
    loggers: from 1 on they log DEBUG. Clients cannot set `log_file`: a client that selects the file a server writes to can
    take over the server (CVE-2024-0087).

    Not thread-safe: called on the event loop. The handlers read single attributes, from any thread.

    Args:
        logger: parent of all our loggers; the filter is added to the handlers that its records reach at construction.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._verbose_level = 0
        self._switches = _Switches()
        self._formatters: list[TextFormatter] = []
        for handler in _handlers(logger):
            handler.addFilter(self._switches)
            if isinstance(handler.formatter, TextFormatter):
                self._formatters.append(handler.formatter)

    def settings(self) -> LogSettingsResponse:
        """Return the settings in force."""
        iso8601 = any(formatter.iso8601 for formatter in self._formatters)
        return {
            "log_file": "",
            "log_info": self._switches.infos,
            "log_warning": self._switches.warnings,
            "log_error": self._switches.errors,
            "log_verbose_level": self._verbose_level,
            "log_format": "ISO8601" if iso8601 else "default",
        }

    def update(self, changes: Mapping[str, object]) -> LogSettingsResponse:
        """Change all given settings or none of them; return the settings in force.

        Args:
            changes: new values by name; None leaves a setting as it is, as in Triton.

        Raises:
            BadRequest: an unknown setting or a value it does not take.
            Forbidden: log_file.
        """
        before = self.settings()
        # What stays as it is passes, so that a client may send back what it has read.
        wanted = {
            name: value for name, value in changes.items() if value is not None and not _same(before, name, value)
        }
        for name, value in wanted.items():
            self._check(name, value)
        if wanted:
            # Before the change: who switches the log off leaves this line behind.
            self._logger.warning("a client changes log settings: %s", wanted)
        for name, value in wanted.items():
            self._apply(name, value)
        return self.settings()

    def apply(self, settings: Mapping[str, object]) -> None:
        """Take over the settings of another process, without a line in the log.

        Args:
            settings: of `settings` there.
        """
        for name, value in settings.items():
            if name != "log_file":
                self._apply(name, value)

    def close(self) -> None:
        """Take the switches off the handlers and put back the level INFO."""
        for handler in _handlers(self._logger):
            handler.removeFilter(self._switches)
        self._logger.setLevel(logging.INFO)

    def _check(self, name: str, value: object) -> None:
        if name in _SWITCHES:
            if not isinstance(value, bool):
                raise BadRequest(f"log setting {name} must be true or false")
        elif name == "log_verbose_level":
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_VERBOSE_LEVEL:
                raise BadRequest(f"log setting {name} must be a whole number of 0 to {_MAX_VERBOSE_LEVEL}")
        elif name == "log_format":
            if value not in _FORMATS:
                raise BadRequest(f"log setting {name} must be one of {', '.join(_FORMATS)}")
            if not self._formatters:
                raise BadRequest(f"log setting {name} has no effect on --log-format json: leave it at 'default'")
        elif name == "log_file":
            raise Forbidden(
                "log setting log_file cannot be changed by clients: redirect the standard error of headrace serve"
            )
        else:
            raise BadRequest(f"unknown log setting '{escape(name[:64])}': there are {', '.join(self.settings())}")

    def _apply(self, name: str, value: object) -> None:
        if name in _SWITCHES:
            setattr(self._switches, _SWITCHES[name], value)
        elif isinstance(value, int):
            self._verbose_level = value
            self._logger.setLevel(logging.DEBUG if value else logging.INFO)
        else:
            for formatter in self._formatters:
                formatter.iso8601 = value == "ISO8601"


class _Switches(logging.Filter):
    """Filters records by level."""

    def __init__(self) -> None:
        super().__init__()
        self.errors = True
        self.warnings = True
        self.infos = True

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is logged. Records below INFO have passed the level of their logger."""
        if record.name == AUDIT_LOGGER:
            return True
        if record.levelno >= logging.ERROR:
            return self.errors
        if record.levelno >= logging.WARNING:
            return self.warnings
        return self.infos or record.levelno < logging.INFO


def _handlers(logger: logging.Logger) -> list[logging.Handler]:
    """Return all handlers that a record of the logger reaches."""
    handlers: list[logging.Handler] = []
    ancestor: logging.Logger | None = logger
    while ancestor is not None:
        handlers += ancestor.handlers
        ancestor = ancestor.parent if ancestor.propagate else None
    return handlers


def _same(before: Mapping[str, object], name: str, value: object) -> bool:
    return name in before and type(value) is type(before[name]) and value == before[name]
