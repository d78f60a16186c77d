"""Real servers and the ways to them: a transport and where the pictures lie."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from loadtest.gpu.crowd import Crowd, CrowdFailed, Taken
from loadtest.gpu.report import Reporter
from loadtest.gpu.setup import REQUEST_ROWS, Setup
from loadtest.protocol import send_json
from loadtest.servers import HOST, Running, cpu_seconds, headrace, running

_READY_S = 90.0


@dataclass(frozen=True, slots=True)
class Way:
    """Transport of requests to a server.

    Attributes:
        transport: "http" or "grpc".
        data: "body", "system" or "cuda": where the pictures lie.
    """

    transport: str
    data: str

    @property
    def name(self) -> str:
        """Name in reports and for clients."""
        return f"{self.transport} {self.data}"


WAYS = tuple(Way(transport, data) for transport in ("http", "grpc") for data in ("body", "system", "cuda"))
DEFAULT_WAY = "http system"


def ways_of(setup: Setup) -> list[Way]:
    """Those that this machine has."""
    return [way for way in WAYS if setup.on_gpu or way.data != "cuda"]


def way_called(name: str) -> Way:
    """The way of a name."""
    return next(way for way in WAYS if way.name == name)


@contextmanager
def server(setup: Setup, model: str) -> Iterator[Running]:
    """Headrace with one model of the bench's repository and clients' shared memory allowed."""
    # Its clients keep their connections while others have their turns.
    options = ("--allow-client-shm", "--keep-alive-timeout-s", "3600")
    command = headrace(setup.repository.resolve(), name="headrace", models=(model,), options=options)
    with running(command, setup.scratch, _READY_S) as started:
        yield started


def open_way(
    setup: Setup, crowd: Crowd, way: Way, served: Running, model: str, rows: int, slots: int, **more: Any
) -> str:
    """Make the clients connect; return the key of the connections."""
    key = str(more.pop("key", way.name))
    crowd.open(
        key,
        slots,
        transport=way.transport,
        data=way.data,
        http_port=served.port,
        grpc_port=served.grpc_port,
        model=model,
        rows=rows,
        side=setup.side,
        **more,
    )
    return key


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """A sample and what the server made of it.

    Attributes:
        taken: what the clients found.
        mean_rows: images in a batch.
        server_cores: that the server's process used.
    """

    taken: Taken
    mean_rows: float
    server_cores: float


def saturate(crowd: Crowd, key: str, served: Running, model: str, seconds: float) -> Watched:
    """One closed-loop sample; a request that failed fails it.

    Raises:
        CrowdFailed: a client could not, or was answered with errors.
    """
    before, cpu_s = _counts(served, model), cpu_seconds(served.pid)
    taken = crowd.closed(key, seconds)
    after, cpu_end_s = _counts(served, model), cpu_seconds(served.pid)
    if taken.wrong:
        raise CrowdFailed(f"{key}: {taken.wrong} requests failed, the first with {taken.first_error}")
    # The whole sample, including its warm-up and end; only shows how busy the server is.
    batches = after[1] - before[1]
    return Watched(taken, (after[0] - before[0]) / max(1, batches), (cpu_end_s - cpu_s) / (seconds + 0.5))


def sample_way(
    setup: Setup,
    reporter: Reporter,
    crowd: Crowd,
    key: str,
    name: str,
    served: Running,
    model: str,
    number: int,
    *,
    rows: int = REQUEST_ROWS,
) -> float:
    """Take and report one closed-loop sample of requests of `rows` rows; return images a second.

    Raises:
        CrowdFailed: as for `saturate`.
    """
    watched = saturate(crowd, key, served, model, setup.seconds)
    rate = watched.taken.per_s * rows
    detail = {
        "p50_ms": round(watched.taken.percentile_ms(50), 2),
        "p99_ms": round(watched.taken.percentile_ms(99), 2),
        "mean_batch": round(watched.mean_rows, 1),
        "server_cores": round(watched.server_cores, 2),
        "busiest_client": round(watched.taken.busy, 2),
    }
    reporter.sample(name, "images/s", rate, number, **detail)
    return rate


def _counts(served: Running, model: str) -> tuple[int, int]:
    """Images and batches so far."""
    (statistics,) = send_json(HOST, served.port, f"/v2/models/{model}/stats")["model_stats"]
    return int(statistics["inference_count"]), int(statistics["execution_count"])
