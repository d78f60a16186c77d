"""Everything but inference, once for both protocols: results are Triton's JSON, errors are ours."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from headrace.core.errors import BadRequest, HeadraceError, Unavailable
from headrace.core.tensor import ModelSpec, TensorSpec
from headrace.inference.load_report import describe_load
from headrace.inference.models import Handle, Services

_FILE = "file:"
# Of names in errors: one that is longer than any model may have is shown by its beginning.
_LONGEST_NAME = 128
_SHORTENED_CHARS = 40


class ControlPlane:
    """Health, metadata, configuration, statistics, repository control, trace settings.

    Shared memory and logs need nothing between the protocols and `services`.

    Args:
        services: of the server.
    """

    def __init__(self, services: Services) -> None:
        self.services = services

    def live(self) -> dict[str, object]:
        """Liveness as KServe's client reads it."""
        return {"live": True}

    def require_ready(self) -> dict[str, object]:
        """Readiness as KServe's client reads it; raises Unavailable unless the server is."""
        if not self.services.models.ready():
            raise Unavailable(
                "the server is not ready: it is starting or draining, or models are not available; "
                "the repository index (POST /v2/repository/index) says which, and why"
            )
        return {"ready": True}

    def server_metadata(self) -> dict[str, object]:
        """Name, version and protocol extensions of the server."""
        services = self.services
        return {"name": services.name, "version": services.version, "extensions": list(services.extensions)}

    def model_metadata(self, model: str, version: str = "") -> dict[str, object]:
        """Inputs, outputs and versions; raises NotFound or Unavailable."""
        with self._lease(model, version) as handle:
            return describe(handle.spec, list(self.services.models.versions(model)))

    def require_model_ready(self, model: str, version: str = "") -> dict[str, object]:
        """Readiness of a model; raises NotFound or Unavailable unless requests for it can be served."""
        with self._lease(model, version) as handle:
            handle.admit()
            return {"name": model, "ready": True}

    def list_models(self) -> dict[str, object]:
        """Every model of the repository index by name: its platform, and the state of each of its versions."""
        models: dict[str, dict[str, Any]] = {}
        for row in self.services.models.index():
            name, version = str(row["name"]), str(row["version"])
            model = models.setdefault(name, {"name": name, "platform": "", "versions": []})
            if version:
                model["versions"].append({"version": version, "state": row["state"], "reason": row["reason"]})
            else:  # what is wrong with the model as a whole
                model |= {"state": row["state"], "reason": row["reason"]}
            if row["state"] == "READY":
                with suppress(HeadraceError), self._lease(name, version) as handle:  # unloaded meanwhile
                    model["platform"] = handle.spec.platform
        return {"models": list(models.values())}

    def config(self, model: str, version: str = "") -> Mapping[str, object]:
        """The configuration as it is in force; raises NotFound or Unavailable."""
        return self.services.models.config(model, version)

    def statistics(self, model: str = "", version: str = "") -> dict[str, object]:
        """Exact counts and times since the model was loaded, of all models if `model` is ""."""
        return {"model_stats": list(self.services.models.statistics(model, version))}

    def profile(self, model: str, version: str = "") -> dict[str, object]:
        """How long batches of a version compute; raises NotFound or Unavailable."""
        with self._lease(model, version) as handle:
            return {"name": model, "version": handle.spec.version, "profile": list(handle.profile.table())}

    def explain(self, model: str, version: str = "") -> Mapping[str, object]:
        """What limits a version now; raises NotFound or Unavailable."""
        return self.services.explain(model, version)

    def model_load(self, model: str, version: str = "") -> dict[str, object]:
        """How busy a version is; raises NotFound or Unavailable."""
        with self._lease(model, version) as handle:
            load = handle.load()
            load = load._replace(in_flight=load.in_flight - 1)  # less this lease
            return describe_load(model, handle.spec.version, load)

    async def status(self) -> dict[str, object]:
        """Every version with its state, counts and gauges."""
        services = self.services
        return {"name": "headrace", "version": services.version, **(await services.overview.status())}

    async def layers(self, model: str, version: str = "") -> Mapping[str, object]:
        """How long each layer of a version takes; raises NotFound or Unavailable."""
        return await self.services.overview.layers(model, version)

    def index(self, ready: bool) -> Sequence[Mapping[str, object]]:
        """Every version found, its state and reason; only those that serve if `ready`."""
        rows = self.services.models.index()
        return [row for row in rows if row["state"] == "READY"] if ready else rows

    def trace_settings(self, model: str = "", changes: Mapping[str, object] | None = None) -> Mapping[str, object]:
        """Trace settings in force for a model, or for all if `model` is "", after the changes if there are any.

        Raises:
            NotFound, Unavailable: no such model.
            HeadraceError: what `TraceControl.update` raises.
        """
        if model:
            self.services.models.lease(model, "").release()
        traces = self.services.traces
        return traces.settings(model) if changes is None else traces.update(model, changes)

    async def load(self, model: str, parameters: Mapping[str, object]) -> None:
        """Load a model; `parameters` are those of the request: `config` and `file:<path>` (base64 text, or bytes).

        Raises:
            BadRequest: an unknown parameter or a value it does not take.
            HeadraceError: what `Repository.load` raises.
        """
        config: str | None = None
        files: dict[str, bytes] = {}
        for name, value in parameters.items():
            if name == "config" and isinstance(value, str):
                config = value
            elif name.startswith(_FILE):
                files[name.removeprefix(_FILE)] = _content(name, value)
            else:
                raise BadRequest(f"load takes the parameters 'config' and 'file:<path>' as text, not {name[:64]!r}")
        with _failed_to("load", model):
            await self.services.repository.load(model, config, files)

    async def unload(self, model: str, parameters: Mapping[str, object]) -> None:
        """Unload a model; `parameters` are those of the request: `unload_dependents`.

        Raises:
            BadRequest: an unknown parameter or a value it does not take.
            HeadraceError: what `Repository.unload` raises.
        """
        dependents = parameters.get("unload_dependents", False)
        if type(dependents) is not bool or not parameters.keys() <= {"unload_dependents"}:
            raise BadRequest("unload takes the parameter 'unload_dependents', true or false")
        with _failed_to("unload", model):
            await self.services.repository.unload(model, dependents)

    @contextmanager
    def _lease(self, model: str, version: str) -> Iterator[Handle]:
        """A lease on a model version; raises NotFound or Unavailable."""
        handle = self.services.models.lease(model, version)
        try:
            yield handle
        finally:
            handle.release()


@contextmanager
def _failed_to(action: str, model: str) -> Iterator[None]:
    """Begin an error with Triton's words, which its example clients look for."""
    try:
        yield
    except HeadraceError as error:
        name = model if len(model) <= _LONGEST_NAME else f"{model[:_SHORTENED_CHARS]}..."
        error.prefix(f"failed to {action} {name!r}: ")
        raise


def describe(spec: ModelSpec, versions: list[str]) -> dict[str, object]:
    """Model metadata of the protocol; with `parameters` where a built engine serves the model."""
    return {
        "name": spec.name,
        "versions": versions,
        "platform": spec.platform,
        "inputs": [_describe_tensor(tensor) for tensor in spec.inputs.values()],
        "outputs": [_describe_tensor(tensor) for tensor in spec.outputs.values()],
        **({"parameters": dict(spec.parameters)} if spec.parameters else {}),
    }


def _describe_tensor(tensor: TensorSpec) -> dict[str, object]:
    return {"name": tensor.name, "datatype": tensor.datatype.name, "shape": list(tensor.shape)}


def _content(name: str, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(str(value), validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(f"parameter {name[:64]!r} must be the file's content in base64") from None
