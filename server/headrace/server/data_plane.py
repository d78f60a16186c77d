"""Repository, registry and instances of one process, without any protocol; shared by the server and by embedding programs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from headrace.core.clock import NS_PER_US
from headrace.core.completion import Mailbox
from headrace.core.ledger import CPU
from headrace.core.limits import BodyMemory
from headrace.core.store_url import parse_store_url
from headrace.inference.caching.response_caches import ResponseCaches
from headrace.models.batch_proofs import BatchProofs
from headrace.models.control_policy import ControlPolicy, ModelSelection
from headrace.models.gpu_model_cache import GpuModelCache
from headrace.models.integrity.verified_copy import open_verifier
from headrace.models.loader import Loader
from headrace.models.reconciler import Reconciler
from headrace.models.registry import Registry
from headrace.models.stores.mirror import Mirror
from headrace.models.stores.opening import open_store
from headrace.models.stores.sync import RepositoryStores
from headrace.models.trials import ModelTrials
from headrace.models.warmup import LatencyStore
from headrace.observability.custom_metrics import CustomMetrics
from headrace.python.environments import Environments, environments_root
from headrace.python.model_calls import ModelCalls
from headrace.server.settings import Settings, store_hosts

logger = logging.getLogger("headrace")


class DataPlane:
    """Loads the models of the repositories and serves them to callers in this process.

    Ownership: the reconciler's control thread loads and closes models; `reconciler.start` starts it, `reconciler.stop` ends
    it.

    Args:
        settings: repositories and load options.
        loop: event loop on which callers of `VersionHandle.infer` wait.
        on_loaded: called on the loop after the initial load, with the error if it failed as a whole.
        model_filter: names of the served models, for each repository that is served in part.
        bodies: counts requests in the front ends; None without front ends.

    Attributes:
        registry: versions that serve.
        gpu_model_cache: models in GPU memory, and those under the budget of host memory.
        environments: Python environments of models.
        reconciler: the control thread.
        custom_metrics: metrics that the code of Python models reports.
        stores: repositories that mirror a store; None without any.
    """

    def __init__(
        self,
        settings: Settings,
        loop: asyncio.AbstractEventLoop,
        on_loaded: Callable[[BaseException | None], None],
        model_filter: Mapping[Path, frozenset[str]],
        bodies: BodyMemory | None = None,
    ) -> None:
        self.registry = Registry(settings.ready_when, is_starting=True)
        self.gpu_model_cache = GpuModelCache()
        if settings.host_memory_budget:
            self.gpu_model_cache.ledger.set_limit(CPU, settings.host_memory_budget)
        names = None if settings.model_control != "explicit" else frozenset(settings.load_model) - {"*"}
        selection = ModelSelection(
            settings.model_repository, None if "*" in settings.load_model else names, model_filter
        )
        state = Path(settings.state_dir) if settings.state_dir else None
        self.custom_metrics = CustomMetrics()
        calls, mailbox = ModelCalls(loop, self.registry), Mailbox(loop)
        # With --strict the server starts or refuses to, so it waits for installations.
        self.environments = Environments(environments_root(settings.environments_dir, state), wait=settings.strict)
        self._caches = None if settings.cache_config is None else ResponseCaches(settings.cache_config, mailbox)
        loader = Loader(
            mailbox,
            settings.metrics,
            self._instance_died,
            self._instance_restarted,
            self.registry.set_used,
            gpu_model_cache=self.gpu_model_cache,
            gpu_memory_fraction=settings.gpu_memory_fraction,
            profile_s=settings.profile_s,
            latency_store=None if state is None else LatencyStore(state / "profiles"),
            state=state,
            inline_bound_ns=settings.inline_bound_us * NS_PER_US,
            bodies=bodies,
            allow_python_uploads=settings.allow_python_uploads,
            calls=calls,
            metrics=self.custom_metrics,
            response_caches=self._caches,
            interpreters=self.environments,
            verifier=open_verifier(settings.model_keys_file, state),
            trials=_open_trials(state, settings.trial_limit_s),
            proofs=BatchProofs(state),
        )
        self.registry.sequences = loader.sequences
        self.registry.sequences.by_client = bool(settings.api_keys_file or settings.jwks)
        self.stores = _open_stores(settings)
        self.reconciler = calls.control = Reconciler(
            selection,
            loader,
            self.registry,
            lambda error: loop.call_soon_threadsafe(on_loaded, error),
            _control_policy(settings),
            stores=self.stores,
        )

    def drain(self) -> None:
        """Report the server as not ready and end all loads, because it stops; models serve until `stop`."""
        self.registry.set_complete(False)
        self.reconciler.drain()

    def stop(self, timeout_s: float) -> bool:
        """Close every model after its queued requests have completed, and end all installations.

        Args:
            timeout_s: maximum wait in seconds for the requests of all models.

        Returns:
            True if all requests completed in time.
        """
        self.environments.stop()
        is_clean = self.reconciler.stop(timeout_s)
        self.environments.close()
        if self._caches is not None:
            self._caches.close()
        return is_clean

    def _instance_died(self, name: str, number: str, remaining: int) -> None:
        logger.error("model %s version %s: an instance died, %d remain", name, number, remaining)
        self.registry.update_health(name, number)

    def _instance_restarted(self, name: str, number: str, alive: int) -> None:
        logger.warning("model %s version %s: a dead instance was restarted, %d live", name, number, alive)
        self.registry.update_health(name, number)


def _open_trials(state: Path | None, limit_s: float) -> ModelTrials | None:
    if state is None and limit_s:
        logger.info("models run for the first time in the server itself: no state folder remembers which have run")
    return None if state is None or not limit_s else ModelTrials(state, limit_s)


def _control_policy(settings: Settings) -> ControlPolicy:
    return ControlPolicy(
        mode=settings.model_control,
        allow_override=settings.allow_model_override,
        poll_interval_s=settings.poll_interval_s,
        load_threads=settings.model_load_thread_count,
    )


def _open_stores(settings: Settings) -> RepositoryStores | None:
    """Create the mirrors of the repositories that are in stores; nothing is requested yet."""
    stop, connect = threading.Event(), partial(open_store, hosts=store_hosts())
    mirrors = [
        Mirror(parse_store_url(url), Path(folder), settings.repository_cache_bytes, stop, connect)
        for folder, url in settings.stores
    ]
    interval_s = settings.poll_interval_s if settings.model_control == "poll" else None
    return RepositoryStores(mirrors, interval_s, stop) if mirrors else None
