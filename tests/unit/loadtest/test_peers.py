"""The comparison with other inference servers: its table, its chart, its rounds, and a short run beside a FastAPI handler."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from loadtest.bench import clients, machine
from loadtest.load import LoadFailed
from loadtest.onnx_models import mlp
from loadtest.peers import __main__ as peers
from tests.support.serving import ROOT

NAMES = [peer.name for peer in peers.PEERS]


class Scripted:
    """A session whose samples are rates by variant; a name in `broken` fails."""

    def __init__(self, rates: dict[str, float], broken: str = "") -> None:
        self.rates, self.broken = rates, broken
        self.measured: list[tuple[str, str, str]] = []
        self.models = dict.fromkeys(peers.MODELS)

    def measure(self, peer: peers.Peer, model: str, variant: str) -> dict[int, clients.Sample]:
        self.measured.append((peer.name, model, variant))
        if peer.name == self.broken:
            raise LoadFailed("no request was answered\nmore")
        rate = self.rates.get(variant, 100.0)
        return {count: clients.Sample(int(rate), rate, 1e6 / rate, 0.0) for count in peers.CONNECTIONS}


def test_later_rounds_use_the_faster_variant_in_reverse_order() -> None:
    session = Scripted({"": 50.0, "--batching": 80.0})
    results, failures = peers.run(session, peers.PEERS, 2, lambda text: None)  # type: ignore[arg-type]
    assert not failures
    assert list(results) == NAMES
    variants = [variant for name, model, variant in session.measured if (name, model) == ("BentoML", "mlp")]
    assert variants == ["", "--batching", "--batching"]
    assert session.measured[-1][0] == peers.HEADRACE.name
    samples = results["BentoML"]["mlp", 64]
    assert [sample.requests_per_s for sample in samples] == [80.0, 80.0]


def test_a_failed_peer_is_omitted_and_named() -> None:
    session = Scripted({}, broken="MLServer")
    results, failures = peers.run(session, peers.PEERS, 2, lambda text: None)  # type: ignore[arg-type]
    assert failures == {"MLServer": "no request was answered"}
    assert "MLServer" not in results
    assert len(results) == len(NAMES) - 1
    assert session.measured.count(("MLServer", "tiny", "")) == 1


def test_table_and_chart_name_every_peer() -> None:
    results, _ = peers.run(Scripted({}), peers.PEERS, 1, lambda text: None)  # type: ignore[arg-type]
    described = {"processor": "P", "cores": "2", "python": "CPython", "commit": "abc"}
    table = peers.markdown(results, "command", described)
    assert [line.split(" | ")[0].strip("| ") for line in table.splitlines() if line.startswith("| ")] == [
        "server",
        *NAMES,
    ]
    drawn = "".join(ET.fromstring(peers.chart(results)).itertext())
    assert all(name in drawn for name in NAMES)


def test_every_script_has_pinned_requirements() -> None:
    for peer in peers.PEERS:
        if peer.script:
            assert (peers.HERE / f"run_{peer.script}.py").exists()
            lines = (peers.HERE / "requirements" / f"{peer.script}.txt").read_text().split()
            assert lines
            assert all("==" in line for line in lines)


def test_mlp_has_784_input_features(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    session = ort.InferenceSession(str(tmp_path / "mlp.onnx"), providers=["CPUExecutionProvider"])
    [output] = session.run(None, {"input": np.ones((3, 784), np.float32)})
    assert output.shape == (3, 10)
    assert np.ptp(output) > 0


@pytest.mark.slow
@pytest.mark.skipif(bool(clients.missing()) or len(machine.usable_cores()) < 2, reason="needs wrk, h2load, two cores")
def test_short_run_beside_a_fastapi_handler(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- peers:begin -->\n<!-- peers:end -->\n")
    tiny = ROOT / "model_repository" / "tiny" / "1" / "model.onnx"
    words = ["--rounds", "1", "--seconds", "1", "--only", "FastAPI, raw bytes", "--tiny", str(tiny)]
    words += ["--markdown", str(page), "--chart", str(tmp_path / "chart.svg"), "--environments", str(tmp_path)]
    assert peers.main(words) == 0
    assert "| FastAPI, raw bytes |" in page.read_text()
    assert (tmp_path / "chart.svg").read_text().startswith("<svg")


def test_the_identity_runs_on_both_cores_with_the_same_file_for_triton(tmp_path: Path) -> None:
    files = peers.prepare_identity(tmp_path)
    session = peers.Session(files, tmp_path / "environments", 1, peers.Cores(server=(0,), client=(1,)), tmp_path)
    commands = {peer.name: session.command(peer, peers.IDENTITY, "") for peer in peers.PEERS if peer.script}
    model = tmp_path / "repository" / "identity" / "1" / "model.py"
    assert commands["Triton, Python backend"].command[-2:] == ("--identity", str(model))
    assert commands["MLServer"].command[-1] == "--identity"
    ours = session.command(peers.HEADRACE, peers.IDENTITY, "")
    assert ours.cpus == commands["MLServer"].cpus == (0, 1)
    assert str(tmp_path / "repository") in ours.command
    oracle = ort.InferenceSession(str(files["identity"]), providers=["CPUExecutionProvider"])
    assert oracle.run(None, {"input": np.ones((2, 16), np.float32)})[0].shape == (2, 16)
