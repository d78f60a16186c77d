"""JSON bodies of the traffic route as types; see `headrace.http.bodies`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from pydantic import BaseModel, ConfigDict, Field

from headrace.core.traffic_config import TARGET_PATTERN

_Count = Annotated[int, Field(ge=0)]
_Shares = Annotated[
    dict[Annotated[str, Meta(pattern=TARGET_PATTERN)], Annotated[str, Meta(pattern=r"^\d{1,3}(?:\.\d{1,3})? ?%$")]],
    Meta(description="share of each version, and of other models as model:NAME; the stable version has the rest"),
]


class TrafficRequest(Struct, forbid_unknown_fields=True):
    """Fields of `traffic` to replace (null removes one); or `promote`; or `reset`."""

    versions: _Shares | UnsetType = UNSET
    stable: Annotated[int, Meta(ge=1, le=2**63 - 1)] | UnsetType | None = UNSET
    sticky_header: str | UnsetType = UNSET
    shadow: dict[str, Any] | UnsetType | None = UNSET
    rules: dict[str, Any] | UnsetType | None = UNSET
    promote: (
        Annotated[
            str,
            Meta(
                pattern=TARGET_PATTERN, description="version or model:NAME that gets all traffic, if the rules are met"
            ),
        ]
        | UnsetType
    ) = UNSET
    reset: Annotated[bool, Meta(description="return to the traffic of the configuration")] = False


class VersionTraffic(BaseModel):
    """Traffic of one version or other model; requests, errors, comparisons and agreement are those of the window of the rules."""

    model_config = ConfigDict(extra="forbid")

    version: str = Field(description="number; of another model model:NAME")
    state: Literal["stable", "canary", "shadow", "idle", "undone", "not_ready"]
    share: float = Field(ge=0, le=1, description="of the requests that name no version")
    reason: str = Field(description="why a rule took the share, or another model gets no request; else empty")
    promotion: str = Field(description="why the version may not be promoted now; empty if it may")
    routed: _Count = Field(description="requests that named no version and reached it")
    requests: _Count
    errors: _Count = Field(description="errors of the server")
    p99_ms: float | None = Field(description="of the latest 1024 answers")
    comparisons: _Count = Field(description="compared and failed shadow requests")
    agreement: float | None = Field(description="share of the compared rows that agree with the stable version")
    max_difference: float | str | None = Field(description="largest absolute difference since the version was loaded")
    shadow: dict[str, _Count] = Field(description="shadow requests by outcome")


class TrafficReport(BaseModel):
    """Traffic in force over the versions of a model and other models."""

    model_config = ConfigDict(extra="forbid")

    model: str
    sticky_header: str
    shadow: dict[str, Any] | None
    rules: dict[str, Any] | None
    versions: list[VersionTraffic]
