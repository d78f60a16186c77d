"""The demo model that generates text: its sentences, its chain, and what it writes into a repository."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from headrace_engines.demo.build import CATALOGUE, DemoState, build_demo_model, demo_state
from headrace_engines.demo.markov import ORDER, sentences, train


def test_sentences_are_the_same_every_time_and_end() -> None:
    text = sentences(50, 3)
    assert text == sentences(50, 3) != sentences(50, 4)
    assert text.count(". ") == 50
    assert text.isascii()


def test_the_chain_counts_what_follows_each_context() -> None:
    chain = train("abab", 2)
    assert chain == {
        "": {"a": 2, "b": 2},
        "a": {"b": 2},
        "b": {"a": 1},
        "ab": {"a": 1},
        "ba": {"b": 1},
    }


def test_the_demo_model_is_a_python_model_with_its_chain(
    demo_repository: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = demo_repository("markov_text") / "markov_text"
    compile((folder / "1/model.py").read_text(), "model.py", "exec")
    document = json.loads((folder / "1/chain.json").read_text())
    assert document["order"] == ORDER == max(map(len, document["chain"]))
    assert (folder / "1/chain.json").stat().st_size < 1 << 20
    assert "decoupled: true" in (folder / "config.pbtxt").read_text()
    model = CATALOGUE["markov_text"]
    assert demo_state(model, folder.parent) is DemoState.UP_TO_DATE
    assert not build_demo_model(model, folder.parent, False, lambda *_: None).built


def test_every_context_of_the_training_text_has_a_next_character() -> None:
    text = sentences(200, 1)
    chain = train(text, ORDER)
    for position in range(ORDER, len(text)):
        assert text[position] in chain[text[position - ORDER : position]]
    assert set(text) == set(chain[""])
