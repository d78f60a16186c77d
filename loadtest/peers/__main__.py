"""`python -m loadtest.peers`: the same two models on Headrace and on other inference servers, over HTTP, on one core.

Each peer runs in a virtual environment of its own (`--environments`), made from `requirements/NAME.txt` on the first run, and is
set up as its documentation recommends. The first answer of each is compared with ONNX Runtime. A peer with `--batching` is
measured both ways in the first round; later rounds take the way that was faster with 64 connections.

With `--identity` the model is Python code that returns its input, and the servers may use both cores: Headrace and Triton run
the same model.py, the others their own kind of handler.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from headrace_reports.svg_plot import Bar, bar_plot, bars_height, side_by_side
from onnx import TensorProto, helper
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest import servers
from loadtest.bench import clients, machine
from loadtest.bench.cases import IDENTITY_CODE
from loadtest.bench.clients import Load, Sample, run_http
from loadtest.bench.inprocess import Oracle, WrongAnswer
from loadtest.bench.report import markdown_table, number, replace_block
from loadtest.bench.results import Spread
from loadtest.bench.session import Cores, cores_of
from loadtest.load import LoadFailed
from loadtest.onnx_models import mlp, onnx_model
from loadtest.protocol import Array, HttpRequest, binary_request, decode_answer, json_request, send
from loadtest.servers import HOST, ROOT, Running, ServerCommand

HERE = Path(__file__).resolve().parent
MODELS = ("tiny", "mlp")
IDENTITY = "identity"
IDENTITY_WIDTH = 16
CONNECTIONS = (1, 64)
# Model, connections -> requests/s and p50 in us of each round.
Samples = dict[tuple[str, int], list[Sample]]


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to compare with.

    Attributes:
        name: in the report.
        script: of `run_SCRIPT.py` and `requirements/SCRIPT.txt`; "" for Headrace and the FastAPI handler, which run in this
            environment.
        request: from a model's name and its input to the request.
        answer: from headers and body to the output.
        variants: options of the script, of which the best one counts.
    """

    name: str
    script: str
    request: Callable[[str, Array], HttpRequest]
    answer: Callable[[Mapping[str, str], bytes], Array]
    variants: tuple[str, ...] = ("",)


def _json_rows(model: str, row: Array) -> HttpRequest:
    return HttpRequest("/predict", json.dumps({"input": row.tolist()}).encode(), {"Content-Type": "application/json"})


def _raw(path: str) -> Callable[[str, Array], HttpRequest]:
    return lambda model, row: HttpRequest(path, row.tobytes(), {"Content-Type": "application/octet-stream"})


def _v2(headers: Mapping[str, str], body: bytes) -> Array:
    return decode_answer(headers, body)["output"]


def _floats(headers: Mapping[str, str], body: bytes) -> Array:
    return np.frombuffer(body, np.float32)[None]


def _list(headers: Mapping[str, str], body: bytes) -> Array:
    answer = json.loads(body)
    return np.asarray(answer["output"] if isinstance(answer, dict) else answer, np.float32)


HEADRACE = Peer("Headrace", "", lambda model, row: binary_request(model, {"input": row}), _v2)
PEERS = (
    HEADRACE,
    Peer("FastAPI, raw bytes", "", _raw("/predict"), _floats),
    Peer("Triton, Python backend", "triton", lambda model, row: binary_request("model", {"input": row}), _v2),
    Peer("MLServer", "mlserver", lambda model, row: json_request("model", {"input": row}), _v2),
    Peer("BentoML", "bentoml", _json_rows, _list, ("", "--batching")),
    Peer("LitServe", "litserve", _json_rows, _list, ("", "--batching")),
    Peer("Ray Serve", "ray_serve", _raw("/"), _floats, ("", "--batching")),
)


@dataclass(frozen=True, slots=True)
class Session:
    """One call of the command.

    Attributes:
        models: ONNX file by name.
        environments: folder of the peers' virtual environments.
        seconds: length of a sample.
        cores: of servers and client.
        scratch: folder of logs, repositories and bodies.
    """

    models: Mapping[str, Path]
    environments: Path
    seconds: int
    cores: Cores
    scratch: Path

    def command(self, peer: Peer, model: str, variant: str) -> ServerCommand:
        """Start a peer with one model."""
        cpus = self.cores.both if model == IDENTITY else self.cores.server
        if peer is HEADRACE:
            return servers.headrace(self.scratch / "repository", models=(model,), cpus=cpus)
        if not peer.script:
            options = ("--model", str(self.models[model]), "--handler", "raw")
            return servers.peer("naive_fastapi", peer.name, *options, cpus=cpus)
        python = self.environments / peer.script / "bin" / "python"
        words = (str(python), "-P", str(HERE / f"run_{peer.script}.py"), "--model", str(self.models[model]))
        command = (*words, *([variant] if variant else []))
        if model == IDENTITY:
            command += ("--identity",)
            if peer.script == "triton":
                command += (str(self.scratch / "repository" / IDENTITY / "1" / "model.py"),)
        return ServerCommand(peer.name, command, ready_path="", cpus=cpus, own_group=True)

    def measure(self, peer: Peer, model: str, variant: str) -> dict[int, Sample]:
        """Start, check the answer, warm up, measure with each number of connections.

        Raises:
            WrongAnswer: no answer within two minutes, or another one than ONNX Runtime's.
        """
        oracle = Oracle(self.models[model])
        inputs = oracle.example(rows=1)
        request = peer.request(model, inputs["input"])
        with servers.running(self.command(peer, model, variant), self.scratch) as server:
            oracle.check(inputs, {"output": peer.answer(*_first_answer(server, request))})
            samples = {}
            for connections in CONNECTIONS:
                load = Load(request, connections, self.seconds, cpus=self.cores.client)
                run_http(server.url, replace(load, seconds=1), self.scratch)
                samples[connections] = run_http(server.url, load, self.scratch)
            return samples


