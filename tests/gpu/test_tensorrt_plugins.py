"""Our convolution kernels in TensorRT engines on a real GPU; ONNX Runtime has the right answers."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.core.errors import ConfigError
from headrace.core.request import InferRequest
from headrace.core.tensor import Array
from headrace.models.batch_proofs import BatchProofs
from headrace.models.control_policy import ControlPolicy
from headrace.models.reconciler import Reconciler
from headrace.models.registry import Registry
from headrace.runtimes.tensorrt.backend import MAX_BATCH_SIZE, TensorRtBackend
from headrace_engines.__main__ import main
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.progress import PLUGIN_PHASES
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.plugin_choice import PluginChoice, PluginChooser
from headrace_engines.targets.tensorrt.target import TensorRtTarget
from headrace_lab.kernels import plugin as convolution_plugin
from onnx import TensorProto

from tests.support.control_thread import index, run
from tests.support.gpu_marks import gpu_marks
from tests.support.plugin_case import images, read_past_rows, residual_block

pytestmark = gpu_marks(300)

SIZE = (64, 28, 28)
ORDER = TargetSpec("fp16", (ShapeRange({"x": ((1, *SIZE), (8, *SIZE), (16, *SIZE))}),))
# float16 rounds values of up to 8 by 0.004; TensorRT itself differs by as much.
TOLERANCE = 0.02


def expected(x: Array) -> Array:
    return OnnxRunner(residual_block(size=SIZE)).run({"x": x})["y"].astype(np.float32)


def chosen(folder: Path, mode: str) -> tuple[Path, PluginChoice]:
    """Build the network and choose plug-in layers."""
    target, model, path = TensorRtTarget(optimization_level=1), residual_block(size=SIZE), folder / "model.plan"
    target.build(model, ORDER, path, print_phase)
    batch = {"x": images(8, size=SIZE)}
    chooser = PluginChooser(target, model, ORDER, path, 16, batch, lambda engine: [], print_phase, budget_s=60)
    return path, chooser.choose(mode)


def print_phase(share: float, phase: str) -> None:
    if phase.startswith(PLUGIN_PHASES):
        print(phase, flush=True)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine whose three convolutions are plug-in layers."""
    path, choice = chosen(tmp_path_factory.mktemp("plan"), "conv1,conv2,conv3")
    assert list(choice.layers) == ["conv1", "conv2", "conv3"]
    return path


def test_every_batch_of_the_profile_is_right(plan: Path) -> None:
    engine = TensorRtTarget().open(plan)
    for rows in (1, 3, 8, 16, 2):
        x = images(rows, size=SIZE)
        np.testing.assert_allclose(engine.run({"x": x})["y"].astype(np.float32), expected(x), atol=TOLERANCE)
    assert engine.time({"x": images(8, size=SIZE)}, 0.2).median_us > 0
    engine.close()


def test_an_engine_is_opened_and_closed_often(plan: Path) -> None:
    """Objects of closed engines end once only: TensorRT's binding deleted some twice, and the heap was damaged."""
    x = images(3, size=SIZE)
    for _ in range(20):
        engine = TensorRtTarget().open(plan)
        np.testing.assert_allclose(engine.run({"x": x})["y"].astype(np.float32), expected(x), atol=TOLERANCE)
        engine.close()


@pytest.mark.parametrize(
    "test", ["every_batch_of_the_profile_is_right({})", "instances_of_a_server_share_the_plugin({}, '1')"]
)
def test_another_process_runs_the_plan(plan: Path, test: str) -> None:
    """The server registers the plug-in once TensorRT has not found it, the builder at once."""
    call = "test_" + test.format("Path(sys.argv[1])")
    program = f"import sys; import tests.gpu.test_tensorrt_plugins as t; from pathlib import Path; t.{call}"
    subprocess.run([sys.executable, "-c", program, str(plan)], check=True, timeout=120)


@pytest.mark.parametrize("graphs", ["0", "1"])
def test_instances_of_a_server_share_the_plugin(plan: Path, graphs: str) -> None:
    model = TensorRtBackend().load(plan, 3, {MAX_BATCH_SIZE: "16", "cuda_graphs": graphs})
    executions = [model.execution(index) for index in range(3)]
    try:
        for rows in (1, 5, 16):
            batches = [images(rows + index, size=SIZE)[:rows] for index in range(3)]
            begun = [each.begin({"x": x}, rows) for each, x in zip(executions, batches, strict=True)]
            for execution, batch, x in zip(executions, begun, batches, strict=True):
                np.copyto(batch.inputs["x"], x)
                execution.launch(batch)
            for execution, batch, x in zip(executions, begun, batches, strict=True):
                y = execution.finish(batch)["y"].astype(np.float32)
                np.testing.assert_allclose(y, expected(x), atol=TOLERANCE)
    finally:
        for execution in executions:
            execution.close()
        model.close()


