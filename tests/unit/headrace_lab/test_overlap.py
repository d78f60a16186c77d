"""`headrace lab overlap`: both modes on late streams, the timeline, the page and the advice."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from headrace.runtimes.cuda.devices import Nvml
from headrace_engines.errors import BuildError, CallError
from headrace_engines.onnx_graph import Array
from headrace_engines.project import Project
from headrace_engines.targets.tensorrt.api import load
from headrace_engines.targets.tensorrt.pipelined import PipelinedPlan
from headrace_lab.commands import overlap as lab_overlap
from headrace_lab.gpu_load import GpuLoad
from headrace_lab.overlap import (
    SHOWN,
    STAGES,
    OverlapLab,
    OverlapResult,
    PixelStage,
    StageInterval,
    TensorStage,
    top_classes,
)
from headrace_lab.overlap_page import overlap_advice, overlap_page
from rich.console import Console

from tests.support import networks
from tests.support.engine_projects import write_project
from tests.support.fake_gpu import cuda as cuda
from tests.support.fake_gpu import trt as trt
from tests.support.fake_gpu import trt_version as trt_version
from tests.support.tensorrt_case import build

BATCH = {"x": np.array([[1, 2, 3], [-9, 0, 0]], np.float32)}


class _Recording(TensorStage):
    """Sends another batch each time, and checks that its result comes back."""

    def __init__(self, batch: Mapping[str, Array]) -> None:
        super().__init__(batch)
        self.sent: list[float] = []
        self.received: list[float] = []

    def preprocess(self, inputs: Mapping[str, Array]) -> None:
        number = float(len(self.sent) + 1)
        inputs["x"][...] = [[number, 0, 0], [0, number, 0]]
        self.sent.append(number)

    def postprocess(self, outputs: Mapping[str, Array]) -> Array:
        # y = relu(x @ [[1, 2], [3, 4], [5, 6]] + [1, -1])
        self.received.append(float(outputs["y"][0, 0]) - 1)
        return np.zeros(1)


@pytest.mark.parametrize("overlapped", [False, True])
def test_every_batch_gets_its_own_result(trt: Any, tmp_path: Path, overlapped: bool) -> None:
    stage = _Recording(BATCH)
    with closing(PipelinedPlan(load(), build(tmp_path), 0)) as plan:
        lab = OverlapLab(plan, BATCH, stage, 0, Nvml())
        result = lab.measure(0.001, overlapped=overlapped)
        lab.close()
    assert stage.received == stage.sent
    assert len(stage.sent) == result.batches >= SHOWN
    assert {one.stage for one in result.intervals} == set(STAGES)
    assert {one.batch for one in result.intervals} == set(range(SHOWN))
    assert all(one.end_us >= one.start_us >= 0 for one in result.intervals)
    assert set(result.stage_us) == set(STAGES)
    assert (result.rows, result.overlapped) == (2, overlapped)


class _Changing(TensorStage):
    def __init__(self, batch: Mapping[str, Array]) -> None:
        super().__init__(batch)
        self.count = 0

    def postprocess(self, outputs: Mapping[str, Array]) -> Array:
        self.count += 1
        return np.array([self.count // 5])


class _Failing(TensorStage):
    def preprocess(self, inputs: Mapping[str, Array]) -> None:
        raise MemoryError("no room")


@pytest.mark.parametrize(("stage", "error"), [(_Changing, BuildError), (_Failing, MemoryError)])
@pytest.mark.parametrize("overlapped", [False, True])
def test_errors_of_any_thread_end_the_measurement(
    trt: Any, tmp_path: Path, overlapped: bool, stage: type[TensorStage], error: type[BaseException]
) -> None:
    with closing(PipelinedPlan(load(), build(tmp_path), 0)) as plan:
        lab = OverlapLab(plan, BATCH, stage(BATCH), 0, Nvml())
        with pytest.raises(error):
            lab.measure(0.001, overlapped=overlapped)
        # The GPU may still work on a batch.
        for stream in lab._streams:
            from headrace.runtimes.cuda.driver import current

            with current():
                stream.synchronize()
        lab.close()


def test_pixels_are_normalised_to_the_samples() -> None:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (2, 5, 4, 3))
    mean, std = np.array([10.0, 20, 30]), np.array([2.0, 3, 4])
    batch = {"x": ((pixels - mean) / std).astype("f4").transpose(0, 3, 1, 2), "other": np.arange(2)}
    stage = PixelStage(batch, "x", mean, std, channels_first=True)
    inputs = {"x": np.zeros((2, 3, 5, 4), "f4"), "other": np.zeros(2, np.int64)}
    stage.preprocess(inputs)
    np.testing.assert_allclose(inputs["x"], batch["x"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(inputs["other"], batch["other"])


def test_the_best_classes_come_first() -> None:
    scores = np.random.default_rng(1).normal(size=(3, 20))
    np.testing.assert_array_equal(top_classes(scores), np.argsort(-scores, axis=1)[:, :5])
    assert top_classes(scores[:, :2]).shape == (3, 2)


def made(
    overlapped: bool, rate: float, run_share: float = 0.5, load: GpuLoad | None = None, **us: float
) -> OverlapResult:
    stages = {"preprocess": 100.0, "copy": 100.0, "run": 300.0, "postprocess": 50.0} | us
    batches = round(rate / 8)
    intervals = tuple(
        StageInterval(stage, batch, 100.0 * batch, 100.0 * batch + us)
        for batch in range(2)
        for stage, us in stages.items()
    )
    seconds = stages["run"] * batches / 1e6 / run_share
    return OverlapResult(overlapped, 8, batches, seconds, intervals, load or GpuLoad(1.0, 0), stages)


@pytest.mark.parametrize(
    ("result", "precision", "text"),
    [
        (made(True, 800, 0.95), "fp16", "one instance with batches in flight is enough"),
        (made(True, 800, 0.95), "fp16", "`headrace compare` shows what INT8 gains and loses"),
        (made(True, 800, 0.95), "fp16", "GPU: it is the limit at its full clocks"),
        (made(True, 800, 0.6), "int8", "2 batches in flight (parameter pipeline_depth, or two instances)"),
        (made(True, 800, 0.2, preprocess=900.0), "int8", "3 times as many threads for it would keep the GPU busy"),
        (made(True, 800, 0.2, preprocess=900.0), "int8", "the server's GPU normalises 8-bit pixels"),
        (made(True, 800, 0.2, preprocess=900.0), "int8", "a smaller GPU, or more models on this one, would do"),
        (made(True, 800, 0.5, copy=900.0), "int8", "inputs of 8 or 16 bits are smaller"),
        (made(True, 800), "fp32", "the engine is FP32"),
        (
            made(True, 800, load=GpuLoad(1.0, 2, slowed=("power limit",))),
            "fp16",
            "the clocks were lowered by the power limit",
        ),
        (
            made(True, 800, load=GpuLoad(1.0, 2, power_w=350.0, power_limit_w=700.0)),
            "fp16",
            "Power: 350 of 700 W; no clock",
        ),
    ],
)
def test_the_advice_follows_from_the_figures(result: OverlapResult, precision: str, text: str) -> None:
    assert text in "\n".join(overlap_advice(made(False, 400), result, precision))


def test_the_page_has_both_timelines_on_one_scale() -> None:
    results = [made(False, 400), made(True, 800)]
    page = overlap_page("a <model>", "a GPU", results, ["some <advice>"])
    assert page.count("<svg") == 2
    assert "a <model>" not in page
    assert "some &lt;advice&gt;" in page
    for start in (page.index("<svg"), page.rindex("<svg")):
        drawing = ElementTree.fromstring(page[start : page.index("</svg>", start) + 6])
        bars = [one for one in drawing.iter() if one.tag.endswith("rect")]
        assert len(bars) == 2 * len(STAGES)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    model = networks.residual()
    return write_project(tmp_path / "models", model, networks.inputs_of(model, 16))


def called(project: Project, *words: str) -> str:
    parser = argparse.ArgumentParser()
    lab_overlap.add_arguments(parser)
    repository = project.folder.path.parent
    arguments = [project.name, "--model-repository", str(repository), "--cache", str(repository.parent / "cache")]
    console = Console(file=io.StringIO(), width=160)
    assert lab_overlap.run(parser.parse_args([*arguments, *words]), console) == 0
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_command_prints_both_modes_and_writes_files(trt: Any, project: Project, tmp_path: Path) -> None:
    page, document = tmp_path / "overlap.html", tmp_path / "overlap.json"
    words = ["--precision", "fp32", "--batch", "4", "--seconds", "0.001", "--html", str(page), "--json", str(document)]
    text = called(project, *words)
    assert "without" in text
    assert "with overlap" in text
    assert "<svg" in page.read_text()
    results = json.loads(document.read_text())["results"]
    assert [result["overlapped"] for result in results] == [False, True]
    assert [result["rows"] for result in results] == [4, 4]


def test_wrong_options_are_named(trt: Any, project: Project) -> None:
    with pytest.raises(CallError, match="--batch is 99, net takes 1 to 8 rows"):
        called(project, "--batch", "99")
    with pytest.raises(CallError, match="--seconds is 0"):
        called(project, "--seconds", "0")


def test_without_a_gpu_there_is_one_sentence(cuda: Any, project: Project) -> None:
    cuda.devices = 0
    with pytest.raises(
        BuildError, match="the overlap of GPU stages cannot be measured: this machine has no NVIDIA GPU"
    ):
        called(project)
