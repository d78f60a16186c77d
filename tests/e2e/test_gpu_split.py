"""A model cut in two parts on two GPUs, over real sockets; the GPUs are fakes in the server's process."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support import split_cases as cases
from tests.support.fake_gpu import install_gpu
from tests.support.fake_gpu_server import GPUS
from tests.support.gpu_pipeline_cases import OPTIONS
from tests.support.serving import serving

COMMAND = (sys.executable, "-m", "tests.support.fake_gpu_server")
pytestmark = pytest.mark.slow


def test_parts_on_two_gpus_answer_as_the_whole(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        install_gpu(patch)
        repository = cases.make_repository(tmp_path, (0, 1))
    with serving(repository, tmp_path, *OPTIONS, env={GPUS: "2"}, command=COMMAND) as server:
        cases.check_answers(server)
        # Only the tensors between the parts stay on the GPU: X comes from the client, and each part reads it from the host.
    assert "Traceback" not in server.text, server.text
    copies = re.search(r"copies between GPUs: (.*)", server.text)
    assert copies is not None, server.text
    assert copies[1] == "0 to 1", "the tensor between the parts goes from GPU 0 to GPU 1"
