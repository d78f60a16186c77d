"""JPEG files to classes through a pipeline on a GPU, and what bounds it: `python -m loadtest.gpu.images`.

ResNet-50 in INT8 by TensorRT (`--cpu MODEL` tries the bench with a demo model on a CPU). Prints the images a second that the
decoders could do on all cores, then those of the server with more and more decoder processes, each with the cores that the
server's process, its decoders and the clients used. A process whose interpreter is always busy uses one core and a little more.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench import images
from loadtest.servers import HOST, ROOT, cpu_seconds, descendants, headrace, running

RESNET = "resnet50"
_READY_S = 300.0
_BUILD_S = 400.0
_CORES_OF_OTHERS = 4  # server, clients
# A shared core counts as used up from here on.
_BUSY = 0.9


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of the server.

    Cores in use: of the server's process, its decoders and its clients; `loop_cores` of the event loop's thread alone.
    """

    images_per_s: float
    server_cores: float
    loop_cores: float
    decoder_cores: float
    client_cores: float

    def bound(self, decoders: int) -> str:
        """Return what limits the rate."""
        if self.decoder_cores >= _BUSY * decoders:
            return "the decoder processes"
        if self.server_cores >= _BUSY:
            return "the interpreter of the server's process"
        return "none of the processors: the clients, or the model"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu.images", description="What bounds images on a GPU.")
    add = parser.add_argument
    add("--work", type=Path, default=Path(tempfile.gettempdir()) / "headrace-gpu-images", help="models, engines, logs")
    add("--seconds", type=float, default=4.0, help="of one sample")
    add("--rounds", type=int, default=2)
    add("--connections", type=int, default=128)
    add("--clients", type=int, default=2, help="client processes")
    add("--decoders", type=int, nargs="+", help="numbers of decoder processes (1, half of the cores, all but four)")
    add("--cpu", metavar="MODEL", default="", help="a demo model of model_repository, without a GPU")
    add("--client", type=int, nargs=2, metavar=("PORT", "CONNECTIONS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.client:
        return _load(options.client[0], options.client[1], options.seconds)
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    model = options.cpu or RESNET
    file = _prepare_cpu(work, model) if options.cpu else _prepare_gpu(work)
    cores = len(os.sched_getaffinity(0))
    _say("decoding alone", cores=cores, **_alone(cores, options.seconds))
    numbers = options.decoders or sorted({1, max(cores // 2, 1), max(cores - _CORES_OF_OTHERS, 1)})
    for number in range(options.rounds):
        for decoders in numbers:
            sample = _sample(work, model, file, decoders, options)
            figures = {name: round(getattr(sample, name), 2) for name in Sample.__slots__}
            _say("served", round=number, decoders=decoders, **figures, bound=sample.bound(decoders))
    return 0


def _say(what: str, **figures: object) -> None:
    print(json.dumps({"what": what, **figures}), flush=True)


def _alone(workers: int, seconds: float) -> dict[str, float]:
    rate = images.in_process(None, workers, 1, seconds)
    return {"images_per_s": round(rate.images_per_s, 1), "cpu_ms": round(rate.cpu_ms, 3)}


def _prepare_cpu(work: Path, model: str) -> Path:
    repository = work / "models"
    if not (repository / model).is_dir():
        shutil.copytree(ROOT / "model_repository" / model, repository / model)
    return next((repository / model).glob("*/model.onnx"))


def _prepare_gpu(work: Path) -> Path:
    """Make ResNet-50 and its INT8 engine, or find them; raises subprocess.CalledProcessError if that fails."""
    repository, words = work / "models", [sys.executable, "-m", "headrace_engines"]
    if not (repository / RESNET).is_dir():
        build = [*words, "models", "build", "--only", RESNET, "--output", str(repository)]
        subprocess.run(build, cwd=ROOT, check=True, timeout=_BUILD_S)
        config = repository / RESNET / "config.pbtxt"
        config.write_text(config.read_text().replace('"fp16"', '"int8"'))  # else the server builds the other one
    if not list((repository / RESNET).glob("*/build.json")):
        # Random weights keep few best classes: the speed is measured, hence --force.
        build = [*words, "build", RESNET, "--model-repository", str(repository), "--target", "tensorrt", "--force"]
        build += ["--precision", "int8", "--cache", str(work / "cache")]
        begun_s = time.monotonic()
        subprocess.run(build, cwd=ROOT, check=True, timeout=_BUILD_S)
        _say("engine built", seconds=round(time.monotonic() - begun_s, 1))
    return next((repository / RESNET).glob("*/model.onnx"))


def _sample(work: Path, model: str, file: Path, decoders: int, options: argparse.Namespace) -> Sample:
    """Start a server with so many decoders, and load it."""
    repository = work / "models"
    images.write_pipeline(repository, model, file, processes=decoders)
    command = headrace(repository, models=(images.PIPELINE,), options=("--profile-s", "0") if options.cpu else ())
    with running(command, work, _READY_S) as server:
        with urllib.request.urlopen(f"{server.url}/v2/models/{model}") as answer:
            _say("model", platform=json.load(answer).get("platform"))
        _clients(server.port, options, seconds=1.0)
        processes = descendants(server.pid)
        before = cpu_seconds(server.pid), _loop_s(server.pid), sum(map(cpu_seconds, processes))
        results = _clients(server.port, options, options.seconds)
        after = cpu_seconds(server.pid), _loop_s(server.pid), sum(map(cpu_seconds, processes))
    elapsed_s = max(result["seconds"] for result in results)
    used = [(late - early) / elapsed_s for early, late in zip(before, after, strict=True)]
    rate = sum(result["answers"] / result["seconds"] for result in results)
    return Sample(rate, *used, sum(result["cpu_s"] for result in results) / elapsed_s)


def _loop_s(pid: int) -> float:
    """Return the processor time of a process's main thread, which runs the event loop."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _clients(port: int, options: argparse.Namespace, seconds: float) -> list[dict[str, float]]:
    share = str(max(options.connections // options.clients, 1))
    words = [sys.executable, "-m", __spec__.name if __spec__ else "loadtest.gpu.images", "--seconds", str(seconds)]
    words += ["--client", str(port), share]
    started = [subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(options.clients)]
    answers = [client.communicate()[0] for client in started]
    for client in started:
        if client.returncode:
            raise subprocess.CalledProcessError(client.returncode, words)
    return [json.loads(answer) for answer in answers]


def _load(port: int, connections: int, seconds: float) -> int:
    """Send images on every connection, one at a time, and print how many were answered; 1 if one was refused."""
    request = images.image_request(images.photograph())
    head = f"POST {request.path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(request.body)}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    message = head.encode() + b"\r\n" + request.body
    answers, begun_s, cpu_s = 0, time.monotonic(), time.process_time()
    with selectors.DefaultSelector() as selector:
        for _ in range(connections):
            connection = socket.create_connection((HOST, port))
            selector.register(connection, selectors.EVENT_READ, bytearray())
            connection.sendall(message)
        while time.monotonic() - begun_s < seconds:
            for key, _ in selector.select(1.0):
                connection, received = key.fileobj, key.data
                assert isinstance(connection, socket.socket)
                received += connection.recv(65536)
                if not _is_whole(received):
                    continue
                if not received.startswith(b"HTTP/1.1 200"):
                    print(bytes(received[:500]), file=sys.stderr)
                    return 1
                received.clear()
                answers += 1
                connection.sendall(message)
        for key in list(selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
    used_s, elapsed_s = time.process_time() - cpu_s, time.monotonic() - begun_s
    print(json.dumps({"answers": answers, "seconds": elapsed_s, "cpu_s": used_s}))
    return 0


def _is_whole(received: bytearray) -> bool:
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return False
    lengths = [line for line in bytes(received[:end]).lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(lengths) and len(received) >= end + 4 + int(lengths[0].partition(b":")[2])


if __name__ == "__main__":
    sys.exit(main())
