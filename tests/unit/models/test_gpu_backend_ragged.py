"""Ragged batches with `backend: tensorrt` and `kind: gpu`, from the build to the answer, on a GPU that does its work late."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import headrace
import numpy as np
import pytest
from headrace.runtimes.overlapped import InFlightBatch
from headrace.runtimes.tensorrt.backend import TensorRtExecution
from headrace_engines.build import build_engine
from headrace_engines.errors import BuildError
from headrace_engines.progress import silent
from headrace_engines.project import open_project, read_spec
from headrace_engines.store import Store
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support import gpu_ragged_cases as cases
from tests.support.cuda_provider import install_provider
from tests.support.models import add_model
from tests.support.ragged_models import ragged_spans


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of every batch that is begun."""
    sizes: list[int] = []
    begin: Callable[..., InFlightBatch] = TensorRtExecution.begin

    def recorded(execution: TensorRtExecution, like: Any, rows: int) -> InFlightBatch:
        sizes.append(like["ELEMENTS"].size)
        return begin(execution, like, rows)

    monkeypatch.setattr(TensorRtExecution, "begin", recorded)
    return sizes


def test_every_answer_is_that_of_the_request_alone(trt: Any, tmp_path: Path) -> None:
    cases.check_all(cases.make_repository(tmp_path))


async def test_batches_are_divided_before_they_reach_the_engine(trt: Any, batches: list[int], tmp_path: Path) -> None:
    repository = cases.make_repository(tmp_path)

    async with headrace.Server(repository, state_dir="") as server:
        lengths = np.random.default_rng(5).integers(1, cases.MOST + 1, 80).tolist()
        await cases.check_answers(server, "plan", lengths)
    assert 0 < max(batches) <= cases.MOST
    assert len(batches) < 90, "some requests shared a batch"


async def test_no_graph_and_one_context_for_each_slot(trt: Any, cuda: Any, tmp_path: Path) -> None:
    repository = cases.make_repository(tmp_path)

    async with headrace.Server(repository, state_dir="") as server:
        before = trt.state.contexts
        await cases.check_answers(server, "plan", list(range(1, 60)))
        assert trt.state.contexts == before
        assert not cuda.graphs


def test_the_cuda_provider_joins_requests_too(cuda: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_provider(monkeypatch)
    cases.check_cuda_provider(tmp_path)
    gc.collect()
    assert not cuda.live, "memory was not given back"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "optimization: {profiles: [{shapes: {ELEMENTS: [[1], [32], [64]]}}]}",
            "",
            "the elements of the ragged input ELEMENTS have no bound: write the fewest, tuned and most elements of a batch, "
            "e.g. optimization: {profiles: [{shapes: {ELEMENTS: [[1], [1024], [16384]]}}]}",
        ),
        ("[[1], [32], [64]]", "[[1, 1], [1, 32], [1, 64]]", "the ragged input ELEMENTS has several sizes"),
        ("{shapes: {", "{shapes: {OTHER: [[1], [1], [1]], ", "the model's inputs are ELEMENTS, OFFSETS, MAX_SHAPE"),
        ("{shapes: {", "{batch: [1, 2, 9], shapes: {", "a profile has a batch of 9, max_batch_size is 8"),
        ("{profiles", "{precision: int8, profiles", "int8 needs samples, which ragged batches have none of"),
        ("{profiles", "{calibration: {data: a.npz}, profiles", "a build for ragged batches takes no samples"),
    ],
)
def test_builds_are_refused_by_name(trt: Any, tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in cases.CONFIG
    add_model(tmp_path, "m", ragged_spans(), files={"config.yaml": cases.CONFIG.replace(old, new)})
    project = open_project("m", tmp_path)
    with pytest.raises(BuildError) as refused:
        build_engine(project, read_spec(project.config), TensorRtTarget(), Store(tmp_path / "store"), silent)
    assert message in str(refused.value)
