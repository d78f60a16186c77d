"""Servers whose repositories are in S3 (moto), behind a proxy with faults: start, polling, load requests, and errors."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import headrace
import numpy as np
import onnx
import pytest

from tests.support import models
from tests.support.serving import Server, ServerFailed, run_headrace, serving, start
from tests.support.store_servers import (
    SECRET,
    FaultyProxy,
    StoreHandler,
    answering,
    s3_client,
    s3_environment,
    s3_server,
    serve_http,
)
from tests.support.waiting import until

pytestmark = pytest.mark.slow


class Bucket:
    """A bucket of the S3 server, and the variables with which a server reads it through the proxy."""

    def __init__(self, s3: Any, name: str, proxy: FaultyProxy, port: int) -> None:
        self._s3, self._name = s3, name
        self.proxy = proxy
        self.url = f"s3://{name}/models"
        self.env = s3_environment(port)
        s3.create_bucket(Bucket=name)

    def put(self, path: str, content: bytes) -> None:
        self._s3.put_object(Bucket=self._name, Key=f"models/{path}", Body=content)

    def put_model(self, name: str, seed: int, version: int = 1) -> None:
        self.put(f"{name}/{version}/model.onnx", models.affine(seed=seed).SerializeToString())

    def remove(self, path: str) -> None:
        self._s3.delete_object(Bucket=self._name, Key=f"models/{path}")


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def bucket(s3_port: int, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    s3 = s3_client(s3_port)
    proxy = FaultyProxy(s3_port)
    with proxy.serve() as port:
        name = f"bucket-{abs(hash(request.node.name)) % 10**12}"
        yield Bucket(s3, name, proxy, port)


def infer(server: Server, model: str) -> np.ndarray:
    body = {"inputs": [{"name": "X", "shape": [1, 16], "datatype": "FP32", "data": [1.0] * 16}]}
    status, _, content = server.request("POST", f"/v2/models/{model}/infer", json.dumps(body).encode())
    assert status == 200, content
    return np.array(json.loads(content)["outputs"][0]["data"], np.float32)


def expected(seed: int) -> np.ndarray:
    weights = {each.name: onnx.numpy_helper.to_array(each) for each in models.affine(seed=seed).graph.initializer}
    return np.maximum(np.ones((1, 16), np.float32) @ weights["W"] + weights["B"], 0)[0]


def serves(server: Server, model: str, seed: int) -> bool:
    return bool(np.allclose(infer(server, model), expected(seed), atol=1e-4))


def status(server: Server) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = json.loads(server.request("GET", "/v2/status")[2])["stores"]
    return result


def test_models_of_a_bucket_and_of_a_folder_serve_together(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put_model("remote", seed=1)
    bucket.put("README.md", b"text")
    # Throttling and cut connections delay the start only.
    bucket.put("remote/1/notes.bin", os.urandom(2_000_000))
    bucket.proxy.slow_downs, bucket.proxy.cuts = 3, 2
    local = tmp_path / "local"
    models.add_model(local, "here", models.affine(seed=2))
    options = ["--model-repository", bucket.url, "--repository-cache-dir", str(tmp_path / "cache")]
    with serving(local, tmp_path, *options, env=bucket.env) as server:
        assert (bucket.proxy.slow_downs, bucket.proxy.cuts) == (0, 0)
        assert serves(server, "remote", 1)
        assert serves(server, "here", 2)
        (store,) = status(server)
        assert store["url"] == bucket.url
        assert store["reachable"] is True
        page = server.request("GET", "/metrics")[2].decode()
        assert f'headrace_repository_reachable{{repository="{bucket.url}"}} 1.0' in page
        assert SECRET not in server.text + page
    # The next server compares, and reads no object again.
    reads = len(bucket.proxy.reads())
    with serving(local, tmp_path, *options, env=bucket.env) as server:
        assert serves(server, "remote", 1)
    assert len(bucket.proxy.reads()) == reads
    assert not bucket.proxy.reads("README")


def test_polling_reads_changed_objects_only(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put_model("changing", seed=1)
    bucket.put("changing/config.yaml", b"version_policy: {all: {}}\n")
    bucket.put_model("staying", seed=3)
    options = ["--model-control", "poll", "--poll-interval-s", "0.2", "--repository-cache-dir", str(tmp_path / "cache")]
    with serving(bucket.url, tmp_path, *options, env=bucket.env) as server:
        assert serves(server, "changing", 1)
        bucket.proxy.requests.clear()
        bucket.put_model("changing", seed=2, version=2)
        until(lambda: serves(server, "changing", 2))
        bucket.put_model("changing", seed=4, version=2)
        until(lambda: serves(server, "changing", 4))
        assert {path.rpartition("/models/")[2] for path in bucket.proxy.reads()} == {"changing/2/model.onnx"}
        bucket.remove("changing/2/model.onnx")
        until(lambda: serves(server, "changing", 1))
        assert len(bucket.proxy.reads("changing/2")) == 2
        assert serves(server, "staying", 3)


def test_a_store_that_refuses_leaves_the_models_in_service_and_one_that_is_away_lets_the_server_stop(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused at once, not after the attempts of a store that is away, which take half a minute."""
    bucket.put_model("net", seed=1)
    options = ["--model-control", "poll", "--poll-interval-s", "0.2", "--repository-cache-dir", str(tmp_path / "cache")]
    with serving(bucket.url, tmp_path, *options, env=bucket.env) as server:
        with monkeypatch.context() as patch:
            patch.setattr(bucket.proxy, "answer", lambda handler: handler.send(403, b"<Error/>"))
            until(lambda: not status(server)[0]["reachable"])
            assert "refuses access" in status(server)[0]["error"]
            assert serves(server, "net", 1)
            assert server.request("GET", "/v2/health/ready")[0] == 200
            page = server.request("GET", "/metrics")[2].decode()
            assert f'headrace_repository_reachable{{repository="{bucket.url}"}} 0.0' in page
            bucket.put_model("net", seed=2, version=2)
        until(lambda: serves(server, "net", 2))
        assert status(server)[0]["reachable"] is True
        assert server.text.count("what is loaded stays in service") == 1
        assert server.text.count("can be read again") == 1
        bucket.proxy.slow_downs = 1 << 30
        requests = len(bucket.proxy.requests)
        until(lambda: len(bucket.proxy.requests) > requests + 1)
    assert "Traceback" not in server.text


