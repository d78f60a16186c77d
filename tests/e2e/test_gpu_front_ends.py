"""Front ends before an engine process with a GPU, over real sockets; the GPU is a fake in the engine's process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import shared_memory_cases as cases
from tests.support.gpu_servers import gpu_serving


@pytest.mark.skipif(sys.platform != "linux", reason="front ends need Linux")
def test_tensors_in_bodies(tmp_path: Path) -> None:
    with gpu_serving(cases.make_repository, tmp_path, "--front-ends", "2") as server:
        cases.bodies_through_front_ends(server, cases.inputs_and_answers())
