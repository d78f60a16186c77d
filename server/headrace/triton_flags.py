"""Command-line flags of tritonserver: those that `headrace serve` accepts, and an explanation of each of the others.

`docs/from-triton.md` has the same explanations in a table, which a test compares.
"""

from __future__ import annotations

# Flags with the same name, meaning and values.
SAME: tuple[str, ...] = (
    "--help",
    "--id",
    "--model-repository",
    "--load-model",
    "--http-port",
    "--grpc-port",
    "--metrics-port",
    "--trace-file",
    "--trace-rate",
    "--metrics-config",
)

# Other names of Headrace's options with the same meaning and values.
ALIASES: dict[str, str] = {
    "--model-store": "--model-repository",
    "--model-control-mode": "--model-control",
    "--repository-poll-secs": "--poll-interval-s",
    "--exit-timeout-secs": "--drain-timeout-s",
    "--http-max-input-size": "--max-body-bytes",
}

_ONE_ADDRESS = "write --host: one address for HTTP, gRPC and metrics"
_LEVELS = "not needed: POST /v2/logging changes the level of the running server"
_TRACES = (
    "not here: POST /v2/trace/setting changes it in the running server; --trace-file and --trace-rate set the start"
)
_PINGS = "not here: the defaults of gRPC apply"
_AGE = "not here: a load balancer in front closes connections; --keep-alive-timeout-s closes idle ones of HTTP"
_PORTS = "not here: start each server on a port of its own behind a load balancer"
_RESTRICTED = (
    "not here: put a proxy in front; loading models and shared memory are off unless --model-control explicit and "
    "--allow-client-shm allow them"
)
_FORWARD = "not here: headers are not handed to models; send a parameter of the request"
_POOL = "not needed: memory of requests is taken and given back with each request; --max-body-bytes bounds it"
_MEMORY = "not needed: --gpu-memory-fraction bounds what all models take of each GPU"
_SAGEMAKER = "not here: SageMaker's routes are not served; put a proxy in front that maps /ping and /invocations"
_VERTEX = "not here: Vertex AI's routes are not served; put a proxy in front that maps its predict route"
_QUOTAS = (
    "not here: an instance takes work when it is idle; `rate_limits` of a model's configuration bounds each client"
)
_CACHE = "not here: there is no response cache, every request is computed"
_LIBRARIES = "not here: backends and caches are part of the server, no shared libraries are loaded"

