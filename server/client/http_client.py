"""Calls a V2 server over HTTP with the standard library alone; tensors travel by the binary tensor data extension.

One connection a call: this serves a command line, where a fresh connection costs nothing and cannot be stale.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlsplit

import orjson

from server.client.binary_tensors import AnyArray, datatype_of, from_bytes, from_json, named, to_bytes
from server.core.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    ModelFailed,
    NotFound,
    TooLarge,
    Unavailable,
)
from server.core.tensor import Array

DEFAULT_URL = "http://127.0.0.1:8000"

_HEADER_LENGTH = "Inference-Header-Content-Length"
_BY_STATUS: dict[int, type[HeadraceError]] = {
    400: BadRequest,
    404: NotFound,
    413: TooLarge,
    429: Unavailable,
    499: Cancelled,
    503: Unavailable,
    504: DeadlineExceeded,
}

Outputs = Mapping[str, Mapping[str, Any]]


class Client:
    """Talks to one server. Holds no connection, so it needs no closing and may be shared by threads.

    Args:
        url: e.g. "http://127.0.0.1:8000"; the scheme may be left out, a path is put in front of every route.
        timeout_s: for connecting, and for every wait for bytes.

    Raises:
        BadRequest: from here, if the URL is none; from every method, if the server says that the request is wrong.
        NotFound, Unavailable, DeadlineExceeded, ModelFailed: from every method, as the server's status says. `Unavailable`
            is also that nobody listens, or that no answer came in time.
    """

    def __init__(self, url: str = DEFAULT_URL, timeout_s: float = 60.0) -> None:
        parts = urlsplit(url if "://" in url else "http://" + url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise BadRequest(f"the URL {url!r} is wrong ({error}): write it like {DEFAULT_URL}") from None
        if parts.scheme not in ("http", "https") or not host:
            raise BadRequest(f"the URL {url!r} names no HTTP server: write it like {DEFAULT_URL}")
        self.url = url
        self._secure = parts.scheme == "https"
        self._host, self._port, self._prefix = host, port, parts.path.rstrip("/")
        self._timeout_s = timeout_s

    def ready(self) -> bool:
        """True if the server is there and can serve everything it should."""
        try:
            self._call("GET", "/v2/health/ready")
        except Unavailable:
            return False
        return True

    def metadata(self, model: str, version: str = "") -> dict[str, Any]:
        """Name, versions, platform, inputs and outputs (name, datatype, shape) of a model."""
        return self._json(_route(model, version))

    def config(self, model: str, version: str = "") -> dict[str, Any]:
        """The model's configuration in Triton's JSON."""
        return self._json(_route(model, version) + "/config")

    def statistics(self, model: str, version: str = "") -> dict[str, Any]:
        """Counts and times (nanoseconds) since the model was loaded, in Triton's JSON."""
        return self._json(_route(model, version) + "/stats")

    def explain(self, model: str, version: str = "") -> dict[str, Any]:
        """What limits the model now; Headrace's own."""
        return self._json(_route(model, version) + "/explain")

    def infer(
        self,
        model: str,
        inputs: Mapping[str, AnyArray],
        version: str = "",
        *,
        outputs: Outputs | None = None,
        datatypes: Mapping[str, str] | None = None,
    ) -> dict[str, Array]:
        """Run a model.

        Args:
            model: its name.
            inputs: arrays by input name.
            version: the model's, empty for the one that the server chooses.
            outputs: what to ask for, each with its parameters, e.g. {"logits": {"classification": 5}}; None for all.
            datatypes: the protocol's datatype of inputs where the array leaves it open: "BF16" for bits in uint16.

        Returns:
            Arrays by output name; BYTES is an object array of `bytes`, BF16 its bits in uint16.
        """
        header, tensors = encode_request(inputs, outputs=outputs, datatypes=datatypes)
        headers = {"Content-Type": "application/octet-stream", _HEADER_LENGTH: str(len(header))}
        answer_headers, body = self._call("POST", _route(model, version) + "/infer", header + tensors, headers)
        length = answer_headers.get(_HEADER_LENGTH)
        if length is not None and not (length.isascii() and length.isdigit() and int(length) <= len(body)):
            raise ModelFailed(f"the answer's {_HEADER_LENGTH} is {length[:32]!r}, its body has {len(body)} bytes")
        return decode_response(body, len(body) if length is None else int(length))

    def _json(self, path: str) -> dict[str, Any]:
        _, body = self._call("GET", path)
        return _parse(body)

    def _call(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[http.client.HTTPMessage, bytes]:
        connection = self._connection()
        try:
            # A server that refuses a large body answers before it has read it all, and the answer says why.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, self._prefix + path, body, dict(headers or {}))
            response = connection.getresponse()
            content = response.read()
        except ConnectionRefusedError:
            cure = "start one with `headrace serve` (or `make serve`), or name its address with --url"
            raise Unavailable(f"no server answers at {self.url}: {cure}") from None
        except TimeoutError:
            raise Unavailable(
                f"no answer from {self.url} within {self._timeout_s:g} s: the server may be busy or stopped; "
                f"look at its log, or wait longer with --timeout"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise Unavailable(
                f"talking to {self.url} failed ({reason}): check the address, and the server's log"
            ) from error
        finally:
            connection.close()
        if response.status != 200:
            raise _failure(response.status, response.headers, content)
        return response.headers, content

    def _connection(self) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)


def encode_request(
    inputs: Mapping[str, AnyArray], *, outputs: Outputs | None = None, datatypes: Mapping[str, str] | None = None
) -> tuple[bytes, bytes]:
    """An inference request as its JSON header and the tensors' bytes that follow it.

    Args:
        inputs, outputs, datatypes: as for `Client.infer`.

    Raises:
        BadRequest: an array that the protocol has no datatype for, or not the one in `datatypes`.
    """
    tensors: list[bytes] = []
    described: list[dict[str, Any]] = []
    for name, array in inputs.items():
        said = (datatypes or {}).get(name)
        datatype = datatype_of(array, name) if said is None else named(said, name)
        tensors.append(to_bytes(array, datatype, name))
        described.append(
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": datatype.name,
                "parameters": {"binary_data_size": len(tensors[-1])},
            }
        )
    request: dict[str, Any] = {"inputs": described, "parameters": {"binary_data_output": True}}
    if outputs is not None:
        request["outputs"] = [
            {"name": name, "parameters": {"binary_data": True, **parameters}} for name, parameters in outputs.items()
        ]
    return orjson.dumps(request), b"".join(tensors)


