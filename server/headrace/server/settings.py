"""Settings of the server from the command line and the environment. The only reader of the environment.

`TRITON_ALIASES` has the command-line flags of tritonserver that have another name here, triton_options.toml an explanation
of each that is not accepted. `docs/from-triton.md` has the same explanations, which a test compares.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from headrace_reports.command_line import number_parser, path_or_url

from headrace.core.cache_options import CacheOptions, CacheSetting, cache_options, parse_cache_setting, size_bytes
from headrace.core.limits import CLIENT_HEADER, LIMIT_HELP, Limits
from headrace.core.store_url import StoreUrl
from headrace.core.telemetry import OTLP_PROTOCOLS, REQUEST_LOG_MODES, Telemetry, TritonMetrics

# Other names of Headrace's options with the same meaning and values.
TRITON_ALIASES: dict[str, str] = {
    "--model-store": "--model-repository",
    "--model-control-mode": "--model-control",
    "--repository-poll-secs": "--poll-interval-s",
    "--exit-timeout-secs": "--drain-timeout-s",
    "--http-max-input-size": "--max-body-bytes",
}
# Options of earlier versions that are gone, by command -> what replaces them.
REMOVED: dict[str, dict[str, str]] = {
    "serve": {"--grpc-engine": "there is one gRPC server, Headrace's own"},
    "simulate": dict.fromkeys(
        ("--requests-per-sequence", "--think-ms", "--think-variation", "--slots", "--strategy", "--idle-ms"),
        "sequences are not simulated, headrace explain shows those of a served model that wait for a slot",
    ),
}
PREFIX = "HEADRACE_"


@cache
def triton_hints() -> dict[str, str]:
    """Read the flags of tritonserver that are not accepted, and what to write instead, or why nothing is needed."""
    groups = tomllib.loads(Path(__file__).with_name("triton_options.toml").read_text(encoding="utf-8"))
    return {flag: text for flags, text in groups.items() for flag in flags.split()}


def option_hint(command: str, option: str) -> str:
    """Return an explanation of an option of tritonserver or of an earlier version that is gone; "" for any other.

    Args:
        command: the command that has refused it, such as "serve", which alone explains options of tritonserver.
        option: with its dashes, without its value.
    """
    if text := REMOVED.get(command, {}).get(option):
        return f"of an earlier version, which is gone: {text}; leave the option out"
    hint = triton_hints().get(option) if command == "serve" else None
    return f"of tritonserver: {hint}" if hint else ""


def _refuse_removed(environ: Mapping[str, str]) -> None:
    """Raise ValueError for a variable of an option that is gone."""
    for option, text in REMOVED["serve"].items():
        variable = PREFIX + option.removeprefix("--").replace("-", "_").upper()
        if variable in environ:
            raise ValueError(f"{variable}={environ[variable]}: the variable of Headrace 0.1 is gone: {text}; unset it")


_TRUE = {"1", "true", "yes", "on"}
_HEADER = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
# Headers with a meaning of their own for the protocols.
_RESERVED_HEADERS = frozenset((
    "accept-encoding", "content-encoding", "content-length", "content-type", "endpoint-load-metrics-format", "host",
    "inference-header-content-length", "te", "traceparent", "tracestate", "x-request-timeout-ms",
))  # fmt: skip
_METRICS_SWITCHES = ("counter_latencies", "summary_latencies", "histogram_latencies")
_FALSE = {"0", "false", "no", "off", ""}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `headrace serve`; a field is an option and an environment variable `HEADRACE_<FIELD>`.

    `OPTIONS`, `LIMIT_HELP` and `Telemetry` describe the fields that are options; these are none:

    Attributes:
        stores: folder and URL of each repository that mirrors a store.
        telemetry: traces, spans and request log; each field is an option of its own.
        limits: limits on clients; most are options of their own.
        front_ends_reason: why AUTO chose `front_ends`; "" if it did not.
    """

    model_repository: tuple[Path, ...]
    model_name: str = ""
    stores: tuple[tuple[str, str], ...] = ()
    repository_cache_dir: str = ""
    repository_cache_bytes: int = 100 << 30
    id: str = "headrace"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    grpc: bool = True
    metrics_port: int | None = None
    model_control: Literal["none", "explicit", "poll"] = "none"
    poll_interval_s: float = 2.0
    load_model: tuple[str, ...] = ()
    strict: bool = False
    ready_when: Literal["any", "all"] = "any"
    allow_client_shm: bool = False
    allow_model_override: bool = False
    allow_python_uploads: bool = False
    trace_file: str = ""
    telemetry: Telemetry = field(default_factory=Telemetry)
    log_format: str = "text"
    client_header: str = CLIENT_HEADER
    http_header_forward_pattern: str = ""
    grpc_header_forward_pattern: str = ""
    orca: Literal["always", "on-request", "never"] = "on-request"
    limits: Limits = field(default_factory=Limits)
    gpu_memory_fraction: float = 0.9
    host_memory_budget: int = 0
    model_load_thread_count: int = 4
    profile_s: float = 0.25
    trial_limit_s: float = 120.0
    inline_bound_us: int = 500
    state_dir: str = "~/.cache/headrace/state"
    environments_dir: str = ""
    model_keys_file: str = ""
    drain_timeout_s: float = 30.0
    # Most proxies keep idle connections to their backends for 60 s. The server must not close first, or a request that is on
    # its way to it is lost.
    keep_alive_timeout_s: float = 75.0
    stream_heartbeat_s: float = 15.0
    metrics: bool = True
    metrics_config: TritonMetrics = field(default_factory=TritonMetrics)
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    api_keys_file: str = ""
    insecure_control: bool = False
    allowed_host: tuple[str, ...] = ()
    cors_origin: tuple[str, ...] = ()
    jwks: str = ""
    jwt_issuer: str = ""
    jwt_audience: str = ""
    cache_config: CacheOptions | None = None
    front_ends: int = 0
    front_ends_reason: str = ""
    hang_timeout_s: float = 5.0
    grpc_max_connection_age_s: float = 600.0


