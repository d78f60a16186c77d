"""The smallest demo models: `tiny`, for measuring overhead, and `add_sub` in two datatypes."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from headrace_engines.demo.catalogue import Artefact
from headrace_engines.demo.graph import Floats, GraphBuilder, fp32
from headrace_engines.progress import Report

WIDTH = 16
SEED = 20


def build_tiny(report: Report) -> Artefact:
    """A perceptron 16-16-16 with seeded weights: input FP32 [N, 16], output FP32 [N, 16]."""
    report(0.0, "seeding")
    random = np.random.default_rng(SEED)

    def normal(*shape: int) -> Floats:
        return random.normal(0.0, 1.0 / np.sqrt(WIDTH), shape).astype(np.float32)

    graph = GraphBuilder("tiny")
    hidden = graph.node("Relu", graph.dense("input", "hidden", normal(WIDTH, WIDTH), normal(WIDTH)))
    graph.dense(hidden, "last", normal(WIDTH, WIDTH), normal(WIDTH), output="output")
    model = graph.model(
        {"input": fp32(WIDTH)},
        {"output": fp32(WIDTH)},
        "A perceptron of 16-16-16 with random weights, for measuring the overhead of serving.",
        {"origin": f"seeded random weights, seed {SEED}", "licence": "Apache-2.0"},
    )
    return Artefact(model, "seeded")


def build_add_sub_int32(report: Report) -> Artefact:
    """INPUT0, INPUT1 INT32 [N, 16]; OUTPUT0 is their sum, OUTPUT1 their difference."""
    return _build_add_sub(report, "add_sub", TensorProto.INT32)


def build_add_sub_fp32(report: Report) -> Artefact:
    """INPUT0, INPUT1 FP32 [N, 16]; OUTPUT0 is their sum, OUTPUT1 their difference."""
    return _build_add_sub(report, "add_sub_fp32", TensorProto.FLOAT)


def _build_add_sub(report: Report, name: str, element_type: int) -> Artefact:
    report(0.0, "assembling")
    graph = GraphBuilder(name)
    graph.node("Add", "INPUT0", "INPUT1", output="OUTPUT0")
    graph.node("Sub", "INPUT0", "INPUT1", output="OUTPUT1")
    tensor = (element_type, (WIDTH,))
    model = graph.model(
        {"INPUT0": tensor, "INPUT1": tensor},
        {"OUTPUT0": tensor, "OUTPUT1": tensor},
        "The sum and the difference of two tensors.",
        {"origin": "no weights", "licence": "Apache-2.0"},
    )
    return Artefact(model, "none")
