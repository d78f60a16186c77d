"""A real GPU that fails for good under load: the next engine process serves on it, and on the one that failed with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import lost_gpu_cases as cases
from tests.support.failing_gpu_server import COMMAND
from tests.support.gpu_marks import gpu_marks
from tests.support.gpu_pipeline_cases import make_repository
from tests.support.serving import serving

pytestmark = [*gpu_marks(180, "fastapi", "uvicorn"), pytest.mark.usefixtures("two_gpus")]


def test_the_next_process_serves(tmp_path: Path) -> None:
    repository, file = make_repository(tmp_path, cases.GPUS), tmp_path / "fail"
    options, env = cases.WITH_FRONT_ENDS, {cases.FILE: str(file)}
    with serving(repository, tmp_path, *options, env=env, command=COMMAND) as server:
        cases.check_next_process_serves(server, file)
