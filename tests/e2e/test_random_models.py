"""Random models, random requests, all at once: every response is that of ONNX Runtime for the request alone, or an error.

A longer run: HEADRACE_RANDOM_MODELS=200 HEADRACE_RANDOM_REQUESTS=20000 pytest tests/e2e/test_random_models.py

Only models with independent rows, or with a wrong number of output rows, get a configuration that declares dynamic batching:
such a configuration would rightly merge the rows of the others.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import traceback
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException, shared_memory

from tests.support.models import add_model
from tests.support.random_models import Sample, sample
from tests.support.serving import HOST, Server, serving

pytestmark = pytest.mark.slow

MODELS = int(os.environ.get("HEADRACE_RANDOM_MODELS", "16"))
REQUESTS = int(os.environ.get("HEADRACE_RANDOM_REQUESTS", "600"))
FIRST_SEED = int(os.environ.get("HEADRACE_RANDOM_SEED", "0"))
CALLERS = 6
MAX_ROWS = 11
OUTPUT_BYTES = 4096
# So many requests of a caller go to the same three models, before one of these changes.
_TOGETHER = 6

Array = np.ndarray[Any, Any]

# Errors that are allowed for a model whose graph cannot process the batches that its configuration declares.
_ERRORS = ("The model is at fault", "send fewer rows in one request", "no longer split")


@dataclass
class Reference:
    """A model as ONNX Runtime runs it, without a server."""

    sample: Sample
    session: ort.InferenceSession = field(init=False)

    def __post_init__(self) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        self.session = ort.InferenceSession(self.sample.model.SerializeToString(), options, ["CPUExecutionProvider"])

    def outputs(self, x: Array) -> list[Array]:
        return list(self.session.run(self.sample.outputs, {"X": x}))


class HttpCaller:
    """Sends what Triton's client writes, on a connection of its own."""

    def __init__(self, server: Server, region: Region) -> None:
        self._server = server
        self._region = region
        self._connection = http.client.HTTPConnection(HOST, server.port, timeout=60)

    def message(self, sample: Sample, x: Array, how: str) -> tuple[bytes, int | None]:
        tensor = triton_http.InferInput("X", x.shape, "FP32")
        if how == "shared memory":
            self._region.place(tensor, x)
        else:
            tensor.set_data_from_numpy(x, binary_data=how == "binary")
        outputs = []
        for index, name in enumerate(sample.outputs):
            output = triton_http.InferRequestedOutput(name, binary_data=how == "binary")
            if how == "shared memory":
                self._region.expect(output, index)
            outputs.append(output)
        body, header_length = triton_http.InferenceServerClient.generate_request_body([tensor], outputs)
        return body, header_length

    def infer_sample(self, sample: Sample, x: Array, how: str) -> list[Array]:
        body, header_length = self.message(sample, x, how)
        headers = {} if header_length is None else {"Inference-Header-Content-Length": str(header_length)}
        self._connection.request("POST", f"/v2/models/{sample.name}/infer", body, headers)
        response = self._connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise InferenceServerException(content.decode(), str(response.status))
        length = response.getheader("Inference-Header-Content-Length")
        parsed = triton_http.InferenceServerClient.parse_response_body(
            content, header_length=None if length is None else int(length)
        )
        if how != "shared memory":
            return [parsed.as_numpy(name) for name in sample.outputs]
        raw_outputs = [parsed.get_output(name) for name in sample.outputs]
        return [
            self._region.read(index, output["datatype"], output["shape"]) for index, output in enumerate(raw_outputs)
        ]

    def leave(self, sample: Sample, x: Array) -> None:
        """Send a request, or half of one, and close the connection."""
        body, header_length = self.message(sample, x, "binary")
        head = (
            f"POST /v2/models/{sample.name}/infer HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(body)}\r\n"
            f"Inference-Header-Content-Length: {header_length}\r\n\r\n"
        )
        message = head.encode() + body
        with socket.create_connection((HOST, self._server.port), timeout=10) as connection:
            connection.sendall(message if x.shape[0] % 2 else message[: len(message) // 2])

    def close(self) -> None:
        self._connection.close()


class GrpcCaller:
    """Triton's client."""

    def __init__(self, server: Server, region: Region) -> None:
        self._region = region
        self._client = triton_grpc.InferenceServerClient(server.grpc_address)

    def message(self, sample: Sample, x: Array, how: str) -> tuple[list[Any], list[Any]]:
        tensor = triton_grpc.InferInput("X", x.shape, "FP32")
        outputs = [triton_grpc.InferRequestedOutput(name) for name in sample.outputs]
        if how == "shared memory":
            self._region.place(tensor, x)
            for index, output in enumerate(outputs):
                self._region.expect(output, index)
        else:
            tensor.set_data_from_numpy(x)
        return [tensor], outputs

    def infer_sample(self, sample: Sample, x: Array, how: str) -> list[Array]:
        inputs, outputs = self.message(sample, x, how)
        answer = self._client.infer(sample.name, inputs, outputs=outputs, client_timeout=60)
        if how != "shared memory":
            return [answer.as_numpy(name) for name in sample.outputs]
        raw_outputs = [answer.get_output(name) for name in sample.outputs]
        return [self._region.read(index, output.datatype, output.shape) for index, output in enumerate(raw_outputs)]

    def leave(self, sample: Sample, x: Array) -> None:
        """Cancel a call."""
        inputs, outputs = self.message(sample, x, "binary")
        self._client.async_infer(sample.name, inputs, lambda result, error: None, outputs=outputs).cancel()

    def close(self) -> None:
        self._client.close()


class Region:
    """Shared memory of one caller: an input, and outputs behind it."""

    def __init__(self, client: triton_grpc.InferenceServerClient) -> None:
        self._name = f"answers_{uuid.uuid4().hex[:8]}"
        size_bytes = 3 * OUTPUT_BYTES
        self._handle = shared_memory.create_shared_memory_region(
            self._name, f"/{self._name}", size_bytes, create_only=True
        )
        client.register_system_shared_memory(self._name, f"/{self._name}", size_bytes)

    def place(self, tensor: Any, x: Array) -> None:
        shared_memory.set_shared_memory_region(self._handle, [x])
        tensor.set_shared_memory(self._name, x.nbytes)

    def expect(self, output: Any, index: int) -> None:
        output.set_shared_memory(self._name, OUTPUT_BYTES, offset=(1 + index) * OUTPUT_BYTES)

    def read(self, index: int, datatype: str, shape: Sequence[int]) -> Array:
        dtype, offset = {"FP32": np.float32, "INT64": np.int64}[datatype], (1 + index) * OUTPUT_BYTES
        values: Array = shared_memory.get_contents_as_numpy(self._handle, dtype, list(shape), offset=offset)
        return values.copy()

    def close(self) -> None:
        shared_memory.destroy_shared_memory_region(self._handle)


class Caller(threading.Thread):
    """One of many concurrent clients that compare responses.

    Attributes:
        wrong: answers that are not right, in words.
        counts: of "answers" that were compared, "errors" that were allowed and "left": requests that were given up.
    """

    def __init__(self, server: Server, references: list[Reference], seed: int, requests: int) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._references = references
        self._rng = np.random.default_rng(seed)
        self._requests = requests
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            control = stack.enter_context(triton_grpc.InferenceServerClient(self._server.grpc_address))
            region = Region(control)
            stack.callback(region.close)
            callers = [HttpCaller(self._server, region), GrpcCaller(self._server, region)]
            for caller in callers:
                stack.callback(caller.close)
            for number in range(self._requests):
                try:
                    self._one(number, callers[int(self._rng.integers(2))])
                except Exception as error:
                    self.wrong.append("".join(traceback.format_exception(error)))
                    return

    def _one(self, number: int, caller: HttpCaller | GrpcCaller) -> None:
        rng = self._rng
        # A few models at a time, so that requests meet.
        reference = self._references[(number // _TOGETHER + int(rng.integers(3))) % len(self._references)]
        rows = int(rng.integers(1, 3)) if rng.random() < 0.6 else int(rng.integers(1, MAX_ROWS + 1))
        x = rng.integers(-3, 4, (rows, reference.sample.width)).astype(np.float32)
        if rng.random() < 0.1:
            caller.leave(reference.sample, x)
            self.counts["left"] += 1
            return
        how = str(rng.choice(["binary", "binary", "JSON", "shared memory"]))
        try:
            answers = caller.infer_sample(reference.sample, x, how)
        except InferenceServerException as error:
            if not (reference.sample.may_fail and any(text in str(error) for text in _ERRORS)):
                self.wrong.append(f"{reference.sample.name} {reference.sample.steps}: {rows} rows: {error}")
            self.counts["errors"] += 1
            return
        self.counts["answers"] += 1
        for name, answer, expected in zip(reference.sample.outputs, answers, reference.outputs(x), strict=True):
            same = answer.shape == expected.shape and np.allclose(answer, expected, 1e-5, 1e-5, equal_nan=True)
            if not same:
                self.wrong.append(
                    f"{reference.sample.name} {reference.sample.steps}, {type(caller).__name__}, {how}, {rows} rows: {name} is "
                    f"{answer.tolist()}, alone {expected.tolist()}"
                )


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Reference]]:
    """A repository of random models, and the same models outside of any server."""
    repository = tmp_path_factory.mktemp("random") / "models"
    model_references = [Reference(sample(seed)) for seed in range(FIRST_SEED, FIRST_SEED + MODELS)]
    for reference in model_references:
        add_model(repository, reference.sample.name, reference.sample.model, config=reference.sample.config)
    return repository, model_references


@pytest.mark.timeout(3600 if REQUESTS > 2000 else 120)
def test_every_answer_is_that_of_the_request_alone(references: tuple[Path, list[Reference]], tmp_path: Path) -> None:
    repository, models = references
    options = ("--allow-client-shm", "--profile-s", "0")
    with serving(repository, tmp_path, *options) as server:
        callers = [Caller(server, models, seed, REQUESTS // CALLERS) for seed in range(CALLERS)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        wrong = [text for caller in callers for text in caller.wrong]
        counts = sum((caller.counts for caller in callers), Counter[str]())
        print(dict(counts))
        assert not wrong, f"{len(wrong)} of {sum(counts.values())}: " + "\n".join(wrong[:10])
        assert counts["answers"] > REQUESTS // 3
