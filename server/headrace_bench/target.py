"""The server under load: its address, the metadata and statistics of its model, and registration of shared memory."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import orjson
from headrace.core.errors import BadRequest, HeadraceError, ModelFailed, NotFound, Unavailable
from headrace.server.commands.connection import ConnectionOptions, explained_request, model_path

if TYPE_CHECKING:
    from headrace.server.commands.infer_client import InferClient

DEFAULT_PORTS = {"http": 8000, "https": 8000, "grpc": 8001, "grpcs": 8001}
_CURE = "write http://HOST:8000 or grpc://HOST:8001 (https:// or grpcs:// with TLS)"
_START = "start one with `headrace serve`, or name the address of a running one"


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """Address of a server.

    Attributes:
        protocol: "http" or "grpc".
        host: name or address, without brackets.
        port: TCP port.
        is_tls: True for https and grpcs.
        prefix: path in front of every route of HTTP, "" for none.
    """

    protocol: str
    host: str
    port: int
    is_tls: bool
    prefix: str = ""

    @property
    def authority(self) -> str:
        """Host and port as a Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def text(self) -> str:
        """The address as a URL."""
        return f"{self.protocol}{'s' if self.is_tls else ''}://{self.authority}{self.prefix}"


def parse_url(text: str) -> ServerUrl:
    """Parse the address of a server.

    Raises:
        BadRequest: it is none of HTTP or gRPC.
    """
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadRequest(f"the server's address {text!r} is wrong ({error}): {_CURE}") from None
    if parts.scheme not in DEFAULT_PORTS or not host or "://" not in text:
        raise BadRequest(f"the server's address {text!r} names no protocol that this command speaks: {_CURE}")
    prefix = parts.path.rstrip("/")
    is_grpc = parts.scheme.startswith("grpc")
    if is_grpc and prefix:
        raise BadRequest(f"the server's address {text!r} has a path, which gRPC has not: {_CURE}")
    protocol = "grpc" if is_grpc else "http"
    return ServerUrl(protocol, host, port or DEFAULT_PORTS[parts.scheme], parts.scheme.endswith("s"), prefix)


def tls_context(ca: str, cert: str, key: str, protocol: str) -> ssl.SSLContext:
    """Create the TLS context of a client.

    Args:
        ca, cert, key: see `ConnectionOptions`.
        protocol: "http" or "grpc".

    Raises:
        BadRequest: a file cannot be read or is invalid.
    """
    context = ConnectionOptions(ca, cert, key).ssl_context()
    context.set_alpn_protocols(["h2"] if protocol == "grpc" else ["http/1.1"])
    return context