def decode_response(body: bytes, header_size: int) -> dict[str, Array]:
    """The outputs of an inference response, binary or in JSON.

    Args:
        body: JSON, then the binary tensors in the order of the outputs.
        header_size: bytes of JSON.

    Raises:
        ModelFailed: the answer breaks the protocol; says which tensor and how.
    """
    try:
        outputs = _parse(body[:header_size])["outputs"]
        rest = memoryview(body)[header_size:]
        found: dict[str, Array] = {}
        for output in outputs:
            name, shape = str(output["name"]), tuple(int(size) for size in output["shape"])
            datatype = named(output["datatype"], name)
            size = output.get("parameters", {}).get("binary_data_size")
            if size is None:
                found[name] = from_json(output["data"], datatype, shape, name)
                continue
            if not 0 <= int(size) <= len(rest):
                raise BadRequest(f"tensor '{name}' claims {size} bytes, {len(rest)} are left in the answer")
            found[name] = from_bytes(rest[: int(size)], datatype, shape, name)
            rest = rest[int(size) :]
        if len(rest):
            raise BadRequest(f"{len(rest)} bytes are left over behind the tensors")
    except BadRequest as error:
        raise ModelFailed(f"the server's answer is wrong: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelFailed(f"the server's answer is no inference response: {type(error).__name__} {error}") from error
    return found


def _route(model: str, version: str) -> str:
    path = "/v2/models/" + quote(model, safe="")
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _parse(body: bytes) -> dict[str, Any]:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ModelFailed(f"the answer is not JSON ({error}): is the URL that of a V2 inference server?") from None
    if not isinstance(parsed, dict):
        raise ModelFailed(
            f"the answer is a JSON {type(parsed).__name__}, not an object: is the URL that of a V2 server?"
        )
    return parsed


def _failure(status: int, headers: http.client.HTTPMessage, body: bytes) -> HeadraceError:
    """The error that a status and a body `{"error": text}` say."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    said = parsed.get("error") if isinstance(parsed, dict) else None
    if not isinstance(said, str) or not said:
        start = body[:200].decode("utf-8", "replace").strip()
        said = f"{start or 'no text'} (no V2 error: is the URL that of a V2 inference server?)"
    kind = _BY_STATUS.get(status, ModelFailed if status >= 500 else BadRequest)
    text = f"the server says {status}: {said}"
    if issubclass(kind, Unavailable):
        after = headers.get("Retry-After", "")
        return kind(text, float(after) if after.isascii() and after.isdigit() else 1.0)
    return kind(text)
