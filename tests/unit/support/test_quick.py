"""`make quick` selects the tests of changed packages and of those that import them."""

from __future__ import annotations

import pytest

from tests.support.quick import selected

IMPORTS = {
    "server/headrace/core/errors.py": set(),
    "server/headrace/core/tensor.py": {"headrace.core.errors.BadRequest"},
    "server/headrace/http/codec.py": {"numpy", "headrace.core.tensor"},
    "server/headrace_model/slots.py": set(),
    "engines/headrace_engines/targets/onnx.py": {"headrace.core.errors"},
    "tests/support/models.py": {"headrace.http.codec.encode"},
    "tests/unit/core/test_errors.py": {"headrace.core.errors"},
    "tests/unit/core/test_other.py": {"json"},
    "tests/unit/http/test_codec.py": {"headrace.http.codec"},
    "tests/unit/http/test_routes.py": {"tests.support.models.affine"},
    "tests/unit/engines/targets/test_onnx.py": {"headrace_engines.targets.onnx.Target"},
    "tests/e2e/test_server.py": {"headrace.http.codec"},
}


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("server/headrace/core/errors.py", "core/test_errors core/test_other engines/targets/test_onnx"),
        ("server/headrace/core/tensor.py", "core/test_errors core/test_other http/test_codec"),
        ("server/headrace/http/codec.py", "http/test_codec http/test_routes"),
        ("server/headrace/http/notes.html", "http/test_codec http/test_routes"),
        ("tests/support/models.py", "http/test_routes"),
        ("README.md", ""),
    ],
)
def test_tests_of_a_change(changed: str, tests: str) -> None:
    assert selected([changed], IMPORTS) == {f"tests/unit/{name}.py" for name in tests.split()}


def test_a_changed_test_runs() -> None:
    assert selected(["tests/e2e/test_server.py"], IMPORTS) == {"tests/e2e/test_server.py"}
