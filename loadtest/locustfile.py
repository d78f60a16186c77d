"""Locust users for a running Headrace with the demo models.

    python -m loadtest.run                                                      headless, with thresholds (`make load`)
    python -m locust -f loadtest/locustfile.py --host http://127.0.0.1:8000     by hand, in the browser

Every answer is checked: its status, the shapes of its tensors, and what is seen on the photographs.

The gRPC users are tritonclient's, on a channel of their own each. Locust runs its users on gevent's greenlets, where a blocking
call of grpcio would stop all of them; grpcio's own gevent support (experimental by name) lets the others run meanwhile.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass, replace

import grpc.experimental.gevent
import numpy as np
import tritonclient.grpc as triton
from locust import FastHttpUser, User, constant, events, task
from tritonclient.utils import InferenceServerException

from loadtest.pictures import photographs
from loadtest.protocol import NAMES, Array, HttpRequest, binary_request, decode_answer, json_request


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A request and what its answer has to look like.

    Attributes:
        name: how the statistics call it.
        model: who is asked.
        inputs: what is sent over gRPC.
        request: what is sent over HTTP; made once, sent many times.
        shapes: the shape of every output, by name.
        class_index: the largest value of the only output stands here; None if any will do.
    """

    name: str
    model: str
    inputs: Mapping[str, Array]
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


def _question(how: str, model: str, inputs: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]) -> Question:
    build = json_request if how == "JSON" else binary_request
    return Question(f"{model} {how}", model, inputs, build(model, inputs), shapes)


def _small_questions(how: str) -> list[Question]:
    """`tiny`, `digits` and `add_sub`, one row each."""
    rng = np.random.default_rng(0)
    features = {"input": rng.standard_normal((1, 16), dtype=np.float32)}
    image = {"image": rng.uniform(0, 16, (1, 1, 8, 8)).astype(np.float32)}
    numbers = {name: rng.integers(0, 100, (1, 16), dtype=np.int32) for name in ("INPUT0", "INPUT1")}
    return [
        _question(how, "tiny", features, {"output": (1, 16)}),
        _question(how, "digits", image, {"probabilities": (1, 10)}),
        _question(how, "add_sub", numbers, {"OUTPUT0": (1, 16), "OUTPUT1": (1, 16)}),
    ]


def _photograph_questions(how: str) -> list[Question]:
    questions = []
    for photograph in photographs():
        question = _question(how, "efficientnet_lite0", {"input": photograph.pixels}, {"probabilities": (1, 1000)})
        name = f"{question.name} {photograph.name}"
        questions.append(replace(question, name=name, class_index=photograph.class_index))
    return questions


JSON = _small_questions("JSON")
BINARY = _small_questions("binary")
GRPC = _small_questions("gRPC")
PHOTOGRAPHS = _photograph_questions("binary")
GRPC_PHOTOGRAPHS = _photograph_questions("gRPC")

grpc.experimental.gevent.init_gevent()


@events.init_command_line_parser.add_listener
def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--grpc-address", default="127.0.0.1:8001", help="HOST:PORT that the gRPC users talk to")


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


class GrpcUser(User):
    """Small models over gRPC, now and then a photograph, by tritonclient."""

    wait_time = constant(0)
    _turn = 0

    def on_start(self) -> None:
        """Open a connection that no other user shares."""
        address = self.environment.parsed_options.grpc_address
        self._client = triton.InferenceServerClient(address, channel_args=[("grpc.use_local_subchannel_pool", 1)])

    def on_stop(self) -> None:
        """Close it."""
        self._client.close()

    @task(20)
    def infer(self) -> None:
        """One of the small models."""
        self.ask(GRPC)

    @task(1)
    def look_at_photograph(self) -> None:
        """A palace or a daisy."""
        self.ask(GRPC_PHOTOGRAPHS)

    def ask(self, questions: list[Question]) -> None:
        """Send the next of some questions, check the answer, and tell locust."""
        self._turn += 1
        question = questions[self._turn % len(questions)]
        tensors = []
        for name, array in question.inputs.items():
            tensors.append(triton.InferInput(name, list(array.shape), NAMES[array.dtype]))
            tensors[-1].set_data_from_numpy(array)
        failure: Exception | None = None
        start = time.perf_counter()
        try:
            result = self._client.infer(question.model, tensors, client_timeout=30.0)
        except InferenceServerException as error:
            failure = error
        spent_ms = (time.perf_counter() - start) * 1e3
        if failure is None:
            names = [output.name for output in result.get_response().outputs]
            wrong = question.wrong_with({name: result.as_numpy(name) for name in names})
            failure = ValueError(wrong) if wrong else None
        self.environment.events.request.fire(
            request_type="gRPC",
            name=question.name,
            response_time=spent_ms,
            response_length=0,
            exception=failure,
            context={},
        )
