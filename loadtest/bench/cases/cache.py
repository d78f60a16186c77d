"""The response cache: the latency of a hit beside that of a refused request, throughput without hits, and with every second
request a hit."""

from __future__ import annotations

import shutil
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import onnx
from onnx import TensorProto, helper

from loadtest import grpc_protocol
from loadtest.bench.inprocess import WrongAnswer
from loadtest.bench.results import CaseResult, Comparison, Figure, Target, at_least, at_most
from loadtest.bench.session import Bench, Case, Question, answer, interleave
from loadtest.bench.spread import Spread, completion_rate, ratios
from loadtest.bench.wrk import Load
from loadtest.onnx_models import onnx_model
from loadtest.protocol import Array, HttpRequest, binary_request, decode_answer, send_json, wire_bytes
from loadtest.servers import HOST, Running, cpu_seconds

HIT, REFUSED, UNKNOWN, COMPUTED = "hit", "refused: 400", "refused: 404", "computed"
CACHED, PLAIN = "with a cache", "without a cache"
WIDTHS = {"64 bytes": 16, "4 KB": 1024, "600 KB": 150_528}
LARGEST_SMALL_BYTES = 4096
EXTRA_US = 25.0
HASH_BYTES_PER_US = 5000.0
DISTINCT = 512
"""Different requests that are sent in turn; the cache of the case without hits holds a tenth of them."""
PICTURES = 48
PAIRS = 1500
MISS_CONNECTIONS, MODEL_CONNECTIONS = 64, 16
ENABLED = "response_cache { enable: true }\n"

Exchange = Callable[[], None]


