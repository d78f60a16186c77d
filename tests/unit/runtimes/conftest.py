"""The fragile model in a process of its own; and a GPU that is not there."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from headrace.runtimes.isolated.backend import IsolatedBackend, IsolatedModel

from tests.support import fragile_backend as fragile
from tests.support.fake_gpu import cuda as cuda
from tests.support.fake_gpu import trt as trt
from tests.support.fake_gpu import trt_version as trt_version
from tests.support.processes import isolated_children_of_this_process

Load = Callable[..., IsolatedModel]


@pytest.fixture
def load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Load]:
    """Loads the fragile model; all processes must have ended with the test."""
    models: list[IsolatedModel] = []

    def made(words: str = "", instances: int = 1, limit_s: float = 20.0) -> IsolatedModel:
        file = tmp_path / "model"
        file.write_text(words)
        models.append(IsolatedBackend("m", fragile.FACTORY, limit_s).load(file, instances, {"a": "b"}))
        return models[-1]

    # A crash that a test wants leaves no core behind.
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, before[1]))
    open_files = len(os.listdir("/proc/self/fd"))
    yield made
    resource.setrlimit(resource.RLIMIT_CORE, before)
    for model in models:
        model.close()
    models.clear()
    assert isolated_children_of_this_process() == []
    assert not [thread.name for thread in threading.enumerate() if thread.name.endswith("supervisor")]
    caplog.clear()
    gc.collect()  # errors hold what they came through
    assert len(os.listdir("/proc/self/fd")) <= open_files
