"""What the API page says of the inference route, which FastAPI never sees."""

from __future__ import annotations

from typing import Any

_TENSOR: dict[str, Any] = {
    "type": "object",
    "required": ["name", "datatype", "shape"],
    "properties": {
        "name": {"type": "string"},
        "datatype": {"type": "string", "examples": ["FP32"]},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "data": {"type": "array", "description": "flat or nested; absent if the tensor follows in binary form"},
        "parameters": {"type": "object"},
    },
}
_WANTED: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "parameters": {
            "type": "object",
            "properties": {"binary_data": {"type": "boolean"}, "classification": {"type": "integer"}},
        },
    },
}
_REQUEST: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "inputs": {"type": "array", "items": _TENSOR},
        "outputs": {"type": "array", "items": _WANTED},
        "parameters": {"type": "object"},
    },
}
_ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "model_name": {"type": "string"},
        "model_version": {"type": "string"},
        "id": {"type": "string"},
        "outputs": {"type": "array", "items": _TENSOR},
    },
}
_ERROR: dict[str, Any] = {
    "content": {"application/json": {"schema": {"type": "object", "properties": {"error": {"type": "string"}}}}}
}


def _path(*names: str) -> dict[str, Any]:
    return {
        "post": {
            "tags": ["inference"],
            "summary": "Run a model",
            "description": (
                "JSON, or JSON followed by binary tensors (the header `Inference-Header-Content-Length` tells the size of "
                "the JSON); gzip and deflate both ways."
            ),
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ],
            "requestBody": {"required": True, "content": {"application/json": {"schema": _REQUEST}}},
            "responses": {
                "200": {"description": "The answer", "content": {"application/json": {"schema": _ANSWER}}},
                "400": {
                    "description": "The request is wrong; the text says what, where and what was expected",
                    **_ERROR,
                },
                "404": {"description": "No such model or version", **_ERROR},
                "413": {"description": "The body is larger than the server takes", **_ERROR},
                "500": {"description": "The model failed", **_ERROR},
                "503": {
                    "description": "Overloaded, loading or draining; Retry-After tells when to come back",
                    **_ERROR,
                },
                "504": {"description": "The request's own deadline passed", **_ERROR},
            },
        }
    }


INFER_PATHS: dict[str, Any] = {
    "/v2/models/{model}/infer": _path("model"),
    "/v2/models/{model}/versions/{version}/infer": _path("model", "version"),
}
