"""JSON bodies that are small for their size limit and large as objects (attack S4)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.attacks import Attacked, attack, http_body, watched

MIB = 1 << 20
START = b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1,16],"data":'
END = b"}]}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """With the default limits on bodies."""
    with attack(tmp_path_factory.mktemp("json"), "--max-body-bytes", str(128 * MIB)) as attacked:
        yield attacked


# Bodies of 30 MiB, just below the limit on JSON, and words of the error.
BODIES = {
    "empty arrays as data": (
        START + b"[" + b"[]," * (10 * MIB) + b"[]]" + END,
        "regular array|elements came|not valid JSON",
    ),
    "numbers as data": (START + b"[" + b"1," * (15 * MIB) + b"1]" + END, "more than 16 elements"),
    "texts as data": (START + b"[" + b'"",' * (10 * MIB) + b'""]' + END, "must be numbers|more than 16 elements"),
    "empty arrays beside the inputs": (
        b'{"a":[' + b"[]," * (10 * MIB) + b"[]]}",
        "at most 524288 are allowed|at most 4194304 are allowed",
    ),
    "a million inputs": (
        b'{"inputs":[' + b"{}," * (10 * MIB) + b"{}]}",
        "at most 524288 are allowed|at most 4194304 are allowed",
    ),
    "a million outputs": (
        http_body()[:-1] + b',"outputs":[' + b"{}," * MIB + b"{}]}",
        "at most 524288 are allowed|at most 4194304 are allowed",
    ),
    "one long string": (START + b'"' + b"a" * (30 * MIB) + b'"' + END, "at most 4194304 are allowed"),
    "one long number": (START + b"[" + b"9" * (30 * MIB) + b"]" + END, "not valid JSON|at most"),
    "a long name": (
        START.replace(b'"X"', b'"' + b"X" * (30 * MIB) + b'"') + b"[1]" + END,
        "at most 4194304 are allowed",
    ),
    "NaN as data": (START + b"[" + b"NaN," * (7 * MIB) + b"1]" + END, "more than 16 elements"),
    "backslashes": (b'{"id":"' + b"\\" * (30 * MIB) + b'"}', "at most 4194304 are allowed"),
    "brackets": (b"[" * (30 * MIB), "deep"),
}


@pytest.mark.parametrize("case", BODIES)
def test_json_that_is_large_as_objects(server: Attacked, case: str) -> None:
    content, words = BODIES[case]
    with watched(server, f"S4 30 MiB of {case}") as watch, ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(server.infer, [content] * 2))
    watch.check(liveness_s=0.5)
    allowed_bytes = max(3 * len(content), 32 * MIB)
    assert watch.peak_bytes - watch.before_bytes < allowed_bytes, (
        "the memory of two bodies, of which no copies are made"
    )
    for status, text in answers:
        assert status == 400, text
        assert any(word in text for word in words.split("|")), text
        assert len(text) < 500
    server.still_serves()


@pytest.mark.parametrize("size", [60 * MIB, 120 * MIB])
def test_json_over_its_limit_is_refused_before_it_is_read(server: Attacked, size: int) -> None:
    content = START + b"[" + b"[]," * (size // 3) + b"[]]" + END
    with watched(server, f"S4 {size >> 20} MiB of empty arrays") as watch, server.reaches("max_json_bytes"):
        status, text = server.infer(content)
    watch.check(liveness_s=0.5)
    assert watch.peak_bytes - watch.before_bytes < size
    assert (status, "send the tensors as binary data" in text) == (413, True), text
    server.still_serves()


def test_large_json_that_is_right_is_served(server: Attacked) -> None:
    numbers = b",".join([b"0.5"] * (2 * MIB))
    content = b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1,%d],"data":[%s]}],' % (2 * MIB, numbers)
    content += b'"outputs":[{"name":"SUM"}]}'
    with watched(server, "large JSON that is right") as watch:
        status, _, answer = server.server.request("POST", "/v2/models/row_sums/infer", content)
    watch.check(liveness_s=0.5)
    assert status == 200, answer
    assert b"1048576.0" in answer


def test_a_load_request_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Attack S5: with model control off, the permission is checked before the body."""
    content = b'{"parameters":{"a":[' + b"[]," * (20 * MIB) + b"[]]}}"
    with attack(tmp_path, "--max-body-bytes", str(128 * MIB), "--model-control", "none") as closed:
        for action in ("load", "unload"):
            with watched(closed, f"S5 60 MiB to the {action} route") as watch:
                status, text = closed.post(f"/v2/repository/models/affine/{action}", content)
            watch.check(liveness_s=0.5)
            assert (status, "--model-control explicit" in text) == (403, True), text
            assert watch.peak_bytes - watch.before_bytes < len(content)
        closed.still_serves()


def test_a_large_load_request_is_bounded_before_it_is_parsed(server: Attacked) -> None:
    content = b'{"parameters":{"a":[' + b"[]," * (20 * MIB) + b"[]]}}"
    with watched(server, "S5 60 MiB to the load route, model control on") as watch:
        status, text = server.post("/v2/repository/models/affine/load", content)
    watch.check(liveness_s=0.5)
    assert (status, "at most 524288 are allowed" in text) == (400, True), text
    server.still_serves()
