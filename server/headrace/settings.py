"""Settings of the server from the command line and the environment. The only reader of the environment.

The tables `TRITON_...` have the command-line flags of tritonserver: those that `headrace serve` accepts, and an
explanation of each of the others. `docs/from-triton.md` has the same explanations, which a test compares.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from headrace.core.limits import CLIENT_HEADER, LIMIT_HELP, Limits
from headrace.core.telemetry import OTLP_PROTOCOLS, REQUEST_LOG_MODES, Telemetry, TritonMetrics

# Flags with the same name, meaning and values.
TRITON_SAME: tuple[str, ...] = (
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
TRITON_ALIASES: dict[str, str] = {
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
TRITON_HINTS: dict[str, str] = {
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
TRITON_LOG_FORMAT = "the same name, other values: --log-format text or --log-format json"


def triton_hint(option: str) -> str:
    """Return an explanation of a tritonserver option that is not accepted here; "" for any other.

    Args:
        option: with its dashes, without its value.
    """
    return f"of tritonserver: {TRITON_HINTS[option]}" if option in TRITON_HINTS else ""


PREFIX = "HEADRACE_"
_TRUE = {"1", "true", "yes", "on"}
_HEADER = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
# Headers with a meaning of their own for the front ends.
_RESERVED_HEADERS = frozenset(
    (
        *(
            "accept-encoding",
            "content-encoding",
            "content-length",
            "content-type",
            "endpoint-load-metrics-format",
            "host",
            "traceparent",
            "tracestate",
        ),
        *("inference-header-content-length", "te", "x-request-timeout-ms"),
    )
)
_METRICS_SWITCHES = ("counter_latencies", "summary_latencies", "histogram_latencies")
_FALSE = {"0", "false", "no", "off", ""}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `headrace serve`; every field is an option and an environment variable `HEADRACE_<FIELD>`.

    Attributes:
        model_repository: folders with one folder a model.
        id: name of the server in its metadata, as tritonserver's --id.
        host: address to listen on.
        http_port: HTTP port; 0 lets the system choose.
        grpc_port: gRPC port; 0 lets the system choose.
        grpc_engine: "grpcio", or "fast" (Headrace's own HTTP/2).
        grpc: serve gRPC.
        metrics_port: port of /metrics; None for the HTTP port.
        model_control: "none" loads all models at start, "explicit" only `load_model` and those that clients load, "poll"
            watches the folders.
        poll_interval_s: time between two scans with model control "poll", in seconds.
        load_model: models to load at start; "*" is all.
        strict: refuse to start if a model cannot be served.
        ready_when: "any": ready while one model serves; "all": while every model that should serve is READY.
        allow_client_shm: clients may register shared memory.
        allow_model_override: a load request may contain a configuration and files.
        trace_file: file for traces; "" for none.
        telemetry: traces, spans and request log; each field is an option of its own.
        log_format: "text" or "json".
        client_header: HTTP header and gRPC metadata key with the client's name, in lower case.
        limits: limits on clients; most are options of their own.
        gpu_memory_fraction: share of each GPU's memory for all models together, 0 to 1.
        profile_s: maximum time to measure each model before it serves, in seconds; 0 measures nothing.
        inline_bound_us: largest 99th percentile of the compute time, in microseconds, with which a lone request runs on the event
            loop; 0 for never.
        state_dir: folder for latency tables and engines, which outlive the process; "" for none.
        drain_timeout_s: maximum wait at shutdown for requests in flight, in seconds.
        keep_alive_timeout_s: time that an HTTP connection stays open between requests, in seconds.
        metrics: record latency histograms and serve /metrics.
        metrics_config: metrics under Triton's names.
        tls_cert: certificate chain (PEM) of HTTP and gRPC; "" for no TLS.
        tls_key: private key of it (PEM).
        tls_client_ca: CA certificates (PEM) that sign client certificates; "" if clients need none.
    """

    model_repository: tuple[Path, ...]
    id: str = "headrace"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    grpc_engine: str = "grpcio"
    grpc: bool = True
    metrics_port: int | None = None
    model_control: Literal["none", "explicit", "poll"] = "none"
    poll_interval_s: float = 2.0
    load_model: tuple[str, ...] = ()
    strict: bool = False
    ready_when: Literal["any", "all"] = "any"
    allow_client_shm: bool = False
    allow_model_override: bool = False
    trace_file: str = ""
    telemetry: Telemetry = field(default_factory=Telemetry)
    log_format: str = "text"
    client_header: str = CLIENT_HEADER
    limits: Limits = field(default_factory=Limits)
    gpu_memory_fraction: float = 0.9
    profile_s: float = 0.25
    inline_bound_us: int = 200
    state_dir: str = "~/.cache/headrace/state"
    drain_timeout_s: float = 30.0
    # Most proxies keep idle connections to their backends for 60 s. The server must not close first, or a request that is on
    # its way to it is lost.
    keep_alive_timeout_s: float = 75.0
    metrics: bool = True
    metrics_config: TritonMetrics = field(default_factory=TritonMetrics)
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""


