"""Control plane for HTTP and gRPC: health, metadata, statistics, repository, traces. Results are values of Triton's JSON."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from headrace.core import response_bodies as responses
from headrace.core.access import Principal
from headrace.core.clock import pause
from headrace.core.completion import probe_answer
from headrace.core.errors import BadRequest, HeadraceError, Unavailable
from headrace.core.tensor import ModelSpec, TensorSpec
from headrace.wire.requests.codec_threads import LARGE_BYTES
from headrace.wire.requests.load_report import describe_load
from headrace.wire.requests.services import ControlServices, RegistryHandle
from headrace.wire.requests.shared_runs import SharedRuns

MAX_LISTED_MODELS = 1000
"""Most models of a page of the list."""
_FILE = "file:"
# A step of a codec thread: a multiple of 4 characters.
_BASE64_CHARS = 128 << 10
# Names in errors: a name that is longer than any model's is shortened.
_LONGEST_NAME = 128
_SHORTENED_CHARS = 40


class ControlPlane:
    """Health, metadata, configuration, statistics, repository control and trace settings.

    The protocols call some services directly, such as `regions` and `logs` of `ControlServices`: they need no common code.

    Args:
        services: of the server.
    """

    def __init__(self, services: ControlServices) -> None:
        self.services = services
        models = services.models
        self._list = SharedRuns(lambda _: self._listed(self.services.models.index()))
        self._index = SharedRuns(lambda _: models.index())
        self._statistics = SharedRuns(lambda _: models.statistics("", ""))

    def live(self) -> responses.ServerLive:
        """Return the liveness response that KServe's client parses."""
        return {"live": True}

    def require_ready(self) -> responses.ServerReady:
        """Return the readiness response that KServe's client parses; raises Unavailable if the server is not ready."""
        if not self.services.models.ready():
            raise Unavailable(
                "the server is not ready: it is starting or draining, or models are not available; "
                "the repository index (POST /v2/repository/index) says which, and why"
            )
        return {"ready": True}

    def server_metadata(self) -> responses.ServerMetadata:
        """Return name, version and protocol extensions of the server."""
        services = self.services
        return {"name": services.name, "version": services.version, "extensions": list(services.extensions)}

    def model_metadata(self, model: str, version: str = "") -> responses.ModelMetadata:
        """Return inputs, outputs and versions of a model; raises NotFound or Unavailable."""
        with self._lease(model, version) as handle:
            return describe(handle.spec, list(self.services.models.versions(model)))

    async def require_model_ready(self, model: str, version: str = "") -> responses.ModelReady:
        """Return the readiness response of a model, within `headrace.core.completion.PROBE_LIMIT_S`.

        Raises:
            NotFound: no such model.
            Unavailable: it cannot serve requests, or its code says that it is not ready (`is_ready` of a Python model).
        """
        with self._lease(model, version) as handle:
            handle.admit()
            probes = handle.probes()
        for probe in probes:
            if not await probe_answer(probe):
                raise Unavailable(
                    f"model '{model}' is not ready: its is_ready returned false, failed or did not return"
                )
        return {"name": model, "ready": True}

    async def list_models(self, principal: Principal, limit: str = "", after: str = "") -> responses.ModelList:
        """List the models that a principal may read with their platform and the state of each version, by name.

        A page begins after a name, so models that come or go meanwhile move no other model between pages.

        Args:
            principal: lists the models that it may read.
            limit: maximum number of models; "" for all, or for `MAX_LISTED_MODELS` after a page.
            after: name of the last model of the page before; "" for the first page.

        Raises:
            BadRequest: the limit is invalid.
        """
        if not limit and not after:
            return {"models": principal.filter_models(await self._list.result())}
        count = _page_size(limit)
        rows = [row for row in principal.filter_models(await self._index.result()) if row["name"] > after]
        names = list(dict.fromkeys(row["name"] for row in rows))
        last = names[count - 1] if len(names) > count else ""
        page = [row for row in rows if not last or row["name"] <= last]
        models = await asyncio.to_thread(self._listed, page)
        return {"models": models, "next": last} if last else {"models": models}

    def _listed(self, rows: Iterable[responses.IndexRow]) -> list[responses.ListedModel]:
        models: dict[str, responses.ListedModel] = {}
        for row in rows:
            pause()
            name, version = row["name"], row["version"]
            model = models.setdefault(name, {"name": name, "platform": "", "versions": []})
            if version:
                model["versions"].append({"version": version, "state": row["state"], "reason": row["reason"]})
            else:  # an error of the model as a whole
                model |= {"state": row["state"], "reason": row["reason"]}
            if row["state"] == "READY":
                with suppress(HeadraceError), self._lease(name, version) as handle:  # unloaded meanwhile
                    model["platform"] = handle.spec.platform
        return list(models.values())

    def statistics(self, model: str, version: str = "") -> responses.Statistics:
        """Return exact counts and times since a model was loaded."""
        return {"model_stats": self.services.models.statistics(model, version)}

    async def all_statistics(self, principal: Principal) -> responses.Statistics:
        """Return the statistics of all models that a principal may read."""
        return {"model_stats": principal.filter_models(await self._statistics.result())}

    def profile(self, model: str, version: str = "") -> responses.ProfileResponse:
        """Return the latency table of a version: compute time by batch size; raises NotFound or Unavailable."""
        with self._lease(model, version) as handle:
            return {"name": model, "version": handle.spec.version, "profile": handle.latency_table.table()}

    def model_load(self, model: str, version: str = "") -> responses.LoadResponse:
        """Return queue, running batches and predicted wait of a version; raises NotFound or Unavailable."""
        with self._lease(model, version) as handle:
            load = handle.load()
            load = load._replace(in_flight=load.in_flight - 1)  # without the lease of this call
            return describe_load(model, handle.spec.version, load)

    async def status(self, principal: Principal) -> responses.ServerStatus:
        """Return the state, counts and gauges of every version of the models that a principal may read."""
        services = self.services
        status = await services.overview.status()
        models = principal.filter_models(status["models"])
        return {"name": "headrace", "version": services.version, **status, "models": models}

    async def index(self, ready: bool, principal: Principal) -> list[responses.IndexRow]:
        """List every version of the models that a principal may read; only READY versions if `ready`."""
        rows = principal.filter_models(await self._index.result())
        return [row for row in rows if row["state"] == "READY"] if ready else rows

    def trace_settings(self, model: str = "", changes: Mapping[str, object] | None = None) -> responses.TraceSettings:
        """Apply changes of trace settings, if any, and return the settings in force.

        Args:
            model: name; "" for the settings of all models.
            changes: new values by name; None to change nothing.

        Raises:
            NotFound, Unavailable: the model does not exist or does not serve.
            HeadraceError: raised by `Tracer.update`.
        """
        if model:
            self.services.models.lease(model, "").release()
        traces = self.services.traces
        return traces.settings(model) if changes is None else traces.update(model, changes)

    async def load(self, model: str, parameters: Mapping[str, object]) -> None:
        """Load a model.

        Args:
            model: name.
            parameters: of the request: `config` (Triton's JSON), and `file:<path>` (base64 text, or bytes).

        Raises:
            BadRequest: a parameter is unknown or has an invalid value.
            HeadraceError: raised by `Repository.load`.
        """
        config: str | None = None
        files: dict[str, bytes] = {}
        for name, value in parameters.items():
            if name == "config" and isinstance(value, str):
                config = value
            elif name.startswith(_FILE):
                run = self.services.codec_threads.run
                is_large = isinstance(value, str) and len(value) > LARGE_BYTES
                files[name.removeprefix(_FILE)] = (
                    await run(_content, name, value) if is_large else _content(name, value)
                )
            else:
                raise BadRequest(f"load takes the parameters 'config' and 'file:<path>' as text, not {name[:64]!r}")
        with _failed_to("load", model):
            await self.services.repository.load(model, config, files)

    async def unload(self, model: str, parameters: Mapping[str, object]) -> None:
        """Unload a model.

        Args:
            model: name.
            parameters: of the request: `unload_dependents` (bool).

        Raises:
            BadRequest: a parameter is unknown or has an invalid value.
            HeadraceError: raised by `Repository.unload`.
        """
        dependents = parameters.get("unload_dependents", False)
        if type(dependents) is not bool or not parameters.keys() <= {"unload_dependents"}:
            raise BadRequest("unload takes the parameter 'unload_dependents', true or false")
        with _failed_to("unload", model):
            await self.services.repository.unload(model, dependents)

    @contextmanager
    def _lease(self, model: str, version: str) -> Iterator[RegistryHandle]:
        """Lease a model version; raises NotFound or Unavailable."""
        handle = self.services.models.lease(model, version)
        try:
            yield handle
        finally:
            handle.release()


