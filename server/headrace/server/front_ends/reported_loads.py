"""State of the engine process that a front end reads: loads of versions, figures for load reports."""

from __future__ import annotations

from headrace.core.request import ModelLoad
from headrace.wire.requests.load_report import ServerFigures

NO_LOAD = ModelLoad(0, 0, 0, 0, 0, 0, 0, 0.0, 0, ())


class ReportedLoads:
    """State of each version by its number. This one is that of no engine: no figures, and every request is sent."""

    def load(self, version: int) -> ModelLoad:
        """Return the load of a version; zeros if it is unknown."""
        return NO_LOAD

    def server_figures(self, now_ns: int) -> ServerFigures | None:
        """Return the load of the whole server; None while it is unknown."""
        return None

    def check_load(self, version: int, deadline_ns: int) -> None:
        """Raise the error with which the engine would reject any request of a version now."""

    def count_failure(self, version: int, reason: str, time_ns: int) -> bool:
        """Count a failed request of a version; False if the engine must count it."""
        return False
