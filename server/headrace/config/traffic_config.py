"""Configuration of traffic over versions and other models: canary shares, a sticky header, shadow requests, promotion rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from headrace.config.config_base import (
    VERSION_PATTERN,
    ConfigPart,
    PositiveCount,
    Problem,
    Problems,
    Version,
    is_version_number,
    option,
)

ALL_SHARES = 100_000
"""Units of a share: thousandths of a percent."""

DEFAULT_WINDOW_S = 300.0

MODEL_PREFIX = "model:"
"""Begins a target of traffic that is another model, e.g. "model:resnet50_v2"."""

_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,3})?) ?%")
# The names of `headrace.config.model_config.name_problem`.
_MODEL = re.compile(MODEL_PREFIX + r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
TARGET_PATTERN = f"^({VERSION_PATTERN}|{_MODEL.pattern})$"
# RFC 9110, section 5.1, in lower case as on the wire of HTTP/2; "-bin" ends names of binary gRPC metadata.
_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,64}")
# Headers with a meaning of their own: a client must not be routed by its secret, or by a length.
_REFUSED_HEADERS = frozenset((
    "authorization", "connection", "content-encoding", "content-length", "content-type", "cookie", "grpc-timeout",
    "host", "inference-header-content-length", "te", "traceparent", "tracestate", "transfer-encoding", "x-api-key",
    "x-request-timeout-ms",
))  # fmt: skip


def share_units(percent: str) -> int:
    """Return a checked share such as "5%" in units of `ALL_SHARES`."""
    return round(float(percent.rstrip("% ")) * ALL_SHARES / 100)


def _percent(value: Any) -> Any:
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) > 100:
        cure = 'write a percentage from "0%" to "100%" with at most three decimals, e.g. "5%"'
        raise Problems([Problem((), f"{str(value)[:80]!r} is not a share", cure)])
    return f"{float(match[1]):g}%"


def _is_target(value: str) -> bool:
    return is_version_number(value) or _MODEL.fullmatch(value) is not None


def _target(value: str) -> str:
    if not _is_target(value):
        cure = 'write it as in "2": 5%, or another model as in "model:resnet50_v2": 5%'
        raise Problems([Problem((), f"{value[:80]!r} is not a version number", cure)])
    return value


def model_of(target: str) -> str:
    """Return the model of a target such as "model:resnet50_v2"; "" for a version number."""
    return target[len(MODEL_PREFIX) :] if target.startswith(MODEL_PREFIX) else ""


def target_order(target: str) -> tuple[int, str]:
    """Return the sort key of a target: versions by number, then models by name."""
    return (1 << 62, target) if model_of(target) else (int(target), "")


def _header(value: str) -> str:
    name = value.lower()
    if value and (not _HEADER.fullmatch(name) or name in _REFUSED_HEADERS or name.startswith(":")):
        cure = "write the name of a header that the client sends for this purpose, e.g. X-User"
        raise Problems([Problem((), f"{value[:80]!r} cannot be the sticky header", cure)])
    return name


Percent = Annotated[
    str,
    BeforeValidator(_percent),
    WithJsonSchema({"type": "string", "pattern": f"^{_PERCENT.pattern}$"}),
]
Target = Annotated[str, Field(strict=True), AfterValidator(_target)]
HeaderName = Annotated[str, Field(strict=True), AfterValidator(_header)]


class Shadow(ConfigPart):
    """Copies requests to a version; its answers are compared with those of the stable version and never returned."""

    version: Version = Field(description="Version number that receives the copies.")
    share: Percent = option("100%", "Share of the requests of the stable version that are copied.")


class TrafficRules(ConfigPart):
    """Conditions of a promotion. A version with a share that breaks one loses its share."""

    max_error_rate: Percent | None = option(
        None, "Largest share of requests of the version with an error of the server (HTTP status 500 and above)."
    )
    max_p99_ms: Annotated[float, Field(strict=True, gt=0, le=3_600_000)] | None = option(
        None, "Latency in milliseconds that 99 % of the requests of the version keep, from arrival to result."
    )
    min_agreement: Percent | None = option(
        None, "Smallest share of rows whose shadow answer agrees with the stable version; needs `shadow`."
    )
    min_requests: PositiveCount = option(
        100, "Requests in the window, for `min_agreement` comparisons, below which a rule neither breaks nor holds."
    )
    window_s: Annotated[float, Field(strict=True, ge=1, le=86400)] = option(
        DEFAULT_WINDOW_S, "Latest seconds that the rules look at."
    )

    def _problems(self) -> Iterator[Problem]:
        if self.max_error_rate is None and self.max_p99_ms is None and self.min_agreement is None:
            yield Problem((), "rules has no rule", "write max_error_rate, max_p99_ms or min_agreement")


class Traffic(ConfigPart):
    """Shares of versions and other models in requests that name no version, and shadow requests.

    `{"2": 5%}` is short for `versions`.
    """

    model_config = ConfigDict(
        json_schema_extra={"patternProperties": {TARGET_PATTERN: {"type": "string", "pattern": _PERCENT.pattern}}}
    )

    versions: dict[Target, Percent] = option(
        {},
        'Share of each version, e.g. `"2": 5%`, or of another model with the same inputs and outputs, e.g. '
        '`"model:resnet50_v2": 5%`. The stable version has the rest.',
    )
    stable: Version | None = option(
        None,
        "Version with the rest of the traffic. If absent, the highest served version that `traffic` does not name; if it names "
        "all, the one with the largest share.",
    )
    sticky_header: HeaderName = option(
        "",
        "Header, in gRPC metadata, whose value selects the version: equal values get the same one. Requests without it are "
        "distributed one by one.",
    )
    shadow: Shadow | None = option(None, "Copies requests to a version and compares the answers.")
    rules: TrafficRules | None = option(None, "Conditions of a promotion; none if absent.")

    @model_validator(mode="before")
    @classmethod
    def _read_short_form(cls, value: Any) -> Any:
        """Move version numbers and models beside the fields into `versions`."""
        if not isinstance(value, dict):
            return value
        fields = set(cls.model_fields)
        targets = {key: share for key, share in value.items() if key not in fields and _is_target(str(key))}
        if not targets:
            return value
        rest = {key: item for key, item in value.items() if key not in targets}
        named = rest.get("versions", {})
        if not isinstance(named, dict) or any(key in named for key in targets):
            raise Problems([Problem((), "a version is written in and beside `versions`", "keep one of them")])
        return {**rest, "versions": {**named, **{str(key): share for key, share in targets.items()}}}

    @property
    def named(self) -> frozenset[str]:
        """Numbers of all versions that the block names."""
        others = [self.stable, None if self.shadow is None else self.shadow.version]
        numbers = frozenset(target for target in self.versions if not model_of(target))
        return numbers | {str(number) for number in others if number is not None}

    def _problems(self) -> Iterable[Problem]:
        total = sum(map(share_units, self.versions.values()))
        if total > ALL_SHARES:
            message = f"the shares of the versions are {total * 100 / ALL_SHARES:g}% together"
            yield Problem(("versions",), message, "write shares of 100% at most; the stable version has the rest")
        if self.rules is not None and self.rules.min_agreement is not None and self.shadow is None:
            cure = "add shadow, or remove min_agreement"
            yield Problem(
                ("rules", "min_agreement"), "min_agreement compares shadow answers, and there is no shadow", cure
            )
        if self.shadow is not None and self.shadow.version == self.stable:
            yield Problem(("shadow", "version"), "the stable version is also the shadow", "write another version")

    def stable_version(self, versions: Sequence[str]) -> str:
        """Return the stable one of the served versions; "" if none is served.

        Args:
            versions: numbers of the served versions, ascending.
        """
        if self.stable is not None and str(self.stable) in versions:
            return str(self.stable)
        unnamed = [version for version in versions if version not in self.named]
        if unnamed or not versions:
            return unnamed[-1] if unnamed else ""
        return max(versions, key=lambda version: (share_units(self.versions.get(version, "0%")), int(version)))

    def with_share(self, version: str, share: str) -> Traffic:
        """Return the block with another share of a version."""
        return self.model_copy(update={"versions": {**self.versions, version: share}})

    def promoted(self, target: str) -> Traffic:
        """Return the block in which a version is the stable one and has all traffic, or another model has all of it."""
        if model_of(target):
            return self.model_copy(update={"versions": {target: "100%"}})
        version = target
        shadow = None if self.shadow is not None and str(self.shadow.version) == version else self.shadow
        rules = self.rules
        if rules is not None and shadow is None and rules.min_agreement is not None:
            rest = rules.model_copy(update={"min_agreement": None})
            rules = None if rest.max_error_rate is None and rest.max_p99_ms is None else rest
        update = {"versions": {}, "stable": int(version), "shadow": shadow, "rules": rules}
        return self.model_copy(update=update)


def own_traffic_problems(traffic: Traffic | None, name: str) -> list[Problem]:
    """Return the problem of a model, by its name, that is a target of its own traffic."""
    if traffic is None or f"{MODEL_PREFIX}{name}" not in traffic.versions:
        return []
    cure = "write another model, or the number of a version"
    return [Problem(("traffic", "versions"), f"model '{name}' is a target of its own traffic", cure)]


def traffic_problems(traffic: Traffic | None, name: str, is_sequence: bool, is_decoupled: bool) -> Iterator[Problem]:
    """Return the contradictions between `traffic` and other fields of the configuration; `name` is the model's, "" if unknown."""
    if traffic is None:
        return
    yield from own_traffic_problems(traffic, name)
    if is_sequence:
        message = "traffic does not go with sequence_batching: the requests of a sequence belong to one version"
        yield Problem(("traffic",), message, "remove one of them")
    if is_decoupled and traffic.shadow is not None:
        message = "the answers of a decoupled model are not compared"
        yield Problem(("traffic", "shadow"), message, "remove shadow")
