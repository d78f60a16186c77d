"""The public Python API: `Server` runs models in the calling program, with the queue, batching and instances of the server.

A request passes the same checks, queue and scheduler as one that came over HTTP or gRPC. `Server.asgi_application` and
`Server.listen_grpc` add the protocols.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import BadRequest, Cancelled, ConfigError, Finding, HeadraceError, Unavailable
from headrace.core.limits import BodyMemory, Cells
from headrace.core.request import InferRequest, InferResponse
from headrace.core.response_bodies import ProfileRow
from headrace.core.shapes import CheckedShapes
from headrace.core.store_url import is_store_url, parse_store_url
from headrace.core.tensor import BF16, BYTES, Array, ModelSpec, TensorSpec
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.models.folders import open_paths
from headrace.models.stores.cache import open_mirrors
from headrace.server.data_plane import DataPlane
from headrace.server.settings import Settings, ensure_home, expandable_path, header_matcher, repository_cache
from headrace.wire.requests.load_report import COUNT_CELLS, LoadMeter

if TYPE_CHECKING:
    from headrace.server.embedded_protocols import EmbeddedProtocols, MountedApplication

logger = logging.getLogger("headrace")

_THREAD = "headrace-loop"


class ServerLoad(NamedTuple):
    """Load of an embedded server, for a scheduler that adds and removes replicas.

    Attributes:
        utilization: work of the last two seconds as a share of what all instances can do; a server that is busy all the time
            has 1, and 0.5 more for each second that its queue takes to drain.
        in_flight: requests between arrival and response, of all versions.
    """

    utilization: float
    in_flight: int


class Server:
    """Serves models inside the calling program.

    With `with`, the server runs an event loop on its own thread. With `async with`, it uses the running event loop, which
    saves
    `Model.infer_async` two thread switches.

    Ownership: `_loop_thread` is started by `__enter__` and ended by `__exit__`; the control thread belongs to `DataPlane`.

    Args:
        *repositories: model repositories or their URLs, folders of one model, or ONNX files.
        models: names of the models to load; None loads all.
        state_dir: folder for latency tables and built engines, which outlive the process; "" for none.
        profile_s: maximum time in seconds to measure each model before it serves; 0 measures nothing.
        trial_limit_s: limit in seconds of the first load of a file, in a helper process; 0 loads it in this process.
        gpu_memory_fraction: share of each GPU's memory for all models together, 0 to 1.
        host_memory_budget: bytes of host memory for all models that the CPU runs: each is loaded at its first request and
            evicted by use; 0 loads all and keeps them.
        model_keys_file: file with minisign public keys: only models signed with one of them are served; "" for none.
        drain_timeout_s: maximum wait in seconds for requests in flight when the context ends.
        http_header_forward_pattern: regular expression of the headers that models get as parameters; "" for none.
        grpc_header_forward_pattern: the same for gRPC metadata.

    Raises:
        ValueError: no repository, or an invalid pattern.

    Example:
        >>> with headrace.Server("model_repository") as server:
        ...     outputs = server.model("tiny").infer({"x": np.zeros((1, 16), np.float32)})
    """

    def __init__(
        self,
        *repositories: str | os.PathLike[str],
        models: Iterable[str] | None = None,
        state_dir: str | os.PathLike[str] = "~/.cache/headrace/state",
        profile_s: float = 0.25,
        trial_limit_s: float = 120.0,
        gpu_memory_fraction: float = 0.9,
        host_memory_budget: int = 0,
        model_keys_file: str | os.PathLike[str] = "",
        drain_timeout_s: float = 30.0,
        http_header_forward_pattern: str = "",
        grpc_header_forward_pattern: str = "",
    ) -> None:
        if not repositories:
            raise ValueError(
                "no repository is given: name a folder of models, the folder of one model, or an ONNX file"
            )
        patterns = http_header_forward_pattern, grpc_header_forward_pattern
        for pattern in filter(None, patterns):
            header_matcher(pattern)
        if warning := ensure_home():
            logger.warning("%s", warning)
        self._urls = [parse_store_url(path) for path in map(str, repositories) if is_store_url(path)]
        self._paths = [Path(_expanded(path)) for path in repositories if not is_store_url(str(path))]
        self._settings = Settings(
            model_repository=(),
            model_control="none" if models is None else "explicit",
            load_model=() if models is None else tuple(models),
            state_dir=_expanded(state_dir),
            profile_s=profile_s,
            trial_limit_s=trial_limit_s,
            gpu_memory_fraction=gpu_memory_fraction,
            host_memory_budget=host_memory_budget,
            model_keys_file=_expanded(model_keys_file),
            drain_timeout_s=drain_timeout_s,
            http_header_forward_pattern=http_header_forward_pattern,
            grpc_header_forward_pattern=grpc_header_forward_pattern,
        )
        self._resources = ExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._data_plane: DataPlane | None = None
        self._opened_settings = self._settings
        self._bodies = BodyMemory(self._settings.limits)
        self._counts: Cells = [0] * COUNT_CELLS
        self._load_meter: LoadMeter | None = None
        self._protocols: EmbeddedProtocols | None = None

    def __enter__(self) -> Server:
        """Load the models and wait until they serve.

        Raises:
            ConfigError: a repository or one of its models cannot be served; has all reasons.
            RuntimeError: the server is running.
        """
        self._check_new()
        loop = self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=loop.run_forever, name=_THREAD, daemon=True)
        self._loop_thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open(loop), loop).result()
        except BaseException:
            self._end_loop()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        """Complete the queued requests, end the instances and close the models."""
        try:
            self._close()
        finally:
            self._end_loop()

    async def __aenter__(self) -> Server:
        """Load the models on the running event loop; see `__enter__`."""
        self._check_new()
        self._loop = asyncio.get_running_loop()
        try:
            await self._open(self._loop)
        except BaseException:
            self._loop = None
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close the gRPC ports and the models; see `__exit__`."""
        protocols, self._protocols = self._protocols, None
        try:
            if protocols is not None:
                self._running().drain()
                await protocols.drain(self._settings.drain_timeout_s)
        finally:
            await self._close_all(protocols)

    async def _close_all(self, protocols: EmbeddedProtocols | None) -> None:
        try:
            if protocols is not None:
                protocols.stop_timers()
            await asyncio.to_thread(self._close)
            if protocols is not None:
                await asyncio.to_thread(protocols.close)
        finally:
            self._loop = None

    def model(self, name: str, version: str = "") -> Model:
        """Return a serving model.

        Args:
            name: name of the model.
            version: number or label; "" for the latest at the time of each request.

        Raises:
            NotFound: no such model or version.
            Unavailable: the version does not serve now.
            RuntimeError: the server is not running.
        """
        model = Model(self, name, version)
        _ = model.spec  # raises NotFound for an unknown model
        return model

    def models(self) -> list[str]:
        """Return the names of the serving models, sorted."""
        return sorted({name for name, _, _ in self._running().registry.sources()})

    def load(self) -> ServerLoad:
        """Return the load of the last two seconds, at most 50 ms old; any thread may call.

        Raises:
            RuntimeError: the server is not running.
        """
        sources = self._running().registry.sources()
        assert self._load_meter is not None
        in_flight = sum(handle.in_flight for _, _, handle in sources)
        return ServerLoad(self._load_meter.figures(monotonic_ns()).utilization, in_flight)

    def asgi_application(self) -> MountedApplication:
        """Return an ASGI application with the HTTP routes of `headrace serve`, for another ASGI server or framework.

        Callers may infer and read. Loading models, changing log and trace settings, and shared memory are refused. The
        application does not answer scopes of type "lifespan" and "websocket".

        Raises:
            RuntimeError: the server does not run on the running event loop: use `async with`.
        """
        return self._open_protocols().application

    async def listen_grpc(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Serve gRPC on an address until the context ends, with the rights of `asgi_application` and without TLS.

        Args:
            host: address or name to listen on.
            port: 0 for a free one.

        Returns:
            The port.

        Raises:
            OSError: the address is not available.
            RuntimeError: the server does not run on the running event loop: use `async with`.
        """
        return await self._open_protocols().listen_grpc(host, port)

    def _open_protocols(self) -> EmbeddedProtocols:
        data_plane = self._running()
        loop = self._loop
        if self._loop_thread is not None or loop is None or not self._on_loop():
            raise RuntimeError(
                "the protocols run on the server's event loop, and this is not it: use `async with headrace.Server(...)`"
            )
        if self._protocols is None:
            from headrace.server.embedded_protocols import EmbeddedProtocols

            self._protocols = EmbeddedProtocols(self._opened_settings, data_plane, self._bodies, self._counts, loop)
        return self._protocols

    async def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        settings = self._settings
        loaded: asyncio.Future[BaseException | None] = loop.create_future()

        def on_loaded(error: BaseException | None) -> None:
            if not loaded.done():
                loaded.set_result(error)
            elif error is not None:
                logger.error("the control thread ended", exc_info=error)

        try:
            served = self._resources.enter_context(open_paths(self._paths, settings.state_dir))
            folders = self._resources.enter_context(open_mirrors(self._urls, repository_cache(settings)))
            settings = replace(
                settings,
                model_repository=(*served.repositories, *folders),
                stores=tuple((str(folder), str(url)) for folder, url in folders.items()),
            )
            self._opened_settings = settings
            self._data_plane = DataPlane(settings, loop, on_loaded, served.model_filter or {}, self._bodies)
            self._data_plane.reconciler.start()
            error = await loaded
            if error is not None:
                raise error
            failures = self._data_plane.registry.failures()
            if failures:
                raise ConfigError([Finding(f"{name}/{number}", None, reason) for name, number, reason in failures])
            missing = sorted(set(settings.load_model) - {"*", *self.models()})
            if missing:
                cure = f"choose from {self.models()}"
                raise ConfigError(
                    [Finding(name, None, "no repository has a model of this name", cure) for name in missing]
                )
            self._load_meter = LoadMeter(self._data_plane.registry.used_sources, self._counts)
        except BaseException:
            await asyncio.to_thread(self._close)
            raise

    def _close(self) -> None:
        data_plane, self._data_plane = self._data_plane, None
        try:
            if data_plane is not None and not data_plane.stop(self._settings.drain_timeout_s):
                logger.error("requests still run after %g s; their memory is not freed", self._settings.drain_timeout_s)
        finally:
            self._resources.close()

    def _end_loop(self) -> None:
        loop, thread = self._loop, self._loop_thread
        self._loop = self._loop_thread = None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _check_new(self) -> None:
        if self._loop is not None:
            raise RuntimeError("the server is running already: create a second Server for a second set of models")

    def _running(self) -> DataPlane:
        if self._data_plane is None:
            raise RuntimeError("the server is not running: use it inside `with headrace.Server(...) as server:`")
        return self._data_plane

    def _on_loop(self) -> bool:
        return self._loop is not None and asyncio._get_running_loop() is self._loop


class Model:
    """A model of an embedded `Server`, created by `Server.model`. Thread-safe.

    Args:
        server: the server.
        name: name of the model.
        version: number or label; "" for the latest at the time of each request.
    """

    def __init__(self, server: Server, name: str, version: str) -> None:
        self._server = server
        self._name = name
        self._version = version
        # Checked datatypes and shapes by the version's spec; a reload has a new spec.
        self._checked: WeakKeyDictionary[ModelSpec, CheckedShapes] = WeakKeyDictionary()

    @property
    def spec(self) -> ModelSpec:
        """Inputs, outputs and batch size of the version that a request would use now.

        Raises:
            HeadraceError: it does not serve.
        """
        handle = self._lease()
        handle.release()
        return handle.spec

    def profile(self) -> list[ProfileRow]:
        """Return the measured compute times by instances and rows; raises HeadraceError if it does not serve."""
        handle = self._lease()
        handle.release()
        return handle.latency_table.table()

    def infer(
        self,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        outputs: Sequence[str] = (),
        deadline_s: float = 0.0,
        priority: int = 0,
        client: str = "",
    ) -> dict[str, Array]:
        """Run one request; blocks the calling thread until the response.

        If no other request waits, the calling thread runs the model itself, without a thread switch. The arrays of `inputs`
        are read, not copied: they must not change until the response.

        Args:
            inputs: arrays by input name, with the batch dimension in front if the model batches. An array must have the
                input's dtype; lists and scalars are converted. BF16 is `ml_dtypes.bfloat16` or its bit pattern in
                uint16, BYTES an object array of bytes or str.
            outputs: names of the outputs to return; empty for all.
            deadline_s: time in seconds after which the response is of no use; 0 for none.
            priority: priority level, 1 is the highest; 0 for the model's default.
            client: client name for rate limits and fair sharing; "" for none.

        Returns:
            Outputs by name, with as many rows as the inputs; BF16 as its bit pattern in uint16, BYTES as an object array of
            bytes.

        Raises:
            BadRequest: an input or output does not match the model.
            DeadlineExceeded: the deadline passed first.
            Overloaded: the queue is full.
            HeadraceError: any other error of `headrace.core.errors`.
            RuntimeError: called on the server's own event loop, which must not block: await `infer_async` there.
        """
        if self._server._on_loop():
            raise RuntimeError("infer would block the server's event loop: await infer_async there")
        received_ns = monotonic_ns()
        handle = self._lease()
        try:
            handle.admit()
            request = self._request(handle.spec, inputs, received_ns, deadline_s, priority, client)
            output_names = _output_names(handle.spec, outputs)
            response = handle.infer_blocking(request)
        except HeadraceError as error:
            handle.record_failure(error, received_ns)
            raise
        finally:
            handle.release()
        return _select_outputs(response, output_names)

    async def infer_async(
        self,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        outputs: Sequence[str] = (),
        deadline_s: float = 0.0,
        priority: int = 0,
        client: str = "",
    ) -> dict[str, Array]:
        """Run one request from a coroutine on any event loop; see `infer`. A cancelled call leaves the queue.

        Args:
            inputs, outputs, deadline_s, priority, client: as in `infer`.

        Returns:
            As `infer`.

        Raises:
            HeadraceError: as `infer`.
        """
        loop = self._server._loop
        if loop is None:
            self._server._running()
            raise Unavailable("the server is closing")
        call = self._infer_on_loop(inputs, outputs, deadline_s, priority, client)
        if asyncio.get_running_loop() is loop:
            return await call
        answer: Awaitable[dict[str, Array]] = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop))
        return await answer

    async def _infer_on_loop(
        self, inputs: Mapping[str, npt.ArrayLike], outputs: Sequence[str], deadline_s: float, priority: int, client: str
    ) -> dict[str, Array]:
        received_ns = monotonic_ns()
        handle = self._lease()
        try:
            handle.admit()
            request = self._request(handle.spec, inputs, received_ns, deadline_s, priority, client)
            output_names = _output_names(handle.spec, outputs)
            completion = handle.infer(request)
            try:
                response = await completion
            except asyncio.CancelledError:
                completion.abandon()
                error = Cancelled("the caller has cancelled the request")
                outcome = completion.outcome
                handle.record_failure(error, received_ns, outcome if isinstance(outcome, InferResponse) else None)
                raise
        except HeadraceError as error:
            handle.record_failure(error, received_ns)
            raise
        finally:
            handle.release()
        return _select_outputs(response, output_names)

    def _lease(self) -> VersionHandle:
        return self._server._running().registry.lease(self._name, self._version)

    def _request(
        self,
        spec: ModelSpec,
        inputs: Mapping[str, npt.ArrayLike],
        received_ns: int,
        deadline_s: float,
        priority: int,
        client: str,
    ) -> InferRequest:
        if deadline_s < 0 or priority < 0:
            name, value = ("deadline_s", deadline_s) if deadline_s < 0 else ("priority", priority)
            raise BadRequest(f"{name} is {value}, it must not be negative: leave it out for the default")
        arrays = {name: _array(spec, name, value) for name, value in inputs.items()}
        checked = self._checked.get(spec)
        if checked is None:
            checked = self._checked[spec] = CheckedShapes(spec)
        rows, shape_key = checked.rows(arrays)
        return InferRequest(
            inputs=arrays,
            rows=rows,
            shape_key=shape_key,
            received_ns=received_ns,
            priority=priority,
            deadline_ns=received_ns + int(deadline_s * NS_PER_S) if deadline_s else 0,
            size_bytes=sum(array.nbytes for array in arrays.values()),
            client=client,
        )


def _array(spec: ModelSpec, name: str, value: npt.ArrayLike) -> Array:
    """Convert an input to a C-contiguous array of the model's dtype.

    Raises:
        BadRequest: unknown input, or values of another type.
    """
    tensor = spec.inputs.get(name)
    if tensor is None:
        raise BadRequest(f"model '{spec.name}' has no input {name[:128]!r}; its inputs are {list(spec.inputs)}")
    if tensor.datatype is BYTES:
        return _texts(tensor, value)
    dtype = tensor.datatype.dtype
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype != dtype and not (tensor.datatype is BF16 and array.dtype.name == "bfloat16"):
            cure = f"convert it with astype(np.{dtype.name})"
            raise BadRequest(f"input '{name}' has dtype {array.dtype}, expected {dtype} ({tensor.datatype}): {cure}")
        array = np.ascontiguousarray(array).reshape(array.shape)
        return array if array.dtype == dtype else array.view(dtype)
    try:
        return np.asarray(value, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRequest(f"input '{name}' cannot be read as {dtype}: {error}") from error


def _texts(tensor: TensorSpec, value: npt.ArrayLike) -> Array:
    array = np.asarray(value) if isinstance(value, np.ndarray | np.generic) else np.asarray(value, object)
    if array.dtype.kind not in "OSU":
        raise BadRequest(f"input '{tensor.name}' has dtype {array.dtype}, expected bytes or str in an object array")
    texts = np.empty(array.shape, object)
    for index, text in np.ndenumerate(array):
        if not isinstance(text, bytes | str):
            raise BadRequest(f"input '{tensor.name}' holds a {type(text).__name__}, expected bytes or str")
        texts[index] = text.encode() if isinstance(text, str) else bytes(text)
    return texts


def _output_names(spec: ModelSpec, names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if name not in spec.outputs:
            raise BadRequest(f"model '{spec.name}' has no output {name[:128]!r}; its outputs are {list(spec.outputs)}")
    return names or list(spec.outputs)


def _select_outputs(response: InferResponse, names: Sequence[str]) -> dict[str, Array]:
    return {name: np.asarray(response.outputs[name]) for name in names}


def _expanded(path: str | os.PathLike[str]) -> str:
    try:
        return os.path.expanduser(expandable_path(os.fspath(path)))
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from None