def test_a_server_stops_in_the_middle_of_its_first_download(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("net/1/model.onnx", os.urandom(8_000_000))
    is_reading, is_stopped = threading.Event(), threading.Event()

    def hold(_method: str, path: str) -> None:
        if path.endswith("model.onnx"):
            is_reading.set()
            is_stopped.wait(60)

    bucket.proxy.before = hold
    server = start(bucket.url, tmp_path / "log", "--repository-cache-dir", str(tmp_path / "cache"), env=bucket.env)
    try:
        assert is_reading.wait(60)
        server.signal()
    finally:
        is_stopped.set()
    assert server.wait(60) == 0
    assert "Traceback" not in server.text


def test_a_server_stops_in_the_middle_of_a_listing_without_an_end(tmp_path: Path) -> None:
    paths: list[str] = []
    page = b"<ListBucketResult><NextContinuationToken>same</NextContinuationToken></ListBucketResult>"

    def answer(handler: StoreHandler) -> None:
        paths.append(handler.path)
        handler.send(200, page, {"Content-Type": "application/xml"})

    with serve_http(answering(answer)) as port:
        options = ["--repository-cache-dir", str(tmp_path / "cache")]
        server = start("s3://bucket/models", tmp_path / "log", *options, env=s3_environment(port))
        until(lambda: len(paths) > 3)
        server.signal()
        assert server.wait(60) == 0
    assert "Traceback" not in server.text


def test_a_load_request_compares_the_store_first(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put_model("net", seed=1)
    options = ["--model-control", "explicit", "--load-model", "net", "--repository-cache-dir", str(tmp_path / "cache")]
    with serving(bucket.url, tmp_path, *options, env=bucket.env) as server:
        bucket.put_model("net", seed=2)
        bucket.put_model("new", seed=3)
        assert serves(server, "net", 1)
        for name in ("net", "new"):
            assert server.request("POST", f"/v2/repository/models/{name}/load")[0] == 200
        assert serves(server, "net", 2)
        assert serves(server, "new", 3)


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("s3://no-such-bucket-here/models", "does not exist"),
        ("{}/empty", "has no objects"),
    ],
)
def test_a_url_without_models_is_named_at_start(bucket: Bucket, tmp_path: Path, url: str, part: str) -> None:
    url = url.format(bucket.url)
    options = ["--repository-cache-dir", str(tmp_path / "cache")]
    server = start(url, tmp_path / "log", *options, env=bucket.env)
    assert server.wait(60) == 1
    assert part in server.text
    assert url in server.text
    assert SECRET not in server.text
    assert "Traceback" not in server.text


