"""Pipelines whose steps run on GPUs, over real sockets; the GPUs are fakes in the server's process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.test_gpu_shared_memory import export
from tests.support import gpu_pipeline_cases as cases
from tests.support.fake_gpu_server import GPUS
from tests.support.gpu_servers import gpu_serving
from tests.support.serving import Server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("pipelines")
    with gpu_serving(cases.make_repository, folder, *cases.OPTIONS) as started:
        yield started


def test_answers_are_those_of_the_models_one_after_the_other(server: Server) -> None:
    cases.check_same_as_one_after_the_other(server)


def test_a_model_is_loaded_anew_under_load(server: Server) -> None:
    cases.check_unloading(server)


def test_outputs_in_cuda_shared_memory(server: Server) -> None:
    cases.check_outputs_in_a_region(server, export)


def test_two_gpus(tmp_path: Path) -> None:
    make = partial(cases.make_repository, gpus=cases.TWO_GPUS)
    with gpu_serving(make, tmp_path, *cases.OPTIONS, env={GPUS: "2"}) as server:
        cases.check_same_as_one_after_the_other(server)
        for gpu in (0, 1):
            cases.check_outputs_in_a_region(server, export, gpu)
        cases.check_unloading(server)
    copies = re.search(r"copies between GPUs: (.*)", server.text)
    assert copies is not None, server.text
    assert copies[1] == "0 to 1", "tensors of GPU 0 are copied to GPU 1, and none the other way"
