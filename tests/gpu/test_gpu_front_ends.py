"""Front ends before an engine process with a real GPU, which fetches tensors of bodies where they were received."""

from __future__ import annotations

from pathlib import Path

from tests.support import shared_memory_cases as cases
from tests.support.gpu_marks import gpu_marks
from tests.support.serving import serving

pytestmark = gpu_marks(180, "fastapi", "uvicorn")


def test_tensors_in_bodies(tmp_path: Path) -> None:
    repository = cases.make_repository(tmp_path)
    with serving(repository, tmp_path, "--front-ends", "2") as server:
        cases.bodies_through_front_ends(server, cases.inputs_and_answers())
        assert "Traceback" not in server.text, server.text
