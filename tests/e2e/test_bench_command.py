"""`headrace bench` against a real server: both protocols, every form of load and of inputs, errors, Ctrl-C, comparison, page."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from deploy.make_keys import KEYS_FILE, make_keys
from tests.support.certificates import Certificates
from tests.support.models import add_model, affine
from tests.support.serving import HOST, Server, free_port, run_headrace, serving

# One client process: each imports for most of a second. Tests of sweeps have two.
SHORT = ("--duration", "0.4", "--warm-up", "0.1", "--processes", "1")


@dataclass
class Bench:
    server: Server
    folder: Path

    def url(self, protocol: str) -> str:
        return self.server.url if protocol == "http" else f"grpc://{self.server.grpc_address}"

    def run(self, *words: str) -> tuple[int, str, str]:
        done = run_headrace("bench", *words, timeout_s=200)
        return done.returncode, done.stdout, done.stderr

    def measure(self, *words: str) -> dict[str, Any]:
        """The document of a run that must succeed."""
        file = self.folder / "result.json"
        status, out, err = self.run(*SHORT, *words, "--json", str(file))
        if "no request was due in the measured time" in out:  # something else had the processors all that time
            status, out, err = self.run(*SHORT, "--duration", "5", *words, "--json", str(file))
        assert status == 0, out + err
        document: dict[str, Any] = json.loads(file.read_text())
        return document


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("bench")
    add_model(folder / "repository", "net", affine())
    with serving(folder / "repository", folder, "--allow-client-shm") as server:
        yield Bench(server, folder)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_closed_loop_is_a_sweep(bench: Bench, protocol: str) -> None:
    document = bench.measure(
        bench.url(protocol),
        "net",
        "--concurrency",
        "1,6",
        "--check",
        "--slo",
        "10000",
        "--batch",
        "2",
        "--processes",
        "2",
    )
    assert [point["label"] for point in document["points"]] == ["concurrency 1", "concurrency 6"]
    for point in document["points"]:
        assert point["errors"] == {}
        assert point["succeeded"] == point["requests"] == sum(point["histogram"]["counts"]) > 0
        assert point["in_time"] == 1.0
        latency = point["latency_ms"]
        assert latency["min"] <= latency["p50"] <= latency["p99"] <= latency["max"]
        assert point["rows_per_s"] == pytest.approx(2 * point["throughput_per_s"])
        # The server's statistics, read at both ends of the measured time.
        assert point["server"]["requests"] > 0
        assert point["server"]["mean_batch"] >= 2
        assert {"queue", "compute_infer"} <= set(point["server"]["phases_us"])
    assert document["inputs"] == [{"name": "X", "datatype": "FP32", "shape": [2, 16]}]
    assert document["points"][1]["connections_opened"] == 6


def test_the_processor_time_of_the_server_is_read(bench: Bench) -> None:
    pid = str(bench.server.process.pid)
    document = bench.measure(bench.url("http"), "net", "--server-pid", pid, "--duration", "1")
    (point,) = document["points"]
    assert point["server_cpu_us_per_request"] > 0
    assert point["client_cpu_us_per_request"] > 0
    status, _, err = bench.run(bench.url("http"), "net", "--server-pid", str(2**30))
    assert status == 1
    assert "shows no such process: name the server's process" in err


def test_poisson_arrivals_and_traces(bench: Bench) -> None:
    document = bench.measure(bench.url("http"), "net", "--rate", "50,100", "--poisson", "--repeat", "3")
    assert [point["label"] for point in document["points"]] == ["poisson 50/s", "poisson 100/s"]
    assert len(document["points"][0]["repeats"]["throughput_per_s"]) == 3
    trace = bench.folder / "trace.csv"
    trace.write_text("model,seconds\n" + "".join(f"net,{7 + n / 100}\n" for n in range(30)))
    file = bench.folder / "trace.json"
    status, out, err = bench.run(bench.url("http"), "net", "--trace", str(trace), "--json", str(file))
    assert status == 0, out + err
    (point,) = json.loads(file.read_text())["points"]
    assert (point["requests"], point["succeeded"]) == (30, 30)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_inputs_travel_through_shared_memory(bench: Bench, protocol: str) -> None:
    document = bench.measure(bench.url(protocol), "net", "--shared-memory", "--check", "--distinct", "5")
    assert document["points"][0]["errors"] == {}
    assert document["source"] == "random, shared memory"
    assert not list(Path("/dev/shm").glob("hrbench_client_*"))
    _, _, body = bench.server.request("GET", "/v2/systemsharedmemory/status")
    assert json.loads(body) == []


def test_files_and_json_bodies(bench: Bench) -> None:
    np.savez(bench.folder / "rows.npz", X=np.ones((6, 16), np.float32))
    document = bench.measure(
        bench.url("http"), "net", "--npz", str(bench.folder / "rows.npz"), "--batch", "2", "--body", "json", "--check"
    )
    assert document["distinct_requests"] == 3
    assert document["points"][0]["errors"] == {}


# What is found in the words alone has status 2, whatever the protocol.
ERRORS: list[tuple[tuple[str, ...], int, str]] = [
    (("URL", "nett"), 1, r"has no model 'nett' \(.*\): name "),
    (
        ("grpc://127.0.0.1:FREE", "net"),
        1,
        r"no server answers at grpc://127\.0\.0\.1:\d+: start one with `headrace serve`",
    ),
    (
        ("http://127.0.0.1:FREE", "net"),
        1,
        r"no server answers at http://127\.0\.0\.1:\d+: start one with `headrace serve`",
    ),
    (("URL", "net", "--shape", "X:1,17"), 1, r"does not fit the model's shape \[-1, 16\]: give as many sizes"),
    (
        ("URL", "net", "--concurrency", "4", "--connections", "2"),
        2,
        r"carry fewer requests than --concurrency 4: .* raise",
    ),
    (("URL",), 2, r"the model is missing: write headrace bench MODEL"),
    (("URL", "net", "--trace", "/no/such"), 2, r"/no/such: cannot be read: .*: write one arrival"),
    (("--compare", "/no/a", "/no/b"), 2, r"/no/a: cannot be read: .*: name a file"),
    (("URL", "net", "--shape", "X=1"), 2, r"is no shape: write NAME:SIZE"),
]


@pytest.mark.parametrize(
    ("protocol", "words", "status", "message"),
    [(protocol, *each) for each in ERRORS for protocol in ("http", "grpc") if each[1] == 1 or protocol == "http"],
)
def test_errors_name_the_cause_and_the_cure(
    bench: Bench, protocol: str, words: tuple[str, ...], status: int, message: str
) -> None:
    line = [word.replace("URL", bench.url(protocol)).replace("FREE", str(free_port())) for word in words]
    result, out, err = bench.run(*line)
    assert result == status, out + err
    assert re.search(message, err), err
    assert "Traceback" not in err


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_ctrl_c_prints_what_was_measured(bench: Bench, protocol: str) -> None:
    file = bench.folder / "interrupted.json"
    line = [
        sys.executable,
        "-m",
        "headrace",
        "bench",
        bench.url(protocol),
        "net",
        "--duration",
        "600",
        "--warm-up",
        "0",
    ]
    before = _successes(bench)
    process = subprocess.Popen([*line, "--json", str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while _successes(bench) < before + 50:
            assert process.poll() is None
    finally:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert "interrupted: the figures are those measured so far" in out
    document = json.loads(file.read_text())
    assert document["interrupted"]
    assert document["points"][0]["requests"] >= 40


def _successes(bench: Bench) -> int:
    _, _, body = bench.server.request("GET", "/v2/models/net/stats")
    return int(json.loads(body)["model_stats"][0]["inference_stats"]["success"]["count"])


class _Links(HTMLParser):
    """Collects tags, and attributes that make a browser fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_pages_and_comparison(bench: Bench) -> None:
    files = [bench.folder / name for name in ("a.json", "b.json")]
    page = bench.folder / "a.html"
    words = (bench.url("http"), "net", "--concurrency", "1,4", "--slo", "5")
    status, out, err = bench.run(*words, *SHORT, "--json", str(files[0]), "--html", str(page))
    assert status == 0, out + err
    shutil.copy(*files)
    comparison = bench.folder / "c.json"
    html = bench.folder / "c.html"
    status, out, err = bench.run("--compare", *map(str, files), "--json", str(comparison), "--html", str(html))
    assert status == 0, out + err
    assert "a.json -> b.json" in out
    rows = json.loads(comparison.read_text())["rows"]
    assert {row["load"] for row in rows} == {"concurrency 1", "concurrency 4"}
    assert {"requests/s", "goodput/s", "p50", "p99"} <= {row["figure"] for row in rows}
    for file in (page, html):
        links = _Links()
        links.feed(file.read_text())
        assert links.fetched == []
        assert "svg" in links.tags
        assert "table" in links.tags
        assert "script" not in links.tags
    assert "Sweep" in page.read_text()
    assert "Latency histogram" in page.read_text()


