"""The latency profile of a plan on a real GPU: begun by the tuner's table, or measured, and corrected by flights."""

from __future__ import annotations

from pathlib import Path

import pytest
from headrace.inference.scheduling.latency_table import LatencyEntry
from headrace.models.control_policy import ControlPolicy
from headrace.models.reconciler import Reconciler
from headrace.models.registry import Registry
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.control_thread import infer_values, run
from tests.support.gpu_marks import gpu_marks
from tests.support.models import add_model, affine

pytestmark = gpu_marks(180)

ALL = ControlPolicy("none")
ROWS = 64


@pytest.mark.parametrize("graphs", [True, False])
def test_the_profile_of_a_plan(tmp_path: Path, graphs: bool) -> None:
    folder = add_model(tmp_path / "models", "m", affine(seed=1))
    (folder / "config.yaml").write_text(
        f"backend: tensorrt\nmax_batch_size: {ROWS}\nparameters: {{cuda_graphs: '{int(graphs)}'}}\n"
    )
    shapes = ShapeRange({"X": ((1, 16), (ROWS, 16), (ROWS, 16))})
    TensorRtTarget().build(affine(seed=1), TargetSpec("fp32", (shapes,)), folder / "1" / "model.plan", silent)
    before: list[LatencyEntry] = []
    after: list[LatencyEntry] = []

    async def check(_: Reconciler, registry: Registry) -> None:
        handle = registry.lease("m", "")
        before.extend(handle.latency_table.entries())
        for _number in range(100):
            await infer_values(registry)
        after.extend(handle.latency_table.entries())
        handle.release()

    run(tmp_path / "models", check, ALL, profile_s=1.0)
    for entry in (*before, *after):
        print(entry, flush=True)
    assert (before[0].rows, before[-1].rows) == (1, ROWS)
    assert {entry.observations for entry in before} == {0}
    assert all(0 < entry.median_ns <= entry.p95_ns < 50e6 for entry in (*before, *after))
    assert after[0].observations == 100
    # A flight is more than its kernels: copies, launches, the wait; but nothing of another order.
    assert after[0].median_ns < 100 * before[0].median_ns
