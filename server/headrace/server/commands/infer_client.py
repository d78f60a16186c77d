"""gRPC client of `headrace infer`, and the .npz files that it reads inputs from.

It wraps tritonclient, which takes 0.3 s to import with its libraries: only the command that needs this module imports
it.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from headrace.core.errors import BadRequest, HeadraceError, ModelFailed, Unavailable
from headrace.server.commands.connection import ConnectionOptions, channel_error_text

AnyArray = npt.NDArray[Any]


def read_npz(file: Path) -> dict[str, AnyArray]:
    """Read the arrays of an .npz file by name. Text becomes BYTES; arrays of Python objects are refused, since they need
    pickle.

    Raises:
        BadRequest: the file does not exist, is no .npz, or holds no array.
    """
    cure = "write it with numpy.savez(file, input_name=array)"
    try:
        archive = np.load(file, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise BadRequest(f"{file}: is one array without a name, expected an .npz of named arrays: {cure}")
        with archive:
            arrays = {name: archive[name] for name in archive.files}
    except OSError as error:
        raise BadRequest(f"{file}: cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise BadRequest(f"{file}: cannot be read as an .npz of plain arrays ({error}): {cure}") from None
    if not arrays:
        raise BadRequest(f"{file}: holds no array: {cure}")
    return arrays


def bfloat16_inputs(datatypes: Mapping[str, str], inputs: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """Reinterpret uint16 inputs as BF16 if the datatype is BF16: an .npz cannot store BF16, only its bits."""
    import ml_dtypes  # slow to import

    return {
        name: array.view(ml_dtypes.bfloat16) if datatypes.get(name) == "BF16" and array.dtype == np.uint16 else array
        for name, array in inputs.items()
    }


DEFAULT_PORT = 8001

_CHANNEL_ARGUMENTS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # connect to the address itself, whatever `http_proxy` says
]


class InferClient:
    """Connection to one server, opened on entering the `with` block.

    Args:
        address: HOST:PORT of the server's gRPC, grpcs://HOST:PORT with TLS; the port may be missing.
        timeout_s: for every call.
        options: TLS files and key; None for neither.
        headers: further metadata of every call, names in lower case.

    Attributes:
        warning: "", or a warning that the key travels without TLS to another machine.

    Raises:
        BadRequest: the address is not one of gRPC, or a TLS file is invalid.
        Unavailable: no server listens, or no response comes in time; from every method.
        HeadraceError: the server returns an error; from every method.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float = 60.0,
        options: ConnectionOptions | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        target, self._is_tls = parse_address(address)
        self._address, self._timeout_s = address, timeout_s
        self._is_connected = False
        self._options = options or ConnectionOptions()
        self._host = target.rpartition(":")[0]
        self.warning = "" if self._is_tls else self._options.clear_text_warning(self._host)
        credentials = self._options.channel_credentials() if self._is_tls else None
        self._triton = triton.InferenceServerClient(
            target, ssl=self._is_tls, creds=credentials, channel_args=_CHANNEL_ARGUMENTS
        )
        self._headers = {**self._options.headers(), **(headers or {})}

    def __enter__(self) -> Self:
        self._call(self._triton.is_server_live)
        self._is_connected = True
        return self

    def __exit__(self, *_error: object) -> None:
        self._triton.close()

    def metadata(self, model: str, version: str = "") -> dict[str, Any]:
        """Name, versions, platform, inputs and outputs (name, datatype, shape) of a model, as protobuf's JSON."""
        metadata: dict[str, Any] = self._call(self._triton.get_model_metadata, model, version, as_json=True)
        return metadata

    def config(self, model: str, version: str = "") -> dict[str, Any]:
        """The model's configuration in Triton's JSON."""
        response = self._call(self._triton.get_model_config, model, version, as_json=True)
        config: dict[str, Any] = response.get("config", {})
        return config

    def successes(self, model: str, version: str = "") -> tuple[int, int] | None:
        """Number of successful requests since the model was loaded and their total time in ns; None without statistics."""
        try:
            (statistics,) = self._call(self._triton.get_inference_statistics, model, version).model_stats
        except (HeadraceError, ValueError):
            return None
        success = statistics.inference_stats.success
        return success.count, success.ns

    def server_metadata(self) -> dict[str, Any]:
        """Name, version and extensions of the server, as protobuf's JSON."""
        metadata: dict[str, Any] = self._call(self._triton.get_server_metadata, as_json=True)
        return metadata

    def statistics(self, model: str, version: str = "") -> dict[str, Any]:
        """The model's statistics as protobuf's JSON, whose 64-bit numbers are text."""
        statistics: dict[str, Any] = self._call(self._triton.get_inference_statistics, model, version, as_json=True)
        return statistics

    def register_system_memory(self, name: str, key: str, size_bytes: int) -> None:
        """Register shared memory of the system, the file `key` in its folder."""
        self._call(self._triton.register_system_shared_memory, name, key, size_bytes)

    def unregister_system_memory(self, name: str) -> None:
        """Release the server's mapping of shared memory."""
        self._call(self._triton.unregister_system_shared_memory, name)

    def infer(
        self, model: str, inputs: Mapping[str, AnyArray], version: str = "", outputs: Mapping[str, int] | None = None
    ) -> dict[str, AnyArray]:
        """Run a model.

        Args:
            model: name of the model.
            inputs: arrays by input name; text and bytes are sent as BYTES, `ml_dtypes.bfloat16` as BF16.
            version: version of the model; "" lets the server choose.
            outputs: names of the outputs to return, each with the number of classes of the classification extension,
                0 for the tensor itself; None returns all tensors.

        Returns:
            Arrays by output name; BYTES is an object array of `bytes`, BF16 an array of `ml_dtypes.bfloat16`.

        Raises:
            BadRequest: the protocol has no datatype for an array.
            ModelFailed: the server's response breaks the protocol.
        """
        tensors = [_tensor(name, array) for name, array in inputs.items()]
        requested = None if outputs is None else [triton.InferRequestedOutput(*each) for each in outputs.items()]
        result = self._call(self._triton.infer, model, tensors, version, requested)
        names = [output.name for output in result.get_response().outputs]
        try:
            return {name: result.as_numpy(name) for name in names}
        except (ValueError, TypeError, struct.error) as error:
            raise ModelFailed(f"the server's response is wrong: datatype, shape and bytes disagree ({error})") from None

    def _call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, headers=self._headers, client_timeout=self._timeout_s, **named)
        except InferenceServerException as error:
            raise self._failure(error) from None

    def _failure(self, error: InferenceServerException) -> HeadraceError:
        status, message = (error.status() or "").removeprefix("StatusCode."), error.message()
        if not status:  # from tritonclient itself, e.g. a request over gRPC's 2 GiB
            return BadRequest(f"the request cannot be sent: {message}")
        # Set by the gRPC client itself: the server has not responded.
        if (status, message) == ("DEADLINE_EXCEEDED", "Deadline Exceeded"):
            return Unavailable(
                f"no response from {self._address} within {self._timeout_s:g} s: the server may be busy or stopped; "
                f"read its log, or wait longer with --timeout"
            )
        if self._is_connected or status != "UNAVAILABLE":
            cure = self._options.refusal_cure(status, self._host)
            return HeadraceError(f"the server returned {status}: {message}" + (f"; {cure}" if cure else ""))
        if "Connection refused" in message:
            cure = "start one with `headrace serve` (or `make serve`), or name its gRPC address with --url"
            return Unavailable(f"no server answers at {self._address}: {cure}")
        if reason := channel_error_text(message or "", self._options, self._is_tls):
            return Unavailable(f"the connection to {self._address} failed: {reason}")
        return Unavailable(
            f"the connection to {self._address} failed ({message}): check that it is the server's gRPC address, and read its log"
        )


