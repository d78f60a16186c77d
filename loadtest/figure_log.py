"""Figures of a measurement, printed and kept as lines of JSON as soon as they are there."""

from __future__ import annotations

import json
import time
from pathlib import Path


class FigureLog:
    """Prints figures and appends them to a file as lines of JSON.

    Args:
        file: is continued; its folder is made.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        self._start_s = time.monotonic()

    def report(self, part: str, /, **values: object) -> None:
        """Print and write one figure; values of None are left out, fractions have five digits."""
        rounded = {name: _rounded(value) for name, value in values.items() if value is not None}
        text = ", ".join(f"{name} {value}" for name, value in rounded.items())
        print(f"[{time.monotonic() - self._start_s:5.1f} s] {part}: {text}", flush=True)
        with self._file.open("a") as file:
            file.write(json.dumps({"part": part, **rounded}) + "\n")


def _rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value
