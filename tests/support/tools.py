"""Programs that some tests run beside ours; `make tools` installs them."""

from __future__ import annotations

import os
import shutil

import pytest


def tool(name: str) -> str:
    """Return the path of a program; without it skip the test, or fail it in CI."""
    path = shutil.which(name)
    if path is not None:
        return path
    if os.environ.get("CI"):
        pytest.fail(f"{name} is not installed: `make tools` installs it, but for Go, Java, Maven and Node.js")
    pytest.skip(f"{name} is not installed: `make tools` installs it, but for Go, Java, Maven and Node.js")
