"""The page that Prometheus scrapes: one registry, made when it asks. Nothing on the data plane knows Prometheus.

What is on it stands in `metrics_table`, who makes it in `metrics_models`, `metrics_triton`, `metrics_gpus` and `metrics_server`,
how it is written in `exposition`.
"""

from __future__ import annotations

import threading

from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from headrace.core.telemetry import TritonMetrics
from headrace.observability.exposition import expose
from headrace.observability.metrics_gpus import GpuCollector, Gpus, Memory, MemoryCollector
from headrace.observability.metrics_models import ModelCollector, Sources
from headrace.observability.metrics_server import ServerCollector, ServerFacts
from headrace.observability.metrics_triton import CpuCollector


class MetricsPage:
    """The page that Prometheus scrapes.

    Args:
        sources: gives (model, version, source) of everything loaded.
        memory: of the GPUs; None: nobody tells.
        facts: of the server itself; None: nobody tells.
        gpus: what the driver tells of them; None: nobody asks it.
        triton: which metrics under Triton's names there are; None: the defaults.
    """

    def __init__(
        self,
        sources: Sources,
        memory: Memory | None = None,
        facts: ServerFacts | None = None,
        gpus: Gpus | None = None,
        triton: TritonMetrics | None = None,
    ) -> None:
        self._lock = threading.Lock()  # one scrape at a time
        self._registry = CollectorRegistry()
        self._registry.register(ModelCollector(sources, triton or TritonMetrics()))
        if memory is not None:
            self._registry.register(MemoryCollector(memory))
        if facts is not None:
            self._registry.register(ServerCollector(facts))
        if gpus is not None:
            self._registry.register(GpuCollector(gpus))
        self._registry.register(CpuCollector())
        ProcessCollector(registry=self._registry)

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and body; takes milliseconds, so any thread but the event loop's should call it.

        Args:
            accept: the header of that name.
        """
        with self._lock:
            return expose(self._registry, accept)
