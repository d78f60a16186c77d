"""Demo model that generates text step by step: a recurrent network over characters whose readout is trained in seconds.

The recurrent weights are random and stay as they are; the readout is a ridge regression from the states to the next character
(an echo state network: H. Jaeger, 2001). Each step multiplies a state by a matrix of 36 MiB, so a step of eight requests takes
little longer than one of a single request: the matrix is read from memory once.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import onnx
from numpy.typing import NDArray

from headrace_engines.demo.build import Artefact
from headrace_engines.demo.markov import SEED, sentences
from headrace_engines.progress import Report

SIZE = 3072
# The readout reads some units only: more make it slower to fit, not better.
READ_UNITS = 1024
STREAMS, STEPS = 48, 160
# Steps of a stream before its states are used: they depend on the zeros in front of it.
WASHOUT = 10
RADIUS = 0.9
RIDGE = 0.3


def random_weights(size: int, characters: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the recurrent weights, of shape (size, size) and a spectral radius of about `RADIUS`, and the embedding of
    characters, of shape (characters, size)."""
    random = np.random.default_rng(SEED)
    recurrent = random.standard_normal((size, size), np.float32) * np.float32(RADIUS / np.sqrt(size))
    return recurrent, random.standard_normal((characters, size), np.float32)


def train(
    text: str, characters: str, recurrent: NDArray[np.float32], embedding: NDArray[np.float32], report: Report
) -> tuple[NDArray[np.float32], float]:
    """Fit the readout.

    Args:
        text: to learn from, at least `STREAMS` * (`STEPS` + 1) characters.
        characters: all characters of the text.
        recurrent, embedding: as `random_weights` returns them.
        report: of the progress.

    Returns:
        The readout, of shape (`READ_UNITS`, characters), and the share of the next characters of the text that it scores best.
    """
    index = np.array([characters.index(character) for character in text[: STREAMS * (STEPS + 1)]])
    streams = index.reshape(STREAMS, STEPS + 1)
    states = np.zeros((STREAMS, len(recurrent)), np.float32)
    collected = []
    for step in range(STEPS):
        states = np.tanh(states @ recurrent + embedding[streams[:, step]])
        collected.append(states[:, :READ_UNITS])
        if step % 20 == 0:
            report(0.1 + 0.6 * step / STEPS, "running the recurrent network")
    report(0.7, "fitting the readout")
    inputs = np.concatenate(collected[WASHOUT:])
    following = streams[:, 1:].T[WASHOUT:].reshape(-1)
    targets = np.eye(len(characters), dtype=np.float32)[following]
    gram = inputs.T @ inputs + np.float32(RIDGE) * np.eye(inputs.shape[1], dtype=np.float32)
    readout = np.linalg.solve(gram, inputs.T @ targets).astype(np.float32)
    return readout, float(np.mean((inputs @ readout).argmax(axis=1) == following))


def graph(
    recurrent: NDArray[np.float32], embedding: NDArray[np.float32], readout: NDArray[np.float32], characters: str
) -> onnx.ModelProto:
    """Return one step: `state` (batch, size) and `character` (batch) to `next_state` and `scores` (batch, characters)."""
    constants = {
        "recurrent": recurrent,
        "embedding": embedding,
        "readout": readout,
        "first": np.array([0]),
        "last": np.array([len(readout)]),
        "axis": np.array([1]),
    }
    node = onnx.helper.make_node
    nodes = [
        node("MatMul", ["state", "recurrent"], ["carried"]),
        node("Gather", ["embedding", "character"], ["embedded"]),
        node("Add", ["carried", "embedded"], ["sum"]),
        node("Tanh", ["sum"], ["next_state"]),
        node("Slice", ["next_state", "first", "last", "axis"], ["read"]),
        node("MatMul", ["read", "readout"], ["scores"]),
    ]
    value, float32, int64 = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    inputs = [value("state", float32, ["batch", len(recurrent)]), value("character", int64, ["batch"])]
    outputs = [
        value("next_state", float32, ["batch", len(recurrent)]),
        value("scores", float32, ["batch", len(characters)]),
    ]
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    body = onnx.helper.make_graph(nodes, "rnn_text", inputs, outputs, initializers)
    model = onnx.helper.make_model(body, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.helper.set_model_props(model, {"characters": characters})
    return model


def build(report: Report) -> Artefact:
    """Train the network; the model is a Python model with one step of it as an ONNX file beside it."""
    report(0.05, "making text")
    text = sentences(STREAMS * (STEPS + 1) // 20, SEED)
    characters = "".join(sorted(set(text)))
    recurrent, embedding = random_weights(SIZE, len(characters))
    readout, _ = train(text, characters, recurrent, embedding, report)
    content = graph(recurrent, embedding, readout, characters).SerializeToString()
    code = files("headrace_engines.demo").joinpath("files", "rnn_text", "model.py.txt").read_bytes()
    return Artefact(code, "trained", extra_files={"network.onnx": content})
