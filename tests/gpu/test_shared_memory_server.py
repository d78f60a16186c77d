"""A server on a real GPU whose clients keep inputs in shared memory: the GPU fetches them, whatever clients do meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from headrace.core.tensor import Array

from tests.support import shared_memory_cases as cases
from tests.support.exported_memory import export
from tests.support.gpu_marks import gpu_marks
from tests.support.serving import Server, serving

pytestmark = gpu_marks(180, "fastapi", "uvicorn")


@pytest.fixture(scope="module")
def right() -> tuple[Array, Array]:
    return cases.inputs_and_answers()


@pytest.fixture(scope="module", params=["0", "2"])
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    """Without and with front ends, which send requests of one turn as groups."""
    folder = tmp_path_factory.mktemp("shared")
    with serving(cases.make_repository(folder), folder, *cases.OPTIONS, "--front-ends", request.param) as started:
        yield started
        assert "Traceback" not in started.text, started.text


@pytest.mark.parametrize("case", cases.CASES)
def test_inputs_in_shared_memory(server: Server, right: tuple[Array, Array], case: str) -> None:
    cases.CASES[case](server, right, export)