def test_keys_tls_and_headers(tmp_path: Path) -> None:
    add_model(tmp_path / "repository", "net", affine())
    certificates = Certificates(tmp_path)
    make_keys(tmp_path)
    pair = certificates.server
    options = ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
    options += ["--api-keys-file", str(tmp_path / KEYS_FILE)]
    with serving(tmp_path / "repository", tmp_path, *options) as server:
        secured = Bench(server, tmp_path)
        ca = ("--ca", str(certificates.authority))
        key = (tmp_path / "infer.key").read_text().strip()
        for url in (f"https://{server.address}", f"grpcs://{server.grpc_address}"):
            status, _, err = secured.run(url, "net", *ca)
            assert status == 1
            assert "the server needs an API key: name one with --api-key-file" in err
            status, _, err = secured.run(url, "net", "--api-key-file", str(tmp_path / "infer.key"))
            assert status == 1
            assert "is not trusted" in err
            assert "--ca FILE" in err
            document = secured.measure(url, "net", *ca, "--api-key-file", str(tmp_path / "infer.key"), "--check")
            assert document["points"][0]["errors"] == {}
            document = secured.measure(url, "net", *ca, "--header", f"Authorization: Bearer {key}", "--rate", "50")
            (point,) = document["points"]
            assert (point["requests"], point["errors"], point["label"]) == (20, {}, "constant 50/s")
            assert key not in json.dumps(document)