def names(option: str) -> list[str]:
    """Return an option with tritonserver's names for it."""
    return [option, *(flag for flag, name in TRITON_ALIASES.items() if name == option)]


_size = number_parser(int, lambda number: True, "is not a whole number")
_port = number_parser(int, lambda number: number <= 65535, "is not a port (0 to 65535)")
_positive = number_parser(int, lambda number: 0 < number < 2**62, "is not a whole number of 1 or more")
_seconds = number_parser(float, lambda number: 0 <= number < 1e6, "is not a number of seconds")
_fraction = number_parser(float, lambda number: 0 < number <= 1, "is not a fraction (more than 0, 1 at most)")


AUTO = -1
"""Value of `front_ends` for `auto`."""


def _model_name(text: str) -> str:
    if not text:
        return text
    from headrace.config.model_config import name_problem  # imports NumPy and pydantic, which other commands do without

    problem = name_problem(text)
    if problem is not None:
        raise argparse.ArgumentTypeError(f"{problem.message}: {problem.cure}")
    return text


def _front_ends(text: str) -> int:
    if text == "auto":
        return AUTO
    try:
        return int(_size(text))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number or auto") from None


def _bytes(text: str) -> int:
    if text == "0":
        return 0
    try:
        return size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive_seconds(text: str) -> float:
    seconds = _seconds(text)
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time of more than 0 seconds")
    return seconds


def _limit_type(name: str) -> tuple[Callable[[str], Any], str]:
    """Return parser and placeholder of a limit's option. A lowest value may be 0, which disables it."""
    if name.endswith("_s") and not name.startswith("min_"):
        return _positive_seconds, "S"
    return (_size if name.startswith("min_") else _positive), "N"


def _header(text: str) -> str:
    name = text.lower()
    is_reserved = name.startswith(("grpc-", "headrace-")) or name.endswith("-bin") or name in _RESERVED_HEADERS
    if is_reserved or not _HEADER.fullmatch(name):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot name the client: write a header of letters, digits, '_', '-' and '.' that HTTP and gRPC do not use"
        )
    return name


