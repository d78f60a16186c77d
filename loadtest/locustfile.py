"""Locust users for a running Headrace with the demo models.

    python -m loadtest.run                                                      headless, with thresholds (`make load`)
    python -m locust -f loadtest/locustfile.py --host http://127.0.0.1:8000     by hand, in the browser
    python -m locust -f loadtest/locustfile.py,loadtest/shapes.py --shape ramp  the number of users changes by itself

`loadtest/run.py` has the mixes of users. Every answer is checked: its status, the shapes of its tensors, and the classes of the
photographs.

The gRPC users are tritonclient's, on a channel of their own each. Locust runs its users on gevent's greenlets, where a blocking
call of grpcio would stop all of them; grpcio's own gevent support (experimental by name) lets the others run meanwhile.
"""

from __future__ import annotations

import os
import random
import ssl
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from typing import Any, ClassVar

import grpc.experimental.gevent
import numpy as np
import tritonclient.grpc as triton
from headrace.server.commands.connection import API_KEY_VARIABLE, ConnectionOptions, add_arguments
from headrace.server.commands.infer_client import parse_address
from locust import FastHttpUser, User, events, task
from PIL import Image, ImageOps
from tritonclient.utils import InferenceServerException

from loadtest.protocol import NAMES, Array, HttpRequest, binary_request, decode_answer, json_request

# Photographs that scikit-learn ships, as the tensors that `efficientnet_lite0` takes, and what is on them.

SIDE, SHORT_SIDE = 224, 256
_SHORT_SIDES = (240, 256, 288)
_SHOWN = (("china.jpg", 698), ("flower.jpg", 985))


@dataclass(frozen=True, slots=True, eq=False)
class Photograph:
    """One picture.

    Attributes:
        name: the file.
        pixels: FP32 `[1, 3, 224, 224]`, (pixel - 127) / 128, as the model wants them.
        class_index: the ImageNet class of what it shows.
    """

    name: str
    pixels: Array
    class_index: int


def photographs() -> list[Photograph]:
    """A palace and a daisy."""
    return [Photograph(name, _pixels(name), index) for name, index in _SHOWN]


def album() -> list[Photograph]:
    """The same from nearer and farther, and mirrored: what people send is never the same picture twice."""
    return [
        Photograph(name, _pixels(name, short_side, mirrored), index)
        for name, index in _SHOWN
        for short_side in _SHORT_SIDES
        for mirrored in (False, True)
    ]


