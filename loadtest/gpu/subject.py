"""The models that are measured: pictures in, five classes out, in a repository of the bench's own.

    <work>/demo/resnet50                 as `python -m headrace_engines models build` makes it
    <work>/models/resnet50_fp16          max_batch_size 256, preprocess by: server, top_k 5, with the engine built for it
    <work>/models/resnet50_fp16_i2_on0   the same files with two instances

A variant shares its files with the model by hard links: no engine is built twice.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from headrace.config.model_folder import read_model_folder
from onnx import TensorProto, helper

from loadtest.gpu.setup import CLASSES, Setup
from loadtest.onnx_models import mlp, onnx_model
from loadtest.protocol import Array
from loadtest.servers import ROOT

INPUT, LOGITS = "input", "logits"
SCORES, BEST = "scores", "classes"
VERSION = "1"
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
_SAMPLES = ("calibration", "accuracy")
_SMALL_CLASSES = 10
_PICTURES_OF_OURS = 48
_LEAST_AGREEMENT = 0.7
_PLAIN_BUILD_S = 150.0


class NotBuilt(RuntimeError):
    """A model or an engine could not be made; the text has the end of the builder's output."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Launch settings of a model's engine.

    Attributes:
        instances: on each GPU.
        gpus: numbers of the GPUs.
        is_plain: tensors in and out, without `preprocess` and `postprocess`.
    """

    instances: int = 1
    gpus: tuple[int, ...] = (0,)
    is_plain: bool = False

    @property
    def suffix(self) -> str:
        """Of the model's name."""
        return f"_i{self.instances}_on{'_'.join(map(str, self.gpus))}{'_plain' * self.is_plain}"


def base_name(setup: Setup) -> str:
    """Of the model that has the engine."""
    return f"{setup.model}_{setup.precision}"


def prepare_demo(setup: Setup, limit_s: float) -> None:
    """Make the model that all precisions start from, or find it there; one at a time.

    Raises:
        NotBuilt: it could not be made.
        subprocess.TimeoutExpired: it took too long.
    """
    if not setup.small:
        _run(["models", "build", "--only", "resnet50", "--output", str(Path(setup.work) / "demo")], limit_s)


def prepare(setup: Setup, limit_s: float, environment: Mapping[str, str] | None = None) -> None:
    """Write the model of the setup's precision and build its engine, or find both there. Several precisions may do so at once.

    Args:
        setup: of the precision.
        limit_s: for the engine.
        environment: of the builder, beside this process's: which GPU it sees.

    Raises:
        NotBuilt: the engine could not be built.
        subprocess.TimeoutExpired: it took too long.
    """
    folder = setup.repository / base_name(setup)
    (folder / VERSION).mkdir(parents=True, exist_ok=True)
    demo = Path(setup.work) / "demo"
    file = folder / VERSION / "model.onnx"
    if setup.small or setup.model == "mlp":
        file.unlink(missing_ok=True)  # variants of an earlier run share its content
        onnx.save(_small(setup.side) if setup.small else mlp(LOGITS), file)
    else:
        _link(demo / "resnet50" / VERSION / "model.onnx", file)
    if not setup.on_gpu:
        _write(folder, _config(setup, base_name(setup), Variant(setup.instances)))
        return
    # Of random weights no precision keeps many best classes: the bar is the demo model's own, and so the engine is the one that
    # `headrace build resnet50` makes.
    optimization = _demo_optimization(demo) if setup.model == "resnet50" else {}
    for name in _SAMPLES:
        optimization.setdefault(name, {})["data"] = _samples(setup, name, demo / "resnet50", folder)
    if setup.model == "mlp":
        optimization["accuracy"]["min_top1_agreement"] = _LEAST_AGREEMENT
    _write(folder, _config(setup, base_name(setup), Variant(setup.instances), optimization))
    _build(setup, base_name(setup), limit_s, environment)


def variant(setup: Setup, wanted: Variant) -> str:
    """The name of the model that runs so; its folder is there afterwards.

    An engine belongs to the preparation of its model: one without is built.

    Raises:
        NotBuilt: it could not be built.
        subprocess.TimeoutExpired: it took too long.
    """
    base = setup.repository / base_name(setup)
    name = base_name(setup) + wanted.suffix
    folder = setup.repository / name
    if folder.is_dir():
        shutil.rmtree(folder)
    shutil.copytree(base, folder, copy_function=_link)
    config = json.loads((base / "config.yaml").read_text())
    made = _config(setup, name, wanted)
    kept = {key: value for key, value in config.items() if not (wanted.is_plain and key.endswith("process"))}
    kept |= {key: made[key] for key in ("name", "instance_group")}
    if setup.on_gpu and len(kept) < len(config):
        for sample in _SAMPLES:
            shutil.rmtree(folder / sample, ignore_errors=True)
            kept["optimization"].setdefault(sample, {})["data"] = _random_samples(setup, sample, folder)
        kept["optimization"]["accuracy"]["min_top1_agreement"] = _LEAST_AGREEMENT
        _write(folder, kept)
        _build(setup, name, _PLAIN_BUILD_S)
    else:
        _write(folder, kept)
    return name