def header_matcher(pattern: str) -> tuple[Callable[[str], bool], frozenset[str]]:
    """Compile a pattern of the names of headers, in lower case.

    Returns:
        A function that returns True if the pattern matches a whole name, and the names that the pattern spells out.

    Raises:
        ValueError: the pattern is invalid.
    """
    from pydantic import StringConstraints, TypeAdapter  # its engine is Rust's: linear time, as RE2, which Triton uses

    try:
        # The first alone refuses a pattern that closes the group.
        adapters = [
            TypeAdapter(Annotated[str, StringConstraints(pattern=text)]) for text in (pattern, f"(?i)^(?:{pattern})$")
        ]
    except Exception as error:  # SchemaError, which is no ValueError
        reason = str(error).strip().splitlines()[-1].strip().removeprefix("error: ")
        cure = "write one of RE2's syntax, e.g. x-tenant-.*"
        raise ValueError(f"{pattern[:80]!r} is no regular expression of header names ({reason}): {cure}") from None
    names = pattern[1:-1] if re.fullmatch(r"\([^()]*\)", pattern) else pattern
    literals = frozenset(re.split(r"\|(?![^(]*\))", names.lower()))  # at each | outside of groups
    return adapters[-1].validator.isinstance_python, literals


def _header_pattern(text: str) -> str:
    try:
        header_matcher(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _metrics_setting(text: str) -> tuple[str, bool | str | tuple[float, ...]]:
    """Parse the name and value of a field of `TritonMetrics`."""
    name, _, value = text.partition("=")
    if name in _METRICS_SWITCHES and value in ("true", "false"):
        return name, value == "true"
    if name == "preset" and value in ("full", "lean"):
        return name, value
    if name == "summary_quantiles":
        # Triton's form is QUANTILE:ERROR; here the error is that of the histogram buckets, 9 %.
        try:
            quantiles = tuple(float(item.partition(":")[0]) for item in value.split(","))
        except ValueError:
            quantiles = ()
        if quantiles and all(0 < quantile < 1 for quantile in quantiles) and len(set(quantiles)) == len(quantiles):
            return name, tuple(sorted(quantiles))
    allowed = f"preset=full|lean, {'=true|false, '.join(_METRICS_SWITCHES)}=true|false, or summary_quantiles=0.5:0.05,0.99:0.001"
    raise argparse.ArgumentTypeError(f"{text!r} is not a metrics setting: write {allowed}")


def _cache_setting(text: str) -> tuple[CacheSetting, ...]:
    try:
        return parse_cache_setting(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def expandable_path(text: str) -> str:
    """Check that the home folder at the start of a path exists, and return the path as it is; for the `type` of an argument."""
    try:
        Path(text).expanduser()
    except RuntimeError:
        home = text.partition("/")[0]
        raise argparse.ArgumentTypeError(
            f"{text!r}: {home} has no home folder here: write the whole path, or ./ before it"
        ) from None
    return text


def repository_location(text: str) -> Path | StoreUrl:
    """Parse a path, or the URL of a store."""
    location = path_or_url(text)
    return Path(location) if isinstance(location, str) else location


def _switch(text: str) -> bool:
    if text.lower() not in _TRUE | _FALSE:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in _TRUE


class _Option(NamedTuple):
    """An option of `headrace serve`, and its environment variable `HEADRACE_<NAME>`."""

    name: str  # field of `Settings`, `Telemetry` or `Limits`, which has the default
    help: str  # text of `--help`
    # Parser of the value, or its choices; `_switch` for an option with a `--no-` form.
    kind: Callable[[str], Any] | tuple[str, ...] = str
    metavar: str | None = None  # placeholder of the value in `--help`

    def parse(self, text: str) -> Any:
        """Parse the value of the environment variable; an error names the variable."""
        try:
            if not isinstance(self.kind, tuple):
                return self.kind(text)
            if text not in self.kind:
                raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(self.kind)}")
            return text
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{PREFIX}{self.name.upper()}: {error}") from error

    def declare(self, parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
        """Add the option to a parser; its default is that of the environment, or of the dataclass."""
        text = environ.get(PREFIX + self.name.upper())
        add = partial(parser.add_argument, *names(f"--{self.name.replace('_', '-')}"))
        if self.name in _SEPARATORS and not isinstance(self.kind, tuple):
            # Without a default: argparse would add the values of the command line to it.
            values = [self.parse(part) for part in _split(text or "", _SEPARATORS[self.name]) if part]
            values = values or _REPEATED_DEFAULTS.get(self.name, [])
            parser.set_defaults(**{f"default_{self.name}": values})
            add(action="append", type=self.kind, metavar=self.metavar, help=self.help.format(*values))
            return
        default = _DEFAULTS[self.name] if text is None else self.parse(text)
        if self.kind is _switch:
            add(action=argparse.BooleanOptionalAction, default=default, help=self.help)
        elif isinstance(self.kind, tuple):
            add(choices=self.kind, default=default, help=self.help)
        else:
            add(type=self.kind, default=default, metavar=self.metavar, help=self.help)


def _split(text: str, separator: str | None) -> list[str]:
    """Split the value of a variable; the colon of a URL separates nothing."""
    return text.split(separator) if separator != os.pathsep else re.split(rf"{re.escape(separator)}(?!//)", text)


_DEFAULTS: dict[str, Any] = {each.name: each.default for kind in (Settings, Telemetry, Limits) for each in fields(kind)}
# Servers in a program of their users are one process.
_DEFAULTS["front_ends"] = AUTO
_REPEATED_DEFAULTS = {"model_repository": [Path("model_repository")]}
# Repeatable options, and the separators of their values in the environment; None: any white space.
_SEPARATORS = {
    "model_repository": os.pathsep,
    "load_model": os.pathsep,
    "metrics_config": None,
    "allowed_host": None,
    "cors_origin": None,
    "cache_config": None,
}
_STATE_DIR = _Option(
    "state_dir",
    "folder for latency tables, and for engines of read-only models (%(default)s; '': none)",
    expandable_path,
    metavar="DIR",
)
_ENVIRONMENTS_DIR = _Option(
    "environments_dir",
    "folder for Python environments of models (environments in the state folder)",
    expandable_path,
    metavar="DIR",
)
_REPOSITORY_CACHE = (
    _Option(
        "repository_cache_dir",
        "folder of the copies of repositories in stores (repositories in the state folder)",
        expandable_path,
        metavar="DIR",
    ),
    _Option("repository_cache_bytes", "largest size of all these copies (%(default)s)", _positive, "N"),
)
_MODEL_KEYS_FILE = _Option(
    "model_keys_file",
    "minisign public keys: serve only models that are signed with one of them (none)",
    expandable_path,
    metavar="FILE",
)
_METRICS_HELP = (
    "preset=full|lean, summary_latencies, histogram_latencies, counter_latencies=true|false, summary_quantiles=0.5,0.99"
)
OPTIONS: tuple[_Option, ...] = (
    _Option(
        "model_repository",
        "folder of models, or a URL of one: s3://, gs://, az://, hf://; repeatable ({0})",
        repository_location,
        "DIR_OR_URL",
    ),
    *_REPOSITORY_CACHE,
    _Option("model_control", "how models are loaded (%(default)s)", ("none", "explicit", "poll")),
    _Option("load_model", "model to load at start, with --model-control explicit; repeatable", metavar="NAME"),
    _Option(
        "model_name",
        "serve the model of PATH under this name; models of a repository keep their names (that of the file or folder)",
        _model_name,
        "NAME",
    ),
    _Option("id", "name of the server in its metadata (%(default)s)", metavar="NAME"),
    _Option("host", "address to listen on (%(default)s)"),
    _Option("http_port", "HTTP port (%(default)s)", _port, "N"),
    _Option("grpc_port", "gRPC port (%(default)s)", _port, "N"),
    _Option("metrics_port", "port of /metrics (the HTTP port)", _port, "N"),
    _Option("strict", "refuse to start if a model cannot be served", _switch),
    _Option(
        "ready_when",
        "ready while a model serves, or while every model that should be served is READY (%(default)s)",
        ("any", "all"),
    ),
    _Option("allow_client_shm", "let clients register shared memory", _switch),
    _Option("allow_model_override", "accept load requests that contain a configuration", _switch),
    _Option("allow_python_uploads", "run code in such load requests (Python models)", _switch),
    _Option("trace_file", "write traces to this file", metavar="FILE"),
    _Option("log_format", "format of the log (%(default)s)", ("text", "json")),
    _Option(
        "client_header",
        "header (and gRPC metadata) that names the client, for quotas and fair shares (%(default)s)",
        _header,
        "NAME",
    ),
    *(
        _Option(
            f"{protocol}_header_forward_pattern",
            f"forward {protocol} headers whose whole name matches the regular expression to models, as parameters (none)",
            _header_pattern,
            "REGEX",
        )
        for protocol in ("http", "grpc")
    ),
    _Option(
        "orca",
        "load reports for balancers in responses; on-request: if the request has endpoint-load-metrics-format (%(default)s)",
        ("always", "on-request", "never"),
    ),
    *(_Option(name, f"{text} (%(default)s)", *_limit_type(name)) for name, text in LIMIT_HELP.items()),
    _Option("gpu_memory_fraction", "share of each GPU's memory for all models together (%(default)s)", _fraction, "F"),
    _Option(
        "host_memory_budget",
        "host memory of all models on the CPU together, e.g. 4GiB: loads each at its first request, evicts by use (0: off)",
        _bytes,
        "SIZE",
    ),
    _Option(
        "inline_bound_us",
        "run a lone request on the event loop if the model computes it in this time, us, at p95 (%(default)s; 0: never)",
        _size,
        "US",
    ),
    _Option("otlp_endpoint", "URL of an OpenTelemetry receiver of spans, http://host:4317 (none)", metavar="URL"),
    _Option("otlp_protocol", "protocol of --otlp-endpoint (%(default)s)", OTLP_PROTOCOLS),
    _Option("trace_rate", "trace one in N requests without a trace context (%(default)s; 0: none)", _size, "N"),
    _Option("request_log", "requests with a line in the access log (%(default)s)", REQUEST_LOG_MODES),
    _Option("request_log_file", "file of the access log, as JSON (standard error)", metavar="FILE"),
    _STATE_DIR,
    _ENVIRONMENTS_DIR,
    _MODEL_KEYS_FILE,
    _Option("model_load_thread_count", "models that are loaded at the same time (%(default)s)", _positive, "N"),
    _Option("profile_s", "measure each model before it serves (%(default)s; 0: do not)", _seconds, "S"),
    _Option(
        "trial_limit_s",
        "limit of the first load of a file, in a helper process (%(default)s; 0: load it in the server)",
        _seconds,
        "S",
    ),
    _Option("drain_timeout_s", "wait for requests at shutdown (%(default)s)", _seconds, "S"),
    _Option("keep_alive_timeout_s", "keep an HTTP connection between requests (%(default)s)", _seconds, "S"),
    _Option("stream_heartbeat_s", "comment in an event stream without events for so long (%(default)s)", _seconds, "S"),
    _Option("grpc", "serve gRPC (on)", _switch),
    _Option("tls_cert", "certificate chain of the server (PEM): TLS for HTTP and gRPC", metavar="FILE"),
    _Option("tls_key", "private key of --tls-cert (PEM)", metavar="FILE"),
    _Option("tls_client_ca", "require client certificates signed by one of these CAs (PEM)", metavar="FILE"),
    _Option(
        "api_keys_file", "file with keys and their scopes, see headrace keys (none: no keys)", expandable_path, "FILE"
    ),
    _Option(
        "insecure_control", "without keys: let any client of a network address load models and change settings", _switch
    ),
    _Option(
        "allowed_host",
        "name in the header Host that the server answers to, besides localhost and IP addresses; repeatable",
        metavar="NAME",
    ),
    _Option(
        "cors_origin",
        "origin of web pages that may use the server, such as https://app.example; repeatable",
        metavar="ORIGIN",
    ),
    _Option("jwks", "public keys of JSON web tokens: a file, or an https:// URL (none)", metavar="FILE_OR_URL"),
    _Option("jwt_issuer", "issuer of accepted tokens, with --jwks", metavar="ISSUER"),
    _Option("jwt_audience", "audience of accepted tokens, with --jwks", metavar="AUDIENCE"),
    _Option(
        "cache_config",
        "response cache of models with response_cache.enable, as in Triton: local,size=BYTES or redis,host=NAME,port=NUMBER "
        "(none)",
        _cache_setting,
        "CACHE,NAME=VALUE",
    ),
    _Option(
        "front_ends",
        "processes that serve sockets and protocols before one engine process, on Linux (auto, which `serve` does by default: as "
        "many as the load needs; 0: one process for all)",
        _front_ends,
        "N|auto",
    ),
    _Option(
        "grpc_max_connection_age_s",
        "with --front-ends: age at which a gRPC connection gets GOAWAY, and its client opens another (%(default)s; 0: none)",
        _seconds,
        "S",
    ),
    _Option(
        "hang_timeout_s",
        "with --front-ends: a process that does not answer for this time is killed and started again (%(default)s)",
        _positive_seconds,
        "S",
    ),
    _Option("poll_interval_s", "interval of --model-control poll (%(default)s)", _seconds, "S"),
    _Option("metrics", "latency histograms and /metrics (on)", _switch),
    _Option("metrics_config", f"as in Triton: {_METRICS_HELP}; repeatable", _metrics_setting, "NAME=VALUE"),
)


def add_arguments(parser: argparse.ArgumentParser, environ: Mapping[str, str] | None = None) -> None:
    """Declare the options of `headrace serve`, with defaults from the environment.

    Args:
        parser: the parser.
        environ: environment variables; None for those of the process.

    Raises:
        ValueError: a variable has an invalid value, or its option is gone; names both.
    """
    text = (
        "a repository or its URL, the folder of one model, or a model file (model.onnx), in place of --model-repository"
    )
    parser.add_argument("path", nargs="*", type=repository_location, metavar="PATH", help=text)
    environ = os.environ if environ is None else environ
    _refuse_removed(environ)
    for option in OPTIONS:
        option.declare(parser, environ)
    # As in Triton's cache for Redis, which has no passphrase.
    names = ("TRITONCACHE_REDIS_USERNAME", "TRITONCACHE_REDIS_PASSWORD", "HEADRACE_REDIS_KEY_PASSWORD")
    parser.set_defaults(redis_credentials=tuple(environ.get(name, "") for name in names))


def add_state(parser: argparse.ArgumentParser) -> None:
    """Declare `--state-dir` for a command that loads models as the server does."""
    _STATE_DIR.declare(parser, os.environ)


def add_repository_cache(parser: argparse.ArgumentParser) -> None:
    """Declare the options of copies of stores for a command that reads repositories; `--state-dir` is another one."""
    for option in _REPOSITORY_CACHE:
        option.declare(parser, os.environ)


def add_environments(parser: argparse.ArgumentParser) -> None:
    """Declare `--environments-dir` for a command that uses the Python environments of models."""
    _ENVIRONMENTS_DIR.declare(parser, os.environ)


def add_model_keys(parser: argparse.ArgumentParser) -> None:
    """Declare `--model-keys-file` for a command that checks models as the server does."""
    _MODEL_KEYS_FILE.declare(parser, os.environ)


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
    """Create settings from parsed arguments; `model_repository` has the local ones of `repository_locations`."""
    values = vars(args)
    telemetry, limits, settings = (
        {each.name: values[each.name] for each in fields(kind) if each.name in values}
        for kind in (Telemetry, Limits, Settings)
    )
    settings |= {
        "model_repository": tuple(each for each in repository_locations(args) if isinstance(each, Path)),
        "load_model": tuple(args.load_model or args.default_load_model),
        "allowed_host": tuple(args.allowed_host or args.default_allowed_host),
        "cors_origin": tuple(args.cors_origin or args.default_cors_origin),
        "cache_config": cache_options(args.cache_config or args.default_cache_config, *args.redis_credentials),
        "telemetry": Telemetry(**telemetry),
        "limits": Limits(**limits),
        "metrics_config": TritonMetrics(**dict(args.metrics_config or args.default_metrics_config)),
    }
    return Settings(**settings)


def repository_locations(args: argparse.Namespace) -> tuple[Path | StoreUrl, ...]:
    """Return the repositories of parsed arguments: those of --model-repository, then the URLs among the paths."""
    # A path on the command line replaces the default repository.
    repositories = args.model_repository or ([] if args.path else args.default_model_repository)
    return (*repositories, *(each for each in args.path if isinstance(each, StoreUrl)))


def repository_cache(settings: Settings | argparse.Namespace) -> str:
    """Return the folder of all mirrors of stores, of settings or parsed arguments; "" if there is none."""
    default = os.path.join(settings.state_dir, "repositories") if settings.state_dir else ""
    return str(settings.repository_cache_dir or default)


def with_state(words: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the command line of `headrace build` with the server's state folder, if only the environment has one.

    Args:
        words: the command and its arguments.
        environ: environment variables; None for those of the process.
    """
    state = (os.environ if environ is None else environ).get(f"{PREFIX}STATE_DIR", "")
    is_named = any(word.partition("=")[0] == "--state-dir" for word in words)
    if words[:1] != ["build"] or is_named or not state:
        return list(words)
    return [words[0], "--state-dir", state, *words[1:]]


def default_keys_file() -> str:
    """Return the path of the keys file that `headrace keys` edits without --file."""
    return os.environ.get(f"{PREFIX}API_KEYS_FILE") or "~/.config/headrace/keys.yaml"


def api_key(environ: Mapping[str, str] | None = None) -> str:
    """Return the API key of commands that talk to a server, from HEADRACE_API_KEY; "" without one.

    Args:
        environ: environment variables; None for those of the process.
    """
    return (os.environ if environ is None else environ).get(f"{PREFIX}API_KEY", "")


def server_url(environ: Mapping[str, str] | None = None) -> str:
    """Return the URL of the server for commands that talk to one, from HEADRACE_URL; "" without one; arguments as `api_key`."""
    return (os.environ if environ is None else environ).get(f"{PREFIX}URL", "")


def store_hosts(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the hosts that the providers' variables name for object stores and credentials, and those of the region in S3.

    Args:
        environ: environment variables; None for those of the process.
    """
    environ = os.environ if environ is None else environ
    texts = []
    for name, value in environ.items():
        if re.match("AWS|AZUR|GOOGLE|IDENTITY|MSI", name):
            texts.append(value)
            if value.endswith(".json"):  # the file of an account names the host of its tokens
                with suppress(OSError, ValueError):
                    texts.append(Path(value).read_text())
        elif name.startswith("GCE_METADATA"):
            texts.append(f"http://{value}")
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    domains = [f"{name}.{region}.amazonaws.com{end}" for name in ("s3", "sts") for end in ("", ".cn")]
    named = [host for text in texts for host in re.findall(r"https?://(\[[^\]]*\]|[^/:\s\"?]+)", text)]
    return (*(host.strip("[]") for host in named), *domains, "sts.amazonaws.com")


def configures_malloc() -> bool:
    """Return True if the environment configures the arenas of the C library."""
    return "MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", "")


def ensure_home() -> str:
    """Set HOME to a private folder if the user has none, as a container's user without an entry in passwd; returns a warning."""
    if os.path.expanduser("~") != "~":
        return ""
    folder = Path(tempfile.gettempdir(), f"headrace-{os.geteuid()}")
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode != stat.S_IFDIR | 0o700:  # of another user
        folder = Path(tempfile.mkdtemp(prefix="headrace-"))
    os.environ["HOME"] = str(folder)
    return f"this user has no home folder: files are kept in {folder}, set HOME for another"


def disable_ort_telemetry() -> None:
    """Switch off ONNX Runtime's telemetry in this process and its children; call it before the library is imported."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
