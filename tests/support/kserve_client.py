"""Program with KServe's SDK, run by the interpreter of the environment `.venv/kserve`; writes JSON to standard output."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import kserve  # type: ignore[import-not-found]
import kubernetes.client  # type: ignore[import-not-found]
import numpy as np
import yaml

X = np.ones((1, 16), np.float32)


def request(model: str) -> Any:
    """A request of one row."""
    tensor = kserve.InferInput("X", [1, 16], "FP32")
    tensor.set_data_from_numpy(X, binary_data=True)
    return kserve.InferRequest(model_name=model, infer_inputs=[tensor])


def answer(response: Any) -> Any:
    """Values of the first output."""
    return response.outputs[0].as_numpy().reshape(-1).tolist()


async def ask_http(address: str, model: str) -> dict[str, Any]:
    """Health and one answer over REST."""
    client = kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2", timeout=50, retries=3))
    url = f"http://{address}"
    try:
        return {
            "live": await client.is_server_live(url),
            "ready": await client.is_server_ready(url),
            "model": await client.is_model_ready(url, model),
            "answer": answer(await client.infer(url, request(model), model_name=model)),
        }
    finally:
        await client.close()


async def ask_grpc(address: str, model: str) -> dict[str, Any]:
    """Health and one answer over gRPC."""
    async with kserve.InferenceGRPCClient(address, timeout=50) as client:
        return {
            "live": await client.is_server_live(),
            "ready": await client.is_server_ready(),
            "model": await client.is_model_ready(model),
            "answer": answer(await client.infer(request(model))),
        }


async def overload_grpc(address: str, model: str) -> dict[str, Any]:
    """Three requests at the same time, with the SDK's three attempts of each."""
    async with kserve.InferenceGRPCClient(address, timeout=50) as client:
        results = await asyncio.gather(*(client.infer(request(model)) for _ in range(3)))
        return {"answers": [answer(each) for each in results]}


def check_manifest(kind: str, path: str) -> dict[str, Any]:
    """Build the SDK's models from a manifest; their fields are those of the CRD. Returns what they do not allow."""
    with open(path, encoding="utf-8") as stream:
        document = yaml.safe_load(stream)
    problems: list[str] = []
    _check(kind, document, kind, problems)
    return {"problems": problems}


def _check(kind: str, value: Any, path: str, problems: list[str]) -> None:
    """Compare a value with its type in the SDK's notation: `str`, `list[V1Container]`, `dict(str, str)`, a model.

    The client of Kubernetes writes `List[...]` and `Dict[...]`.
    """
    if kind.lower().startswith("list["):
        for index, each in enumerate(value):
            _check(kind[5:-1], each, f"{path}[{index}]", problems)
    elif kind.lower().startswith(("dict(", "dict[")):
        for name, each in value.items():
            _check(kind[5:-1].partition(",")[2].strip(), each, f"{path}.{name}", problems)
    elif kind in ("str", "int", "bool", "float"):
        if type(value).__name__ != kind:
            problems.append(f"{path}: {value!r} is not {kind}")
    elif kind not in ("object", "datetime", "ResourceQuantity", "IntOrString"):
        model = getattr(kserve, kind, None) or getattr(kserve.models, kind, None) or getattr(kubernetes.client, kind)
        fields = {name: field for field, name in model.attribute_map.items()}
        problems += [f"{path}.{name}: unknown" for name in value if name not in fields]
        known = {name: each for name, each in value.items() if name in fields}
        for name, each in known.items():
            _check(model.openapi_types[fields[name]], each, f"{path}.{name}", problems)
        try:
            model(**{fields[name]: each for name, each in known.items()})
        except ValueError as error:  # a required field is missing
            problems.append(f"{path}: {error}")


def main(command: str, *words: str) -> None:
    """Run one command and print its result."""
    if command == "manifest":
        result = check_manifest(*words)
    else:
        result = asyncio.run({"http": ask_http, "grpc": ask_grpc, "overload": overload_grpc}[command](*words))
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
