"""The cases of the benchmark, in the order in which they run and are reported."""

from __future__ import annotations

from loadtest.bench.cases import cache, generate, jpeg, pipelines, python_models, ragged, sequences
from loadtest.bench.cases.grpc import GrpcDefault, GrpcFrontEnd, GrpcMillion, GrpcStream
from loadtest.bench.cases.http import FrontEnd, IdleConnections, KeysCost, Memory, MetricsCost, Mixed
from loadtest.bench.cases.models import ModelThroughput, Quantized
from loadtest.bench.cases.shared_memory import SharedMemoryInputs
from loadtest.bench.results import at_least, at_most
from loadtest.bench.session import Case

CASES: tuple[Case, ...] = (
    FrontEnd("tiny-64", 64, "binary", to_bare=at_least(0.5), to_naive=at_least(5.0)),
    FrontEnd("tiny-1", 1, "binary", extra_p50_us=at_most(120.0)),
    FrontEnd("tiny-json-64", 64, "json"),
    Mixed("mixed-64", 64),
    MetricsCost("metrics", 64, ratio=at_least(0.98)),
    KeysCost("keys", 64),
    IdleConnections("idle-connections", 16, idle=1000),
    Memory("memory", 64, warm_up_requests=20_000, requests=200_000, growth=at_most(1.05)),
    GrpcFrontEnd("grpc-tiny-64", 4, in_flight=16, grpcio_to_echo=at_least(0.8), fast_to_echo=at_least(4.0)),
    GrpcDefault("grpc-default-tiny-64", 4, in_flight=16, model="tiny", to_echo=at_least(8.0)),
    GrpcDefault("grpc-default-mlp-64", 4, in_flight=16, model="mlp", to_echo=at_least(4.0)),
    GrpcDefault("grpc-default-tiny-1", 1, in_flight=1, model="tiny", to_echo=at_least(1.2)),
    GrpcDefault("grpc-default-mlp-1", 1, in_flight=1, model="mlp", to_echo=at_least(1.2)),
    GrpcStream("grpc-stream-64", 4, in_flight=16, to_unary=at_least(1.5)),
    GrpcMillion("grpc-million", 1, in_flight=64, calls=1_000_000),
    SharedMemoryInputs("shm", 1, copies=at_most(1.5)),
    ModelThroughput("resnet50", 16, "resnet50", ratio=at_least(0.95)),
    ModelThroughput("efficientnet_lite0", 16, "efficientnet_lite0", ratio=at_least(0.95)),
    Quantized("int8", 16, "resnet50", raw=at_least(2.8), served=at_least(2.8)),
    *python_models.CASES,
    *pipelines.CASES,
    *jpeg.CASES,
    *cache.CASES,
    *ragged.CASES,
    *sequences.CASES,
    *generate.CASES,
)