def _pixels(name: str, short_side: int = SHORT_SIDE, mirrored: bool = False) -> Array:
    with as_file(files("sklearn.datasets") / "images" / name) as path, Image.open(path) as opened:
        picture = ImageOps.mirror(opened.convert("RGB")) if mirrored else opened.convert("RGB")
    scale = short_side / min(picture.size)
    size = (round(picture.width * scale), round(picture.height * scale))
    left, top = (size[0] - SIDE) // 2, (size[1] - SIDE) // 2
    cropped = picture.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + SIDE, top + SIDE))
    pixels = (np.asarray(cropped, dtype=np.float32) - 127) / 128
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A request and the checks of its answer.

    Attributes:
        name: in the statistics.
        model: name of the model.
        inputs: tensors sent over gRPC.
        request: HTTP request; created once, sent many times.
        shapes: the shape of every output, by name.
        classes: where the largest value of the only output stands, row by row; empty if any will do.
    """

    name: str
    model: str
    inputs: Mapping[str, Array]
    request: HttpRequest
    shapes: Mapping[str, tuple[int, ...]]
    classes: tuple[int, ...] = ()

    def wrong_with(self, outputs: Mapping[str, Array]) -> str:
        """Return the error in an answer, "" if it is right."""
        shapes = {name: output.shape for name, output in outputs.items()}
        if shapes != dict(self.shapes):
            return f"shapes {shapes}, expected {dict(self.shapes)}"
        if self.classes:
            (output,) = outputs.values()
            if (seen := tuple(output.argmax(axis=1).tolist())) != self.classes:
                return f"classes {seen}, expected {self.classes}"
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
    return [
        replace(question, name=f"{question.name} {photograph.name}", classes=(photograph.class_index,))
        for photograph in photographs()
        for question in [_question(how, PICTURE_MODEL, {"input": photograph.pixels}, {"probabilities": (1, 1000)})]
    ]


def _album_questions(how: str) -> list[Question]:
    """One picture, or several in one request."""
    pictures = album()
    random.Random(0).shuffle(pictures)
    questions = []
    for rows in (1, 1, 1, 2, 4):
        shown, pictures = pictures[:rows], pictures[rows:]
        pixels = np.concatenate([photograph.pixels for photograph in shown])
        question = _question(how, PICTURE_MODEL, {"input": pixels}, {"probabilities": (rows, 1000)})
        classes = tuple(photograph.class_index for photograph in shown)
        questions.append(replace(question, name=f"{question.name} x{rows}", classes=classes))
    return questions


def _batch_questions() -> list[Question]:
    """As many rows as `tiny` and `digits` take at once."""
    rng = np.random.default_rng(1)
    rows = 64
    features = {"input": rng.standard_normal((rows, 16), dtype=np.float32)}
    images = {"image": rng.uniform(0, 16, (rows, 1, 8, 8)).astype(np.float32)}
    questions = [
        _question("binary", "tiny", features, {"output": (rows, 16)}),
        _question("binary", "digits", images, {"probabilities": (rows, 10)}),
    ]
    return [replace(question, name=f"{question.name} x{rows}") for question in questions]


PICTURE_MODEL = "efficientnet_lite0"
JSON = _small_questions("JSON")
BINARY = _small_questions("binary")
GRPC = _small_questions("gRPC")
PHOTOGRAPHS = _photograph_questions("binary")
GRPC_PHOTOGRAPHS = _photograph_questions("gRPC")
ALBUM = _album_questions("binary")
GRPC_ALBUM = _album_questions("gRPC")
BATCHES = _batch_questions()
PAGES = ("/v2/health/ready", "/v2/models/tiny", "/v2/models/tiny/stats", "/v2/models/tiny/load", "/metrics")

grpc.experimental.gevent.init_gevent()


_failed = False


@events.request.add_listener
def _print_first_error(request_type: str, name: str, exception: BaseException | None, **_more: object) -> None:
    """Print the first error as it happens, not only in the summary at the end."""
    global _failed
    if exception is not None and not _failed:
        _failed = True
        sys.stderr.write(f"first error: {request_type} {name}: {exception}\n")
        sys.stderr.flush()


@events.init_command_line_parser.add_listener
def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--grpc-address", default="127.0.0.1:8001", help="HOST:PORT of gRPC, grpcs://HOST:PORT with TLS"
    )
    add_arguments(parser)
    parser.add_argument(
        "--think-s", type=float, default=0.0, help="pause between an answer and the next request, on average"
    )


def _pause_s(user: User) -> float:
    """A random time from half to one and a half of `--think-s`."""
    think_s: float = user.environment.parsed_options.think_s
    return random.uniform(0.5, 1.5) * think_s


def _connection_options(options: Namespace) -> ConnectionOptions:
    """TLS files and key. The key is not an option, because locust shows all options on its page."""
    return ConnectionOptions.from_arguments(
        Namespace(**(vars(options) | {"api_key": os.environ.get(API_KEY_VARIABLE, "")}))
    )


def _mostly(often: list[Question], rarely: list[Question]) -> list[Question]:
    """Twenty of the first for each of the second, in an order of its own."""
    questions = often * (20 * len(rarely)) + rarely * len(often)
    random.shuffle(questions)
    return questions


class _ConnectedUser(FastHttpUser):
    """A user with TLS files and a key. A certificate that is not trusted is an error, and redirects are not followed."""

    abstract = True
    insecure = False
    max_redirects = 0

    def __init__(self, environment: Any) -> None:
        options = _connection_options(environment.parsed_options)
        self.default_headers = options.headers()
        self.ssl_context_factory: Callable[[], ssl.SSLContext] = options.ssl_context
        super().__init__(environment)


class _HttpUser(_ConnectedUser):
    """A user that sends the next request after the answer."""

    abstract = True
    wait_time = _pause_s
    questions: ClassVar[Sequence[Question]] = ()

    def on_start(self) -> None:
        """Begin anywhere, so that users do not send the same at the same time."""
        self._turn = random.randrange(len(self.questions))

    @task
    def ask(self) -> None:
        """Send the next question and check the answer."""
        self._turn += 1
        question = self.questions[self._turn % len(self.questions)]
        request = question.request
        # Bytes are sent unchanged; the annotation of `data` lacks them.
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


class JsonUser(_HttpUser):
    """Small models, tensors as JSON."""

    questions = JSON


class BinaryUser(_HttpUser):
    """Small models, tensors as raw bytes."""

    questions = BINARY


class MixedUser(_HttpUser):
    """All models and both encodings, now and then a photograph."""

    questions = _mostly(JSON + BINARY, PHOTOGRAPHS)


class GalleryUser(_HttpUser):
    """Photographs, one or several at a time."""

    questions = ALBUM


class BatchUser(_HttpUser):
    """Full batches of small models."""

    questions = BATCHES


class OnlookerUser(_ConnectedUser):
    """Monitoring of a server: probes, metrics, statistics."""

    wait_time = _pause_s

    @task
    def look(self) -> None:
        """One of the pages."""
        self.client.get(random.choice(PAGES))


class _GrpcUser(User):
    """A user of gRPC that calls again after the answer, by tritonclient."""

    abstract = True
    wait_time = _pause_s
    questions: ClassVar[Sequence[Question]] = ()

    def on_start(self) -> None:
        """Open a connection that no other user shares."""
        options = _connection_options(self.environment.parsed_options)
        target, is_tls = parse_address(self.environment.parsed_options.grpc_address)
        credentials = options.channel_credentials() if is_tls else None
        self._client = triton.InferenceServerClient(
            target, ssl=is_tls, creds=credentials, channel_args=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._headers = options.headers()
        self._turn = random.randrange(len(self.questions))

    def on_stop(self) -> None:
        """Close it."""
        self._client.close()

    @task
    def ask(self) -> None:
        """Send the next question, check the answer, and report it to locust."""
        self._turn += 1
        question = self.questions[self._turn % len(self.questions)]
        tensors = []
        for name, array in question.inputs.items():
            tensors.append(triton.InferInput(name, list(array.shape), NAMES[array.dtype]))
            tensors[-1].set_data_from_numpy(array)
        failure: Exception | None = None
        start = time.perf_counter()
        try:
            result = self._client.infer(question.model, tensors, client_timeout=30.0, headers=self._headers)
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


class GrpcUser(_GrpcUser):
    """Small models, now and then a photograph."""

    questions = _mostly(GRPC, GRPC_PHOTOGRAPHS)


class GrpcGalleryUser(_GrpcUser):
    """Photographs, one or several at a time."""

    questions = GRPC_ALBUM
