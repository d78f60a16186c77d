"""`make quick` selects the tests of changed packages and of those that import them, nearest first."""

from __future__ import annotations

import pytest

from tests.support import quick
from tests.support.quick import ranked

IMPORTS = {
    "server/headrace/core/errors.py": set(),
    "server/headrace/core/tensor.py": {"headrace.core.errors.BadRequest"},
    "server/headrace/wire/http/codec.py": {"numpy", "headrace.core.tensor"},
    "server/headrace_model/slots.py": set(),
    "engines/headrace_engines/targets/onnx.py": {"headrace.core.errors"},
    "tests/support/models.py": {"headrace.wire.http.codec.encode"},
    "tests/unit/core/test_errors.py": {"headrace.core.errors"},
    "tests/unit/core/test_other.py": {"json"},
    "tests/unit/wire/http/test_codec.py": {"headrace.wire.http.codec"},
    "tests/unit/wire/http/test_routes.py": {"tests.support.models.affine"},
    "tests/unit/wire/http/test_tensors.py": {
        "headrace.core.errors",
        "headrace.core.tensor",
        "headrace.wire.http.codec",
    },
    "tests/unit/engines/targets/test_onnx.py": {"headrace_engines.targets.onnx.Target"},
    "tests/e2e/test_server.py": {"headrace.wire.http.codec"},
}


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (
            "server/headrace/core/errors.py",
            "core/test_other core/test_errors wire/http/test_tensors engines/targets/test_onnx",
        ),
        (
            "server/headrace/core/tensor.py",
            "core/test_other core/test_errors wire/http/test_tensors wire/http/test_codec",
        ),
        ("server/headrace/wire/http/codec.py", "wire/http/test_codec wire/http/test_routes wire/http/test_tensors"),
        ("server/headrace/wire/http/notes.html", "wire/http/test_codec wire/http/test_routes wire/http/test_tensors"),
        ("tests/support/models.py", "wire/http/test_routes"),
        ("README.md", ""),
    ],
)
def test_tests_of_a_change_nearest_first(changed: str, tests: str) -> None:
    assert ranked([changed], IMPORTS) == [f"tests/unit/{name}.py" for name in tests.split()]


def test_a_changed_test_runs_first() -> None:
    assert ranked(["server/headrace_model/slots.py", "tests/e2e/test_server.py"], IMPORTS) == [
        "tests/e2e/test_server.py"
    ]
    assert (
        ranked(["server/headrace/core/errors.py", "tests/e2e/test_server.py"], IMPORTS)[0] == "tests/e2e/test_server.py"
    )


def test_at_the_same_distance_one_file_of_each_folder_comes_in_turn() -> None:
    """In a folder the one that imports least comes first."""
    imports = {
        "server/headrace/core/errors.py": set(),
        "tests/unit/wire/grpc/test_a.py": {
            "headrace.core.errors",
            "headrace.core.errors.BadRequest",
            "headrace.wire.grpc.call",
        },
        "tests/unit/wire/grpc/test_b.py": {"headrace.core.errors"},
        "tests/unit/wire/http/test_a.py": {"headrace.core.errors"},
        "server/headrace/wire/grpc/call.py": set(),
    }
    names = ("wire/grpc/test_b", "wire/http/test_a", "wire/grpc/test_a")
    assert ranked(["server/headrace/core/errors.py"], imports) == [f"tests/unit/{name}.py" for name in names]


def test_what_is_left_out_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(quick, "changed_files", lambda: ["server/headrace/core/errors.py"])
    monkeypatch.setattr(quick, "tree_imports", lambda: IMPORTS)
    assert quick.main() == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(quick, "MAX_FILES", 2)
    assert quick.main() == 0
    printed, said = capsys.readouterr()
    assert printed.split() == ["tests/unit/core/test_other.py", "tests/unit/core/test_errors.py"]
    assert said == (
        "quick: left to `make test`, 2 of 4 test files, the farthest from the change: 1 of wire, 1 of engines\n"
    )
