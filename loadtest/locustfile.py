"""Locust users for a running Headrace with the demo models.

    python -m loadtest.run                                                      headless, with thresholds (`make load`)
    python -m locust -f loadtest/locustfile.py --host http://127.0.0.1:8000     by hand, in the browser

Every answer is checked: its status, the shapes of its tensors, and what is seen on the photographs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from locust import FastHttpUser, constant, task

from loadtest.pictures import photographs
from loadtest.protocol import Array, HttpRequest, binary_request, decode_answer, json_request


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A request and what its answer has to look like.

    Attributes:
        name: how the statistics call it.
        request: what is sent; made once, sent many times.
        shapes: the shape of every output, by name.
        class_index: the largest value of the only output stands here; None if any will do.
    """

    name: str
    request: HttpRequest
    shapes: Mapping[str, tuple[int, ...]]
    class_index: int | None = None

    def wrong_with(self, outputs: Mapping[str, Array]) -> str:
        """What is wrong with an answer, empty if nothing."""
        shapes = {name: output.shape for name, output in outputs.items()}
        if shapes != dict(self.shapes):
            return f"shapes {shapes}, expected {dict(self.shapes)}"
        if self.class_index is not None:
            (output,) = outputs.values()
            if int(output.argmax()) != self.class_index:
                return f"class {int(output.argmax())}, expected {self.class_index}"
        return ""


def _small_questions(encoding: str) -> list[Question]:
    """`tiny`, `digits` and `add_sub`, one row each."""
    rng = np.random.default_rng(0)
    build = binary_request if encoding == "binary" else json_request
    features = {"input": rng.standard_normal((1, 16), dtype=np.float32)}
    image = {"image": rng.uniform(0, 16, (1, 1, 8, 8)).astype(np.float32)}
    numbers = {name: rng.integers(0, 100, (1, 16), dtype=np.int32) for name in ("INPUT0", "INPUT1")}
    return [
        Question(f"tiny {encoding}", build("tiny", features), {"output": (1, 16)}),
        Question(f"digits {encoding}", build("digits", image), {"probabilities": (1, 10)}),
        Question(f"add_sub {encoding}", build("add_sub", numbers), {"OUTPUT0": (1, 16), "OUTPUT1": (1, 16)}),
    ]


def _photograph_questions() -> list[Question]:
    shapes = {"probabilities": (1, 1000)}
    return [
        Question(
            f"efficientnet_lite0 {photograph.name}",
            binary_request("efficientnet_lite0", {"input": photograph.pixels}),
            shapes,
            photograph.class_index,
        )
        for photograph in photographs()
    ]


JSON = _small_questions("JSON")
BINARY = _small_questions("binary")
PHOTOGRAPHS = _photograph_questions()


class _AskingUser(FastHttpUser):
    """A user who asks again as soon as the answer is there."""

    abstract = True
    wait_time = constant(0)
    _turn = 0

    def ask(self, questions: list[Question]) -> None:
        """Send the next of some questions and check the answer."""
        self._turn += 1
        question = questions[self._turn % len(questions)]
        request = question.request
        # Bytes are sent as they are, whatever the annotation of `data` says.
        with self.client.post(
            request.path,
            data=request.body,  # type: ignore[arg-type]
            headers=dict(request.headers),
            name=question.name,
            catch_response=True,
        ) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}: {(response.text or '')[:200]}")
                return
            try:
                wrong = question.wrong_with(decode_answer(response.headers, response.content))
            except (ValueError, KeyError) as error:
                wrong = f"not an answer of the protocol: {error!r}"
            if wrong:
                response.failure(wrong)


class JsonUser(_AskingUser):
    """Small models, tensors as JSON."""

    @task
    def infer(self) -> None:
        """One of the small models."""
        self.ask(JSON)


class BinaryUser(_AskingUser):
    """Small models, tensors as raw bytes."""

    @task
    def infer(self) -> None:
        """One of the small models."""
        self.ask(BINARY)


class MixedUser(_AskingUser):
    """All models and both encodings, now and then a photograph."""

    @task(20)
    def infer(self) -> None:
        """One of the small models."""
        self.ask(JSON + BINARY)

    @task(1)
    def look_at_photograph(self) -> None:
        """A palace or a daisy."""
        self.ask(PHOTOGRAPHS)
