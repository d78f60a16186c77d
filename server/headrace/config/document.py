"""A configuration file as read: plain data, and the line where each piece of it stands.

Both readers end here, so that everything after them (screening, validation, completion) is written once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.core.command_line import nearest
from headrace.core.errors import ConfigError, Finding
from headrace.core.model_config import Location, Problem

# A configuration is a page of text; a larger file is something else.
MAX_CONFIG_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Document:
    """One configuration file, parsed but not yet checked.

    Attributes:
        path: the file, relative to where the repository was named.
        data: field names to plain values (dict, list, str, int, float, bool).
        lines: 1-based line of every place in `data`.
        own_prefix: how the file writes Headrace's own fields, "headrace." in `config.pbtxt`, "" in `config.yaml`.
    """

    path: str
    data: dict[str, object] = field(default_factory=dict)
    lines: dict[Location, int] = field(default_factory=dict)
    own_prefix: str = ""

    def line_of(self, loc: Location) -> int | None:
        """The line of `loc`, or of the nearest place around it that has one."""
        for end in range(len(loc), 0, -1):
            if loc[:end] in self.lines:
                return self.lines[loc[:end]]
        return None

    def finding(self, problem: Problem, fatal: bool = True) -> Finding:
        """Says where in the file a problem stands."""
        return Finding(self.path, self.line_of(problem.loc), problem.message, problem.cure, fatal)


def refuse(path: str, line: int | None, message: str, cure: str = "") -> ConfigError:
    """The error with the one finding told."""
    return ConfigError([Finding(path, line, message, cure)])


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A cure that names the known word nearest to `word`, or all that are known."""
    words = sorted(known)
    if near := nearest(word, words):
        return f"did you mean {near}?"
    if not words:
        return "remove it"
    return f"known here: {', '.join(words)}" if len(words) <= 8 else "docs/configuration.md lists the fields"
