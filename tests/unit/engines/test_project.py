"""Specifications of builds, and their digests, which depend on everything that changes the artefact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from headrace.config.optimization_config import AccuracyBar, Calibration
from headrace_engines import project as spec
from headrace_engines.project import BuildSpec
from headrace_engines.quantization import calibration as ranges
from headrace_engines.targets.base import ShapeRange

SHAPES = ShapeRange({"x": ((1, 4), (8, 4), (8, 4))})


def wanted(**changes: Any) -> BuildSpec:
    plain = BuildSpec("int8", (SHAPES,), None, Calibration(data="a.npz"), AccuracyBar())
    return replace(plain, **changes)


def test_the_digest_depends_on_all_inputs_of_the_artefact(monkeypatch: pytest.MonkeyPatch) -> None:
    calibration = Calibration(data="a.npz")
    changed = [
        wanted(),
        wanted(precision="fp8"),
        wanted(profiles=(ShapeRange({"x": ((1, 4), (4, 4), (8, 4))}),)),
        wanted(workspace_bytes=1 << 20),
        *(
            wanted(calibration=calibration.model_copy(update=update))
            for update in (
                {"data": "b.npz"},
                {"method": "minmax"},
                {"method": "percentile"},
                {"method": "percentile", "percentile": 99.0},
                {"samples": 8},
                {"keep": ("a",)},
            )
        ),
        # What it must reach decides which layers are kept.
        *(
            wanted(accuracy=AccuracyBar(**bar))
            for bar in (
                {"data": "c.npz"},
                {"samples": 8},
                {"min_top1_agreement": 0.5},
                {"max_drop": 0.1},
                {"min_cosine": 0.5},
            )
        ),
    ]
    digests = [one.digest() for one in changed]
    for module, name in ((spec, "BUILD_RECIPE"), (ranges, "RANGES_RECIPE")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, getattr(module, name) + 1)
            digests.append(wanted().digest())
    assert len(set(digests)) == len(digests)
    assert wanted().digest() == digests[0]


def test_nodes_that_stay_fp32_count_below_fp32_only() -> None:
    assert wanted(keep_fp32=("a",)).digest() != wanted().digest()
    assert wanted(keep_fp32=("a",)).digest() != wanted(keep_fp32=("b",)).digest()
    assert wanted(precision="fp32", keep_fp32=("a",)).digest() == wanted(precision="fp32").digest()


def test_the_calibration_makes_nothing_of_fp16() -> None:
    other = Calibration(data="a.npz", method="minmax")
    assert wanted(precision="fp16").digest() == wanted(precision="fp16", calibration=other).digest()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_agreement_is_required_by_labelled_samples_or_the_configuration(precision: str) -> None:
    random = wanted(precision=precision, calibration=Calibration())
    assert (random.bar.min_top1_agreement, random.bar.min_cosine) == (0.0, 0.999)
    assert replace(random, accuracy=AccuracyBar(data="held_out.npz")).bar.min_top1_agreement == 0.98
    assert replace(random, calibration=Calibration(data="a.npz")).bar.min_top1_agreement == 0.98
    assert replace(random, accuracy=AccuracyBar(min_top1_agreement=0.7)).bar.min_top1_agreement == 0.7
