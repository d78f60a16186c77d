"""A model that changes answers only for values that no test of its batches has: found in the rows that it serves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest

from tests.support import proof_cases as cases
from tests.support.models import add_model
from tests.support.networks import network
from tests.support.serving import Server, run_headrace, serving
from tests.support.triton_clients import ask
from tests.support.waiting import until

Array = np.ndarray[Any, Any]
# Each row gets 1 if any row has a value from 1000 to 1001.
BAND = """a = Greater (x, low)\n b = Less (x, high)\n c = And (a, b)\n d = Cast <to: int = 1> (c)
 m = ReduceMax <axes: ints = [0, 1]> (d)\n y = Add (x, m)"""
CONSTANTS = {"low": np.array(1000.0), "high": np.array(1001.0)}
BATCHES = """max_batch_size: 4
dynamic_batching: {max_queue_delay_microseconds: 300000, preferred_batch_size: [2]}
proof_sample: 2
"""


def send_together(server: Server, rows: list[Array]) -> list[Array]:
    """Return the answers to requests that share a batch."""
    with ThreadPoolExecutor(len(rows)) as pool:
        return list(pool.map(lambda x: ask(server, "http", "m", {"x": x})["y"], rows))


def explain(server: Server) -> dict[str, Any]:
    document: dict[str, Any] = httpx.get(f"http://{server.address}/v2/models/m/explain").json()
    return document


def test_rows_that_were_served_are_run_again_alone(tmp_path: Path) -> None:
    model = network(BAND, CONSTANTS, ("N", 4))
    add_model(tmp_path / "models", "m", model)
    (tmp_path / "models" / "m" / "config.yaml").write_text(BATCHES)
    rows = [np.zeros((1, 4), np.float32), np.full((1, 4), 1000.5, np.float32)]
    with serving(tmp_path / "models", tmp_path, "--state-dir", str(tmp_path / "state"), "--profile-s", "0") as server:
        assert explain(server)["batches"]["state"] == "proven"

        def is_found() -> bool:
            send_together(server, rows)
            return bool(explain(server)["batches"]["state"] == "alone")

        until(is_found, pause_s=0.5)
        for answer, right in zip(send_together(server, rows), (0.0, 1001.5), strict=True):
            np.testing.assert_array_equal(answer, np.full((1, 4), right, np.float32))
        page = httpx.get(f"http://{server.address}/metrics").text
        assert 'headrace_row_differences_total{model="m",version="1"} 1.0' in page
        assert "model m: a row of a batch of 2: alone: output 'y' of row" in server.text
    repeat = ("proof", str(tmp_path / "models" / "m"), "--state-dir", str(tmp_path / "state"))
    repeated = run_headrace(*repeat)
    assert repeated.returncode == 1, repeated
    assert "m/1: alone: output 'y' of row" in repeated.stdout
    assert "of 2 differs by 1 from the row alone, 2.59e-05 is allowed" in repeated.stdout
    onnx.save(
        network("y = Add (x, low)", {"low": CONSTANTS["low"]}, ("N", 4)), tmp_path / "models" / "m" / "1" / "model.onnx"
    )
    repeated = run_headrace(*repeat)
    assert repeated.returncode == 0, repeated
    assert "of 2 has the outputs of the row alone" in repeated.stdout
    onnx.save(network("y = Tanh (x)", {}, ("N", 5)), tmp_path / "models" / "m" / "1" / "model.onnx")
    repeated = run_headrace(*repeat)
    assert repeated.returncode == 1, repeated
    assert "m/1: the stored batch fails" in repeated.stdout


def test_without_a_stored_difference_nothing_is_repeated(tmp_path: Path) -> None:
    add_model(tmp_path / "models", "m", network("y = Tanh (x)", {}, ("N", 4)))
    command = ("proof", str(tmp_path / "models" / "m"), "--state-dir", str(tmp_path / "state"))
    repeated = run_headrace(*command)
    assert (repeated.returncode, "no difference of model 'm' is stored" in repeated.stdout) == (2, True)
    folder = tmp_path / "state" / "proofs" / "differences"
    folder.mkdir(parents=True)
    for content in (b"", b"PK", b"not a file of arrays"):
        (folder / "m.npz").write_bytes(content)
        assert run_headrace(*command).returncode == 2


@pytest.mark.parametrize(
    ("graph", "text", "state"),
    [
        (cases.UNKNOWN, "m: 4 batch sizes proven, up to 4 rows", "proven"),
        (cases.MIXED, "m: not all batches are proven (alone): influence: output 'y' of row 0 of 2 changes by", "alone"),
    ],
)
def test_a_build_proves_the_batches_of_its_engine(tmp_path: Path, graph: str, text: str, state: str) -> None:
    add_model(tmp_path / "models", "m", cases.model_of(graph))
    (tmp_path / "models" / "m" / "config.yaml").write_text("max_batch_size: 4\ndynamic_batching: {}\n")
    options = ("--target", "onnxruntime", "--precision", "fp32", "--cache", str(tmp_path / "cache"))
    folders = ("--state-dir", str(tmp_path / "state"))
    built = run_headrace("build", str(tmp_path / "models" / "m"), "--publish-slower", *options, *folders)
    assert built.returncode == 0, built
    assert text in built.stdout
    (stored,) = (tmp_path / "state" / "proofs").glob("*.json")
    written_ns = stored.stat().st_mtime_ns
    with serving(tmp_path / "models", tmp_path, *folders, "--profile-s", "0") as server:
        assert explain(server)["batches"]["state"] == state
    assert stored.stat().st_mtime_ns == written_ns, "the load has tested the batches again"
