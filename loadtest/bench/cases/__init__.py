"""The cases of the benchmark, in the order in which they run and are reported."""

from __future__ import annotations

from loadtest.bench.cases.front_end import FrontEnd
from loadtest.bench.cases.grpc_front_end import GrpcFrontEnd
from loadtest.bench.cases.grpc_million import GrpcMillion
from loadtest.bench.cases.grpc_stream import GrpcStream
from loadtest.bench.cases.idle_connections import IdleConnections
from loadtest.bench.cases.memory import Memory
from loadtest.bench.cases.metrics_cost import MetricsCost
from loadtest.bench.cases.mixed import Mixed
from loadtest.bench.cases.model_throughput import ModelThroughput
from loadtest.bench.cases.quantized import Quantized
from loadtest.bench.cases.shared_memory import SharedMemoryInputs
from loadtest.bench.results import at_least, at_most
from loadtest.bench.session import Case

CASES: tuple[Case, ...] = (
    FrontEnd("tiny-64", encoding="binary", connections=64, to_bare=at_least(0.5), to_naive=at_least(5.0)),
    FrontEnd("tiny-1", encoding="binary", connections=1, extra_p50_us=at_most(120.0)),
    FrontEnd("tiny-json-64", encoding="json", connections=64),
    Mixed("mixed-64", connections=64),
    MetricsCost("metrics", connections=64, ratio=at_least(0.98)),
    IdleConnections("idle-connections", connections=16, idle=1000),
    Memory("memory", connections=64, warm_up_requests=20_000, requests=200_000, growth=at_most(1.05)),
    GrpcFrontEnd("grpc-tiny-64", connections=4, in_flight=16, grpcio_to_echo=at_least(0.8), fast_to_echo=at_least(4.0)),
    GrpcStream("grpc-stream-64", connections=4, in_flight=16, to_unary=at_least(1.5)),
    GrpcMillion("grpc-million", in_flight=64, calls=1_000_000),
    SharedMemoryInputs("shm", copies=at_most(1.5)),
    ModelThroughput("resnet50", connections=16, ratio=at_least(0.95)),
    ModelThroughput("efficientnet_lite0", connections=16, ratio=at_least(0.95)),
    Quantized("int8", "resnet50", connections=16, raw=at_least(2.8), served=at_least(2.8)),
)