def parse_address(address: str) -> tuple[str, bool]:
    """Split a gRPC address into the channel's target ("host:port") and whether it uses TLS.

    Raises:
        BadRequest: not a gRPC address; for an HTTP URL the message has the gRPC address to try.
    """
    cure = f"write HOST:PORT of its gRPC, e.g. 127.0.0.1:{DEFAULT_PORT}, or grpcs://HOST:PORT for TLS"
    try:
        parts = urlsplit(address if "://" in address else "grpc://" + address)
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError as error:
        raise BadRequest(f"the server's address {address!r} is wrong ({error}): {cure}") from None
    if host and ":" in host:
        host = f"[{host}]"
    if parts.scheme in ("http", "https") and host:
        tls = "grpcs://" if parts.scheme == "https" else ""
        raise BadRequest(
            f"the server's address {address!r} is one of HTTP, `headrace infer` speaks gRPC: "
            f"give its gRPC address, e.g. --url {tls}{host}:{DEFAULT_PORT}"
        )
    if parts.scheme not in ("grpc", "grpcs") or not host or parts.path.strip("/"):
        raise BadRequest(f"the server's address {address!r} is not one of gRPC: {cure}")
    return f"{host}:{port}", parts.scheme == "grpcs"


def datatype_of(array: AnyArray, name: str = "") -> str:
    """Return the protocol's datatype of an array, e.g. "FP32"; text and bytes of any kind are BYTES.

    Args:
        array: of native byte order.
        name: of the tensor, for the error.

    Raises:
        BadRequest: the protocol has no such datatype, e.g. for complex numbers.
    """
    datatype = "BYTES" if array.dtype.kind in "OSUT" else np_to_triton_dtype(array.dtype)
    if datatype is None:
        raise BadRequest(f"tensor '{name}' is {array.dtype}, which the protocol has no datatype for: convert it")
    return str(datatype)


def _tensor(name: str, array: AnyArray) -> triton.InferInput:
    if array.dtype.kind in "SUT":
        array = array.astype(object)
    elif not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return triton.InferInput(name, array.shape, datatype_of(array, name)).set_data_from_numpy(np.asarray(array))