def add_arguments(parser: argparse.ArgumentParser, environ: Mapping[str, str] | None = None) -> None:
    """Declare the options of `headrace serve`, with defaults from the environment.

    Args:
        parser: the parser.
        environ: environment variables; None for those of the process.

    Raises:
        ValueError: a variable has an invalid value; names both.
    """
    env = _Environment(os.environ if environ is None else environ)
    add = parser.add_argument
    _add_repositories(parser, env)
    server_id = env.text("ID", "headrace")
    add("--id", default=server_id, metavar="NAME", help="name of the server in its metadata (%(default)s)")
    add("--host", default=env.text("HOST", "127.0.0.1"), help="address to listen on (%(default)s)")
    add("--http-port", type=_port, default=env.port("HTTP_PORT", 8000), metavar="N", help="HTTP port (%(default)s)")
    add("--grpc-port", type=_port, default=env.port("GRPC_PORT", 8001), metavar="N", help="gRPC port (%(default)s)")
    metrics_port = env.port("METRICS_PORT", None)
    add("--metrics-port", type=_port, default=metrics_port, metavar="N", help="port of /metrics (the HTTP port)")
    _add_flag(parser, env, "strict", "refuse to start if a model cannot be served")
    ready_when = env.choice("READY_WHEN", "any", ("any", "all"))
    text = "ready while a model serves, or while every model that should be served is READY (%(default)s)"
    add("--ready-when", choices=("any", "all"), default=ready_when, help=text)
    _add_flag(parser, env, "allow-client-shm", "let clients register shared memory")
    _add_flag(parser, env, "allow-model-override", "let a load request bring its own configuration")
    add("--trace-file", default=env.text("TRACE_FILE", ""), metavar="FILE", help="write traces to this file")
    log_format = env.choice("LOG_FORMAT", "text", ("text", "json"))
    add("--log-format", choices=("text", "json"), default=log_format, help="of the log (%(default)s)")
    client = env.header("CLIENT_HEADER", CLIENT_HEADER)
    text = "header (and gRPC metadata) that names the client, for quotas and fair shares (%(default)s)"
    add("--client-header", type=_header, default=client, metavar="NAME", help=text)
    _add_limits(parser, env)
    fraction = env.fraction("GPU_MEMORY_FRACTION", 0.9)
    text = "of each GPU's memory, for all models together (%(default)s)"
    add("--gpu-memory-fraction", type=_fraction, default=fraction, metavar="F", help=text)
    _add_inline_bound(parser, env)
    _add_telemetry(parser, env)
    _add_state(parser, env)
    _add_timeouts(parser, env)
    _add_grpc(parser, env)
    _add_tls(parser, env)
    poll = env.seconds("POLL_INTERVAL_S", 2.0)
    add(
        *names("--poll-interval-s"),
        type=_seconds,
        default=poll,
        metavar="S",
        help="of --model-control poll (%(default)s)",
    )
    add(
        "--metrics",
        action=argparse.BooleanOptionalAction,
        default=env.flag("METRICS", True),
        help="latency histograms and /metrics (on)",
    )
    _add_metrics_config(parser, env)