@dataclass(frozen=True, slots=True)
class CacheCost(Case):
    """All figures of the cache in one run; contenders take turns.

    Attributes:
        without_hits: target of requests a second with a cache that never hits, over those without a cache.
        half_hits: the same for resnet50 with every second request a hit.
    """

    without_hits: Target
    half_hits: Target

    contenders = 4
    sample_s = 6

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return "response cache: a hit beside a refused request, one connection; no hits; every second request of resnet50 a hit"

    def run(self, bench: Bench) -> CaseResult:
        """Check all answers, then measure."""
        figures: list[Figure] = []
        comparisons: list[Comparison] = []
        for part in (self._hits, self._without_hits, self._half_hits):
            more_figures, more_comparisons = part(bench)
            figures += more_figures
            comparisons += more_comparisons
        notes = (
            "a refused request has the same head and size, and a wrong key in its JSON; all kinds take turns",
            f"without hits: {DISTINCT} different requests in turn, and a cache for a tenth of them, which switches itself off",
        )
        return CaseResult(self.name, self.title, figures, comparisons, notes)

    # Hits

    def _hits(self, bench: Bench) -> tuple[list[Figure], list[Comparison]]:
        repository = bench.scratch / "cache-hits"
        for width in WIDTHS.values():
            write_model(repository, f"cached{width}", width, ENABLED)
            write_model(repository, f"plain{width}", width)
        ours = replace(bench, repository=repository)
        names = [f"{kind}{width}" for kind in ("cached", "plain") for width in WIDTHS.values()]
        figures: list[Figure] = []
        comparisons: list[Comparison] = []
        with ours.headrace(*names, name="hits", options=("--cache-config", "local,size=64MiB")) as server:
            for label, width in WIDTHS.items():
                medians = self._latencies(ours, server, width)
                figures += [Figure(f"{label}, {name}", "p50 us", Spread.of(values)) for name, values in medians.items()]
                extra = [hit - refused for hit, refused in zip(medians[HIT], medians[REFUSED], strict=True)]
                size_bytes = 4 * width
                allowed_us = EXTRA_US + (size_bytes / HASH_BYTES_PER_US if size_bytes > LARGEST_SMALL_BYTES else 0)
                comparisons.append(
                    Comparison(f"{label}: hit - refused, p50", "us", Spread.of(extra), at_most(allowed_us))
                )
            medians = self._grpc_latencies(ours, server)
            figures += [Figure(f"gRPC, 4 KB, {name}", "p50 us", Spread.of(values)) for name, values in medians.items()]
            extra = [hit - refused for hit, refused in zip(medians[HIT], medians[UNKNOWN], strict=True)]
            comparisons.append(Comparison("gRPC, 4 KB: hit - refused, p50", "us", Spread.of(extra), at_most(EXTRA_US)))
        return figures, comparisons

    def _latencies(self, bench: Bench, server: Running, width: int) -> dict[str, list[float]]:
        """Return the medians of each round in microseconds over HTTP."""
        inputs = {"x": np.random.default_rng(1).standard_normal((1, width)).astype(np.float32)}
        requests = {
            HIT: binary_request(f"cached{width}", inputs),
            COMPUTED: binary_request(f"plain{width}", inputs),
            UNKNOWN: binary_request(f"absent{width}", inputs),
        }
        hit = requests[HIT]
        requests[REFUSED] = replace(hit, body=hit.body.replace(b'"inputs"', b'"inputz"', 1))
        for name in (HIT, COMPUTED):
            for _ in range(2):
                _check_sum(decode_answer(*answer(server, requests[name])), inputs["x"])
        expected = {HIT: b" 200 ", COMPUTED: b" 200 ", UNKNOWN: b" 404 ", REFUSED: b" 400 "}
        connections = {name: socket.create_connection((HOST, server.port)) for name in requests}
        try:
            exchanges: dict[str, Exchange] = {}
            for name, connection in connections.items():
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                exchanges[name] = partial(
                    _exchange, connection, wire_bytes(requests[name], server.port), expected[name]
                )
            return self._alternate(bench, f"latency of {4 * width} bytes", exchanges)
        finally:
            for connection in connections.values():
                connection.close()

    def _grpc_latencies(self, bench: Bench, server: Running) -> dict[str, list[float]]:
        """Return the medians of each round in microseconds over gRPC; grpcio takes most of the time."""
        inputs = {"x": np.ones((1, WIDTHS["4 KB"]), np.float32)}
        with grpc.insecure_channel(f"{HOST}:{server.grpc_port}") as channel:
            infer = channel.unary_unary(grpc_protocol.MODEL_INFER)
            messages = {
                name: grpc_protocol.infer_message(f"{model}1024", inputs) for name, model in _GRPC_MODELS.items()
            }
            for name in (HIT, COMPUTED):
                _check_sum(grpc_protocol.decode_answer(infer(messages[name], timeout=30)), inputs["x"])

            def call(name: str) -> None:
                try:
                    infer(messages[name], timeout=30)
                except grpc.RpcError as error:
                    if name != UNKNOWN or error.code() is not grpc.StatusCode.NOT_FOUND:
                        raise

            return self._alternate(bench, "latency over gRPC", {name: partial(call, name) for name in messages})

    def _alternate(self, bench: Bench, step: str, exchanges: Mapping[str, Exchange]) -> dict[str, list[float]]:
        """Run all exchanges in turn; the medians of each round in microseconds."""
        medians: dict[str, list[float]] = {name: [] for name in exchanges}
        for _ in range(bench.rounds):
            bench.progress(step, 2)
            times: dict[str, list[float]] = {name: [] for name in exchanges}
            for _ in range(PAIRS // 6 if bench.quick else PAIRS):
                for name, exchange in exchanges.items():
                    begun_ns = time.perf_counter_ns()
                    exchange()
                    times[name].append((time.perf_counter_ns() - begun_ns) / 1000)
            for name, values in times.items():
                medians[name].append(statistics.median(values))
        return medians

    # Throughput

    def _without_hits(self, bench: Bench) -> tuple[list[Figure], list[Comparison]]:
        width = WIDTHS["4 KB"]
        values = np.random.default_rng(2).standard_normal((DISTINCT, 1, width)).astype(np.float32)
        requests = [binary_request("m", {"x": value}) for value in values]
        with self._servers(bench, "cache-misses", width, f"local,size={DISTINCT // 10}KiB") as servers:
            load = Load(tuple(requests), MISS_CONNECTIONS, bench.seconds(self.sample_s), cpus=bench.cores.client)
            for server in servers:
                _check_sum(decode_answer(*answer(server, requests[0])), values[0])
            for server in servers:
                bench.warm_up(server, load)
            cpu_us: dict[str, list[float]] = {server.name: [] for server in servers}
            contenders = {server.name: partial(self._rate_and_cost, bench, server, load, cpu_us) for server in servers}
            rates = interleave(contenders, self.rounds(bench))
        figures = [
            Figure(f"no hits, {name}", unit, Spread.of(values[name]))
            for unit, values in (("requests/s", rates), ("CPU us/request", cpu_us))
            for name in values
        ]
        label = "no hits: with / without a cache, requests/s"
        by_cpu = Comparison(
            "no hits: with / without a cache, CPU us/request", "", ratios(cpu_us[CACHED], cpu_us[PLAIN])
        )
        return figures, [Comparison(label, "", ratios(rates[CACHED], rates[PLAIN]), self.without_hits), by_cpu]

    def _rate_and_cost(self, bench: Bench, server: Running, load: Load, cpu_us: dict[str, list[float]]) -> float:
        """Return requests a second; adds the processor time of the server for a request."""
        before_s = cpu_seconds(server.pid)
        sample = bench.measure(server, load)
        cpu_us[server.name].append((cpu_seconds(server.pid) - before_s) * 1e6 / sample.requests)
        return sample.requests_per_s

    def _half_hits(self, bench: Bench) -> tuple[list[Figure], list[Comparison]]:
        question = bench.question("resnet50")
        requests = _every_second_equal(question)
        repository = bench.scratch / "cache-resnet50"
        _copy_with_cache(bench, "resnet50", repository)
        cached = replace(bench, repository=repository)
        load = Load(
            tuple(requests),
            MODEL_CONNECTIONS,
            max(bench.seconds(3 * self.sample_s), 8),  # shorter samples end before the first batches
            cpus=bench.cores.both,
            record_completions=True,
        )
        cores = bench.cores.both
        with (
            # Two of the outputs of 4 kB fit: the one that repeats stays.
            cached.headrace(
                "resnet50", cpus=cores, name=CACHED, options=("--cache-config", "local,size=64KiB")
            ) as with_cache,
            bench.headrace("resnet50", cpus=cores, name=PLAIN) as without,
        ):
            servers = (with_cache, without)
            for server in servers:
                bench.check(server, question)
                bench.progress(f"warm up {server.name}", 0.0)
                bench.load(server, replace(load, seconds=5))
            rates = interleave(
                {server.name: partial(self._rate, bench, server, load) for server in servers}, self.rounds(bench)
            )
            report = send_json(HOST, with_cache.port, "/v2/models/resnet50/explain")["cache"]
        figures = [
            Figure(f"resnet50, half hits, {name}", "images/s", Spread.of(values)) for name, values in rates.items()
        ]
        figures.append(Figure("resnet50, half hits", "hits of all lookups", Spread.of([report["hit_ratio"]])))
        label = "resnet50, half hits: with / without a cache, images/s"
        return figures, [Comparison(label, "", ratios(rates[CACHED], rates[PLAIN]), self.half_hits)]

    def _rate(self, bench: Bench, server: Running, load: Load) -> float:
        sample = bench.measure(server, load)
        times_s = sample.completions_s[MODEL_CONNECTIONS:]
        return completion_rate(times_s) if len(times_s) > MODEL_CONNECTIONS else sample.requests_per_s

    @contextmanager
    def _servers(self, bench: Bench, name: str, width: int, option: str) -> Iterator[tuple[Running, Running]]:
        """Two servers of one model on the server's core, with a cache and without."""
        for kind, enabled in ((CACHED, ENABLED), (PLAIN, "")):
            write_model(bench.scratch / name / kind, "m", width, enabled)
        cached = replace(bench, repository=bench.scratch / name / CACHED)
        plain = replace(bench, repository=bench.scratch / name / PLAIN)
        with (
            cached.headrace("m", name=CACHED, options=("--cache-config", option)) as with_cache,
            plain.headrace("m", name=PLAIN) as without,
        ):
            yield with_cache, without


_GRPC_MODELS = {HIT: "cached", COMPUTED: "plain", UNKNOWN: "absent"}


def write_model(repository: Path, name: str, width: int, config: str = "") -> None:
    """Write a model that returns the sum of a row `x` of FP32 as `y`."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=1)
    x, y = (TensorProto.FLOAT, ("rows", width)), (TensorProto.FLOAT, ("rows", 1))
    onnx.save(onnx_model([node], {"x": x}, {"y": y}, {"axes": np.array([1])}), folder / "1" / "model.onnx")
    text = "max_batch_size: 64\ndynamic_batching { }\ninstance_group [{ kind: KIND_CPU }]\n"
    (folder / "config.pbtxt").write_text(text + config)


def _copy_with_cache(bench: Bench, model: str, repository: Path) -> None:
    """Copy a model into another repository, with `response_cache`."""
    shutil.copytree(bench.repository / model, repository / model)
    with (repository / model / "config.pbtxt").open("a") as config:
        config.write(ENABLED)


def _every_second_equal(question: Question) -> list[HttpRequest]:
    """Return requests of which every second one is the question, and the others are different."""
    requests = []
    for number in range(PICTURES):
        changed = {name: np.array(array) for name, array in question.inputs.items()}
        for array in changed.values():
            array.flat[0] = number + 1
        requests += [question.request, binary_request(question.model, changed)]
    return requests


def _check_sum(outputs: Mapping[str, Array], x: Array) -> None:
    if not np.allclose(outputs["y"], x.sum(axis=1, keepdims=True), rtol=1e-3, atol=1e-3):
        raise WrongAnswer(f"the sum is {x.sum()}, the answer {outputs['y']}")


def _exchange(connection: socket.socket, request: bytes, status: bytes) -> None:
    """Send a request and read its whole answer; raises WrongAnswer for another status."""
    connection.sendall(request)
    content = connection.recv(1 << 16)
    while b"\r\n\r\n" not in content:
        content += connection.recv(1 << 16)
    head, _, body = content.partition(b"\r\n\r\n")
    if status not in head[:32]:
        raise WrongAnswer(f"expected{status.decode()}, got {head[:100]!r}")
    size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    received = len(body)
    while received < size:
        received += len(connection.recv(1 << 16))


CASES: tuple[Case, ...] = (CacheCost("cache", 1, without_hits=at_least(0.98), half_hits=at_least(1.9)),)