class HttpControl:
    """Control calls over HTTP. Every method raises HeadraceError.

    Args:
        url: address of the server.
        model: name of the model.
        version: version of the model; "" lets the server choose.
        options: TLS files and key.
        timeout_s: for every call.
        headers: further headers.
    """

    def __init__(
        self,
        url: ServerUrl,
        model: str,
        version: str,
        options: ConnectionOptions,
        timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._url, self._model, self._options, self._timeout_s = url, model, options, timeout_s
        self._headers = headers or {}
        self._path = model_path(model, version)

    def metadata(self) -> dict[str, Any]:
        """Return inputs and outputs of the model: name, datatype and shape of each."""
        try:
            return self._object(self._path)
        except NotFound as error:
            raise NotFound(f"the server has no model '{self._model}' ({error}){self._names()}") from None

    def config(self) -> dict[str, Any]:
        """Return the model's configuration; empty from a server without that extension."""
        return _optional(self._object, self._path + "/config") or {}

    def server(self) -> dict[str, Any]:
        """Return name and version of the server."""
        return _optional(self._object, "/v2") or {}

    def statistics(self) -> dict[str, Any] | None:
        """Return the statistics of the model's version; None from a server without that extension."""
        return one_version(_optional(self._object, self._path + "/stats"))

    def register(self, name: str, key: str, size_bytes: int) -> None:
        """Register system shared memory."""
        body = {"key": key, "offset": 0, "byte_size": size_bytes}
        self._call("POST", f"/v2/systemsharedmemory/region/{quote(name, safe='')}/register", body)

    def unregister(self, name: str) -> None:
        """Release the server's mapping of shared memory."""
        self._call("POST", f"/v2/systemsharedmemory/region/{quote(name, safe='')}/unregister", {})

    def _names(self) -> str:
        """Return the names of the server's models for an error."""
        try:
            document = orjson.loads(self._call("POST", "/v2/repository/index", {}))
            names = sorted({str(entry["name"]) for entry in document})
        except (HeadraceError, ValueError, KeyError, TypeError):
            names = []
        more = ", ..." if len(names) > 10 else ""
        return f": name one of {', '.join(names[:10])}{more}" if names else ": name a model that it serves"

    def _object(self, path: str) -> dict[str, Any]:
        body = self._call("GET", path)
        try:
            document = orjson.loads(body)
        except orjson.JSONDecodeError:
            document = None
        if not isinstance(document, dict):
            start = body[:100].decode("utf-8", "replace").strip() or "no text"
            raise ModelFailed(
                f"{self._url.text}{path} returned {start!r}, expected a JSON object: check that the URL is that of a V2 "
                "inference server"
            )
        return document

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        url, options = self._url, self._options
        status, answer = explained_request(
            url.text,
            path,
            self._timeout_s,
            options,
            start=_START,
            wait=", or wait longer with --timeout",
            method=method,
            body=None if body is None else orjson.dumps(body),
            headers=self._headers,
        )
        if status == 200:
            return answer
        cure = options.refusal_cure(status, url.host)
        text = f"the server returned {status}: {_error(answer)}" + (f"; {cure}" if cure else "")
        raise NotFound(text) if status == 404 else HeadraceError(text)


class GrpcControl:
    """Control calls over gRPC. Every method raises HeadraceError.

    Args:
        url, model, version, options, timeout_s, headers: see `HttpControl`.
    """

    def __init__(
        self,
        url: ServerUrl,
        model: str,
        version: str,
        options: ConnectionOptions,
        timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> None:
        from headrace.server.commands.infer_client import InferClient  # takes 0.3 s to import

        lowered = {name.lower(): value for name, value in (headers or {}).items()}
        self._client: InferClient = InferClient(url.text, timeout_s, options, lowered)
        self._model, self._version = model, version
        try:
            self._client.__enter__()
        except Unavailable as error:
            if "no server answers" not in str(error):
                raise
            raise Unavailable(f"no server answers at {url.text}: {_START}") from None

    def metadata(self) -> dict[str, Any]:
        """Return inputs and outputs of the model: name, datatype and shape of each."""
        try:
            return self._client.metadata(self._model, self._version)
        except Unavailable:
            raise
        except HeadraceError as error:
            if "NOT_FOUND" not in str(error):
                raise
            raise NotFound(f"the server has no model '{self._model}' ({error}): name a model that it serves") from None

    def config(self) -> dict[str, Any]:
        """Return the model's configuration; empty from a server without that extension."""
        return _optional(self._client.config, self._model, self._version) or {}

    def server(self) -> dict[str, Any]:
        """Return name and version of the server."""
        return _optional(self._client.server_metadata) or {}

    def statistics(self) -> dict[str, Any] | None:
        """Return the statistics of the model's version; None from a server without that extension."""
        return one_version(_optional(self._client.statistics, self._model, self._version))

    def register(self, name: str, key: str, size_bytes: int) -> None:
        """Register system shared memory."""
        self._client.register_system_memory(name, key, size_bytes)

    def unregister(self, name: str) -> None:
        """Release the server's mapping of shared memory."""
        self._client.unregister_system_memory(name)


Control = HttpControl | GrpcControl


def _optional(call: Callable[..., dict[str, Any]], *words: str) -> dict[str, Any] | None:
    try:
        return call(*words)
    except HeadraceError:
        return None


def one_version(document: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the statistics of the only version in a response; with several versions that of the highest number."""
    entries = (document or {}).get("model_stats") or []
    return max(entries, key=lambda entry: str(entry.get("version", "")).zfill(12), default=None)


def _error(body: bytes) -> str:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    text = document.get("error") if isinstance(document, dict) else None
    return str(text) if text else body[:200].decode("utf-8", "replace").strip() or "no text"
