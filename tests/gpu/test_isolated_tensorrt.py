"""TensorRT in a process of the model's own, on a real GPU: right answers, also after a crash, and no memory left behind.

`pytest -s` prints what the process costs a batch.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.core.ledger import Ledger
from headrace.models.loader import FACTORIES
from headrace.runtimes.cuda.driver import current, loaded
from headrace.runtimes.isolated.backend import IsolatedBackend
from headrace.runtimes.overlapped import is_overlapped
from headrace.runtimes.tensorrt.backend import MAX_BATCH_SIZE, TensorRtBackend
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.gpu_marks import gpu_marks
from tests.support.processes import isolated_children_of_this_process
from tests.support.tensorrt_networks import answers, convolutions, cosine, pictures
from tests.support.waiting import until

pytestmark = gpu_marks(180)

ROWS = 32


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`convolutions` for 1 to 32 rows."""
    path = tmp_path_factory.mktemp("plan") / "model.plan"
    shapes = ShapeRange({"x": tuple((n, 3, 16, 16) for n in (1, 8, ROWS))})  # type: ignore[arg-type]
    TensorRtTarget(optimization_level=1).build(convolutions(), TargetSpec("fp32", (shapes,)), path, silent)
    return path


def right(result: dict[str, Any], x: np.ndarray[Any, Any]) -> bool:
    return cosine(result["logits"], answers(convolutions(), {"x": x})["logits"]) > 0.9999


def free_bytes() -> int:
    """Of the GPU: memory of ended processes has no owner."""
    with current(0):
        return int(loaded().mem_get_info()[0])


def fly(execution: Any, x: np.ndarray[Any, Any]) -> Any:
    batch = execution.begin({"x": x}, len(x))
    np.copyto(batch.inputs["x"], x)
    execution.launch(batch)
    return batch


def median_us(execution: Any, x: np.ndarray[Any, Any]) -> float:
    times = []
    for _ in range(300):
        start_s = time.perf_counter()
        execution.run({"x": x})
        times.append(1e6 * (time.perf_counter() - start_s))
    return float(np.median(times))


@pytest.mark.whole_gpu
def test_isolated_batches_overlap_and_survive_a_crash(plan: Path) -> None:
    before = free_bytes()
    ledger = Ledger()
    ledger.set_limit(0, before)
    account = ledger.account("m", "1")
    backend = IsolatedBackend("m", FACTORIES["tensorrt"], 60.0)
    with closing(backend.load(plan, 2, {MAX_BATCH_SIZE: str(ROWS)}, account)) as model:
        assert {tensor.name for tensor in model.inputs} == {"x"}
        assert ledger.reserved_bytes(0) > 0
        executions = [model.execution(index) for index in range(2)]
        assert all(is_overlapped(execution) for execution in executions)
        batches = [pictures(rows, seed=rows) for rows in (1, 7, ROWS)]
        for _round in range(2):
            for execution in executions:
                in_flight_batches = [fly(execution, x) for x in batches]
                assert all(
                    right(execution.finish(batch), x) for batch, x in zip(in_flight_batches, batches, strict=True)
                )
            (child,) = isolated_children_of_this_process()
            os.kill(child, signal.SIGKILL)
            until(lambda: not model.process_status.up, 30)
        assert right(executions[0].run({"x": batches[1]}), batches[1])
        assert model.process_status.restarts == 2
        for execution in executions:
            execution.close()
    until(lambda: free_bytes() > before - (64 << 20), 30)


def test_overhead_of_the_process_for_each_batch(plan: Path) -> None:
    x = pictures(1)
    with closing(TensorRtBackend().load(plan, 1, {MAX_BATCH_SIZE: str(ROWS)})) as within:
        execution = within.execution(0)
        here = median_us(execution, x)
        execution.close()
    with closing(IsolatedBackend("m", FACTORIES["tensorrt"], 60.0).load(plan, 1, {MAX_BATCH_SIZE: str(ROWS)})) as apart:
        isolated = apart.execution(0)
        there = median_us(isolated, x)
        isolated.close()
    print(f"\nbatch of 1, median: {here:.0f} us in the server's process, {there:.0f} us in one of its own")
    assert there < here + 2000