class Forwarding(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Forwards every unary call."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        call = self._channel.unary_unary(handler_call_details.method)
        return grpc.unary_unary_rpc_method_handler(lambda message, _: call(message))


@pytest.fixture
def grpcio_address(bench: Bench) -> Iterator[str]:
    """A grpcio server that forwards every unary call to the server of the other tests."""
    with grpc.insecure_channel(bench.server.grpc_address) as channel, ThreadPoolExecutor(16) as pool:
        forwarding = grpc.server(pool, handlers=[Forwarding(channel)])
        port = forwarding.add_insecure_port(f"{HOST}:0")
        forwarding.start()
        yield f"{HOST}:{port}"
        forwarding.stop(None).wait()


def test_the_http2_of_grpcio_is_understood(bench: Bench, grpcio_address: str) -> None:
    """Another implementation of HTTP/2 on the server's side: dynamic header tables, its own windows and settings."""
    # 256 KB a request: more than the window of a new stream. A busy machine needs most of a second for one.
    large = ("--concurrency", "3", "--batch", "4096", "--duration", "2")
    for words in (("--concurrency", "12"), large, ("--rate", "50")):
        (point,) = bench.measure(f"grpc://{grpcio_address}", "net", "--check", *words)["points"]
        assert point["errors"] == {}
        assert point["succeeded"] > 0
