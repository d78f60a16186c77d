"""The JSON of what the server's own page shows, as types; never made, they only describe what `Overview` gives."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from server.frontends.http_bodies import IndexRow

_Count = Annotated[int, Meta(ge=0)]
_Time = Annotated[float, Meta(ge=0)]


class Serving(Struct, forbid_unknown_fields=True):
    """What a version that serves is, has done since it was loaded, and is doing."""

    platform: str
    runtime: Annotated[str, Meta(description="that runs it: onnxruntime or tensorrt")]
    device: Annotated[str, Meta(description='CPU, or e.g. "GPU 0,1"')]
    precision: Annotated[str, Meta(description="of the engine; of the model's own file which file that is")]
    artefact: Annotated[str, Meta(description="name of the file that is loaded")]
    not_on_gpu: Annotated[str, Meta(description="why the CPU runs it though a GPU is there or asked for, else empty")]
    engine: Annotated[
        str, Meta(description="precision of the built engine that serves, empty for the model's own file")
    ]
    max_batch_size: Annotated[
        int, Meta(ge=0, description="rows that run together at most where the version runs; 0: no batches")
    ]
    instances: Annotated[int, Meta(ge=0, description="that there should be")]
    living: Annotated[int, Meta(ge=0, description="of them")]
    restarts: Annotated[int, Meta(ge=0, description="of instances that had died")]
    parked: Annotated[bool, Meta(description="out of the GPU's memory, loaded when a request comes")]
    queued: Annotated[int, Meta(ge=0, description="requests in the queue")]
    wait_ns: Annotated[
        int, Meta(ge=0, description="that a request which came now is expected to wait, 0 if nothing is known")
    ]
    late: Annotated[int, Meta(ge=0, description="answers that came after they were due")]
    in_flight: Annotated[int, Meta(ge=0, description="requests between arrival and answer")]
    requests: Annotated[int, Meta(ge=0, description="answered with success")]
    rows: Annotated[int, Meta(ge=0, description="of those requests")]
    failures: Annotated[dict[str, _Count], Meta(description="requests by the reason of their error")]
    batches: Annotated[dict[str, _Count], Meta(description="by the reason why they were closed")]
    sizes: Annotated[dict[str, _Count], Meta(description="batches by their rows")]
    queue_ns: Annotated[int, Meta(ge=0, description="of successful requests, summed, like those that follow")]
    assembly_ns: _Count
    compute_ns: _Count
    split_ns: _Count
    total_ns: _Count
    latency: Annotated[
        dict[str, _Count],
        Meta(description="successful requests by their time: bucket i ends at 2 ** (i / buckets_per_doubling) seconds"),
    ]


class VersionStatus(IndexRow):
    """A version in the repository, and what it does if it serves."""

    serving: Serving | None


class Status(Struct, forbid_unknown_fields=True):
    """The server and all models; counts since each version was loaded, as of some tenths of a second ago at most."""

    name: str
    version: str
    time_ns: Annotated[int, Meta(ge=0, description="when this was so, by a clock of the server's own")]
    uptime_ns: _Count
    ready: Annotated[bool, Meta(description="what /v2/health/ready says")]
    models_ready: Annotated[int, Meta(ge=0, description="models of which every version that should be served is READY")]
    models_expected: Annotated[int, Meta(ge=0, description="models that should be served")]
    buckets_per_doubling: Annotated[int, Meta(ge=1, description="of times, in `latency`")]
    models: list[VersionStatus]


class Layer(Struct, forbid_unknown_fields=True):
    """One step of what serves a version."""

    name: str
    kind: str
    nodes: Annotated[list[str], Meta(description="of the ONNX model, that it does")]
    precision: str
    tactic: str
    time_us: _Time
    share: _Time


class Layers(Struct, forbid_unknown_fields=True):
    """How long each layer takes, in order, by the profiler of what runs it."""

    format: int
    model: str
    version: int
    artefact: Annotated[str, Meta(description="the file that was measured")]
    precision: str
    machine: Annotated[str, Meta(description="that it was measured on")]
    reason: Annotated[str, Meta(description="why it is the model's own file, empty if it is a built engine")]
    shapes: dict[str, list[int]]
    rows: _Count
    median_us: _Time
    p99_us: _Time
    rows_per_s: _Time
    total_us: _Time
    layers: list[Layer]