def names(option: str) -> list[str]:
    """Return an option with tritonserver's names for it."""
    return [option, *(flag for flag, ours in TRITON_ALIASES.items() if ours == option)]


def add_state(parser: argparse.ArgumentParser) -> None:
    """Declare `--state-dir` for a command that loads models as the server does."""
    _add_state(parser, _Environment(os.environ))


def is_json_log(arguments: Sequence[str]) -> bool:
    """True if the command line, which may be invalid, or else the environment selects a JSON log; only `serve` has one."""
    if list(arguments[:1]) != ["serve"]:
        return False
    for index, word in reversed(list(enumerate(arguments))):
        if word.startswith("--log-format="):
            return word == "--log-format=json"
        if word == "--log-format":
            return list(arguments[index + 1 : index + 2]) == ["json"]
    return os.environ.get(f"{PREFIX}LOG_FORMAT", "") == "json"


def from_arguments(args: argparse.Namespace) -> Settings:
    """Create settings from parsed arguments."""
    return Settings(
        model_repository=_repositories(args),
        id=args.id,
        host=args.host,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        model_control=args.model_control,
        load_model=tuple(args.load_model or args.default_load_model),
        strict=args.strict,
        ready_when=args.ready_when,
        allow_client_shm=args.allow_client_shm,
        allow_model_override=args.allow_model_override,
        trace_file=args.trace_file,
        telemetry=Telemetry(**{field.name: getattr(args, field.name) for field in fields(Telemetry)}),
        log_format=args.log_format,
        client_header=args.client_header,
        limits=Limits(**{name: getattr(args, name) for name in LIMIT_HELP}),
        gpu_memory_fraction=args.gpu_memory_fraction,
        profile_s=args.profile_s,
        inline_bound_us=args.inline_bound_us,
        state_dir=args.state_dir,
        drain_timeout_s=args.drain_timeout_s,
        keep_alive_timeout_s=args.keep_alive_timeout_s,
        metrics=args.metrics,
        metrics_config=TritonMetrics(**dict(args.metrics_config or args.default_metrics_config)),
        grpc_engine=args.grpc_engine,
        grpc=args.grpc,
        poll_interval_s=args.poll_interval_s,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        tls_client_ca=args.tls_client_ca,
    )


def _repositories(args: argparse.Namespace) -> tuple[Path, ...]:
    """Repositories of the options; the default only if no path is given either."""
    folders = args.model_repository or ([] if args.path else args.default_model_repository)
    return tuple(Path(folder) for folder in folders)


def _add_repositories(parser: argparse.ArgumentParser, env: _Environment) -> None:
    add = parser.add_argument
    repositories = env.list("MODEL_REPOSITORY") or ["model_repository"]
    add(
        *names("--model-repository"),
        action="append",
        metavar="DIR",
        help=f"folder of models, repeatable ({repositories[0]})",
    )
    text = "a repository, the folder of one model, or a model file (model.onnx), in place of --model-repository"
    add("path", nargs="*", type=Path, metavar="PATH", help=text)
    parser.set_defaults(default_model_repository=repositories, default_load_model=env.list("LOAD_MODEL"))
    control = env.choice("MODEL_CONTROL", "none", ("none", "explicit", "poll"))
    add(
        *names("--model-control"),
        choices=("none", "explicit", "poll"),
        default=control,
        help="who loads models (%(default)s)",
    )
    add(
        "--load-model", action="append", metavar="NAME", help="load at start, with --model-control explicit; repeatable"
    )


