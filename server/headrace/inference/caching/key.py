"""Keys of cached responses: a keyed hash of all that decides a response.

These are the version (its artefact and configuration), the datatypes, shapes and bytes of the inputs, the requested outputs, and
the parameters and the id of the request if the model reads them. The hash is BLAKE3 with a secret key and 256 bits. Clients
cannot compute it, so they cannot search for two requests with one key, and inputs need not be stored for a comparison
(docs/decisions/0019-response-cache.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import numpy as np
from blake3 import blake3

from headrace.core.request import InferRequest, ParameterValue
from headrace.core.tensor import BYTES, Array, ModelSpec, is_resident

KEY_BYTES = 32
# One call for all parts is faster up to here, although it copies them.
_JOINED_BYTES = 32 << 10
# Shapes of requests repeat; maximum number of cached heads of a version.
_MAX_HEADS = 1024


class KeyFactory:
    """Computes the keys of one version's requests. Any thread may call.

    Args:
        spec: tensor specs of the version.
        identity: text that differs between versions whose responses may differ.
        secret: 32 bytes, the key of the hash.
        reads_parameters: True if the model reads parameters of requests; others do not count.
    """

    def __init__(self, spec: ModelSpec, identity: str, secret: bytes, reads_parameters: bool = False) -> None:
        self._tensors = [(tensor.name, tensor.datatype is BYTES) for tensor in spec.inputs.values()]
        self._types = [[tensor.name, tensor.datatype.name] for tensor in spec.inputs.values()]
        self._identity = f"{identity}\0{spec.name}\0{spec.version}"
        self._secret = secret
        self._reads_parameters = reads_parameters
        self._heads: dict[object, bytes] = {}

    def key(self, request: InferRequest, state: bytes = b"", reads_ids: bool = False) -> bytes | None:
        """Return the 32 bytes that identify the response; None if the inputs are not in host memory, or the model reads headers.

        Args:
            request: the request.
            state: digest of the versions that compute a pipeline's steps; of the same size in all calls.
            reads_ids: the model reads ids of requests; others do not count.
        """
        if request.has_headers and self._reads_parameters:
            return None
        inputs = request.inputs
        shapes: list[object] = []
        parts: list[bytes | memoryview] = [b""]
        if state:
            parts.append(state)
        size = 0
        for name, is_text in self._tensors:
            array = inputs.get(name)
            if array is None:
                shapes.append(None)
                continue
            if is_resident(array):
                return None
            shapes.append(array.shape)
            if is_text:
                text = _text_bytes(array)
                parts.append(text)
                size += len(text)
            else:
                parts.append(array.data if array.flags.c_contiguous else np.ascontiguousarray(array).data)
                size += array.nbytes
        parameters = request.parameters if self._reads_parameters else None
        if request.outputs or parameters or (reads_ids and request.id):
            parts[0] = self._head(shapes, request.outputs, parameters or {}, request.id if reads_ids else "")
        else:
            label = tuple(shapes)
            parts[0] = self._heads.get(label) or self._cached_head(label)
        if size <= _JOINED_BYTES:
            return blake3(b"".join(parts), key=self._secret).digest()
        hasher = blake3(parts[0], key=self._secret)
        for part in parts[1:]:
            hasher.update(part if isinstance(part, bytes) else np.frombuffer(part, np.uint8).data)
        return hasher.digest()

    def _cached_head(self, shapes: tuple[object, ...]) -> bytes:
        head = self._head(shapes, (), {})
        if len(self._heads) < _MAX_HEADS:
            self._heads[shapes] = head
        return head

    def _head(
        self,
        shapes: Iterable[object],
        outputs: tuple[str, ...],
        parameters: Mapping[str, ParameterValue],
        request_id: str = "",
    ) -> bytes:
        """Return the part before the contents. It determines their sizes, so equal keys mean equal parts."""
        types = [[*names, shape] for names, shape in zip(self._types, shapes, strict=True)]
        document = [self._identity, types, sorted(set(outputs)), sorted(parameters.items()), request_id]
        text = json.dumps(document, separators=(",", ":")).encode()
        return len(text).to_bytes(8, "little") + text


def _text_bytes(array: Array) -> bytes:
    """Return a BYTES tensor with the length before each element: two splits of one text have different bytes."""
    parts: list[bytes] = []
    for element in array.ravel().tolist():
        text = element if isinstance(element, bytes) else str(element).encode("utf-8", "surrogatepass")
        parts.append(len(text).to_bytes(8, "little"))
        parts.append(text)
    return b"".join(parts)
