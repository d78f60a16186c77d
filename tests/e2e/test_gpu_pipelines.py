"""Pipelines whose steps run on GPUs, over real sockets; the GPUs are fakes in the server's process."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_gpu_shared_memory import export
from tests.support import gpu_pipeline_cases as cases
from tests.support.fake_gpu import install_gpu
from tests.support.fake_gpu_server import GPUS
from tests.support.serving import Server, serving

COMMAND = (sys.executable, "-m", "tests.support.fake_gpu_server")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("pipelines")
    with pytest.MonkeyPatch.context() as patch:
        install_gpu(patch)
        repository = cases.make_repository(folder)
    with serving(repository, folder, *cases.OPTIONS, command=COMMAND) as started:
        yield started
        assert "Traceback" not in started.text, started.text


def test_answers_are_those_of_the_models_one_after_the_other(server: Server) -> None:
    cases.check_same_as_one_after_the_other(server)


def test_a_model_is_loaded_anew_under_load(server: Server) -> None:
    cases.check_unloading(server)


def test_outputs_in_cuda_shared_memory(server: Server) -> None:
    cases.check_outputs_in_a_region(server, export)


def test_two_gpus(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        install_gpu(patch)
        repository = cases.make_repository(tmp_path, cases.TWO_GPUS)
    with serving(repository, tmp_path, *cases.OPTIONS, env={GPUS: "2"}, command=COMMAND) as server:
        cases.check_same_as_one_after_the_other(server)
        cases.check_outputs_in_a_region(server, export)
        cases.check_unloading(server)
    assert "Traceback" not in server.text, server.text
    copies = re.search(r"copies between GPUs: (.*)", server.text)
    assert copies is not None, server.text
    assert copies[1] == "0 to 1", "tensors of GPU 0 are copied to GPU 1, and none the other way"
