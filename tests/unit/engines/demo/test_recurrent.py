"""The demo model that generates text step by step: its network, and the readout that is fitted."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from headrace_engines.demo import recurrent
from headrace_engines.demo.build import CATALOGUE, build_demo_model
from headrace_engines.demo.markov import SEED, sentences


def test_the_readout_finds_the_next_character_of_text_that_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STREAMS": 4, "STEPS": 60, "READ_UNITS": 64}.items():
        monkeypatch.setattr(recurrent, name, value)
    text = "abcabd" * 50
    weights, embedding = recurrent.random_weights(96, 4)
    readout, share = recurrent.train(text, "abcd", weights, embedding, lambda *_: None)
    assert readout.shape == (64, 4)
    assert share > 0.99  # after "ab" only the characters before it decide


def test_one_step_of_the_graph_is_that_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "READ_UNITS", 8)
    weights, embedding = recurrent.random_weights(16, 3)
    readout = np.arange(24, dtype=np.float32).reshape(8, 3)
    model = recurrent.graph(weights, embedding, readout, "abc")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    state = np.random.default_rng(0).standard_normal((5, 16), np.float32)
    character = np.array([0, 2, 1, 1, 0])
    next_state, scores = session.run(None, {"state": state, "character": character})
    expected = np.tanh(state @ weights + embedding[character])
    np.testing.assert_allclose(next_state, expected, atol=1e-5)
    np.testing.assert_allclose(scores, expected[:, :8] @ readout, atol=1e-4)
    assert session.get_modelmeta().custom_metadata_map["characters"] == "abc"


def test_the_code_of_the_demo_model_compiles() -> None:
    file = Path(recurrent.__file__).parent / "files/rnn_text/model.py.txt"
    compile(file.read_text(encoding="utf-8"), "model.py", "exec")


@pytest.mark.slow
def test_the_network_of_the_demo_model_has_learned_its_text(tmp_path: Path) -> None:
    build_demo_model(CATALOGUE["rnn_text"], tmp_path, False, lambda *_: None)
    session = onnxruntime.InferenceSession(tmp_path / "rnn_text/1/network.onnx", providers=["CPUExecutionProvider"])
    characters = session.get_modelmeta().custom_metadata_map["characters"]
    text = sentences(8, SEED + 1)  # not those of the training
    state, right = np.zeros((1, session.get_inputs()[0].shape[1]), np.float32), 0
    for now, following in pairwise(text):
        state, scores = session.run(None, {"state": state, "character": np.array([characters.index(now)])})
        right += characters[int(scores.argmax())] == following
    assert right / len(text) > 0.8