def with_state(words: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the command line of `headrace build` with the server's state folder, if only the environment has one.

    Args:
        words: the command and its arguments.
        environ: environment variables; None for those of the process.
    """
    state = _Environment(os.environ if environ is None else environ).text("STATE_DIR", "")
    is_named = any(word.partition("=")[0] == "--state-dir" for word in words)
    if words[:1] != ["build"] or is_named or not state:
        return list(words)
    return [words[0], "--state-dir", state, *words[1:]]


def _add_state(parser: argparse.ArgumentParser, env: _Environment) -> None:
    state, text = (
        env.text("STATE_DIR", "~/.cache/headrace/state"),
        "where profiles, and engines of folders that cannot be written, outlive the process (%(default)s; '': nowhere)",
    )
    parser.add_argument("--state-dir", default=state, metavar="DIR", help=text)


def _add_limits(parser: argparse.ArgumentParser, env: _Environment) -> None:
    defaults = Limits().table()
    for name, help_text in LIMIT_HELP.items():
        kind, metavar = (_positive_seconds, "S") if name.endswith("_s") else (_positive, "N")
        value = env.positive(name.upper(), defaults[name], kind)
        text = f"{help_text} (%(default)s)"
        option = names(f"--{name.replace('_', '-')}")
        parser.add_argument(*option, type=kind, default=value, metavar=metavar, help=text)


def _add_inline_bound(parser: argparse.ArgumentParser, env: _Environment) -> None:
    bound = env.positive("INLINE_BOUND_US", 200, _size)
    text = (
        "run a lone request on the event loop if the model computes it in this time, us, at p99 (%(default)s; 0: never)"
    )
    parser.add_argument("--inline-bound-us", type=_size, default=bound, metavar="US", help=text)


def _add_telemetry(parser: argparse.ArgumentParser, env: _Environment) -> None:
    add, default = parser.add_argument, Telemetry()
    text = "URL of an OpenTelemetry receiver of spans, http://host:4317 (none)"
    add("--otlp-endpoint", default=env.text("OTLP_ENDPOINT", ""), metavar="URL", help=text)
    protocol = env.choice("OTLP_PROTOCOL", default.otlp_protocol, OTLP_PROTOCOLS)
    add("--otlp-protocol", choices=OTLP_PROTOCOLS, default=protocol, help="of --otlp-endpoint (%(default)s)")
    text = "trace one in N requests that bring no trace (%(default)s; 0: none)"
    rate = env.positive("TRACE_RATE", default.trace_rate, _size)
    add("--trace-rate", type=_size, default=rate, metavar="N", help=text)
    mode = env.choice("REQUEST_LOG", default.request_log, REQUEST_LOG_MODES)
    add("--request-log", choices=REQUEST_LOG_MODES, default=mode, help="a line for each request (%(default)s)")
    file = env.text("REQUEST_LOG_FILE", "")
    add("--request-log-file", default=file, metavar="FILE", help="where it goes, as JSON (standard error)")


def _add_metrics_config(parser: argparse.ArgumentParser, env: _Environment) -> None:
    words = env.text("METRICS_CONFIG", "").split()
    parser.set_defaults(default_metrics_config=[env.parsed("METRICS_CONFIG", word, _metrics_setting) for word in words])
    text = (
        "as in Triton: summary_latencies, histogram_latencies, counter_latencies=true|false, summary_quantiles=0.5,0.99"
    )
    parser.add_argument(
        "--metrics-config", action="append", type=_metrics_setting, metavar="NAME=VALUE", help=f"{text}; repeatable"
    )


def _add_timeouts(parser: argparse.ArgumentParser, env: _Environment) -> None:
    for option, seconds, text in (
        ("profile-s", 0.25, "measure each model before it serves (%(default)s; 0: do not)"),
        ("drain-timeout-s", 30.0, "wait for requests at shutdown (%(default)s)"),
        ("keep-alive-timeout-s", 75.0, "keep an HTTP connection between requests (%(default)s)"),
    ):
        default = env.seconds(option.replace("-", "_").upper(), seconds)
        parser.add_argument(*names(f"--{option}"), type=_seconds, default=default, metavar="S", help=text)


def _add_grpc(parser: argparse.ArgumentParser, env: _Environment) -> None:
    engine = env.choice("GRPC_ENGINE", "grpcio", ("grpcio", "fast"))
    parser.add_argument(
        "--grpc-engine", choices=("grpcio", "fast"), default=engine, help="fast: our own HTTP/2 (%(default)s)"
    )
    served = env.flag("GRPC", True)
    parser.add_argument("--grpc", action=argparse.BooleanOptionalAction, default=served, help="serve gRPC (on)")


def _add_tls(parser: argparse.ArgumentParser, env: _Environment) -> None:
    for option, text in (
        ("tls-cert", "certificate chain of the server (PEM): TLS on both front ends"),
        ("tls-key", "private key of --tls-cert (PEM)"),
        ("tls-client-ca", "clients must show a certificate signed by one of these (PEM)"),
    ):
        default = env.text(option.replace("-", "_").upper(), "")
        parser.add_argument(f"--{option}", default=default, metavar="FILE", help=text)


def _add_flag(parser: argparse.ArgumentParser, env: _Environment, name: str, text: str) -> None:
    default = env.flag(name.replace("-", "_").upper(), False)
    parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default, help=text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)


def _metrics_setting(text: str) -> tuple[str, bool | tuple[float, ...]]:
    """A name and value of `TritonMetrics`."""
    name, _, value = text.partition("=")
    if name in _METRICS_SWITCHES and value in ("true", "false"):
        return name, value == "true"
    if name == "summary_quantiles":
        # Triton's form is QUANTILE:ERROR; here the error is that of the histogram buckets, 9 %.
        try:
            quantiles = tuple(float(item.partition(":")[0]) for item in value.split(","))
        except ValueError:
            quantiles = ()
        if quantiles and all(0 < quantile < 1 for quantile in quantiles) and len(set(quantiles)) == len(quantiles):
            return name, tuple(sorted(quantiles))
    allowed = f"{'=true|false, '.join(_METRICS_SWITCHES)}=true|false, or summary_quantiles=0.5:0.05,0.99:0.001"
    raise argparse.ArgumentTypeError(f"{text!r} is not a metrics setting: write {allowed}")


def _size(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _header(text: str) -> str:
    name = text.lower()
    is_reserved = name.startswith(("grpc-", "headrace-")) or name.endswith("-bin") or name in _RESERVED_HEADERS
    if is_reserved or not _HEADER.fullmatch(name):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot name the client: write a header of letters, digits, '_', '-' and '.' that HTTP and gRPC do not use"
        )
    return name


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**62:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _positive_seconds(text: str) -> float:
    seconds = _seconds(text)
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time of more than 0 seconds")
    return seconds


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction (more than 0, 1 at most)")
    return value


class _Environment:
    """Reads `HEADRACE_` variables; errors name the variable."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, name: str, default: str) -> str:
        return self._environ.get(PREFIX + name, default)

    def list(self, name: str) -> list[str]:
        return [part for part in self.text(name, "").split(os.pathsep) if part]

    def port(self, name: str, default: int | None) -> int | None:
        text = self._environ.get(PREFIX + name)
        return default if text is None else int(self.parsed(name, text, _port))

    def seconds(self, name: str, default: float) -> float:
        text = self._environ.get(PREFIX + name)
        return default if text is None else self.parsed(name, text, _seconds)

    def header(self, name: str, default: str) -> str:
        text = self._environ.get(PREFIX + name)
        return default if text is None else str(self.parsed(name, text, _header))

    def positive(self, name: str, default: float, parse: Callable[[str], float]) -> float:
        text = self._environ.get(PREFIX + name)
        return default if text is None else self.parsed(name, text, parse)

    def fraction(self, name: str, default: float) -> float:
        text = self._environ.get(PREFIX + name)
        return default if text is None else self.parsed(name, text, _fraction)

    def flag(self, name: str, default: bool) -> bool:
        text = self._environ.get(PREFIX + name)
        if text is None:
            return default
        if text.lower() not in _TRUE | _FALSE:
            raise ValueError(f"{PREFIX}{name}: {text!r} is neither true nor false")
        return text.lower() in _TRUE

    def choice(self, name: str, default: str, choices: Sequence[str]) -> str:
        text = self.text(name, default)
        if text not in choices:
            raise ValueError(f"{PREFIX}{name}: {text!r} is not one of {', '.join(choices)}")
        return text

    @staticmethod
    def parsed(name: str, text: str, parse: object) -> Any:
        try:
            return parse(text)  # type: ignore[operator]
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{PREFIX}{name}: {error}") from error


def disable_ort_telemetry() -> None:
    """Switch off ONNX Runtime's telemetry in this process and its children; call it before the library is imported."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