# Flags that are not accepted -> what to write instead, or why nothing is needed.
ANSWERS: dict[str, str] = {
    "--exit-on-error": "write --strict (off by default: other models are served if one is broken)",
    "--strict-model-config": "not needed: what a configuration leaves out is read from the model, the rest is compared",
    "--disable-auto-complete-config": "not needed: only what a configuration leaves out is read from the model",
    "--strict-readiness": "write --ready-when all; any, the default, is ready while one model serves",
    "--model-load-thread-count": "not needed: models are loaded one after the other",
    "--model-load-retry-count": "not here: load a model again with POST /v2/repository/models/NAME/load",
    "--model-load-gpu-limit": _MEMORY,
    "--model-config-name": "not here: a model has one configuration, config.pbtxt or config.yaml in its folder",
    "--model-namespacing": "not here: a model's name is unique across all repositories",
    "--enable-peer-access": "not needed: a model uses one GPU for each instance",
    "--allow-http": "not needed: HTTP is always served",
    "--http-address": _ONE_ADDRESS,
    "--reuse-http-port": _PORTS,
    "--http-header-forward-pattern": _FORWARD,
    "--http-thread-count": "not needed: one event loop serves all connections",
    "--http-restricted-api": _RESTRICTED,
    "--allow-grpc": "write --grpc (the default) or --no-grpc",
    "--grpc-address": _ONE_ADDRESS,
    "--reuse-grpc-port": _PORTS,
    "--grpc-header-forward-pattern": _FORWARD,
    "--grpc-infer-allocation-pool-size": _POOL,
    "--grpc-max-response-pool-size": _POOL,
    "--grpc-infer-thread-count": "not needed: one event loop serves all connections",
    "--grpc-use-ssl": "write --tls-cert and --tls-key: TLS on HTTP and gRPC",
    "--grpc-use-ssl-mutual": "write --tls-client-ca beside --tls-cert and --tls-key",
    "--grpc-server-cert": "write --tls-cert: TLS on HTTP and gRPC",
    "--grpc-server-key": "write --tls-key: TLS on HTTP and gRPC",
    "--grpc-root-cert": "write --tls-client-ca",
    "--grpc-infer-response-compression-level": "not here: answers over gRPC are not compressed",
    "--grpc-keepalive-time": _PINGS,
    "--grpc-keepalive-timeout": _PINGS,
    "--grpc-keepalive-permit-without-calls": _PINGS,
    "--grpc-http2-max-pings-without-data": _PINGS,
    "--grpc-http2-min-recv-ping-interval-without-data": _PINGS,
    "--grpc-http2-max-ping-strikes": _PINGS,
    "--grpc-max-connection-age": _AGE,
    "--grpc-max-connection-age-grace": _AGE,
    "--grpc-restricted-protocol": _RESTRICTED,
    "--log-verbose": _LEVELS,
    "--log-info": _LEVELS,
    "--log-warning": _LEVELS,
    "--log-error": _LEVELS,
    "--log-file": "not needed: the log goes to standard error; write 2> FILE",
    "--allow-sagemaker": _SAGEMAKER,
    "--sagemaker-port": _SAGEMAKER,
    "--sagemaker-safe-port-range": _SAGEMAKER,
    "--sagemaker-thread-count": _SAGEMAKER,
    "--allow-vertex-ai": _VERTEX,
    "--vertex-ai-port": _VERTEX,
    "--vertex-ai-thread-count": _VERTEX,
    "--vertex-ai-default-model": _VERTEX,
    "--allow-metrics": "write --metrics (the default) or --no-metrics",
    "--allow-gpu-metrics": "not needed: /metrics has the GPUs where there are any",
    "--allow-cpu-metrics": "not needed: /metrics has the processor",
    "--metrics-address": _ONE_ADDRESS,
    "--metrics-interval-ms": "not needed: metrics are read when /metrics is",
    "--trace-config": "write --trace-file FILE and --trace-rate N, or --otlp-endpoint URL for OpenTelemetry",
    "--trace-level": _TRACES,
    "--trace-count": _TRACES,
    "--trace-log-frequency": _TRACES,
    "--rate-limit": _QUOTAS,
    "--rate-limit-resource": _QUOTAS,
    "--pinned-memory-pool-byte-size": "not needed: pinned memory is allocated for each batch in flight",
    "--cuda-memory-pool-byte-size": _MEMORY,
    "--cuda-virtual-address-size": _MEMORY,
    "--cache-config": _CACHE,
    "--response-cache-byte-size": _CACHE,
    "--cache-directory": _LIBRARIES,
    "--min-supported-compute-capability": "not needed: an engine is built for the GPU that is there",
    "--backend-directory": _LIBRARIES,
    "--repoagent-directory": _LIBRARIES,
    "--backend-config": "write `parameters` in the model's configuration, e.g. intra_op_thread_count",
    "--buffer-manager-thread-count": "not needed: threads that copy rows start where a batch is large",
    "--host-policy": "not here: start the server under numactl or taskset",
}

# A flag of both servers whose values differ.
LOG_FORMAT = "the same name, other values: --log-format text or --log-format json"


def answer(option: str) -> str:
    """Return an explanation of a tritonserver option that is not accepted here; "" for any other.

    Args:
        option: with its dashes, without its value.
    """
    return f"of tritonserver: {ANSWERS[option]}" if option in ANSWERS else ""
