"""What the API page says of the inference routes: they are served in front of the table of `http_routes`."""

from __future__ import annotations

from typing import Any

from server.core.names import CLIENT_PATTERN
from server.core.tensor import DATATYPES

_DATATYPES = [datatype.name for datatype in DATATYPES]
_SHAPE: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
_IN_MEMORY: dict[str, Any] = {
    "shared_memory_region": {"type": "string", "description": "the tensor lies in this registered region"},
    "shared_memory_offset": {"type": "integer", "minimum": 0},
    "shared_memory_byte_size": {"type": "integer", "minimum": 0},
}

SCHEMAS: dict[str, Any] = {
    "InferInput": {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {
            "name": {"type": "string"},
            "datatype": {"type": "string", "examples": _DATATYPES},
            "shape": _SHAPE,
            "data": {"description": "in row-major order, flat or nested; absent if the tensor comes another way"},
            "parameters": {
                "type": "object",
                "properties": {
                    "binary_data_size": {
                        "type": "integer",
                        "minimum": 0,
                        "description": "bytes of the tensor behind the JSON; the inputs' bytes follow in their order",
                    },
                    **_IN_MEMORY,
                },
            },
        },
    },
    "InferRequestedOutput": {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string"},
            "parameters": {
                "type": "object",
                "properties": {
                    "binary_data": {"type": "boolean", "description": "send it behind the JSON"},
                    "classification": {"type": "integer", "minimum": 0, "description": "send this many best classes"},
                    **_IN_MEMORY,
                },
            },
        },
    },
    "InferRequest": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string", "description": "comes back with the answer"},
            "inputs": {"type": "array", "items": {"$ref": "#/components/schemas/InferInput"}},
            "outputs": {
                "type": "array",
                "items": {"$ref": "#/components/schemas/InferRequestedOutput"},
                "description": "all, if absent or empty",
            },
            "parameters": {
                "type": "object",
                "properties": {
                    "binary_data_output": {"type": "boolean", "description": "send all outputs behind the JSON"},
                    "priority": {
                        "type": "integer",
                        "minimum": 0,
                        "description": "1 is the most urgent; 0 and numbers beyond the model's levels are its default",
                    },
                    "timeout": {
                        "type": "integer",
                        "minimum": 0,
                        "description": "the longest time in the queue, microseconds; only where the model's queue policy has "
                        "allow_timeout_override, and only if it is shorter than the policy's",
                    },
                    "headrace_deadline_us": {
                        "type": "integer",
                        "minimum": 0,
                        "description": "how long the caller waits, microseconds from the arrival of the request on; 0 for ever",
                    },
                    "headrace_timing": {
                        "type": "boolean",
                        "description": "tell with the answer where its time has gone",
                    },
                },
            },
        },
    },
    "InferOutput": {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {
            "name": {"type": "string"},
            "datatype": {"enum": _DATATYPES},
            "shape": _SHAPE,
            "data": {"type": "array"},
            "parameters": {"type": "object"},
        },
    },
    "InferAnswer": {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "parameters": {
                "type": "object",
                "description": "where the answer's time has gone, if that was asked for",
                "properties": {
                    **{
                        f"headrace_{part}_us": {"type": "integer", "minimum": 0}
                        for part in ("queue", "assemble", "compute", "split", "answer", "total")
                    },
                    "headrace_batch_rows": {"type": "integer", "minimum": 1},
                    "headrace_batch_closed": {"type": "string"},
                },
            },
            "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/InferOutput"}},
        },
    },
}

PATHS = ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer")
STATUSES = (403, 404, 413, 429, 503, 504)

_BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
_HEADER_SIZE: dict[str, Any] = {"type": "integer", "minimum": 0}

HEADERS: list[dict[str, Any]] = [
    {
        "name": "Inference-Header-Content-Length",
        "in": "header",
        "description": "bytes of JSON at the start of the body (unpacked); 0: the body is one tensor; without it all is JSON",
        "schema": _HEADER_SIZE,
    },
    {
        "name": "Content-Encoding",
        "in": "header",
        "description": "of the whole body",
        "schema": {"type": "string", "enum": ["gzip", "deflate", "identity"]},
    },
    {
        "name": "Accept-Encoding",
        "in": "header",
        "description": "gzip and deflate are offered, by their weights, for answers of 1 KiB and more",
        "schema": {"type": "string", "examples": ["gzip"]},
    },
    {
        "name": "X-Request-Timeout-Ms",
        "in": "header",
        "description": "how long the caller waits, from the first bytes of its request on; 0 for ever",
        "schema": {"type": "integer", "minimum": 0, "examples": [250]},
    },
    {
        "name": "X-Headrace-Client",
        "in": "header",
        "description": "who asks, for quotas and fair shares; another header with --client-header",
        "schema": {"type": "string", "pattern": CLIENT_PATTERN, "examples": ["shop"]},
    },
    {
        "name": "Headrace-Timing",
        "in": "header",
        "description": "1: tell with the answer where its time has gone",
        "schema": {"type": "string", "enum": ["0", "1"]},
    },
    {
        "name": "Endpoint-Load-Metrics-Format",
        "in": "header",
        "description": "tell with the answer how busy the model is, as Open Request Cost Aggregation has it",
        "schema": {"type": "string", "enum": ["text", "json"]},
    },
]

OPERATION: dict[str, Any] = {
    "tags": ["inference"],
    "summary": "Run a model",
    "description": (
        "The body is JSON, or JSON with the bytes of tensors behind it; then `Inference-Header-Content-Length` tells the size "
        "of the JSON, in the request as in the answer. Numbers are little-endian; every element of BYTES has its length as "
        "four bytes in front. The media type of a request is not looked at. A raw binary request is the data of a model's one "
        "input and nothing else, with the header `Inference-Header-Content-Length: 0`: one row, at most one free dimension, all "
        "outputs in binary. NaN and infinities among JSON's numbers are `NaN`, `Infinity` and `-Infinity`."
    ),
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/InferRequest"}},
            "application/octet-stream": _BINARY,
        },
    },
}

ANSWER: dict[str, Any] = {
    "description": "JSON, or JSON with the bytes of tensors behind it (application/octet-stream)",
    "headers": {
        "Inference-Header-Content-Length": {
            "description": "bytes of JSON; there if tensors follow it",
            "schema": _HEADER_SIZE,
        },
        "Content-Encoding": {"schema": {"type": "string", "enum": ["gzip", "deflate"]}},
        "Headrace-Queue-Depth": {"description": "requests that wait for the model", "schema": _HEADER_SIZE},
        "Headrace-Predicted-Wait-Us": {
            "description": "how long a request that came now would wait until it is run; 0: unknown, too",
            "schema": _HEADER_SIZE,
        },
        "Headrace-Timing": {"description": "if it was asked for", "schema": {"type": "string"}},
        "Server-Timing": {"description": "the same as W3C has it", "schema": {"type": "string"}},
        "Endpoint-Load-Metrics": {"description": "if it was asked for", "schema": {"type": "string"}},
    },
    "content": {
        "application/json": {"schema": {"$ref": "#/components/schemas/InferAnswer"}},
        "application/octet-stream": _BINARY,
    },
}
