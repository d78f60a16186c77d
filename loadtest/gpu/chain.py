"""`python -m loadtest.gpu.chain`: three TensorRT models in a row, with the tensors between them on the GPU or in the host.

Both pipelines run the same models in this process. A condition that always holds sends the tensors of one of them through the
host. The answers of both are compared. Exit status: 0, or 2 if the answers differ.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import headrace
import numpy as np
from headrace.embedding import Model
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget
from onnx import ModelProto, NodeProto, TensorProto, helper

from loadtest.gpu.closed_loop import Load, alternate, report
from loadtest.onnx_models import Dim, onnx_model
from loadtest.protocol import Array

_CHANNELS = 16
_ON_GPU, _THROUGH_HOST = "on the GPU", "through the host"
_PIPELINES = {_ON_GPU: "resident", _THROUGH_HOST: "copied"}
_MODEL = """backend: tensorrt
max_batch_size: {rows}
dynamic_batching: {{}}
input: [{{name: X, data_type: fp32, dims: {inputs}}}]
output: [{{name: Y, data_type: fp32, dims: {outputs}}}]
"""
_PIPELINE = """max_batch_size: {rows}
input: [{{name: X, data_type: fp32, dims: [{channels}]}}]
output: [{{name: Y, data_type: fp32, dims: [{channels}]}}]
pipeline:
  steps:
    spread: {{model: spread, inputs: {{X: X}}, outputs: {{Y: first}}}}
    convolve: {{model: convolve, inputs: {{X: first}}, outputs: {{Y: second}}{first}}}
    mean: {{model: mean, inputs: {{X: second}}, outputs: {{Y: Y}}{second}}}
"""
# TensorRT computes FP32 with TF32, whose sums differ with the kernel.
_TOLERANCE = 2e-2


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check, measure, print; return the exit status."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="headrace-chain-") as name:
        repository = Path(name)
        _add_models(repository, options)
        _add_pipelines(repository, options.rows)
        return asyncio.run(_measure(repository, options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.gpu.chain", description="Tensors between models on a GPU."
    )
    add = parser.add_argument
    add("--backend", choices=("tensorrt", "onnxruntime"), default="tensorrt", help="onnxruntime: try it on a CPU")
    add("--rows", type=int, default=32, help="rows of the largest batch (%(default)s)")
    add("--side", type=int, default=96, help="the tensors between the models are 16 x side x side (%(default)s)")
    add(
        "--in-flight", type=int, default=128, help="requests of one row in flight (%(default)s); also measured with one"
    )
    add("--seconds", type=float, default=1.5, help="of a sample (%(default)s)")
    add("--rounds", type=int, default=5, help="samples of each pipeline (%(default)s)")
    add("--json", type=Path, help="folder for the figures of both loads")
    return parser


def _add_models(repository: Path, options: argparse.Namespace) -> None:
    few, many = [_CHANNELS], [_CHANNELS, options.side, options.side]
    for name, model, inputs, outputs in (
        ("spread", _spread(options.side), few, many),
        ("convolve", _convolve(options.side), many, many),
        ("mean", _mean(options.side), many, few),
    ):
        version = repository / name / "1"
        version.mkdir(parents=True)
        config = _MODEL.format(rows=options.rows, inputs=inputs, outputs=outputs)
        if options.backend == "tensorrt":
            shapes = (1, *inputs), (options.rows, *inputs), (options.rows, *inputs)
            spec = TargetSpec("fp32", (ShapeRange({"X": shapes}),))
            TensorRtTarget(optimization_level=3).build(model, spec, version / "model.plan", silent)
        else:
            config = config.replace("backend: tensorrt\n", "")
            (version / "model.onnx").write_bytes(model.SerializeToString())
        (version.parent / "config.yaml").write_text(config)


def _add_pipelines(repository: Path, rows: int) -> None:
    for name, conditions in (
        (_PIPELINES[_ON_GPU], ("", "")),
        (_PIPELINES[_THROUGH_HOST], (", when: first.rows > 0", ", when: second.rows > 0")),
    ):
        (repository / name / "1").mkdir(parents=True)
        config = _PIPELINE.format(rows=rows, channels=_CHANNELS, first=conditions[0], second=conditions[1])
        (repository / name / "config.yaml").write_text(config)


def _spread(side: int) -> ModelProto:
    """(rows, 16) -> (rows, 16, side, side): each value, scaled for each pixel."""
    scales = np.random.default_rng(0).standard_normal((1, _CHANNELS, side, side), np.float32)
    nodes = [
        helper.make_node("Unsqueeze", ["X", "axes"], ["values"]),
        helper.make_node("Mul", ["values", "scales"], ["Y"]),
    ]
    return _model(nodes, (), (side, side), {"axes": np.array([2, 3], np.int64), "scales": scales})


def _convolve(side: int) -> ModelProto:
    """(rows, 16, side, side) -> the same shape: a convolution of 3 x 3 and ReLU."""
    weights = np.random.default_rng(1).standard_normal((_CHANNELS, _CHANNELS, 3, 3), np.float32)
    nodes = [
        helper.make_node("Conv", ["X", "weights"], ["sums"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["sums"], ["Y"]),
    ]
    return _model(nodes, (side, side), (side, side), {"weights": weights})


def _mean(side: int) -> ModelProto:
    """(rows, 16, side, side) -> (rows, 16): the mean of each channel."""
    nodes = [helper.make_node("ReduceMean", ["X", "axes"], ["Y"], keepdims=0)]
    return _model(nodes, (side, side), (), {"axes": np.array([2, 3], np.int64)})


def _model(
    nodes: Sequence[NodeProto], inputs: tuple[Dim, ...], outputs: tuple[Dim, ...], constants: Mapping[str, Array]
) -> ModelProto:
    kind = TensorProto.FLOAT
    x, y = (kind, ("rows", _CHANNELS, *inputs)), (kind, ("rows", _CHANNELS, *outputs))
    return onnx_model(nodes, {"X": x}, {"Y": y}, constants)


async def _measure(repository: Path, options: argparse.Namespace) -> int:
    rng = np.random.default_rng(2)
    inputs = [{"X": rng.standard_normal((1, _CHANNELS), np.float32)} for _ in range(256)]
    names = ["spread", "convolve", "mean", *_PIPELINES.values()]
    async with headrace.Server(repository, models=names, state_dir="") as server:
        models = {label: server.model(name) for label, name in _PIPELINES.items()}
        difference = await _largest_difference(models[_ON_GPU], models[_THROUGH_HOST], inputs)
        print(f"largest difference of the answers of both: {difference:.2g} of the largest value", flush=True)
        if not difference < _TOLERANCE:
            print(f"FAILED: more than {_TOLERANCE}")
            return 2
        for in_flight in (options.in_flight, 1):
            print(f"{in_flight} in flight", flush=True)
            samples = await alternate(models, inputs, Load(in_flight, options.seconds, options.rounds))
            report(samples, "requests/s", None, options.json and options.json / f"chain-{in_flight}.json")
    return 0


async def _largest_difference(first: Model, second: Model, inputs: Sequence[Mapping[str, Array]]) -> float:
    largest = 0.0
    for model in (first, second):  # in batches, then one after the other
        together = await asyncio.gather(*[model.infer_async(each) for each in inputs])
        for each, answer in zip(inputs, together, strict=True):
            alone = (await second.infer_async(each))["Y"]
            largest = max(largest, float(np.abs(answer["Y"] - alone).max() / np.abs(alone).max()))
    return largest


if __name__ == "__main__":
    sys.exit(main())
