"""Mixes of users, as in real traffic: their requests, pauses and thresholds.

A class of users stands in `loadtest/locustfile.py`; its weight is its share of all users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

P99_MS = 1000.0
SMALL_MODELS = ("tiny", "digits", "add_sub")
ALL_MODELS = (*SMALL_MODELS, "efficientnet_lite0")


@dataclass(frozen=True, slots=True)
class Mix:
    """A mix of users.

    Attributes:
        text: description.
        users: weight of each class of users, by the class's name.
        models: models of their requests, in the order in which they are looked up.
        think_s: how long a user pauses between an answer and the next question, on average; 0: not at all.
        p99_ms: limits that replace `P99_MS`, by pattern of request names; the first match counts.
    """

    text: str
    users: Mapping[str, int]
    models: tuple[str, ...] = ALL_MODELS
    think_s: float = 0.0
    p99_ms: Mapping[str, float] = field(default_factory=dict)


MIXES: Mapping[str, Mix] = {
    "everything": Mix(
        "every protocol and encoding without a pause: small models, now and then a photograph",
        {"JsonUser": 1, "BinaryUser": 1, "MixedUser": 1, "GrpcUser": 1},
    ),
    "web": Mix(
        "back ends of web sites: many users that pause, small JSON and gRPC requests, and what watches the server",
        {"JsonUser": 12, "GrpcUser": 6, "OnlookerUser": 1},
        think_s=0.2,
        p99_ms={"*": 500.0},
    ),
    "gallery": Mix(
        "people with photographs: one or an album at a time, cropped and mirrored, over HTTP and gRPC, then a look",
        {"GalleryUser": 4, "GrpcGalleryUser": 2, "JsonUser": 2},
        think_s=1.0,
        p99_ms={"efficientnet_lite0*": 3000.0},
    ),
    "nightly": Mix(
        "jobs that send full batches without a pause, beside a few people who wait for theirs",
        {"BatchUser": 2, "JsonUser": 2, "OnlookerUser": 1},
        SMALL_MODELS,
        p99_ms={"* x64": 2000.0},
    ),
}
