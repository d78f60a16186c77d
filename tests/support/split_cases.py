"""A model cut in two, each part on its own GPU: the same cases for real GPUs and for fakes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import yaml
from headrace.core.tensor import Array
from headrace_engines.commands.inspect import inspect_source, inspection_inputs
from headrace_engines.onnx_graph import read_onnx
from headrace_engines.progress import silent
from headrace_engines.project import SOURCE, open_project
from headrace_engines.split.models import split_model
from headrace_engines.split.part_writer import staged_split
from headrace_engines.targets import choose_target
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget
from onnx import TensorProto, helper

from loadtest.onnx_models import onnx_model
from tests.support.gpu_pipeline_cases import infer
from tests.support.serving import Server

ROWS, WIDTH = 8, 16
NAME, PIPELINE = "stack", "stack_split"


def stack(layers: int = 4) -> onnx.ModelProto:
    """X (n, 16) -> Y (n, 16) FP32: layers of a product, an addition and a ReLU, each with a skip from the first."""
    random = np.random.default_rng(0)
    nodes, constants, state = [], {}, "X"
    for layer in range(layers):
        constants[f"w{layer}"] = (random.standard_normal((WIDTH, WIDTH)) / 4).astype(np.float32)
        last = "Y" if layer == layers - 1 else f"s{layer}"
        nodes += [
            helper.make_node("MatMul", [state, f"w{layer}"], [f"m{layer}"]),
            helper.make_node("Add", [f"m{layer}", "X" if layer else f"m{layer}"], [f"a{layer}"]),
            helper.make_node("Relu", [f"a{layer}"], [last]),
        ]
        state = last
    shape = (TensorProto.FLOAT, ("n", WIDTH))
    return onnx_model(nodes, {"X": shape}, {"Y": shape}, constants)


def make_repository(folder: Path, gpus: Sequence[int]) -> Path:
    """Return a repository with the parts as plans, and the pipeline; the whole is beside it.

    Args:
        folder: parent of the repository.
        gpus: GPU number of each part.
    """
    whole, repository = folder / "whole" / NAME, folder / "repository"
    (whole / "1").mkdir(parents=True)
    repository.mkdir()
    onnx.save(stack(), whole / "1" / SOURCE)
    (whole / "config.yaml").write_text(f"max_batch_size: {ROWS}\ndynamic_batching: {{}}\n")
    project = open_project(str(whole), whole.parent)
    inputs = inspection_inputs(project, choose_target("onnxruntime"), None)
    model = read_onnx(project.source)
    split = split_model(model, inspect_source(project), inputs, parts=len(gpus), slack=0.05, batched=True)
    with staged_split(project, split, repository, gpus, replace=False) as (_, published):
        pass
    for name in published.parts:
        part = open_project(name, repository)
        shapes = {
            entry.name: ((1, *entry.dims), (ROWS, *entry.dims), (ROWS, *entry.dims)) for entry in part.config.input
        }
        plan = part.version_folder / "model.plan"
        spec = TargetSpec("fp32", (ShapeRange(shapes),))
        TensorRtTarget(optimization_level=1).build(read_onnx(part.source), spec, plan, silent)
        part.source.unlink()
        config = repository / name / "config.yaml"
        config.write_text(yaml.safe_dump({"backend": "tensorrt", **yaml.safe_load(config.read_text())}))
    return repository


def check_answers(server: Server, clients: int = 8, requests: int = 20) -> None:
    """Requests of many clients: each answer is that of the whole on ONNX Runtime."""
    session = ort.InferenceSession(stack().SerializeToString(), providers=["CPUExecutionProvider"])

    def client(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(requests):
            x: Array = random.standard_normal((int(random.integers(1, ROWS + 1)), WIDTH)).astype(np.float32)
            (expected,) = session.run(None, {"X": x})
            np.testing.assert_allclose(infer(server, PIPELINE, "X", x)["Y"], expected, rtol=2e-2, atol=2e-2)

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
