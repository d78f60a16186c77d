"""Pipelines whose steps run on one real GPU: their tensors stay there between the steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import gpu_pipeline_cases as cases
from tests.support.exported_memory import export
from tests.support.gpu_marks import gpu_marks
from tests.support.serving import Server, serving

pytestmark = gpu_marks(180, "fastapi", "uvicorn")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("pipelines")
    with serving(cases.make_repository(folder), folder, *cases.OPTIONS) as started:
        yield started
        assert "Traceback" not in started.text, started.text


def test_answers_are_those_of_the_models_one_after_the_other(server: Server) -> None:
    cases.check_same_as_one_after_the_other(server)


def test_a_model_is_loaded_anew_under_load(server: Server) -> None:
    cases.check_unloading(server)


def test_outputs_in_cuda_shared_memory(server: Server) -> None:
    cases.check_outputs_in_a_region(server, export)
