"""Programs in other languages that tests build once, from pinned sources, into a cache folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support.serving import ROOT
from tests.support.tools import tool

CLIENTS = ROOT / "tests" / "clients"
CACHE = ROOT / "build" / "clients"
# A first build downloads packages; pytest's own timeout is that of the test.
BUILD_TIMEOUT_S = 400


def cached(name: str, sources: Iterable[Path]) -> Path:
    """Return the cache folder of a program; another one for other sources."""
    digest = hashlib.sha256()
    for source in sorted(sources):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = CACHE / f"{name}-{digest.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(words: Sequence[str | Path], folder: Path, **environment: str) -> str:
    """Run a build step and return its output; fails with the output if the step fails."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, words))}:\n{done.stdout}"
    return done.stdout


def go_tool(package: str) -> Path:
    """Build a program of another Go module, at the version in tests/clients/go/go.mod; return its path."""
    go, module = tool("go"), CLIENTS / "go"
    program = cached("go-tools", [module / "go.mod", module / "go.sum"]) / package.rpartition("/")[2]
    if not program.exists():
        partial = program.with_suffix(f".{os.getpid()}")
        run([go, "build", "-mod=readonly", "-o", partial, package], module, GOFLAGS="-buildvcs=false")
        partial.replace(program)
    return program
