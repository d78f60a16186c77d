"""Starts `headrace` processes for tests by a fork: they need not import the server's modules again, which takes seconds.

`ForkServer` is the end of the tests. The process behind it (`python -m tests.support.fork_server`) imports the modules, has no
thread and no event loop, and forks for each request. The child gets a folder, environment and standard streams of its own, closes
everything else, and runs the program as the interpreter would.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
# Modules that run as programs after a fork: none changes the machine or the environment before it imports others.
PROGRAMS = ("headrace", "tests.support.fake_gpu_server")
# Imported before the first fork. None starts a thread; ONNX Runtime starts some with its first session.
MODULES = (
    "numpy.random",
    "onnx",
    "onnxruntime",
    "headrace.__main__",
    "headrace.server.app",
    "headrace.runtimes.onnxruntime",
    "headrace_bench.options",
    "headrace.server.commands.tune",
    "headrace.server.front_ends.supervisor",
    "headrace.wire.grpc.server",
    "headrace.inference.simulation.options",
    "headrace.models.stores.cache",
    "pydantic.v1",
    "uvicorn.lifespan.off",
)
# Variables that are read when the interpreter or a library starts: another value needs a new interpreter.
EARLY = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_", "ORT_", "GRPC_", "CUDA_", "NVIDIA_", "LC_", "LANG")
# OpenBLAS would start a thread at its import.
WITHOUT_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
_REQUEST_BYTES = 1 << 20


class ForkedProcess:
    """A process of the fork server, with the part of `subprocess.Popen` that tests use.

    Attributes:
        args: words of the command.
        pid: process id.
        returncode: exit status, negative for a signal; None before `poll` or `wait` has seen the end.
    """

    def __init__(self, args: Sequence[str], channel: socket.socket) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        self._channel = channel
        self._lock = threading.Lock()
        self.pid = int.from_bytes(channel.recv(4), "big")
        assert self.pid, "the fork server has ended: its error is on standard error"

    def poll(self) -> int | None:
        """Return the exit status, or None if the process still runs."""
        with self._lock:
            self._receive(0)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status.

        Raises:
            subprocess.TimeoutExpired: the process still runs after `timeout` seconds.
        """
        end_s = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            # In short pieces, so that another thread can poll.
            left_s = 0.1 if end_s is None else min(0.1, end_s - time.monotonic())
            with self._lock:
                self._receive(max(0.0, left_s))
            if self.returncode is None and left_s <= 0.0:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _receive(self, timeout_s: float) -> None:
        if self.returncode is not None:
            return
        poll = select.poll()  # unlike `select`, for descriptors of any number
        poll.register(self._channel, select.POLLIN)
        if poll.poll(1000 * timeout_s):
            self.returncode = int.from_bytes(self._channel.recv(4), "big", signed=True)
            self._channel.close()


class ForkServer:
    """A process that forks on request; it ends, with its children, when this process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._early = _early(os.environ)
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(other.fileno())],
                cwd=ROOT,
                env={**os.environ, **WITHOUT_THREADS},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # no terminal, as the files of its children
                pass_fds=[other.fileno()],
            )
        atexit.register(self.close)

    def can_start(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return True if a fork can stand for a new interpreter.

        Args:
            command: what comes before the arguments of the program.
            env: its whole environment.
        """
        known = [(sys.executable, "-m", program) for program in PROGRAMS]
        return tuple(command) in known and _early(env) == self._early

    def start(
        self, words: Sequence[str], cwd: Path, env: Mapping[str, str], output: IO[bytes], errors: IO[bytes]
    ) -> ForkedProcess:
        """Fork a process.

        Args:
            words: `python -m MODULE` and the arguments.
            cwd: its current folder.
            env: its whole environment.
            output, errors: files for its standard output and standard error.
        """
        request = json.dumps({"words": list(words[2:]), "cwd": str(cwd), "env": dict(env)}).encode()
        assert len(request) <= _REQUEST_BYTES, "the environment is too large"
        mine, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with channel, self._lock:
            socket.send_fds(self._socket, [request], [channel.fileno(), output.fileno(), errors.fileno()])
        return ForkedProcess(words, mine)

    def close(self) -> None:
        """End the process and its children."""
        self._socket.close()
        self._process.wait()


def _early(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `EARLY`, but for a PYTHONPATH that names the current folder of the fork server."""
    return {
        name: value
        for name, value in env.items()
        if name.startswith(EARLY) and (name, value) != ("PYTHONPATH", str(ROOT))
    }


def _serve(requests: socket.socket) -> list[str] | None:
    """Fork for each request; returns in a child with the words of its program, and None when the tests have ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the tests end first, and close the socket
    children: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: process id, channel
    while True:
        ready = select.select([requests, *children], [], [])[0]
        for child in ready:
            if isinstance(child, int):
                pid, channel = children.pop(child)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.close(child)
                with channel, contextlib.suppress(OSError):
                    channel.send(status.to_bytes(4, "big", signed=True))
        if requests not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
        if not message:
            for child in children:
                signal.pidfd_send_signal(child, signal.SIGKILL)
            return None
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"{len(threads)} threads at a fork"
        pid = os.fork()
        if pid == 0:
            for _, channel in children.values():
                channel.detach()
            request = json.loads(message)
            _become(request["cwd"], request["env"], fds[1:])
            return list(request["words"])
        channel = socket.socket(fileno=fds[0])
        for stream in fds[1:]:
            os.close(stream)
        channel.send(pid.to_bytes(4, "big"))
        children[os.pidfd_open(pid)] = pid, channel


def _become(cwd: str, env: Mapping[str, str], streams: Sequence[int]) -> None:
    """Give a forked process what a new one has: streams, folder, environment, signals, random numbers."""
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
    os.closerange(3, 1 << 16)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _forget_random_state()


def _forget_random_state() -> None:
    random.seed()
    importlib.import_module("numpy").random.seed()


def main() -> int:
    """Import the modules, fork, and run a program in each child."""
    from headrace.server import settings

    settings.disable_ort_telemetry()  # as `headrace` does before it imports ONNX Runtime
    for module in MODULES:
        importlib.import_module(module)
    # Children of frozen modules neither collect nor, at their end, free one by one what these hold: that took longer than most
    # commands.
    importlib.import_module("headrace.server.front_ends.children").prepare_forks()
    requests = socket.socket(fileno=int(sys.argv[1]))
    words = _serve(requests)
    requests.detach()
    if words is None:
        return 0
    if words[0] == "headrace":
        program = importlib.import_module("headrace.__main__")
        sys.argv = [str(program.__file__), *words[1:]]
        program.run()
    sys.argv[1:] = words[1:]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
