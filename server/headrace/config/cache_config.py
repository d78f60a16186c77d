"""Configuration of the response cache for one model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace.config.config_base import ConfigPart, Flag, SizeBytes, option


class ResponseCache(ConfigPart):
    """Caches the responses of the model, if the server has a cache (`--cache-config`)."""

    enable: Flag = option(False, "Equal requests are answered from the cache.")


class CacheLimits(ConfigPart):
    """Limits of the model's entries in the response cache."""

    ttl_s: Annotated[float, Field(strict=True, ge=0.001, le=1e9)] | None = option(
        None, "Seconds after which a response is computed again; no limit if absent."
    )
    max_bytes: SizeBytes | None = option(
        None, 'Maximum memory of the model\'s responses, in bytes or as text, e.g. "64MiB"; the whole cache if absent.'
    )
