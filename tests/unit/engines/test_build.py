"""Builds for ONNX Runtime: selected samples, comparison of artefacts, best precision."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace_engines import build
from headrace_engines.build import BuildResult, build_best_engine, build_engine, make_stamp
from headrace_engines.errors import BuildError
from headrace_engines.progress import silent
from headrace_engines.project import Project, read_spec
from headrace_engines.store import Store
from headrace_engines.targets.base import BatchTiming
from headrace_engines.targets.onnxruntime import OnnxRuntimeTarget

from tests.support import networks
from tests.support.engine_projects import write_project

LABELS = np.zeros(12, np.int64)


def free() -> onnx.ModelProto:
    """A classifier of pictures of any size, which fails where they are smaller than its filters."""
    text = "c = Conv(x, w, b)  r = Relu(c)  p = GlobalAveragePool(r)  f = Flatten(p)  y = MatMul(f, v)"
    constants = networks.weights(w=(8, 3, 5, 5), b=(8,), v=(8, 4))
    return networks.network(text, constants, ("N", 3, "H", "W"))


def pictures(count: int, size: int = 8, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3, size, size)).astype(np.float32)


def built(project: Project, folder: Path, precision: str = "", target: OnnxRuntimeTarget | None = None) -> BuildResult:
    spec = read_spec(project.config, precision)
    return build_engine(project, spec, target or OnnxRuntimeTarget(), Store(folder / "store"), silent)


PROFILE = {"batch": [1, 4, 8], "shapes": {"x": [[3, 6, 6], [3, 8, 8], [3, 16, 16]]}}


@pytest.mark.slow
def test_noise_has_the_shape_that_the_profile_is_tuned_for(tmp_path: Path) -> None:
    project = write_project(tmp_path, free(), {}, calibration={"data": ""}, profiles=[PROFILE])
    for precision in ("fp32", "fp16"):
        one = built(project, tmp_path, precision)
        assert one.accuracy is not None
        assert one.accuracy.data.startswith("random inputs")
        assert one.refusal == []


def test_stored_engines_of_earlier_versions_with_sparse_kernels_are_published(tmp_path: Path) -> None:
    project = write_project(tmp_path, free(), {"x": pictures(12, 16)}, profiles=[PROFILE])
    one = built(project, tmp_path)
    report = {"rows": 4, "dense_us": 100.0, "sparse_us": 80.0, "nodes": ["c"]}
    entry = Store(tmp_path / "store").find(one.key)
    assert entry is not None
    facts = {**entry.facts, "sparse_weights": True, "sparsity_report": report}
    stamp = make_stamp(one, replace(entry, facts=facts), project, "fp32", False, False)
    assert stamp.sparse_weights


@pytest.mark.slow
def test_samples_of_every_shape_in_a_profile_are_used_and_no_others(tmp_path: Path) -> None:
    project = write_project(tmp_path, free(), {"x": pictures(12, 16)}, profiles=[PROFILE])
    assert built(project, tmp_path, "int8").accuracy is not None
    project = write_project(tmp_path, free(), {"x": pictures(12, 17)}, profiles=[PROFILE], name="large")
    with pytest.raises(BuildError, match=r"x \[3, 17, 17\], which is in no profile: widen optimization\.profiles"):
        built(project, tmp_path, "int8")


@pytest.mark.slow
def test_calibration_samples_are_not_used_for_the_comparison(tmp_path: Path) -> None:
    rows = pictures(12)
    accuracy = {"data": "accuracy.npz", "min_top1_agreement": 0.0}
    project = write_project(
        tmp_path, networks.network("f = Flatten(x)  y = MatMul(f, w)", networks.weights(w=(192, 4)), ("N", 3, 8, 8)),
        {"x": rows}, accuracy=accuracy,
    )  # fmt: skip
    np.savez(project.folder.path / "accuracy.npz", x=rows)
    with pytest.raises(BuildError, match=r"accuracy\.data has only samples of the calibration"):
        built(project, tmp_path, "int8")
    np.savez(project.folder.path / "accuracy.npz", x=np.concatenate([rows, pictures(5, seed=2)]))
    one = built(project, tmp_path, "int8")
    assert one.accuracy is not None
    assert one.accuracy.samples == 5
    assert built(project, tmp_path, "fp16").key != one.key


def test_artefacts_for_later_versions_are_refused_before_the_build(tmp_path: Path) -> None:
    project = write_project(tmp_path, networks.residual(), {})
    spec = replace(read_spec(project.config, "fp32"), version_compatible=True)
    notes: list[str] = []
    with pytest.raises(BuildError, match="files of ONNX Runtime fit any version: build with --target"):
        build_engine(project, spec, OnnxRuntimeTarget(), Store(tmp_path / "store"), lambda _, note: notes.append(note))
    assert notes == []


class _Picky(OnnxRuntimeTarget):
    """Takes the rows of a profile and no others, as TensorRT does."""

    def __init__(self, least: int, most: int) -> None:
        self.rows = range(least, most + 1)
        self.batch_sizes: list[int] = []

    def open(self, path: Path, source: onnx.ModelProto | None = None, *, host_code: bool = False) -> Any:
        engine, picky = super().open(path, source), self
        run = engine.run

        def strict(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            picky.batch_sizes.append(len(inputs["x"]))
            assert picky.batch_sizes[-1] in picky.rows
            return run(inputs)

        engine.run = strict  # type: ignore[method-assign]
        return engine


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "compared"), [((4, 8, 8), [8, 4]), ((9, 9, 12), [9, 9]), ((2, 2, 2), [2] * 5)])
def test_artefacts_are_compared_on_batches_that_they_take(
    batch: tuple[int, int, int], compared: list[int], tmp_path: Path
) -> None:
    text = "f = Flatten(x)  y = MatMul(f, w)"
    model = networks.network(text, networks.weights(w=(192, 4)), ("N", 3, 8, 8))
    accuracy = {"data": "accuracy.npz"}
    profiles = [{"batch": list(batch)}]
    project = write_project(tmp_path, model, {"x": pictures(4)}, rows=12, accuracy=accuracy, profiles=profiles)
    np.savez(project.folder.path / "accuracy.npz", x=pictures(10, seed=3))
    target = _Picky(batch[0], batch[2])
    one = built(project, tmp_path, "fp32", target)
    assert target.batch_sizes[: len(compared)] == compared
    assert one.accuracy is not None
    assert (one.accuracy.samples, one.accuracy.top1_agreement, one.accuracy.max_abs) == (10, 1.0, 0.0)


@pytest.mark.slow
def test_the_output_with_the_label_file_is_held_against_labels(tmp_path: Path) -> None:
    model = networks.network(
        "f = Flatten(x)  e = MatMul(f, w)  y = MatMul(e, v)", networks.weights(w=(192, 8), v=(8, 4)), ("N", 3, 8, 8)
    )
    model.graph.output.insert(0, onnx.helper.make_tensor_value_info("e", 1, ["N", 8]))
    project = write_project(tmp_path, model, {"x": pictures(12), "labels": LABELS})
    outputs = tuple(
        output.model_copy(update={"label_filename": "labels.txt"}) if output.name == "y" else output
        for output in project.config.output
    )
    config = project.config.model_copy(update={"output": outputs})
    labelled = replace(project, folder=replace(project.folder, config=config))
    result = [built(one, tmp_path, "fp16").accuracy for one in (project, labelled)]
    assert [accuracy.output for accuracy in result if accuracy] == ["e", "y"]


# The best


def candidate(precision: str, rates: Mapping[int, float], refusal: list[str] | None = None) -> BuildResult:
    timings = tuple(BatchTiming(rows, 1.0, 1.0, rate) for rows, rate in rates.items())
    anything: Any = None
    spec: Any = type("Spec", (), {"precision": precision})()
    return BuildResult(Path(), spec, anything, precision, None, refusal or [], (), timings, 0, 0.0, False)


@pytest.mark.parametrize(
    ("created", "best"),
    [
        ([candidate("fp32", {1: 10, 8: 50}), candidate("fp16", {1: 10, 8: 51}), candidate("int8", {8: 52})], "fp32"),
        ([candidate("fp32", {1: 90, 8: 50}), candidate("fp16", {1: 10, 8: 60}), candidate("int8", {8: 61})], "fp16"),
        ([candidate("fp32", {8: 50}), candidate("fp16", {8: 60}), candidate("int8", {8: 90}, ["no"])], "fp16"),
        ([candidate("fp32", {8: 50}), candidate("fp16", {8: 40}), candidate("int8", {8: 90})], "int8"),
        ([candidate("fp32", {8: 50}, ["no"]), candidate("fp16", {8: 90}, ["no"])], "fp32"),
    ],
)
def test_the_best_is_clearly_the_fastest_at_the_largest_batch_that_holds(
    created: list[BuildResult],
    best: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    by_precision = {one.spec.precision: one for one in created}

    def fake(_project: Project, spec: Any, *_: Any, **__: Any) -> BuildResult:
        if spec.precision not in by_precision:
            raise BuildError("calibration.keep names nothing")
        return by_precision[spec.precision]

    monkeypatch.setattr(build, "build_engine", fake)
    project = write_project(tmp_path, free(), {"x": pictures(4)}, profiles=[PROFILE], precision="best")
    spec = read_spec(project.config)
    with caplog.at_level(logging.WARNING):
        one = build_best_engine(project, spec, OnnxRuntimeTarget(), Store(tmp_path / "store"), silent, rebuild=False)
    assert one.spec.precision == best
    assert ("int8 is left out: calibration.keep names nothing" in caplog.text) == (len(created) < 3)