def _first_answer(server: Running, request: HttpRequest, timeout_s: float = 120.0) -> tuple[dict[str, str], bytes]:
    """Headers and body of the first answer with status 200; some peers take connections before their model is there."""
    deadline = time.monotonic() + timeout_s
    status, body = 0, b""
    while time.monotonic() < deadline:
        try:
            status, headers, body = send(HOST, server.port, request)
        except OSError:
            status = 0
        if status == 200:
            return headers, body
        time.sleep(0.2)
    raise WrongAnswer(f"{server.name} answered {status} to {request.path}: {body[:300]!r}")


def prepare_identity(folder: Path) -> dict[str, Path]:
    """Write a repository with the identity in Python, and an ONNX file of it for the oracle; the file by name."""
    model = folder / "repository" / IDENTITY
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(IDENTITY_CODE.format(input="input", output="output"))
    tensor = f"data_type: TYPE_FP32, dims: [{IDENTITY_WIDTH}]"
    (model / "config.yaml").write_text(
        "backend: python\nmax_batch_size: 64\ndynamic_batching: {}\n"
        f"input: [{{name: input, {tensor}}}]\noutput: [{{name: output, {tensor}}}]\n"
    )
    shape = (TensorProto.FLOAT, ("N", IDENTITY_WIDTH))
    node = helper.make_node("Identity", ["input"], ["output"])
    onnx.save(onnx_model([node], {"input": shape}, {"output": shape}), folder / "identity.onnx")
    return {IDENTITY: folder / "identity.onnx"}


def prepare(folder: Path, tiny: Path) -> dict[str, Path]:
    """Write a repository with both models; ONNX files by name."""
    paths = {name: folder / "repository" / name / "1" / "model.onnx" for name in MODELS}
    for path in paths.values():
        path.parent.mkdir(parents=True)
    paths["tiny"].write_bytes(tiny.read_bytes())
    onnx.save(mlp(), paths["mlp"])
    for path in paths.values():
        (path.parent.parent / "config.yaml").write_text("max_batch_size: 64\n")
    return paths


def install(peer: Peer, environments: Path) -> None:
    """Make a peer's environment unless it is there.

    Raises:
        subprocess.CalledProcessError: venv or pip failed.
    """
    folder = environments / peer.script
    stamp = folder / "installed.txt"
    requirements = HERE / "requirements" / f"{peer.script}.txt"
    if stamp.exists() and stamp.read_bytes() == requirements.read_bytes():
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    words = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*words, "-r", str(requirements)], check=True)
    stamp.write_bytes(requirements.read_bytes())


def chart(results: Mapping[str, Samples], models: Sequence[str] = MODELS) -> str:
    """SVG: requests/s by peer, one panel for each model with 64 connections."""
    panels = []
    for model in models:
        rates = {name: _spread(samples, model, 64).median for name, samples in results.items()}
        top = max(rates.values())
        bars = [
            Bar("fp32" if name == HEADRACE.name else "other", name, rate / top, number(rate))
            for name, rate in rates.items()
        ]
        panels.append((bar_plot(f"{model}, 64 connections, requests/s", bars), bars_height(len(bars))))
    cores = "Server on both cores" if IDENTITY in models else "One server core"
    return side_by_side(panels, (), f"{cores}, one client core, HTTP") + "\n"


