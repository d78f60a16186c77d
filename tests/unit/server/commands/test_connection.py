"""TLS files and API keys of the commands that talk to a server, against real servers with TLS."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from headrace.core.errors import BadRequest, HeadraceError
from headrace.server.commands.connection import ConnectionOptions, add_arguments, channel_error_text, is_loopback
from headrace.server.commands.infer_client import InferClient
from headrace.wire.tls import TlsFiles
from tritonclient.grpc import service_pb2_grpc

from tests.support.certificates import Certificates, Pair
from tests.support.serving import run_headrace
from tests.unit.server.commands.conftest import ScriptedGrpcServer
from tests.unit.server.commands.test_health import Peer, running_peer

KEY = "hr_" + "k3y-" * 10 + "end"


def options_of(*words: str, api_key: str = "") -> ConnectionOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser, api_key)
    return ConnectionOptions.from_arguments(parser.parse_args(words))


# --- the key -----------------------------------------------------------------------------------------------------------


def test_a_key_is_read_from_its_file_or_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"  {KEY}\n")
    assert options_of().headers() == {}
    assert options_of("--api-key-file", str(file)).headers() == {"authorization": f"Bearer {KEY}"}
    assert options_of(api_key=KEY).headers() == {"authorization": f"Bearer {KEY}"}
    both = options_of("--api-key-file", str(file), api_key="hr_other")
    assert (both.api_key, both.api_key_source) == (KEY, str(file))


def test_a_key_is_not_shown(tmp_path: Path) -> None:
    assert KEY not in repr(options_of(api_key=KEY))
    parser = argparse.ArgumentParser()
    add_arguments(parser, KEY)
    assert KEY not in parser.format_help()


@pytest.mark.parametrize("text", ["", "\n", "two words", "key\r\nHost: evil", "schl\u00fcssel", "x" * 20_000, "\0"])
def test_what_is_no_key_is_refused_without_repeating_it(text: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(text, encoding="utf-8", newline="")
    with pytest.raises(BadRequest, match=r"the file .*key holds no API key: expected one word") as caught:
        options_of("--api-key-file", str(file))
    assert not text.strip("\n\0") or text not in str(caught.value)
    if text:
        with pytest.raises(BadRequest, match="HEADRACE_API_KEY holds no API key"):
            options_of(api_key=text)


def test_a_missing_key_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"the API key file .*nowhere cannot be read: No such file"):
        options_of("--api-key-file", str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("[::1]", True), ("localhost", True)),
        *(
            ("LOCALHOST.", True),
            ("10.0.0.7", False),
            ("::", False),
            ("localhost.example", False),
            ("fe80::1%lo", False),
        ),
    ],
)
def test_only_this_machine_gets_a_key_without_tls_unwarned(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
    warning = options_of(api_key=KEY).clear_text_warning(host)
    assert (warning == "") is expected
    assert KEY not in warning
    assert options_of().clear_text_warning(host) == ""


@pytest.mark.parametrize(
    "command", [["explain", "m"], ["infer", "m", "x.png"], ["health"]], ids=lambda command: command[0]
)
def test_every_command_warns_before_a_key_travels_in_clear_text(command: list[str]) -> None:
    """No other machine is connected to: the loopback address is taken for one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    code = "import sys; from headrace.__main__ import main; from headrace.server.commands import connection\n"
    code += "connection.is_loopback = lambda host: False; sys.exit(main())"
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"127.0.0.1:{used.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", code, *command, "--url", url],
            env=environment | {"HEADRACE_API_KEY": KEY},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.stderr.startswith("warning: the API key is sent to 127.0.0.1 without TLS"), done.stderr
    assert done.returncode == 1
    assert KEY not in done.stdout + done.stderr


