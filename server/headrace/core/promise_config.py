"""How a configuration tells what callers are promised, and what each of them may ask for. All of it is Headrace's own."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from headrace.core.config_base import ConfigPart, PositiveCount, Problem, Problems
from headrace.core.names import CLIENT_PATTERN

_CLIENT = re.compile(CLIENT_PATTERN)
_MAX_RATE_HZ = 1e9
# Beyond these, one client's turn would be lost in the rounding of the others'.
_MIN_WEIGHT, _MAX_WEIGHT = 1e-3, 1e3


def _client(value: str) -> str:
    if not _CLIENT.fullmatch(value):
        cure = "write it as the client sends it: 1 to 128 visible ASCII characters"
        raise Problems([Problem((), f"{value[:80]!r} cannot be the name of a client", cure)])
    return value


ClientName = Annotated[str, Field(strict=True), AfterValidator(_client)]
Weight = Annotated[float, Field(strict=True, ge=_MIN_WEIGHT, le=_MAX_WEIGHT)]


class Slo(ConfigPart):
    """The latency objective. A response that is late all the same is still delivered."""

    p99_ms: Annotated[float, Field(strict=True, gt=0)] | None = Field(
        default=None,
        description="Latency in milliseconds that 99 % of requests keep. Requests that would miss it are rejected at "
        "once.",
    )


class RateLimit(ConfigPart):
    """Rate limit of one client: a token bucket."""

    requests_per_s: Annotated[float, Field(strict=True, gt=0, le=_MAX_RATE_HZ)] = Field(
        description="Sustained requests per second."
    )
    burst: PositiveCount | None = Field(
        default=None, description="Maximum requests in a burst; if absent, one second's requests."
    )

    @property
    def most_at_once(self) -> int:
        """`burst`, or what stands for it."""
        return self.burst or max(1, int(self.requests_per_s))


class RateLimits(ConfigPart):
    """Rate limits of clients. A request over the limit is refused (429, RESOURCE_EXHAUSTED), even if the queue is empty."""

    default: RateLimit | None = Field(
        default=None,
        description="Limit of each client that is not listed, and of all unnamed clients together; unlimited if absent.",
    )
    clients: dict[ClientName, RateLimit] = Field(default={}, description="Limits by client name.")

    @model_validator(mode="after")
    def _check(self) -> RateLimits:
        if self.default is None and not self.clients:
            raise Problems([Problem((), "rate_limits limits nobody", "write default, clients, or both")])
        return self


class FairSharing(ConfigPart):
    """Shares of clients within each priority level, in proportion to their weights."""

    default_weight: Weight = Field(
        default=1.0,
        description="Weight of each client that is not listed; all unnamed clients are one client.",
    )
    weights: dict[ClientName, Weight] = Field(
        default={}, description="Weights by client name: weight 2 gets twice the share of weight 1."
    )
