"""Request headers that models get as parameters: `--http-header-forward-pattern` and `--grpc-header-forward-pattern`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from headrace.core.errors import BadRequest
from headrace.core.request import InferRequest

# A longer name is not forwarded: the time of a match grows with it.
_MAX_NAME_LENGTH = 128
# Clients choose names: results of further ones are not kept.
_MAX_NAMES = 1024
_CREDENTIALS = frozenset(("authorization", "cookie", "x-api-key"))
# Headers of the connection and the body: the endpoints read them.
_TRANSPORT = frozenset((
    "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect",
    "inference-header-content-length", "keep-alive", "origin", "sec-fetch-site", "te", "trailer", "transfer-encoding",
    "upgrade",
))  # fmt: skip
# Of HTTP/2 and gRPC, and the prefixes of parameters that are reserved for the server.
_RESERVED = (":", "grpc-", "triton_", "headrace")


class ForwardedHeaders:
    """Selects the headers that are forwarded by their names in lower case. Ownership: the event loop.

    Args:
        matches: returns True if the pattern matches a whole name, in linear time.
        literals: names that the pattern spells out.
    """

    def __init__(self, matches: Callable[[str], bool], literals: frozenset[str]) -> None:
        self._matches, self._literals = matches, literals
        self._selected: dict[str, bool] = {}

    def selects(self, name: str) -> bool:
        """Return True if the header is forwarded."""
        selected = self._selected.get(name)
        if selected is None:
            selected = self._may_forward(name) and self._matches(name)
            if len(self._selected) < _MAX_NAMES:
                self._selected[name] = selected
        return selected

    def _may_forward(self, name: str) -> bool:
        if len(name) > _MAX_NAME_LENGTH or name in _TRANSPORT or name.startswith(_RESERVED) or name.endswith("-bin"):
            return False
        return name in self._literals or not (name in _CREDENTIALS or name.startswith("proxy-"))

    def values(self, headers: Mapping[str, str]) -> dict[str, str] | None:
        """Return the forwarded values by name, from values in Latin-1 of the bytes, which are UTF-8; None without any."""
        selected = [name for name in headers if self.selects(name)]
        return {name: headers[name].encode("latin-1").decode(errors="replace") for name in selected} or None


class WireNames(dict[bytes, str]):
    """Names of the headers that are read, by their bytes on the wire; contains those that are forwarded too."""

    def __init__(self, names: Iterable[str], forwarded: ForwardedHeaders) -> None:
        super().__init__({name.encode(): name for name in names})
        self._forwarded = forwarded

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (
            isinstance(name, bytes) and self._forwarded.selects(name.decode("latin-1"))
        )

    def __missing__(self, name: bytes) -> str:
        return name.decode("latin-1")


def add_headers(request: InferRequest, headers: Mapping[str, str]) -> None:
    """Add forwarded headers to the parameters of a request.

    Raises:
        BadRequest: the request has a parameter of that name, in any case.
    """
    for name in request.parameters:
        if name.lower() in headers:
            raise BadRequest(
                f"parameter {name[:64]!r} is also a header of the request, which models get: send one of the two"
            )
    request.parameters = {**request.parameters, **headers}
    request.has_headers = True
