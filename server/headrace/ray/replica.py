"""A replica of a Ray Serve deployment: an embedded server behind Ray's HTTP proxy, a gRPC port and Python calls."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy.typing as npt
import ray
from ray import serve

from headrace.core.errors import Unavailable
from headrace.ray.scaling import load_metrics
from headrace.server.embedding import Model, Server


class ReplicaOptions(NamedTuple):
    """Options of a replica.

    Attributes:
        repositories: absolute paths and URLs, the same on every node.
        server: keyword arguments of `headrace.Server`.
        grpc: listen for gRPC on a free port of the node's address.
    """

    repositories: tuple[str, ...]
    server: Mapping[str, Any]
    grpc: bool


class Replica:
    """One replica. Ray Serve constructs it, calls its methods and deletes it, all on one event loop.

    Attributes:
        options: options of the replica; a subclass sets them, so that Ray constructs it without arguments.
    """

    options: ClassVar[ReplicaOptions]

    def __init__(self) -> None:
        self._server = Server(*self.options.repositories, **self.options.server)
        self._models: dict[tuple[str, str], Model] = {}
        self._grpc_address = ""
        self._is_open = False

    async def __serve_build_asgi_app__(self) -> Any:
        """Load the models, and return the application that Ray Serve sends HTTP requests to.

        Raises:
            ConfigError: a model cannot be served; the deployment fails with its reasons.
        """
        await self._server.__aenter__()
        self._is_open = True
        if self.options.grpc:
            host = ray.util.get_node_ip_address()
            port = await self._server.listen_grpc(host)
            self._grpc_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self._server.asgi_application()

    async def __del__(self) -> None:
        """Close the gRPC port and the models after their requests; Ray has waited for those that it routed."""
        if self._is_open:
            self._is_open = False
            await self._server.__aexit__()

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        deadline_s: float = 0.0,
        priority: int = 0,
        client: str = "",
    ) -> dict[str, Any]:
        """Run one request; concurrent ones share batches.

        Args:
            model: name of the model.
            inputs: arrays by input name, see `headrace.Model.infer`.
            version: number or label; "" for the latest.
            outputs, deadline_s, priority, client: see `headrace.Model.infer`.

        Returns:
            NumPy arrays by output name.

        Raises:
            HeadraceError: see `headrace.Model.infer`.
        """
        found = self._models.get((model, version))
        if found is None:
            found = self._models[model, version] = self._server.model(model, version)
        return await found.infer_async(inputs, outputs=outputs, deadline_s=deadline_s, priority=priority, client=client)

    def describe(self) -> dict[str, Any]:
        """Return replica ID, node ID, process ID, gRPC address ("" without gRPC) and models of this replica."""
        return {
            "replica_id": serve.get_replica_context().replica_id.unique_id,
            "node_id": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "grpc_address": self._grpc_address,
            "models": self._server.models(),
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load of the last two seconds, for Ray's autoscaler; see `load_metrics`."""
        return load_metrics(self._server.load())

    def check_health(self) -> None:
        """Raise if no model serves, for Ray to replace the replica."""
        if not self._server.models():
            raise Unavailable("no model of this replica serves: the log of the replica has the reasons")
