"""A model cut in two parts on real GPUs: answers are those of the whole, and its tensors go from GPU to GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.peers import peer_copy

from tests.support import split_cases as cases
from tests.support.gpu_marks import gpu_marks
from tests.support.gpu_pipeline_cases import OPTIONS
from tests.support.serving import serving

pytestmark = gpu_marks(180, "fastapi", "uvicorn")


def test_parts_on_one_gpu(tmp_path: Path) -> None:
    with serving(cases.make_repository(tmp_path, (0, 0)), tmp_path, *OPTIONS) as server:
        cases.check_answers(server)
    assert "Traceback" not in server.text, server.text


def test_parts_on_two_gpus(tmp_path: Path) -> None:
    if driver.load().Device.count() < 2:
        pytest.skip("needs two GPUs")
    assert peer_copy(0, 1) is not None, "the log says why"
    with serving(cases.make_repository(tmp_path, (0, 1)), tmp_path, *OPTIONS) as server:
        cases.check_answers(server)
    for words in ("Traceback", "no copies from GPU"):
        assert words not in server.text, server.text
