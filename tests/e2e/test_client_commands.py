"""`headrace health`, `explain` and `infer` against a real server with keys, TLS and client certificates."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from deploy.make_keys import KEYS_FILE, make_keys
from tests.support.certificates import Certificates
from tests.support.models import add_model, affine
from tests.support.serving import Server, run_headrace, serving


@dataclass
class Guarded:
    """A server that requires keys and client certificates, and the files of its clients."""

    server: Server
    certificates: Certificates
    folder: Path

    @property
    def tls(self) -> tuple[str, ...]:
        client = self.certificates.client
        return ("--ca", str(self.certificates.authority), "--cert", str(client.certificate), "--key", str(client.key))

    def run(self, command: str, *words: str, **variables: str) -> tuple[int, str]:
        """Run a command; its exit status, and what it prints."""
        address = f"grpcs://{self.server.grpc_address}" if command == "infer" else f"https://{self.server.address}"
        named = {"health": (), "explain": ("net",), "infer": ("net", "--raw", str(self.folder / "rows.npz"))}[command]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        done = run_headrace(command, *named, "--url", address, *words, env=environment | variables)
        assert self.key("infer") not in done.stdout + done.stderr
        return done.returncode, done.stdout + done.stderr

    def key(self, name: str) -> str:
        return (self.folder / f"{name}.key").read_text().strip()

    def file(self, name: str) -> tuple[str, str]:
        return ("--api-key-file", str(self.folder / f"{name}.key"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    add_model(folder / "repository", "net", affine())
    np.savez(folder / "rows.npz", X=np.ones((1, 16), np.float32))
    certificates = Certificates(folder)
    make_keys(folder)
    pair = certificates.server
    options = ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
    options += ["--tls-client-ca", str(certificates.authority), "--api-keys-file", str(folder / KEYS_FILE)]
    with serving(folder / "repository", folder, *options) as server:
        yield Guarded(server, certificates, folder)


@pytest.mark.parametrize("command", ["health", "explain", "infer"])
def test_a_command_gets_its_answer(guarded: Guarded, command: str) -> None:
    status, printed = guarded.run(command, *guarded.tls, *guarded.file("infer"))
    assert status == 0, printed
    status, printed = guarded.run(command, *guarded.tls, HEADRACE_API_KEY=guarded.key("infer"))
    assert status == 0, printed
    assert "warning" not in printed


def test_health_needs_no_key(guarded: Guarded) -> None:
    """Container health checks: with TLS by the server's own certificate, without a key."""
    client, pair = guarded.certificates.client, guarded.certificates.server
    variables = {"HEADRACE_HTTP_PORT": str(guarded.server.port), "HEADRACE_TLS_CERT": str(pair.certificate)}
    done = run_headrace("health", "--cert", client.certificate, "--key", client.key, env=os.environ | variables)
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr
    assert guarded.run("health", *guarded.tls) == (0, "ready\n")


@pytest.mark.parametrize("command", ["explain", "infer"])
def test_a_command_without_a_valid_key(guarded: Guarded, command: str) -> None:
    for words, cure in (
        ((), "the server needs an API key: name one with --api-key-file FILE"),
        (guarded.file("metrics"), "does not allow it: use a key with that scope and model"),
    ):
        status, printed = guarded.run(command, *guarded.tls, *words)
        assert (status, cure in printed) == (1, True), printed
    status, printed = guarded.run(command, *guarded.tls, HEADRACE_API_KEY="hr_" + "A" * 43)
    assert (status, "does not accept the API key of HEADRACE_API_KEY" in printed) == (1, True), printed


@pytest.mark.parametrize("command", ["health", "explain", "infer"])
def test_a_command_without_its_tls_files(guarded: Guarded, command: str) -> None:
    key = guarded.file("infer")
    status, printed = guarded.run(command, *guarded.tls[2:], *key)
    assert (status, "the server's certificate is not trusted" in printed) == (1, True), printed
    status, printed = guarded.run(command, *guarded.tls[:2], *key)
    assert (status, "requires a client certificate: send" in printed) == (1, True), printed


def test_a_host_that_the_server_refuses(tmp_path: Path) -> None:
    """A name that resolves to the loopback address, as `localhost` does, and is not in the list."""
    add_model(tmp_path / "repository", "net", affine())
    make_keys(tmp_path)
    keys = ("--api-keys-file", str(tmp_path / KEYS_FILE), "--allowed-host", "inference.example")
    with serving(tmp_path / "repository", tmp_path, *keys) as server:
        code = "import socket, sys; real = socket.getaddrinfo\n"
        code += "socket.getaddrinfo = lambda host, *rest, **more: real('127.0.0.1', *rest, **more)\n"
        code += "from headrace.__main__ import main; sys.exit(main())"
        url = f"http://other.example:{server.port}"
        line = [
            sys.executable,
            "-c",
            code,
            "explain",
            "net",
            "--url",
            url,
            "--api-key-file",
            str(tmp_path / "infer.key"),
        ]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the server returned 421: " in done.stderr, done.stderr
    assert "start the server with --allowed-host other.example" in done.stderr
    assert "warning: the API key is sent to other.example without TLS" in done.stderr