def _build(setup: Setup, name: str, limit_s: float, environment: Mapping[str, str] | None = None) -> None:
    words = ["build", name, "--model-repository", str(setup.repository), "--target", "tensorrt"]
    _run([*words, "--cache", str(Path(setup.work) / "cache"), "--force", "--publish-slower"], limit_s, environment)


def pictures(setup: Setup, count: int, seed: int = 7) -> Array:
    """Smooth random pictures, uint8 (count, side, side, 3)."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (count, 8, 8, 3)).astype(np.uint8)
    scale = setup.side // 8
    return np.ascontiguousarray(coarse.repeat(scale, axis=1).repeat(scale, axis=2))


def rows_of(setup: Setup, count: int, seed: int) -> Array:
    """Random rows as the engine takes them, FP32 (count, *dims): normalised pictures, or standard normal values."""
    if setup.model == "mlp":
        return np.random.default_rng(seed).standard_normal((count, *setup.dims), dtype=np.float32)
    made = (pictures(setup, count, seed).astype(np.float32) - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return np.ascontiguousarray(made.transpose(0, 3, 1, 2))


def _config(setup: Setup, name: str, how: Variant, optimization: Mapping[str, Any] | None = None) -> dict[str, Any]:
    classes = 1000 if setup.model == "resnet50" else _SMALL_CLASSES
    side = setup.side
    config: dict[str, Any] = {
        "name": name,
        "backend": setup.backend,
        "max_batch_size": setup.max_rows,
        "input": [{"name": INPUT, "data_type": "TYPE_FP32", "dims": list(setup.dims)}],
        "output": [{"name": LOGITS, "data_type": "TYPE_FP32", "dims": [classes]}],
        "dynamic_batching": {},
        "preprocess": {
            "by": "server",
            "input": INPUT,
            "resize_short_side": side,
            "crop": [side, side],
            "mean": list(MEAN),
            "std": list(STD),
        },
        "postprocess": {"output": LOGITS, "softmax": True, "top_k": CLASSES},
        "instance_group": [{"kind": "KIND_CPU", "count": how.instances}],
    }
    if setup.model == "mlp":
        del config["preprocess"], config["postprocess"]
    if setup.on_gpu:
        config["instance_group"] = [{"kind": "KIND_GPU", "count": how.instances, "gpus": list(how.gpus)}]
        config["optimization"] = {**(optimization or {}), "precision": setup.precision}
    return config


def _demo_optimization(demo: Path) -> dict[str, Any]:
    section = read_model_folder(demo / "resnet50", demo).config.optimization
    return section.model_dump(mode="json", exclude_unset=True)


def _write(folder: Path, config: dict[str, Any]) -> None:
    """JSON is YAML too."""
    path = folder / "config.yaml"
    path.unlink(missing_ok=True)  # it may share its content with another model's
    path.write_text(json.dumps(config, indent=1) + "\n")


def _samples(setup: Setup, name: str, demo: Path, folder: Path) -> str:
    """Path of the samples in the model's folder: the demo's photographs, else random pictures."""
    if setup.model == "resnet50" and (demo / name).is_dir():
        shutil.copytree(demo / name, folder / name, copy_function=_link, dirs_exist_ok=True)
        return name
    return _random_samples(setup, name, folder)


def _random_samples(setup: Setup, name: str, folder: Path) -> str:
    arrays: dict[str, Any] = {INPUT: rows_of(setup, _PICTURES_OF_OURS, seed=len(name))}
    np.savez(folder / f"{name}.npz", **arrays)
    return f"{name}.npz"


def _small(side: int) -> onnx.ModelProto:
    """A model with the inputs and outputs of the real one that computes next to nothing."""
    weights = np.random.default_rng(0).standard_normal((3 * 4 * 4, _SMALL_CLASSES)).astype(np.float32)
    size = side // 4
    nodes = [
        helper.make_node("AveragePool", [INPUT], ["pooled"], kernel_shape=[size, size], strides=[size, size]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], [LOGITS]),
    ]
    kind = TensorProto.FLOAT
    outputs = {LOGITS: (kind, ("rows", _SMALL_CLASSES))}
    return onnx_model(nodes, {INPUT: (kind, ("rows", 3, side, side))}, outputs, {"weights": weights})


def _link(source: str | Path, target: str | Path) -> None:
    """A hard link, or a copy where the file system has none."""
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _run(words: list[str], limit_s: float, environment: Mapping[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "headrace_engines", *words]
    print("$", *command, flush=True)
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=limit_s,
    )
    print(finished.stdout, flush=True)
    if finished.returncode:
        raise NotBuilt(f"`{' '.join(words[:3])}` ended with {finished.returncode}:\n{finished.stdout[-2000:]}")
