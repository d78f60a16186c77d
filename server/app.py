"""Wiring only: settings in, a running server out."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.responses import Response

from server.control.lifecycle import State
from server.control.loader import Loader
from server.control.reconciler import Desired, Reconciler
from server.control.registry import Registry
from server.core.completion import Mailbox
from server.core.errors import ConfigError, Forbidden
from server.frontends.http_protocol import HeadraceHttpProtocol
from server.frontends.http_server import HttpApplication
from server.frontends.models import Services
from server.observability.metrics import MetricsPage
from server.settings import Settings, without_effect

logger = logging.getLogger("headrace")

_EXTENSIONS = ("binary_tensor_data", "classification", "model_configuration", "model_repository", "statistics")


class HeadraceServer:
    """One process: an event loop with the front ends, a control thread, the models' instances.

    Args:
        settings: how to serve.
        announce: called on the loop with the server's URL once all models are loaded.
    """

    def __init__(self, settings: Settings, announce: Callable[[str, Registry], None]) -> None:
        self._settings = settings
        self._announce = announce
        self._registry = Registry()
        self._servers: list[_UvicornServer] = []
        self._exit_status = 0

    def run(self) -> int:
        """Serve until SIGINT or SIGTERM; the exit status."""
        for sentence in without_effect(self._settings):
            logger.warning("%s", sentence)
        _calm_garbage_collector()
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(self._serve())

    async def _serve(self) -> int:
        settings, loop = self._settings, asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        try:
            sockets = self._listen()
        except OSError as error:
            logger.error("cannot listen: %s (choose another --host, --http-port or --metrics-port)", error.strerror)
            return 1
        url = "http://{}:{}".format(*_address(sockets[0]))
        loader = Loader(Mailbox(loop), settings.metrics, self._instance_died)
        names = None if settings.model_control != "explicit" else frozenset(settings.load_model) - {"*"}
        desired = Desired(settings.model_repository, None if "*" in settings.load_model else names)

        def loaded(error: BaseException | None) -> None:
            loop.call_soon_threadsafe(self._loaded, url, error)

        reconciler = Reconciler(desired, loader, self._registry, loaded)
        reconciler.start()
        try:
            await asyncio.gather(*(server.serve([sock]) for server, sock in zip(self._servers, sockets, strict=True)))
        finally:
            clean = await asyncio.to_thread(reconciler.stop, settings.drain_timeout_s)
        if not clean:
            # A backend still computes on a thread of ours: an orderly exit would tear its library down under it.
            logging.shutdown()
            os._exit(1)
        return self._exit_status

    def _listen(self) -> list[socket.socket]:
        settings = self._settings
        page = MetricsPage(self._registry.sources).render if settings.metrics else None
        apart = settings.metrics_port is not None and settings.metrics_port != settings.http_port
        off: Any = _Off()
        services = Services(self._registry, off, off, off, off, version("headrace"), _EXTENSIONS)
        application = HttpApplication(services, settings.max_body_bytes, None if apart else page)
        sockets = [_bind(settings.host, settings.http_port)]
        self._servers.append(_UvicornServer(application, settings))
        if apart and page is not None and settings.metrics_port is not None:
            sockets.append(_bind(settings.host, settings.metrics_port))
            self._servers.append(_UvicornServer(_metrics_application(page), settings))
        return sockets

    def _loaded(self, url: str, error: BaseException | None) -> None:
        failures = self._registry.failures()
        if isinstance(error, ConfigError):
            logger.error("%s", error)
        elif error is not None:
            logger.error("loading failed", exc_info=error)
        if error is not None or (failures and self._settings.strict):
            if error is None:
                logger.error("--strict: %d of the models cannot be served", len(failures))
            self._exit_status = 1
            self._stop()
            return
        self._announce(url, self._registry)

    def _interrupt(self) -> None:
        # Only Ctrl-C is impatient when it comes twice: supervisors like to repeat SIGTERM.
        if self._servers and self._servers[0].should_exit:
            logger.warning("Ctrl-C again: leaving without waiting for requests in flight")
            for server in self._servers:
                server.force_exit = True
        self._stop()

    def _stop(self) -> None:
        self._registry.set_complete(False)
        for server in self._servers:
            server.should_exit = True

    def _instance_died(self, name: str, number: str, left: int) -> None:
        logger.error("model %s version %s: an instance died, %d left", name, number, left)
        if left == 0:
            self._registry.mark(name, number, State.UNAVAILABLE, "all its instances have died")


class _Off:
    """Stands where a service is not wired: nothing is traced, everything else is refused."""

    active = False

    def __getattr__(self, name: str) -> Any:
        raise Forbidden("this server does not offer that")


class _UvicornServer(uvicorn.Server):
    """uvicorn without its signal handling: two of them share a process, and a drained server exits with 0."""

    def __init__(self, application: object, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                application,  # type: ignore[arg-type]
                http=partial(HeadraceHttpProtocol, max_direct_bytes=settings.max_body_bytes),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
                backlog=4096,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `HeadraceServer`."""
        yield


def _metrics_application(page: Callable[[], tuple[str, bytes]]) -> FastAPI:
    app = FastAPI(title="Headrace metrics", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/metrics")
    async def metrics() -> Response:
        content_type, body = page()
        return Response(body, headers={"content-type": content_type})

    return app


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


def _address(sock: socket.socket) -> tuple[str, int]:
    host, port = sock.getsockname()[:2]
    return (f"[{host}]" if ":" in host else host), port


def _calm_garbage_collector() -> None:
    """Requests make no reference cycles worth hunting: look for them rarely, and never among what was there at start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if sys.platform == "win32":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop
