"""The response cache while callers leave, models change, memory is short, keys are hostile and Redis fails.

The worst error is a wrong answer with status 200: every test compares the answers with those of a model without a cache.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.config.cache_config import ResponseCache
from headrace.config.model_config import ModelConfig
from headrace.core.cache_options import CacheOptions, RedisOptions
from headrace.core.completion import Mailbox
from headrace.core.errors import Cancelled
from headrace.core.request import InferRequest, InferResponse
from headrace.core.tensor import FP32, ModelSpec, TensorSpec
from headrace.inference.caching.key import KeyFactory
from headrace.inference.caching.local import LocalStore, frozen
from headrace.inference.caching.response_caches import ResponseCaches
from headrace.inference.caching.values import MAX_VALUE_BYTES

from tests.e2e.test_response_cache import CACHED, body, explained, post, statistics
from tests.support import models
from tests.support.fakes import FakeModel, handle, infer_request
from tests.support.python_models import add_python_model
from tests.support.redis_servers import Reply, false_redis, redis_server, wait_for
from tests.support.serving import HOST, Server, serving


def test_a_crowd_of_equal_requests_whose_first_callers_leave() -> None:
    model, count = FakeModel(), 300

    async def main() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        served = handle(mailbox, model)
        config = ModelConfig(name="fake", backend="onnxruntime", response_cache=ResponseCache(enable=True))
        served.cache = ResponseCaches(CacheOptions(1 << 20), mailbox).open(served, config)
        model.gate.clear()
        blocker = served.infer(infer_request(99))
        assert await asyncio.to_thread(model.started.acquire, timeout=5)
        crowd = [served.infer(infer_request(4)) for _ in range(count)]
        await asyncio.sleep(0.01)
        left = [crowd[0]]
        # The first connection is closed, then that of the request that is computed instead, and so on; some others in between.
        for index in (*range(1, 20), *range(100, 150)):
            left[-1].abandon()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            left.append(crowd[index])
        left[-1].abandon()
        model.gate.set()
        outcomes = await asyncio.wait_for(asyncio.gather(*crowd, return_exceptions=True), 10)
        await blocker
        for completion, outcome in zip(crowd, outcomes, strict=True):
            if completion in left:
                assert isinstance(outcome, Cancelled)
            else:
                assert isinstance(outcome, InferResponse)
                assert outcome.outputs["y"].tolist() == [[8, 8]]
        assert sum(batch.count(4) for batch in model.batches) == 1, "the crowd is computed once"
        assert (await served.infer(infer_request(4))).cached
        assert await asyncio.to_thread(served.close, 5)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_the_memory_is_exact_under_a_hostile_mix_of_sizes() -> None:
    """Threads put, read, expire and close entries of 0 to 300 kB in one store with limits of models."""
    limit = 1 << 20
    store = LocalStore(limit)
    versions = [store.open(max_bytes, ttl_ns) for max_bytes, ttl_ns in ((None, 0), (None, 1), (200_000, 0), (5000, 0))]
    problems: list[str] = []
    stop = threading.Event()

    def put(seed: int) -> None:
        draw = random.Random(seed)
        for number in range(1500):
            version = draw.choice(versions)
            size = draw.choice((0, 1, 100, 1000, 30_000, 90_000, 300_000))
            outputs = frozen({"y": np.zeros(size, np.uint8), "t": np.array([b"x" * (size % 777)], object)})
            version.put(draw.randbytes(2).ljust(32, b"k"), outputs, 1, number)
            version.get(draw.randbytes(2).ljust(32, b"k"), number)

    def watch() -> None:
        while not stop.is_set():
            with store._lock:
                if store.used_bytes > limit:
                    problems.append(f"{store.used_bytes} bytes in use")

    threads = [threading.Thread(target=put, args=(seed,)) for seed in range(4)]
    watcher = threading.Thread(target=watch)
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    watcher.join()
    assert not problems
    entries = list(store._entries.values())
    assert store.used_bytes == sum(entry.size_bytes for entry in entries)
    for version in versions:
        own = [entry for entry in entries if entry.totals is version.totals]
        assert (version.totals.entries, version.totals.size_bytes) == (len(own), sum(each.size_bytes for each in own))
    assert versions[2].totals.size_bytes <= 200_000
    assert versions[3].totals.size_bytes <= 5000
    for version in versions:
        version.close()
    assert (store.used_bytes, len(store)) == (0, 0)


ECHO_ID = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        names = [np.array([[request.request_id().encode()]], object) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", name)]) for name in names]
"""


@pytest.mark.parametrize("model", ["echo", "around"])
def test_an_answer_that_depends_on_the_id_is_not_that_of_another_client(echo_server: Server, model: str) -> None:
    tensor = {"name": "X", "shape": [1, 1], "datatype": "FP32", "data": [1]}

    def answer(request_id: str) -> str:
        document = json.loads(post(echo_server, model, json.dumps({"id": request_id, "inputs": [tensor]}).encode()))
        return str(document["outputs"][0]["data"][0])

    assert [answer(each) for each in ("alice", "bob", "alice", "bob")] == ["alice", "bob", "alice", "bob"]
    assert statistics(echo_server, model)["cache_hit"] == 2


@pytest.fixture(scope="module")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("echo")
    io: Any = {"X": ("TYPE_FP32", (1,))}, {"Y": ("TYPE_STRING", (1,))}
    tensors = (
        'input [{ name: "X" data_type: TYPE_FP32 dims: [1] }] output [{ name: "Y" data_type: TYPE_STRING dims: [1] }]'
    )
    for name, cached in (("echo", CACHED), ("inner", "max_batch_size: 8\n")):
        add_python_model(folder / "models", name, ECHO_ID, f'backend: "python"\n{cached}{tensors}')
    steps = [("inner", {"X": "X"}, {"Y": "Y"})]
    models.add_pipeline(folder / "models", "around", models.ensemble_config(steps, *io, CACHED))
    with serving(folder / "models", folder, "--cache-config", "local,size=1MiB") as running:
        yield running


def test_keys_cannot_be_predicted_without_the_secret() -> None:
    """Hash flooding: inputs of one bucket in one process are spread in another, since the secret differs."""
    spec = ModelSpec("m", "1", "test", {"x": TensorSpec("x", FP32, (-1, 4))}, {}, max_batch_size=8)
    requests = [
        InferRequest(inputs={"x": np.full((1, 4), value, np.float32)}, rows=1, shape_key=None, received_ns=0)
        for value in range(2000)
    ]
    factories = [KeyFactory(spec, "load 1", secret) for secret in (b"a" * 32, b"b" * 32)]
    keys = [[factory.key(request) for request in requests] for factory in factories]
    assert len({*keys[0], *keys[1]}) == 4000
    mask = 255  # inputs that a client has chosen for one bucket of one process are spread in another
    bucket = [index for index, key in enumerate(keys[0]) if hash(key) & mask == 0]
    assert len({hash(keys[1][index]) & mask for index in bucket}) > len(bucket) // 2