def markdown(
    results: Mapping[str, Samples], command: str, described: Mapping[str, str], models: Sequence[str] = MODELS
) -> str:
    """Table of all peers, and where it was measured."""
    columns = [
        "server",
        *(f"`{model}`, {count}" for model in models for count in CONNECTIONS),
        *(f"p50 `{model}`, 1" for model in models),
    ]
    rows = [
        (
            name,
            *(number(_spread(samples, model, count).median) for model in models for count in CONNECTIONS),
            *(f"{_spread(samples, model, 1, 'p50_us').median / 1000:.2f} ms" for model in models),
        )
        for name, samples in results.items()
    ]
    rounds = len(next(iter(results[HEADRACE.name].values())))
    lines = [f"Requests/s by model and connections, median of {rounds} rounds. Written by `{command}`.", ""]
    machine_text = f"{described['processor']}, {described['cores']}, {described['python']}, {described['commit']}"
    return "\n".join([*lines, *markdown_table(columns, rows), "", f"Machine: {machine_text}."])


def _spread(samples: Samples, model: str, connections: int, field: str = "requests_per_s") -> Spread:
    return Spread.of([getattr(sample, field) for sample in samples[model, connections]])


def run(
    session: Session, peers: Sequence[Peer], rounds: int, progress: Callable[[str], None]
) -> tuple[dict[str, Samples], dict[str, str]]:
    """Measure every peer once a round, in turning order; samples and failures by peer. A peer that fails is left out."""
    results: dict[str, Samples] = {peer.name: {} for peer in peers}
    failures: dict[str, str] = {}
    models = tuple(session.models)
    best = {(peer.name, model): peer.variants for peer in peers for model in models}
    for index in range(rounds):
        order = peers if index % 2 == 0 else list(reversed(peers))
        for peer, model in ((peer, model) for peer in order for model in models):
            measured = {}
            for variant in best[peer.name, model]:
                progress(f"round {index + 1}: {peer.name} {variant.strip('-')} {model}")
                if peer.name in failures:
                    continue
                try:
                    measured[variant] = session.measure(peer, model, variant)
                except (servers.ServerFailed, WrongAnswer, LoadFailed) as error:
                    if peer is HEADRACE:
                        raise
                    failures[peer.name] = str(error).splitlines()[0]
                    results.pop(peer.name)
            if peer.name not in failures:
                winner = max(measured, key=lambda variant: measured[variant][64].requests_per_s)
                best[peer.name, model] = (winner,)
                for connections, sample in measured[winner].items():
                    results[peer.name].setdefault((model, connections), []).append(sample)
    return results, failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, measure, write; 0, 1 if a peer failed, or 2 if wrk is missing or there are not two cores."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    console = Console()
    usable = machine.usable_cores()
    if (advice := clients.missing()) or len(usable) < 2:
        console.print(advice or "two cores are needed", style="bold red")
        return 2
    peers = [peer for peer in PEERS if peer is HEADRACE or not options.only or peer.name in options.only]
    if options.identity:  # the FastAPI handler has no model in Python
        peers = [peer for peer in peers if peer is HEADRACE or peer.script]
    cores = cores_of(usable)
    busy = machine.warned_busy_share(console, "expect noise")
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console)
    with tempfile.TemporaryDirectory(prefix="headrace-peers-") as scratch, bar:
        models = (IDENTITY,) if options.identity else MODELS
        steps = sum(len(models) * (len(peer.variants) + options.rounds - 1) for peer in peers)
        task = bar.add_task("install", total=steps + len(peers))
        for peer in peers:
            if peer.script:
                bar.update(task, description=f"install {peer.name}")
                install(peer, options.environments)
            bar.advance(task)
        files = prepare_identity(Path(scratch)) if options.identity else prepare(Path(scratch), options.tiny)
        session = Session(files, options.environments.absolute(), options.seconds, cores, Path(scratch))
        results, failures = run(
            session, peers, options.rounds, lambda text: bar.update(task, description=text, advance=1)
        )
    command = shlex.join(["python", "-m", "loadtest.peers", *words])
    table = markdown(results, command, machine.describe(cores, busy), models)
    console.print(table, markup=False, highlight=False)
    for name, failure in failures.items():
        console.print(f"{name}: {failure}", style="red", markup=False)
    if options.chart:
        options.chart.write_text(chart(results, models))
    if options.markdown:
        block = "peers-identity" if options.identity else "peers"
        options.markdown.write_text(replace_block(options.markdown.read_text(), table, block))
    return int(bool(failures))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.peers", description="Measure Headrace beside other servers."
    )
    names = [peer.name for peer in PEERS if peer is not HEADRACE]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PEER", help=f"of {', '.join(names)}")
    parser.add_argument("--identity", action="store_true", help="measure an identity in Python, on both cores")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--seconds", type=int, default=4, help="length of a sample (default: 4)")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv" / "peers", help="default: .venv/peers")
    default = ROOT / "model_repository" / "tiny" / "1" / "model.onnx"
    parser.add_argument("--tiny", type=Path, default=default, help="the demo model `tiny`, built by `make models`")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="replace the block between the peers markers in a page"
    )
    parser.add_argument("--chart", type=Path, metavar="FILE", help="write the chart as SVG")
    return parser


if __name__ == "__main__":
    sys.exit(main())