def test_an_unreachable_store_is_named_at_start(tmp_path: Path) -> None:
    env = {**s3_environment(1), "HEADRACE_REPOSITORY_CACHE_DIR": str(tmp_path)}
    server = start(tmp_path, tmp_path / "log", "--model-repository", "s3://bucket/models", env=env)
    with pytest.raises(ServerFailed, match="exited with 1"):
        server.wait_until_ready(180)
    assert "s3://bucket/models cannot be read" in server.text
    assert "check the network" in server.text
    assert SECRET not in server.text


@pytest.mark.parametrize(
    "url", ["s3:/bucket/models", "s4://bucket/models", "s3://AKIA:a-secret-of-this-test@bucket/models"]
)
def test_a_mangled_url_is_an_error_of_the_command_line(tmp_path: Path, url: str) -> None:
    server = start(url, tmp_path / "log")
    assert server.wait(60) == 2
    assert "--model-repository" in server.text
    assert "://" in server.text
    assert SECRET not in server.text
    assert "Traceback" not in server.text


def test_an_embedded_server_takes_a_url(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put_model("net", seed=1)
    for name, value in bucket.env.items():
        monkeypatch.setenv(name, value)
    with headrace.Server(bucket.url, state_dir=tmp_path, profile_s=0) as server:
        outputs = server.model("net").infer({"X": np.ones((1, 16), np.float32)})
    assert np.allclose(outputs["Y"][0], expected(1), atol=1e-4)


def test_front_end_processes_mirror_in_the_engine(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put_model("net", seed=1)
    options = ["--front-ends", "1", "--model-control", "poll", "--poll-interval-s", "0.2"]
    options += ["--repository-cache-dir", str(tmp_path / "cache")]
    with serving(bucket.url, tmp_path, *options, env=bucket.env) as server:
        assert serves(server, "net", 1)
        bucket.put_model("net", seed=2)
        until(lambda: serves(server, "net", 2))


def run(bucket: Bucket, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command with its copies in a folder of the test."""
    line = [*words, "--repository-cache-dir", tmp_path / "cache"]
    return run_headrace(*line, env=os.environ | bucket.env, cwd=tmp_path, timeout_s=100)


def test_validate_tune_and_simulate_read_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put_model("good", seed=1)
    bucket.put("good/config.yaml", b"max_batch_size: 4\n")
    bucket.put_model("bad", seed=2)
    bucket.put("bad/config.yaml", b"max_batch_sice: 4\n")
    done = run(bucket, tmp_path, "validate", bucket.url, "--state-dir", "")
    assert done.returncode == 1
    assert "max_batch_sice" in done.stdout
    assert "1 good model, 1 error, 0 warnings" in done.stdout
    reads = len(bucket.proxy.reads())
    # The copy stays: the next commands read no object again.
    done = run(bucket, tmp_path, "simulate", "good", "--model-repository", bucket.url, "--seconds", "0.2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["settings"][0]["models"][0]["name"] == "good"
    words = ("--instances", "1", "--repeats", "1", "--seconds", "0.02", "--json")
    done = run(bucket, tmp_path, "tune", "good", "--model-repository", bucket.url, *words)
    assert done.returncode == 0, done.stderr
    assert len(bucket.proxy.reads()) == reads
    done = run(bucket, tmp_path, "tune", "good", "--model-repository", bucket.url, "--apply")
    assert done.returncode == 2
    assert f"--apply changes a local configuration, {bucket.url} is in a store: leave it out" in done.stderr
    assert SECRET not in done.stdout + done.stderr


def test_commands_name_what_is_wrong_with_a_store(bucket: Bucket, tmp_path: Path) -> None:
    done = run(bucket, tmp_path, "validate", bucket.url)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{bucket.url}: error:"), done.stderr
    assert done.stderr.count("\n") == 1, "one line, no traceback"
    done = run(bucket, tmp_path, "validate", "s4://bucket/models")
    assert done.returncode == 2
    assert "'s4://' is not a store" in done.stderr
    done = run(bucket, tmp_path, "tune", f"{bucket.url}/good")
    assert done.returncode == 1
    assert "is a URL: write the name of the model, and its repository as --model-repository URL" in done.stderr
