"""Wheels that tests make themselves, so that environments are installed without a network."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import numpy as np

# Before any requirement: nothing is fetched.
OFFLINE = "--no-index\n--find-links wheels\n"


def add_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """Write a pure Python wheel.

    Args:
        folder: receives the wheel; made if it is missing.
        name, version: of the package.
        files: text by path below site-packages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*contents, f"{info}/RECORD"))
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**contents, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)
    return wheel


def add_numpy(folder: Path) -> Path:
    """Write a wheel whose NumPy is that of this interpreter, for environments of the same version."""
    return add_wheel(folder, "numpy", np.__version__, {"numpy_of_the_tests.pth": f"{Path(np.__file__).parents[1]}\n"})


def add_uv(folder: Path) -> Path:
    """Write the program `uv` (`small_uv`) into a folder, for PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "uv"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P {Path(__file__).with_name("small_uv.py")} "$@"\n')
    program.chmod(0o755)
    return program
