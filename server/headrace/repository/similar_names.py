"""Similar names, for "did you mean" in errors: an index whose search costs the same for one model as for a thousand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

# Names beyond these are not indexed, and no more than three are suggested.
MAX_NAMES = 256
MAX_SUGGESTIONS = 3
_MAX_LENGTH = 64
_SEPARATORS = re.compile(r"[._\-\s]+")


class SimilarNames:
    """Finds names that differ by one character (added, left out, replaced or swapped), by case or by separators.

    Each name is stored under its text without case and separators and under that text with each one character left out
    (SymSpell, W. Garbe). A search looks up the same texts of its own name, so it takes at most 65 look-ups.

    Args:
        names: to search; the first `MAX_NAMES` in alphabetical order.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names: dict[str, list[str]] = {}
        for name in sorted(names)[:MAX_NAMES]:
            for key in _keys(name):
                self._names.setdefault(key, []).append(name)

    def find(self, name: str) -> list[str]:
        """At most `MAX_SUGGESTIONS` similar names, the same but for case and separators first, then alphabetically."""
        if len(name) > _MAX_LENGTH:
            return []
        exact = self._names.get(_plain(name), [])
        found = {similar for key in _keys(name) for similar in self._names.get(key, [])}
        return sorted(found, key=lambda similar: (similar not in exact, similar))[:MAX_SUGGESTIONS]


def _plain(name: str) -> str:
    return _SEPARATORS.sub("", name.lower())


def _keys(name: str) -> Iterator[str]:
    plain = _plain(name)
    yield plain
    if len(plain) > 2:  # of two characters, one left out is similar to nothing
        yield from {plain[:index] + plain[index + 1 :] for index in range(len(plain))} - {plain}