@pytest.mark.parametrize("pipeline", [False, True])
def test_weights_change_while_equal_requests_are_in_flight(tmp_path: Path, pipeline: bool) -> None:
    """Each answer must be one of the weights that served between its request and its response."""
    repository = tmp_path / "repository"
    models.add_model(repository, "m", models.affine(seed=1), config=CACHED)
    tensors = {"X": ("TYPE_FP32", (16,))}, {"Y": ("TYPE_FP32", (4,))}
    enabled = "max_batch_size: 8 response_cache { enable: true }"
    models.add_pipeline(repository, "p", models.ensemble_config([("m", {"X": "X"}, {"Y": "Y"})], *tensors, enabled))
    options = ("--model-control", "explicit", "--load-model", "p", "--cache-config", "local,size=1MiB")
    name, content = "p" if pipeline else "m", body(1)
    answers: list[tuple[float, float, bytes]] = []
    stop = threading.Event()

    def client(server: Server) -> None:
        while not stop.is_set():
            begun = time.monotonic()
            status, _, answer = server.request("POST", f"/v2/models/{name}/infer", content)
            if status == 200:
                answers.append((begun, time.monotonic(), answer))
            else:
                assert status in (404, 503), answer

    with serving(repository, tmp_path, *options) as server:
        expected = {1: post(server, name, content)}
        threads = [threading.Thread(target=client, args=(server,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        changes: list[tuple[float, float, int]] = []
        for seed in (2, 1, 2, 3):
            models.add_model(repository, "m", models.affine(seed=seed), config=CACHED)
            begun = time.monotonic()
            assert server.request("POST", "/v2/repository/models/m/load", b"{}")[0] == 200
            changes.append((begun, time.monotonic(), seed))
            answer = post(server, name, content)
            assert expected.setdefault(seed, answer) == answer
        assert server.request("POST", "/v2/repository/models/m/unload", b"{}")[0] == 200
        assert server.request("POST", f"/v2/models/{name}/infer", content)[0] in (404, 503)
        stop.set()
        for thread in threads:
            thread.join()
    assert len(set(expected.values())) == 3
    for begun, ended, answer in answers:
        # Weights that were loaded by the end of the request, unless others had replaced them before its begin.
        past = [seed for start, done, seed in [(0.0, 0.0, 1), *changes] if done < begun]
        during = [seed for start, done, seed in changes if done >= begun and start <= ended]
        assert answer in [expected[seed] for seed in (past[-1], *during)]


# Redis


def request_until(server: Server, until: Callable[[], bool], seconds: float) -> list[float]:
    """Send requests, half of them repeated, and compare the answers; returns their times beyond those of the uncached model."""
    durations: list[float] = []
    end, value = time.monotonic() + seconds, 0
    while time.monotonic() < end and not until():
        value += 1
        content = body(value // 2 % 50)
        begun = time.monotonic()
        answer = post(server, "m", content)
        between = time.monotonic()
        assert answer == post(server, "plain", content).replace(b'"plain"', b'"m"')
        durations.append(between - begun - (time.monotonic() - between))
    return durations


@pytest.mark.timing
@pytest.mark.parametrize("fault", ["killed", "paused"])
def test_redis_is_killed_or_paused_in_the_middle_of_traffic(tmp_path: Path, fault: str) -> None:
    repository = tmp_path / "repository"
    models.add_model(repository, "m", models.affine(), config=CACHED)
    models.add_model(repository, "plain", models.affine(), config="max_batch_size: 8")
    with redis_server(tmp_path) as redis, serving(repository, tmp_path, "--cache-config", redis.option) as server:

        def remote() -> dict[str, Any]:
            figures: dict[str, Any] = explained(server, "m")["cache"]["redis"]
            return figures

        wait_for(lambda: remote()["is_up"])
        request_until(server, lambda: remote()["hits"] > 5, 20)
        if fault == "killed":
            redis.kill()
        else:
            redis.pause()
        durations = request_until(server, lambda: not remote()["is_up"], 20)
        assert not remote()["is_up"]
        durations += request_until(server, lambda: False, 1.0)
        # At most a few requests waited, each for 5 ms; the machine adds its own pauses.
        assert sum(duration > 0.1 for duration in durations) <= 3, sorted(durations)[-5:]
        assert remote()["skipped"] > 0
        if fault == "paused":
            redis.resume()
            wait_for(lambda: remote()["is_up"], 30)
            request_until(server, lambda: False, 0.3)
        else:
            with redis_server(tmp_path, port=redis.port):
                wait_for(lambda: remote()["is_up"], 30)
                request_until(server, lambda: False, 0.3)
        assert statistics(server, "m")["fail"] == 0


GARBAGE: dict[str, Reply] = {
    "text": lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a huge length": lambda _: b"$99999999999\r\n" + b"x" * 100,
    "a negative length": lambda _: b"$-5\r\n",
    "nested arrays": lambda _: b"*1\r\n" * 100_000,
    "a huge array": lambda _: b"*999999999\r\n",
    "another type": lambda _: b":5\r\n",
    "no answer": lambda _: b"",
    "closing": lambda _: None,
    "an error": lambda _: b"-WRONGTYPE no\r\n",
    "bytes": lambda _: bytes(range(256)) * 10,
    "a foreign value": lambda _: b"$36\r\nHRC1" + b"\0" * 32 + b"\r\n",
    "too long": lambda _: b"$%d\r\n" % (MAX_VALUE_BYTES * 3) + b"x" * (MAX_VALUE_BYTES * 3) + b"\r\n",
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_an_answer_that_is_not_redis_is_not_served(garbage: str) -> None:
    def reply(command: bytes) -> bytes | None:
        if b"SETINFO" in command:
            return b"+OK\r\n" * command.count(b"SETINFO")
        if b"PING" in command:
            return b"+PONG\r\n"
        if b"SET\r\n" in command:
            return b"+OK\r\n"
        return GARBAGE[garbage](command)

    model = FakeModel()

    async def main(port: int) -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        served = handle(mailbox, model)
        served.digest = "digest"
        config = ModelConfig(name="fake", backend="onnxruntime", response_cache=ResponseCache(enable=True))
        caches = ResponseCaches(CacheOptions(0, RedisOptions(HOST, port)), mailbox)
        assert caches._redis is not None
        served.cache = cache = caches.open(served, config)
        assert cache is not None
        for value in range(1, 5):
            for _ in range(500):
                if caches._redis.is_up:
                    break
                await asyncio.sleep(0.01)
            assert caches._redis.is_up or value > 1
            response = await asyncio.wait_for(served.infer(infer_request(value)), 10)
            assert (response.outputs["y"].tolist(), response.cached) == ([[2 * value] * 2], False)
            if value == 2 and not caches._redis.is_up:
                break  # it is not used any more, and tried again later
        report = cache.report()["redis"]
        assert isinstance(report, dict)
        assert report["hits"] == 0
        assert report["refused"] or report["late"] or report["problem"]
        assert await asyncio.to_thread(served.close, 5)
        await asyncio.to_thread(caches.close)

    with false_redis(reply) as port:
        asyncio.run(asyncio.wait_for(main(port), 60))
