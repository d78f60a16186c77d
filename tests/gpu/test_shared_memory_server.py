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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("shared")
    with serving(cases.make_repository(folder), folder, *cases.OPTIONS) as started:
        yield started
        assert "Traceback" not in started.text, started.text


def test_rows_in_a_system_region(server: Server, right: tuple[Array, Array]) -> None:
    cases.check_system_region(server, right)


def test_rows_that_are_not_aligned(server: Server, right: tuple[Array, Array]) -> None:
    cases.check_unaligned_rows(server, right)


def test_rows_in_a_cuda_region(server: Server, right: tuple[Array, Array]) -> None:
    cases.check_cuda_region(server, right, export)


def test_all_kinds_share_batches(server: Server, right: tuple[Array, Array]) -> None:
    cases.check_all_kinds_together(server, right, export)


def test_a_client_that_truncates_its_memory_affects_only_its_own_responses(
    server: Server, right: tuple[Array, Array]
) -> None:
    cases.check_truncated_memory(server, right)


def test_regions_come_and_go_under_load(server: Server, right: tuple[Array, Array]) -> None:
    cases.check_regions_come_and_go(server, right)