def test_other_kernels_are_refused(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_plugin, "sources_digest", lambda: "0" * 64)
    with pytest.raises(ConfigError) as raised:
        TensorRtBackend().load(plan, 1, {MAX_BATCH_SIZE: "16"})
    assert "was built with other kernels of the plug-in HeadraceConvolution" in raised.value.findings[0].message


def test_damaged_weights_are_refused(plan: Path, tmp_path: Path) -> None:
    content = bytearray(plan.read_bytes())
    if b'"epilogue"' not in content:
        pytest.skip("this TensorRT does not store fields as they are")
    # The header of the first layer ends with its epilogue; weights follow.
    position = content.index(b'"epilogue"') + 200
    content[position] ^= 1
    (tmp_path / "damaged.plan").write_bytes(content)
    with pytest.raises(ConfigError):
        TensorRtBackend().load(tmp_path / "damaged.plan", 1, {MAX_BATCH_SIZE: "16"})


def test_a_closed_engine_frees_its_weights(plan: Path) -> None:
    for _ in range(2):
        engine = TensorRtTarget().open(plan)
        engine.run({"x": images(2, size=SIZE)})
        assert open_convolutions() >= 3
        engine.close()
        del engine
        assert open_convolutions() == 0


def open_convolutions() -> int:
    """Number of convolutions whose weights are on the GPU."""
    return sum(isinstance(one, convolution_plugin._OpenConvolution) for one in gc.get_objects())


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a model whose engine has two plug-in layers, built by the command."""
    folder = tmp_path_factory.mktemp("models") / "m"
    (folder / "1").mkdir(parents=True)
    onnx.save_model(residual_block(element=TensorProto.FLOAT, size=SIZE), folder / "1" / "model.onnx")
    (folder / "config.yaml").write_text(
        "max_batch_size: 16\ninstance_group: [{kind: gpu, count: 2}]\noptimization: {precision: fp16}\n"
        "build_on_load: false\n"
    )
    words = ["build", "m", "--model-repository", str(folder.parent), "--cache", str(folder.parent.parent / "cache")]
    assert main([*words, "--publish-slower", "--target", "tensorrt", "--plugins", "conv1,conv3"]) == 0
    return folder.parent


def test_a_server_answers_with_the_plugin(repository: Path) -> None:
    model = OnnxRunner(residual_block(element=TensorProto.FLOAT, size=SIZE))

    async def check(_: Reconciler, registry: Registry) -> None:
        assert index(registry)["m", "1"] == ("READY", "")
        handle = registry.lease("m", "")
        try:
            for rows in (1, 5, 16, 3):
                x = images(rows, np.float32, SIZE)
                request = InferRequest(inputs={"x": x}, rows=rows, shape_key=x.shape[1:], received_ns=0)
                y = np.asarray((await handle.infer(request)).outputs["y"])
                np.testing.assert_allclose(y, model.run({"x": x})["y"], atol=TOLERANCE)
        finally:
            handle.release()

    run(repository, check, ControlPolicy("none"))


def test_a_plugin_that_reads_past_its_row_is_found(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_past_rows(monkeypatch)

    async def check(_: Reconciler, registry: Registry) -> None:
        ((_, _, handle),) = registry.sources()
        assert (handle.batch_verdict.state, handle.batch_verdict.verified) == ("limited", (1,))
        assert handle.batch_verdict.reason.startswith("influence: output 'y' of row")

    run(repository, check, ControlPolicy("none"), proofs=BatchProofs(None, 20.0))


@pytest.mark.parametrize("values", [{"version": "9"}, {"digest": "f" * 64}, {"name": "Other"}])
def test_a_server_refuses_an_engine_with_another_plugin(repository: Path, values: dict[str, str]) -> None:
    file = repository / "m" / "1" / "build.json"
    before = file.read_text()
    document = json.loads(before)
    document["builds"][0]["plugins"][0].update(values)
    file.write_text(json.dumps(document))

    async def check(_: Reconciler, registry: Registry) -> None:
        state, reason = index(registry)["m", "1"]
        assert state == "UNAVAILABLE"
        assert "plug-in" in reason
        assert "headrace build m --target tensorrt" in reason

    try:
        run(repository, check, ControlPolicy("none"))
    finally:
        file.write_text(before)


def test_the_choice_is_consistent(tmp_path: Path) -> None:
    path, choice = chosen(tmp_path, "auto")
    kept = [row.layer for row in choice.report.table if row.kept]
    assert kept == list(choice.layers)
    assert all(row.kept or row.reason for row in choice.report.table)
    if kept:
        assert choice.report.speedup - 2 * choice.report.error > 1
    engine: Any = TensorRtTarget().open(path, choice.model)
    x = images(8, size=SIZE)
    np.testing.assert_allclose(engine.run({"x": x})["y"].astype(np.float32), expected(x), atol=TOLERANCE)
    engine.close()
