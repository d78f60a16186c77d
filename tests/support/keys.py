"""Keys files of tests: one client for each scope, one with all, and any other, and their keys."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from headrace.core.access import Scope
from headrace.wire.access.keys_file import key_hash, new_key

# A running server reads a changed file within a second.
RELOAD_TIMEOUT_S = 15.0


class Keys:
    """A keys file with the clients `all` and one named after each scope.

    Args:
        folder: the file is keys.yaml in it.

    Attributes:
        path: the keys file.
        clients: content of the file; `write` writes changes.
        keys: key in clear text by client.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.yaml"
        self.clients: dict[str, Any] = {}
        self.keys: dict[str, str] = {}
        for scope in Scope:
            self.add(scope.value, scopes=[scope.value])
        self.add("all", scopes=[scope.value for scope in Scope])
        self.write()

    def add(self, name: str, **fields: Any) -> str:
        """Add a client with one key, which is returned."""
        key = self.keys[name] = new_key()
        self.clients[name] = {**fields, "keys": [{"sha256": key_hash(key).hex()}]}
        return key

    def write(self, text: str | None = None) -> None:
        """Replace the file atomically, by `clients` or by a text."""
        content = yaml.safe_dump({"clients": self.clients}) if text is None else text
        temporary = self.path.with_suffix(".new")
        temporary.write_text(content)
        temporary.chmod(0o600)
        os.replace(temporary, self.path)

    def bearer(self, name: str) -> dict[str, str]:
        """HTTP headers with the key of a client; none for ""."""
        return {"Authorization": f"Bearer {self.keys[name]}"} if name else {}

    def metadata(self, name: str) -> list[tuple[str, str]]:
        """gRPC metadata with the key of a client; none for ""."""
        return [("authorization", f"Bearer {self.keys[name]}")] if name else []


def until(condition: Callable[[], bool], text: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + RELOAD_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