# --- TLS over HTTP -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def explain(url: str, *words: str, api_key: str = "") -> tuple[int, str]:
    """Run `headrace explain` in a process of its own; exit status and standard error."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    variables = {"HEADRACE_API_KEY": api_key} if api_key else {}
    done = run_headrace("explain", "m", "--url", url, *words, env=environment | variables)
    return done.returncode, done.stderr


@contextmanager
def https(pair: Pair, client_ca: str = "") -> Iterator[str]:
    """A server that explains model `m`, with TLS; its URL."""
    for peer in running_peer(Peer(TlsFiles(str(pair.certificate), str(pair.key), client_ca))):
        peer.answer_paths({"/v2/models/m/explain": (200, json.dumps({"name": "m"}).encode())})
        yield f"https://127.0.0.1:{peer.server_port}"


def test_ca_and_the_certificate_itself_are_trusted(certificates: Certificates) -> None:
    with https(certificates.server) as url:
        assert explain(url, "--ca", str(certificates.authority)) == (0, "")
        assert explain(url, "--ca", str(certificates.server.certificate)) == (0, "")


def test_a_certificate_for_another_name(certificates: Certificates) -> None:
    with https(certificates.client) as url:
        status, error = explain(url, "--ca", str(certificates.authority))
    assert status == 1
    assert "the server's certificate is not for 127.0.0.1: write one of its names in the URL" in error


def test_a_client_certificate_that_is_required(certificates: Certificates) -> None:
    trusted = ("--ca", str(certificates.authority))
    client, stranger = (
        ("--cert", str(pair.certificate), "--key", str(pair.key))
        for pair in (certificates.client, certificates.stranger)
    )
    with https(certificates.server, str(certificates.authority)) as url:
        for words, reason in (
            ((), "requires a client certificate"),
            (stranger, "does not trust the client certificate"),
        ):
            status, error = explain(url, *trusted, *words)
            assert status == 1
            assert (
                f"{reason}: send a client certificate that its --tls-client-ca signed: --cert FILE --key FILE" in error
            )
        assert explain(url, *trusted, *client) == (0, "")


def test_tls_to_a_server_without_and_the_other_way(certificates: Certificates) -> None:
    for peer in running_peer(Peer()):
        status, error = explain(f"https://127.0.0.1:{peer.server_port}")
        assert (status, "does not speak TLS on this port: write http://" in error) == (1, True)
    with https(certificates.server) as url:
        status, error = explain(url.replace("https", "http"))
        assert (status, "if the server has TLS, write https://" in error) == (1, True)


@pytest.mark.parametrize("words", [("--ca", "FILE"), ("--cert", "FILE"), ("--cert", "FILE", "--key", "FILE")])
def test_tls_files_that_are_none(words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "file.pem"
    for expected in ("cannot be read: No such file", "holds no PEM certificate"):
        options = options_of(*(word.replace("FILE", str(file)) for word in words))
        with pytest.raises(BadRequest, match=rf"^{words[0]} .*file\.pem.* {expected}"):
            options.ssl_context()
        with pytest.raises(BadRequest, match=rf"^{words[0]} "):
            options.channel_credentials()
        file.write_text("nonsense")


def test_a_private_key_needs_its_certificate() -> None:
    with pytest.raises(BadRequest, match="--cert FILE"):
        options_of("--key", "file")


# --- gRPC --------------------------------------------------------------------------------------------------------------


@contextmanager
def grpcs(pair: Pair, client_ca: bytes | None = None, server: ScriptedGrpcServer | None = None) -> Iterator[str]:
    credentials = grpc.ssl_server_credentials(
        [(pair.key.read_bytes(), pair.certificate.read_bytes())], client_ca, client_ca is not None
    )
    with ThreadPoolExecutor(1) as pool:
        served = grpc.server(pool)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(server or ScriptedGrpcServer(), served)
        port = served.add_secure_port("127.0.0.1:0", credentials)
        served.start()
        try:
            yield f"grpcs://127.0.0.1:{port}"
        finally:
            served.stop(None).wait()


def failure(address: str, options: ConnectionOptions) -> str:
    """Text of the error with which a connection fails."""
    with pytest.raises(HeadraceError) as caught, InferClient(address, 5, options):
        pass
    assert KEY not in str(caught.value)
    return str(caught.value)


def test_grpc_with_tls_and_client_certificates(certificates: Certificates) -> None:
    trusted = ConnectionOptions(ca=str(certificates.authority))
    client, stranger = (
        ConnectionOptions(ca=str(certificates.authority), cert=str(pair.certificate), key=str(pair.key))
        for pair in (certificates.client, certificates.stranger)
    )
    with grpcs(certificates.server) as address:
        with InferClient(address, 5, trusted) as connected:
            assert connected.successes("m") is None
        assert "certificate is not trusted: name the CA" in failure(address, ConnectionOptions())
        assert "if it has TLS, write grpcs://" in failure(address.removeprefix("grpcs://"), trusted)
    with grpcs(certificates.client) as address:
        assert "certificate is not for this host" in failure(address, trusted)
    with grpcs(certificates.server, certificates.authority.read_bytes()) as address:
        assert "requires a client certificate: send" in failure(address, trusted)
        assert "does not trust the client certificate: send" in failure(address, stranger)
        with InferClient(address, 5, client):
            pass


@pytest.mark.parametrize("details", ["Socket closed", "ipv4:127.0.0.1:1: recvmsg:Connection reset by peer (104)"])
def test_a_grpc_connection_that_is_closed_or_reset_names_the_likely_reason(details: str) -> None:
    options = ConnectionOptions()
    assert "requires a client certificate: send" in channel_error_text(details, options, is_tls=True)
    assert "if it has TLS, write grpcs://" in channel_error_text(details, options, is_tls=False)


def test_grpc_on_the_http_port_names_the_other_port() -> None:
    for peer in running_peer(Peer()):
        reason = failure(f"127.0.0.1:{peer.server_port}", ConnectionOptions())
        assert "the server speaks no gRPC on this port, but perhaps HTTP: write its gRPC port" in reason