def _page_size(limit: str) -> int:
    size = int(limit) if limit.isascii() and limit.isdigit() and len(limit) <= 9 else 0
    if limit and not 1 <= size <= MAX_LISTED_MODELS:
        raise BadRequest(f"limit={limit[:80]!a} is no number of models: send 1 to {MAX_LISTED_MODELS}, or no limit")
    return size or MAX_LISTED_MODELS


@contextmanager
def _failed_to(action: str, model: str) -> Iterator[None]:
    """Prefix errors with Triton's words, which its example clients search for."""
    try:
        yield
    except HeadraceError as error:
        name = model if len(model) <= _LONGEST_NAME else f"{model[:_SHORTENED_CHARS]}..."
        error.prefix(f"failed to {action} {name!r}: ")
        raise


def describe(spec: ModelSpec, versions: list[str]) -> responses.ModelMetadata:
    """Return the model metadata of the protocol; with `parameters` if a built engine serves the model."""
    metadata: responses.ModelMetadata = {
        "name": spec.name,
        "versions": versions,
        "platform": spec.platform,
        "inputs": [_describe_tensor(tensor) for tensor in spec.inputs.values()],
        "outputs": [_describe_tensor(tensor) for tensor in spec.outputs.values()],
    }
    if spec.parameters:
        metadata["parameters"] = dict(spec.parameters)
    return metadata


def _describe_tensor(tensor: TensorSpec) -> responses.TensorMetadata:
    return {"name": tensor.name, "datatype": tensor.datatype.name, "shape": list(tensor.shape)}


def _content(name: str, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    text, parts = str(value), []
    try:
        for start in range(0, len(text), _BASE64_CHARS):
            if start:
                pause()
                if text[start - 1] == "=":
                    raise ValueError("padding before the end")
            parts.append(base64.b64decode(text[start : start + _BASE64_CHARS], validate=True))
        return b"".join(parts)
    except ValueError:
        raise BadRequest(f"parameter {name[:64]!r} must be the file's content in base64") from None
