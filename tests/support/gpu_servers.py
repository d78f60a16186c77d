"""Servers whose GPUs are fakes, in processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.fake_gpu import install_gpu
from tests.support.serving import Server, serving

COMMAND = (sys.executable, "-m", "tests.support.fake_gpu_server")


@contextmanager
def gpu_serving(
    make_repository: Callable[[Path], Path], folder: Path, *options: str, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server of a repository that is made with the fake GPU at hand; it must not log a traceback."""
    with pytest.MonkeyPatch.context() as patch:
        install_gpu(patch)
        repository = make_repository(folder)
    with serving(repository, folder, *options, env=env, command=COMMAND) as server:
        yield server
    assert "Traceback" not in server.text, server.text
