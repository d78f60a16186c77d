"""`headrace backends`: list the backends, the file and the process of their models, and what is installed for them."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from headrace_reports.command_line import open_console, plain_table
from rich.text import Text

from headrace.config.model_config import BACKENDS, Backend, served_backends

# Packages that have the library of a backend, the usual one first.
_PACKAGES = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "tensorrt": ("tensorrt", "tensorrt-cu12", "tensorrt-cu13"),
    "sklearn": ("scikit-learn",),
    "xgboost": ("xgboost", "xgboost-cpu"),
    "lightgbm": ("lightgbm",),
    "pytorch": ("torch",),
}


def main(args: argparse.Namespace) -> int:
    """Print the backends, as JSON with `args.json`; returns the exit status."""
    backends = [_describe(BACKENDS[name]) for name in served_backends()]
    console = open_console(highlight=False)
    if args.json:
        console.print(json.dumps(backends, indent=2), markup=False, soft_wrap=True)
        return 0
    table = plain_table("backend", "platform", "model file", "runs in", "library of the server")
    for backend in backends:
        table.add_row(*(Text(str(value)) for value in backend.values()))
    console.print(table)
    return 0


def _describe(backend: Backend) -> dict[str, str]:
    return {
        "backend": backend.name,
        "platform": backend.platform,
        "file": backend.default_model_filename,
        "process": "a process of each instance" if backend.kind == "python" else "the server",
        "library": _library(backend),
    }


def _library(backend: Backend) -> str:
    if backend.kind == "pipeline":
        return ""
    if backend.name == "python":
        return f"Python {platform.python_version()}"
    packages = _PACKAGES.get(backend.name, (backend.name,))
    found = _installed(packages)
    if found:
        return found
    return (
        f"not installed: add {packages[0]} to requirements.txt of the model"
        if backend.kind == "python"
        else "not installed"
    )


def _installed(packages: Sequence[str]) -> str:
    for package in packages:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return ""
