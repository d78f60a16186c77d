"""Interpreters of other versions that are installed beside the one of the tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def python_of(version: str) -> str:
    """Return the interpreter of a version such as "3.8", from uv, pyenv or the path; skips the test without one.

    Args:
        version: major and minor number.
    """
    for path in filter(None, (*_of_uv(version), *_of_pyenv(version), shutil.which(f"python{version}"))):
        code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
        found = subprocess.run([path, "-c", code], capture_output=True, text=True)
        if found.stdout.strip() == version:
            return path
    pytest.skip(f"Python {version} is not installed")


def _of_uv(version: str) -> list[str]:
    uv = shutil.which("uv")
    words = [uv or "", "python", "find", "--no-python-downloads", version]
    return subprocess.run(words, capture_output=True, text=True).stdout.split("\n")[:1] if uv else []


def _of_pyenv(version: str) -> list[str]:
    pyenv = shutil.which("pyenv")
    if not pyenv:
        return []
    names = subprocess.run([pyenv, "versions", "--bare"], capture_output=True, text=True).stdout.split()
    names = [name for name in names if name.startswith(f"{version}.")]
    prefixes = [
        subprocess.run([pyenv, "prefix", name], capture_output=True, text=True).stdout.strip() for name in names
    ]
    return [str(Path(prefix) / "bin" / "python") for prefix in prefixes if prefix]
