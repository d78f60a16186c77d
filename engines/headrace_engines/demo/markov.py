"""Demo model that generates text: a Markov chain over characters, trained on sentences that this module makes.

The distribution of the next character depends on the last `ORDER` characters. It is the smallest model that generates: it shows
streams of responses, and its text is nonsense made of English words.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from importlib.resources import files

from headrace_engines.demo.build import Artefact
from headrace_engines.progress import Report

ORDER = 5
SENTENCES = 4_000
SEED = 7

_SUBJECTS = (
    "the river",
    "a miller",
    "the old wheel",
    "every gate",
    "a heron",
    "the long canal",
    "our boat",
    "the rain",
)
_VERBS = ("turns", "carries", "follows", "fills", "remembers", "crosses", "waits for", "sings to", "opens")
_OBJECTS = (
    "the mill",
    "a stone bridge",
    "the quiet valley",
    "two lanterns",
    "the morning",
    "a field of barley",
    "the sea",
)
_ENDS = ("", " at dawn", " without a sound", " in the spring", " when the wind is low", " and then rests", " once more")


def sentences(count: int, seed: int) -> str:
    """Return sentences of a small grammar, one after the other.

    Args:
        count: number of sentences.
        seed: of the choices.
    """
    choose = random.Random(seed).choice
    parts = []
    for _ in range(count):
        text = f"{choose(_SUBJECTS)} {choose(_VERBS)} {choose(_OBJECTS)}{choose(_ENDS)}. "
        parts.append(text[0].upper() + text[1:])
    return "".join(parts)


def train(text: str, order: int) -> dict[str, dict[str, int]]:
    """Count the characters that follow each context.

    Args:
        text: to learn from.
        order: longest context, in characters.

    Returns:
        For each context of 0 to `order` characters: how often each character follows it.
    """
    chain: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for position, character in enumerate(text):
        for length in range(min(order, position) + 1):
            chain[text[position - length : position]][character] += 1
    return {context: dict(sorted(counts.items())) for context, counts in sorted(chain.items())}


def build(report: Report) -> Artefact:
    """Train the chain; the model is a Python model with the chain as a file beside it."""
    report(0.1, "making text")
    text = sentences(SENTENCES, SEED)
    report(0.3, "counting characters")
    chain = json.dumps({"order": ORDER, "chain": train(text, ORDER)}, separators=(",", ":")).encode()
    code = files("headrace_engines.demo").joinpath("files", "markov_text", "model.py.txt").read_bytes()
    return Artefact(code, "trained", extra_files={"chain.json": chain})
