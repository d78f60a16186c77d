"""JSON web tokens of tests: an issuer with keys of any type, and an HTTPS server of its key set."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jwt
import trustme
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

ISSUER, AUDIENCE = "https://issuer.example", "headrace"
_ALGORITHMS: dict[str, Any] = {
    "RS256": jwt.algorithms.RSAAlgorithm,
    "ES256": jwt.algorithms.ECAlgorithm,
    "EdDSA": jwt.algorithms.OKPAlgorithm,
}


def new_private_key(algorithm: str) -> Any:
    """Make a private key for an algorithm."""
    if algorithm == "RS256":
        return rsa.generate_private_key(65537, 2048)
    return ec.generate_private_key(ec.SECP256R1()) if algorithm == "ES256" else ed25519.Ed25519PrivateKey.generate()


class Issuer:
    """Signs tokens.

    Attributes:
        private_keys: algorithm and private key by `kid`.
    """

    def __init__(self, *algorithms: str) -> None:
        self.private_keys: dict[str, tuple[str, Any]] = {}
        for algorithm in algorithms:
            self.add(algorithm.lower(), algorithm)

    def add(self, key_id: str, algorithm: str) -> None:
        """Add a key."""
        self.private_keys[key_id] = algorithm, new_private_key(algorithm)

    def key_set(self) -> bytes:
        """The public keys as a JSON Web Key Set."""
        rows = []
        for key_id, (algorithm, key) in self.private_keys.items():
            row = json.loads(_ALGORITHMS[algorithm].to_jwk(key.public_key()))
            rows.append({**row, "kid": key_id, "use": "sig"})
        return json.dumps({"keys": rows}).encode()

    def token(self, key_id: str, header: dict[str, Any] | None = None, **claims: Any) -> str:
        """A token with usual claims; a claim that is None is left out."""
        algorithm, key = self.private_keys[key_id]
        now = int(time.time())
        content = {
            "iss": ISSUER, "aud": AUDIENCE, "sub": "web", "scope": "infer read", "iat": now, "exp": now + 600, **claims
        }  # fmt: skip
        content = {name: value for name, value in content.items() if value is not None}
        return jwt.encode(content, key, algorithm=algorithm, headers={"kid": key_id, **(header or {})})


class KeySetServer:
    """An HTTPS server of a key set; see `https_key_set`.

    Attributes:
        url: of the key set.
        content: the key set.
        status: of the responses.
        delay_s: before each response.
        fetches: number of requests.
    """

    def __init__(self, content: bytes) -> None:
        self.url = ""
        self.content = content
        self.status = 200
        self.delay_s = 0.0
        self.fetches = 0


@contextmanager
def https_key_set(folder: Path, content: bytes) -> Iterator[KeySetServer]:
    """Serve a key set over HTTPS; the certificate of its authority is ca.pem in the folder."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    result = KeySetServer(content)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            result.fetches += 1
            time.sleep(result.delay_s)
            self.send_response(result.status)
            if result.status == 302:
                self.send_header("Location", result.url + "/elsewhere")
            self.send_header("Content-Length", str(len(result.content)))
            self.end_headers()
            self.wfile.write(result.content)

        def log_message(self, *_args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    result.url = f"https://localhost:{server.server_port}/keys"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield result
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
