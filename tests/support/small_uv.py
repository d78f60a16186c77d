"""Stands for uv: makes a virtual environment and installs wheels of local folders, within half a second.

It reads what `headrace.python.environments` passes, UV_FIND_LINKS, and requirements that are names, with `==version` or with
`>=version`, which is not compared, or folders with a build backend. pip and the real uv install what is marked slow.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path


def read_requirements(words: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Return the requirements and the folders of wheels of `pip install`'s words, with those of its files."""
    names: list[str] = []
    folders = [Path(folder) for folder in os.environ.get("UV_FIND_LINKS", "").split()]
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "-r":
            rest += Path(rest.pop(0)).read_text().split()
        elif word == "--find-links":
            folders.append(Path(rest.pop(0)))
        elif not word.startswith("-"):
            names.append(word)
    return names, folders


def wheel_of(requirement: str, folders: Sequence[Path], built: Path) -> Path:
    """Return the wheel of a requirement; the one of a folder is built into `built`."""
    if requirement.startswith("./"):
        sys.path.insert(0, requirement)
        return built / importlib.import_module("build").build_wheel(str(built))
    name, _, version = requirement.partition("==")
    pattern = f"{name.partition('>=')[0]}-{version or '*'}-*.whl"
    wheels = sorted(wheel for folder in folders for wheel in folder.glob(pattern))
    if not wheels:
        sys.exit(f"error: {requirement} was not found in {', '.join(map(str, folders))}")
    return wheels[-1]


def main(words: Sequence[str]) -> int:
    """Run `uv venv --quiet --python PYTHON FOLDER` or `uv pip install --quiet --python PYTHON ...`."""
    python, rest = words[words.index("--python") + 1], list(words[words.index("--python") + 2 :])
    if words[0] == "venv":
        return subprocess.call([python, "-m", "venv", "--without-pip", *rest])
    names, folders = read_requirements(rest)
    (packages,) = Path(python).parents[1].glob("lib/python*/site-packages")
    (packages / "torch_backend").write_text(os.environ.get("UV_TORCH_BACKEND", ""))
    with tempfile.TemporaryDirectory() as built:
        for wheel in [wheel_of(name, folders, Path(built)) for name in names]:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(packages)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
