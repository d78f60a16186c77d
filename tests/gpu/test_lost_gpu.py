"""A real GPU that fails for good under load: another one runs the requests; a model without one is unavailable, with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import lost_gpu_cases as cases
from tests.support.failing_gpu_server import COMMAND
from tests.support.gpu_marks import gpu_marks
from tests.support.gpu_pipeline_cases import make_repository
from tests.support.serving import serving

pytestmark = [*gpu_marks(180, "fastapi", "uvicorn"), pytest.mark.usefixtures("two_gpus")]


def test_requests_go_on_on_another_gpu(tmp_path: Path) -> None:
    repository, file = make_repository(tmp_path, cases.GPUS), tmp_path / "fail"
    with serving(repository, tmp_path, *cases.OPTIONS, env={cases.FILE: str(file)}, command=COMMAND) as server:
        cases.check_other_gpu_serves(server, file)
