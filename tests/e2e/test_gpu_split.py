"""A model cut in two parts on two GPUs, over real sockets; the GPUs are fakes in the server's process."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from tests.support import split_cases as cases
from tests.support.fake_gpu_server import GPUS
from tests.support.gpu_pipeline_cases import OPTIONS
from tests.support.gpu_servers import gpu_serving

pytestmark = pytest.mark.slow


def test_parts_on_two_gpus_answer_as_the_whole(tmp_path: Path) -> None:
    make = partial(cases.make_repository, gpus=(0, 1))
    with gpu_serving(make, tmp_path, *OPTIONS, env={GPUS: "2"}) as server:
        cases.check_answers(server)
        # Only the tensors between the parts stay on the GPU: X comes from the client, and each part reads it from the host.
    copies = re.search(r"copies between GPUs: (.*)", server.text)
    assert copies is not None, server.text
    assert copies[1] == "0 to 1", "the tensor between the parts goes from GPU 0 to GPU 1"
