"""Log settings change what is logged, and clients cannot forge lines of the log."""

from __future__ import annotations

import io
import json
import logging
import re
from datetime import datetime, timedelta, timezone

import pytest
from headrace.core.errors import BadRequest, Forbidden
from headrace.observability.logs import JsonFormatter, LogSettings, TextFormatter, escape
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

DEFAULTS = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class Log:
    """A tree of loggers as the server has it: a handler at the top, ours below, the parts of ours below that."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self.stream = io.StringIO()
        self.root = logging.RootLogger(logging.INFO)
        handler = logging.StreamHandler(self.stream)
        handler.setFormatter(formatter)
        self.root.addHandler(handler)
        self.ours = self._child("headrace", self.root)
        self.ours.setLevel(logging.INFO)
        self.part = self._child("headrace.part", self.ours)
        self.library = self._child("library", self.root)

    @staticmethod
    def _child(name: str, parent: logging.Logger) -> logging.Logger:
        logger = logging.Logger(name)
        logger.parent = parent
        # Loggers outside the tree of `logging` must not remember what was enabled.
        logger.isEnabledFor = lambda level: level >= logger.getEffectiveLevel()  # type: ignore[method-assign]
        return logger

    def logged(self, logger: logging.Logger) -> list[str]:
        """Which levels of that logger come through."""
        self.stream.seek(0)
        self.stream.truncate()
        for level in LEVELS:
            logger.log(logging.getLevelName(level), level)
        return self.stream.getvalue().split()

    def text(self) -> str:
        return self.stream.getvalue()


@pytest.fixture
def log() -> Log:
    return Log(TextFormatter())


@pytest.fixture
def settings(log: Log) -> LogSettings:
    return LogSettings(log.ours)


def test_settings_without_changes_are_the_defaults(settings: LogSettings) -> None:
    assert settings.settings() == DEFAULTS
    assert settings.update({}) == DEFAULTS


@pytest.mark.parametrize(
    ("changes", "come_through"),
    [
        ({}, {"INFO", "WARNING", "ERROR", "CRITICAL"}),
        ({"log_info": False}, {"WARNING", "ERROR", "CRITICAL"}),
        ({"log_warning": False}, {"INFO", "ERROR", "CRITICAL"}),
        ({"log_error": False}, {"INFO", "WARNING"}),
        ({"log_info": False, "log_warning": False, "log_error": False}, set()),
        ({"log_verbose_level": 1}, set(LEVELS)),
        ({"log_verbose_level": 2**31 - 1, "log_info": False}, set(LEVELS) - {"INFO"}),
    ],
)
def test_settings_change_the_log_output(
    log: Log, settings: LogSettings, changes: dict[str, object], come_through: set[str]
) -> None:
    assert settings.update(changes) == DEFAULTS | changes
    assert set(log.logged(log.part)) == set(log.logged(log.ours)) == come_through
    # Another library's lines go through the same switches, but it keeps its own level.
    assert set(log.logged(log.library)) == come_through - {"DEBUG"}
    # And back again.
    settings.update({name: DEFAULTS[name] for name in changes})
    assert settings.settings() == DEFAULTS
    assert set(log.logged(log.part)) == {"INFO", "WARNING", "ERROR", "CRITICAL"}


def test_switching_the_log_off_is_logged(log: Log, settings: LogSettings) -> None:
    settings.update({"log_warning": False, "log_error": False})
    assert "a client changes log settings: {'log_warning': False, 'log_error': False}" in log.text()


def test_null_does_not_change_a_setting(settings: LogSettings) -> None:
    settings.update({"log_info": False})
    assert settings.update({"log_info": None, "log_file": None})["log_info"] is False


def test_settings_may_be_sent_back_as_they_were_read(log: Log, settings: LogSettings) -> None:
    assert settings.update(settings.settings()) == DEFAULTS
    assert log.text() == ""


@pytest.mark.parametrize("value", ["/etc/cron.d/x", "x", 1, True])
def test_the_log_file_is_the_operators(settings: LogSettings, value: object) -> None:
    with pytest.raises(Forbidden, match="cannot be changed by clients"):
        settings.update({"log_file": value})


@pytest.mark.parametrize(
    "changes",
    [
        {"log_info": 1},
        {"log_info": "true"},
        {"log_error": []},
        {"log_verbose_level": -1},
        {"log_verbose_level": True},
        {"log_verbose_level": False},
        {"log_verbose_level": 1.0},
        {"log_verbose_level": "1"},
        {"log_verbose_level": 2**31},
        {"log_format": "iso8601"},
        {"log_format": 1},
        {"log_format": ["default"]},
        {"log_warnings": True},
        {"": True},
        {"\x1b[2J": True},
    ],
)
def test_refused_settings_change_nothing(settings: LogSettings, changes: dict[str, object]) -> None:
    with pytest.raises(BadRequest) as caught:
        settings.update({"log_error": False, **changes})
    assert settings.settings() == DEFAULTS
    assert str(caught.value).isprintable()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([*DEFAULTS, "other"]) | st.text(max_size=20), JSON, max_size=3))
def test_any_json_is_accepted_or_refused(changes: dict[str, object]) -> None:
    settings = LogSettings(Log(TextFormatter()).ours)
    try:
        after = settings.update(changes)
    except (BadRequest, Forbidden):
        assert settings.settings() == DEFAULTS
    else:
        assert after == DEFAULTS | {name: value for name, value in changes.items() if value is not None}


def test_iso8601_acts_on_the_times_of_text(settings: LogSettings, log: Log) -> None:
    formatter = log.root.handlers[0].formatter
    assert isinstance(formatter, TextFormatter)
    moment = datetime(2026, 3, 1, 0, 30, 15, 999_999, tzinfo=timezone(timedelta(hours=2)))
    default = formatter.time_text(moment)
    settings.update({"log_format": "ISO8601"})
    assert settings.settings()["log_format"] == "ISO8601"
    assert formatter.time_text(moment) == "2026-02-28T22:30:15Z"
    settings.update({"log_format": "default"})
    assert formatter.time_text(moment) == default == moment.astimezone().isoformat(timespec="seconds")


def test_the_format_of_json_lines_is_not_changed() -> None:
    settings = LogSettings(Log(JsonFormatter()).ours)
    with pytest.raises(BadRequest, match="json"):
        settings.update({"log_format": "ISO8601"})
    assert settings.update({"log_format": "default", "log_info": False})["log_info"] is False


def test_close_restores_the_handlers(log: Log, settings: LogSettings) -> None:
    settings.update({"log_error": False, "log_verbose_level": 3})
    settings.close()
    assert set(log.logged(log.part)) == {"INFO", "WARNING", "ERROR", "CRITICAL"}


# --- Lines -------------------------------------------------------------------------------------------------------------

FORGED = 'model "x"\n[01/01/26 00:00:00] ERROR    all is lost\r\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp\u2028\ud800\x7f'


def test_no_message_forges_a_line_or_steers_a_terminal(log: Log) -> None:
    log.part.error("no such %s", FORGED)
    text = log.text()
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert text[:-1].isprintable()
    assert r'no such model "x"\n[01/01/26' in text
    assert r"\x1b[2J" in text
    assert r"\u202egnp\u2028\ud800\x7f" in text


def test_a_traceback_has_its_lines_and_no_exception_forges_one(log: Log) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.part.exception("failed")
    first, *rest = log.text().removesuffix("\n").split("\n")
    assert first == "failed"
    assert len(rest) >= 3
    assert all(line.startswith("  ") and line.isprintable() for line in rest)
    assert rest[0] == "  Traceback (most recent call last):"


def test_the_rich_handler_prints_it_so() -> None:
    stream = io.StringIO()
    formatter = TextFormatter()
    console = Console(file=stream, width=300, color_system=None)
    handler = RichHandler(
        console=console, show_path=False, markup=False, log_time_format=lambda moment: Text(formatter.time_text(moment))
    )
    handler.setFormatter(formatter)
    logger = logging.Logger("headrace.rich")
    logger.addHandler(handler)
    settings = LogSettings(logger)
    settings.update({"log_format": "ISO8601"})
    stream.truncate(0)
    stream.seek(0)
    logger.error("[red]id %s", FORGED)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ERROR +\[red\]id model", lines[0])
    assert lines[0].isprintable()
    settings.close()


def test_json_lines_stay_lines() -> None:
    json_log = Log(JsonFormatter())
    json_log.part.error("no such %s", FORGED)
    (line,) = json_log.text().splitlines()
    assert json.loads(line)["message"] == "no such " + FORGED


@given(st.text())
def test_escaping_returns_one_printable_line(text: str) -> None:
    escaped = escape(text)
    assert escaped.isprintable()
    escaped.encode()
    if text.isprintable():
        assert escaped == text
