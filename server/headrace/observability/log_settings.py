"""Triton's log settings ("logging extension"): what is logged may be changed while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

from headrace.core.errors import BadRequest, Forbidden
from headrace.observability.logs import TextFormatter, escape

_MAX_VERBOSE_LEVEL = 2**31 - 1
_SWITCHES: Mapping[str, Literal["errors", "warnings", "news"]] = {
    "log_error": "errors",
    "log_warning": "warnings",
    "log_info": "news",
}
_FORMATS = ("default", "ISO8601")


class LogSettings:
    """What the log shows, changed by clients.

    The three switches act on everything that goes through the handlers, other libraries' lines included; the verbose level
    acts on our own lines: from 1 on they include DEBUG. `log_file` is the operator's alone: a server that writes where a
    client says is a server that a client can take over (CVE-2024-0087).

    Not thread-safe: called on the event loop. The handlers read single attributes, from any thread.

    Args:
        logger: the top of our loggers; the switches are put on the handlers that its records reach now.
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

    def settings(self) -> Mapping[str, bool | int | str]:
        """In force now, under Triton's names."""
        iso8601 = any(formatter.iso8601 for formatter in self._formatters)
        return {
            "log_file": "",
            "log_info": self._switches.news,
            "log_warning": self._switches.warnings,
            "log_error": self._switches.errors,
            "log_verbose_level": self._verbose_level,
            "log_format": "ISO8601" if iso8601 else "default",
        }

    def update(self, changes: Mapping[str, object]) -> Mapping[str, bool | int | str]:
        """Change settings, all or none of them, and give what is in force then.

        Args:
            changes: by name; None leaves a setting as it is, as in Triton.

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
            raise Forbidden("log setting log_file is the operator's: redirect the standard error of headrace serve")
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
    """Lets records through by their level."""

    def __init__(self) -> None:
        super().__init__()
        self.errors = True
        self.warnings = True
        self.news = True

    def filter(self, record: logging.LogRecord) -> bool:
        """True if the record is to be logged. What is below INFO was let in by its logger's level."""
        if record.levelno >= logging.ERROR:
            return self.errors
        if record.levelno >= logging.WARNING:
            return self.warnings
        return self.news or record.levelno < logging.INFO


def _handlers(logger: logging.Logger) -> list[logging.Handler]:
    """All handlers that a record of the logger reaches."""
    found: list[logging.Handler] = []
    at: logging.Logger | None = logger
    while at is not None:
        found += at.handlers
        at = at.parent if at.propagate else None
    return found


def _same(before: Mapping[str, bool | int | str], name: str, value: object) -> bool:
    return name in before and type(value) is type(before[name]) and value == before[name]
