"""The OpenAPI document matches the server: schemathesis sends what it allows and what it forbids to every route."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from headrace_engines.demo import networks
from schemathesis.specs.openapi.definitions import OPENAPI_31

from tests.support import models
from tests.support.keys import Keys
from tests.support.serving import Server, serving

# A schema has the form of a request, not the memory that the client has allocated or the inputs of the model: it is no fault to
# refuse what the page allows, with 400. Everything else about them is checked as everywhere.
FORM_IS_NOT_ENOUGH = """
[[operations]]
include-path-regex = "/(infer|generate|generate_stream|traffic)$|sharedmemory/region/.*/register$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "403", "404", "409", "503", "504"]
"""
# 503 is what the page promises for a model that is being unloaded, 504 for a deadline that was too short.
CONFIG = """
seed = 4
continue-on-failure = true
[generation]
max-examples = 10
[checks]
not_a_server_error.expected-statuses = ["2xx", "4xx", "503", "504"]
"""
REAL_NAMES = """
[parameters]
"path.model" = "row_sums"
"path.version" = "1"
"path.region" = "registered"
"""


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own, with every extension of the document on: models are unloaded and settings changed."""
    folder = tmp_path_factory.mktemp("openapi")
    models.add_model(folder / "repository", "row_sums", models.row_sums())
    options = ("--model-control", "explicit", "--load-model", "row_sums", "--allow-client-shm")
    traces = ("--trace-file", str(folder / "traces.json"))
    with serving(folder / "repository", folder, *options, *traces) as running:
        yield running


@pytest.fixture(scope="module")
def page(described: Server) -> Any:
    status, headers, content = described.request("GET", "/openapi.json")
    assert (status, headers["content-type"]) == (200, "application/json")
    return json.loads(content)


@pytest.fixture
def registered(described: Server) -> Iterator[None]:
    memory = SharedMemory(create=True, size=4096)
    try:
        register = json.dumps({"key": memory.name, "byte_size": 4096}).encode()
        path = "/v2/systemsharedmemory/region/registered/register"
        assert described.request("POST", path, register)[0] == 200
        yield
    finally:
        memory.close()
        memory.unlink()


