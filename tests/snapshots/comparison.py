"""Stored texts that the product must go on producing. `SNAPSHOTS=write pytest tests/snapshots` stores them anew."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

STORED = Path(__file__).parent / "stored"
WRITE = os.environ.get("SNAPSHOTS") == "write"


def compare(name: str, text: str) -> None:
    """Compare a text with the stored file of that name; with SNAPSHOTS=write, store it.

    Args:
        name: of the file below `stored/`.
        text: without anything that depends on the machine, the port, the time or the version of Python.
    """
    path = STORED / name
    text = text.rstrip("\n") + "\n"
    if WRITE:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    stored = path.read_text(encoding="utf-8") if path.exists() else ""
    if stored != text:
        diff = difflib.unified_diff(
            stored.splitlines(), text.splitlines(), f"stored/{name}", "as it is now", n=2, lineterm=""
        )
        advice = "if that is intended: SNAPSHOTS=write pytest tests/snapshots, and commit the change"
        pytest.fail("\n".join([f"{name} has changed ({advice})", *diff]), pytrace=False)
