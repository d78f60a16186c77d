"""What a builder raises: its text says what is wrong, where, and what to do."""

from __future__ import annotations

from server.core.errors import HeadraceError


class BuildError(HeadraceError):
    """A model or an engine cannot be built."""


class AccuracyRefused(BuildError):
    """The artefact works but lost too much; it is not published without --force."""