def test_the_page_is_openapi(page: Any) -> None:
    jsonschema_rs.Draft202012Validator(OPENAPI_31).validate(page)
    for schema in page["components"]["schemas"].values():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
    names = [operation["operationId"] for path in page["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names))
    infer = page["paths"]["/v2/models/{model}/infer"]["post"]
    images = {"image/jpeg", "image/png", "image/webp"}
    assert set(infer["requestBody"]["content"]) == {"application/json", "application/octet-stream", *images}
    assert {"200", "400", "403", "404", "413", "503", "504"} <= set(infer["responses"])
    assert infer["responses"]["503"]["headers"]["Retry-After"]["required"]


def test_the_page_declares_keys(page: Any, described: Server) -> None:
    assert set(page["components"]["securitySchemes"]) == {"bearer", "api_key"}
    for path, methods in page["paths"].items():
        for operation in methods.values():
            is_open = path in ("/", "/docs", "/v2/health/live", "/v2/health/ready")
            assert operation["security"] == ([] if is_open else [{"bearer": []}, {"api_key": []}, {}]), path
            assert ("401" in operation["responses"]) is ("403" in operation["responses"]) is not is_open, path
            assert {"400", "421", "431", "500"} <= set(operation["responses"]), path


def test_the_page_requires_keys_on_a_server_with_keys(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    models.add_model(tmp_path / "repository", "row_sums", models.row_sums())
    with serving(tmp_path / "repository", tmp_path, "--api-keys-file", str(keys.path)) as running:
        assert running.request("GET", "/openapi.json")[0] == 401
        status, _, content = running.request("GET", "/openapi.json", None, keys.bearer("read"))
        assert status == 200
        document = json.loads(content)
        jsonschema_rs.Draft202012Validator(OPENAPI_31).validate(document)
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                target = path.format(model="row_sums", version="1", region="region")
                status, headers, _ = running.request(method.upper(), target, b"{}" if method == "post" else None)
                assert (status == 401) is (operation["security"] != []), path
                assert status != 401 or headers["www-authenticate"] == "Bearer"


def test_undocumented_routes_are_not_served(described: Server, page: Any) -> None:
    for path, methods in page["paths"].items():
        concrete = path.format(model="row_sums", version="1", region="registered")
        status, headers, _ = described.request("PATCH", concrete)
        assert status == 405, path
        allowed = {name.upper() for name in methods} | ({"HEAD"} if "get" in methods else set())
        assert headers["allow"] == ", ".join(sorted(allowed)), path
    for path in ("/redoc", "/docs/oauth2-redirect", "/v2/", "/v2/model", "/v2/repository", "/openapi.yaml"):
        assert described.request("GET", path)[0] == 404, path


@pytest.mark.slow
@pytest.mark.parametrize("names", ["", REAL_NAMES], ids=["any names", "real names"])
def test_the_server_matches_its_openapi_page(
    described: Server, page: Any, registered: None, tmp_path: Path, names: str
) -> None:
    described.request("POST", "/v2/repository/models/row_sums/load")
    (tmp_path / "schemathesis.toml").write_text(CONFIG + names + FORM_IS_NOT_ENOUGH)
    options = ["--config-file", "schemathesis.toml", "--no-color"]
    ran = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", *options, "run", "--checks", "all", f"{described.url}/openapi.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-2_000:]
    # All but the page itself, which it has read.
    operations = sum(len(methods) for path, methods in page["paths"].items() if path != "/openapi.json")
    assert f"Tested: {operations}" in ran.stdout, ran.stdout
    assert described.request("GET", "/v2/health/live")[0] == 200
    assert "Traceback" not in described.text


# Operations whose example cannot succeed here, with the status that they return.
EXPECTED = {
    ("post", "/v2/cudasharedmemory/region/{region}/register"): None,  # no example: a handle of a process that lives
    ("get", "/v2/cudasharedmemory/region/{region}/status"): 404,  # so no region can be registered
    ("get", "/v2/repository/models/{model}/traffic"): 404,  # without `traffic` in the configuration
    ("post", "/v2/repository/models/{model}/traffic"): 400,  # the example's version is not served
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the demo model that the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    model = networks.build_tiny(lambda part, text: None).model
    models.add_model(folder / "repository", "tiny", model, config="max_batch_size: 64")
    options = ("--model-control", "explicit", "--load-model", "tiny", "--allow-client-shm")
    with serving(folder / "repository", folder, *options, "--trace-file", str(folder / "traces.json")) as running:
        yield running


def _order(operation: tuple[str, str]) -> int:
    """Registering comes first; unregistering and unloading come last."""
    steps = {"/register": 0, "/unregister": 2, "/unload": 3}
    return next((step for suffix, step in steps.items() if operation[1].endswith(suffix)), 1)


def test_every_example_is_accepted(tiny: Server) -> None:
    paths = json.loads(tiny.request("GET", "/openapi.json")[2])["paths"]
    operations = sorted(((method, path) for path, methods in paths.items() for method in methods), key=_order)
    bodies = 0
    memory = SharedMemory(create=True, size=64)
    try:
        for method, path in operations:
            operation, body, expected = paths[path][method], None, EXPECTED.get((method, path), 200)
            parameters = {each["name"]: each for each in operation["parameters"]}
            examples = {name: str(each["schema"].get("examples", [""])[0]) for name, each in parameters.items()}
            headers = {name: examples[name] for name, each in parameters.items() if each["in"] == "header"}
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]["application/json"]
                if expected is None:
                    assert "example" not in content
                    continue
                body = json.dumps(content["example"]).replace("/input_0", f"/{memory.name}").encode()
                bodies += 1
            headers = {name: value for name, value in headers.items() if value}
            status, received, answer = tiny.request(method.upper(), path.format(**examples), body, headers)
            assert status == expected, (method, path, answer)
            if path.endswith("/infer"):
                answer = gzip.decompress(answer) if received.get("content-encoding") == "gzip" else answer
                assert len(json.loads(answer)["outputs"][0]["data"]) == 16
                assert "headrace-timing" in received
            elif path.endswith("/generate"):
                assert len(json.loads(answer)["output"]) == 16
            elif path.endswith("/generate_stream"):
                event = answer.removeprefix(b"data:")
                assert event != answer
                assert len(json.loads(event)["output"]) == 16
    finally:
        memory.close()
        memory.unlink()
    assert bodies == 14, (
        "load, unload, index, traffic, a region, two trace settings, log settings, inference and generate on two paths each"
    )
