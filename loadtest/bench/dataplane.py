"""Cost of Headrace's Python code for each request: the data plane in one process, on a simulated device that uses no CPU.

    python -m loadtest.bench.dataplane --seconds 3

Callers in a closed loop call a `ModelHandle` with one row at a time and receive a callback. The model behind it is a
pipelined execution whose batches take as long as a GPU of a given speed would, while its thread sleeps. The
measurement is therefore that of the scheduler: the share of the device's speed, CPU time for each request, and the
latency of a single caller beyond that of the device.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import cast

import numpy as np
import uvloop
from headrace.backends.base import Execution, InFlightBatch
from headrace.core.clock import NS_PER_S, NS_PER_US, monotonic_ns
from headrace.core.completion import Mailbox
from headrace.core.tensor import BY_NAME, FP32, ModelSpec, TensorSpec
from headrace.observability.counters import Recorder
from headrace.scheduling.handle import ModelHandle
from headrace.scheduling.policy import BatchPolicy, HandlePolicy, QueueLimits

from loadtest.bench.spread import Spread
from loadtest.callers import Callers
from loadtest.protocol import Array

_WARM_UP_S = 0.3
_OUTPUTS = 10
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True, slots=True)
class Device:
    """Speed of the simulated device.

    Attributes:
        batch_ns: duration of a batch without its rows.
        row_ns: additional duration for each row.
        depth: maximum number of batches in flight.
    """

    batch_ns: int
    row_ns: int
    depth: int = 4

    def ns(self, rows: int) -> int:
        """Duration of a batch of `rows` rows."""
        return self.batch_ns + self.row_ns * rows


@dataclass
class Sleeper:
    """A pipelined execution (and its model) that computes one batch after the other by the clock; its outputs are zeros.

    Attributes:
        device: how fast it is.
        prompt: the event loop may launch.
    """

    device: Device
    prompt: bool = True
    _free_ns: int = 0
    _buffers: deque[Array] = field(default_factory=deque)

    @property
    def depth(self) -> int:
        """Maximum number of batches in flight."""
        return self.device.depth

    def execution(self, index: int) -> Execution:
        """Itself."""
        return self

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Begin, launch and finish in one."""
        batch = self.begin(inputs, len(inputs["x"]))
        self.launch(batch)
        return self.finish(batch)

    def begin(self, like: Mapping[str, Array], rows: int) -> InFlightBatch:
        """Memory that is used again and again."""
        shape = like["x"].shape[1:]
        buffer = self._buffers.popleft() if self._buffers else np.empty((4096, *shape), np.uint8)
        return InFlightBatch({"x": buffer[:rows]}, rows, buffer)

    def launch(self, batch: InFlightBatch) -> None:
        """Fix when it will be done."""
        self._free_ns = max(monotonic_ns(), self._free_ns) + self.device.ns(batch.rows)
        batch.handle = (self._free_ns, batch.handle)

    def finish(self, batch: InFlightBatch) -> dict[str, Array]:
        """Sleep until then."""
        done_ns, buffer = cast("tuple[int, Array]", batch.handle)
        sleep_until(done_ns)
        self._buffers.append(buffer)
        return {
            "scores": np.zeros((batch.rows, _OUTPUTS), np.float32),
            "classes": np.zeros((batch.rows, 5), np.int32),
        }

    def discard(self, batch: InFlightBatch) -> None:
        """Nothing was begun."""

    def close(self) -> None:
        """Holds nothing."""


def sleep_until(done_ns: int) -> None:
    """Return at that time, monotonic, as exactly as the machine can."""
    left_ns = done_ns - monotonic_ns()
    if left_ns > 0:
        _precise_timers()
        time.sleep(left_ns / NS_PER_S)


_precise = threading.local()


def _precise_timers() -> None:
    """Let this thread's sleeps end on time: Linux adds 50 us to spare power, a GPU does not."""
    if not getattr(_precise, "done", False):
        _precise.done = True
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Callers and instances of a measurement.

    Attributes:
        callers: number of concurrent callers.
        blocking: the only caller uses `infer_blocking`, on a thread of its own.
        instances: of the model.
    """

    callers: int = 1
    blocking: bool = False
    instances: int = 1


@dataclass(frozen=True, slots=True)
class Load:
    """Result of one measurement.

    Attributes:
        rate_per_s: requests answered.
        of_device: the same as a share of what the device can do with full batches.
        cpu_us: processor time a request, of all threads.
        rows: in a batch, on average.
        p50_us, p99_us: from the call to the callback.
    """

    rate_per_s: float
    of_device: float
    cpu_us: float
    rows: float
    p50_us: float
    p99_us: float


def _handle(model: Sleeper, max_rows: int, row_bytes: int, instances: int) -> ModelHandle:
    spec = ModelSpec(
        name="sleeper",
        version="1",
        platform="none",
        inputs={"x": TensorSpec("x", BY_NAME["UINT8"], (-1, row_bytes))},
        outputs={
            "scores": TensorSpec("scores", FP32, (-1, _OUTPUTS)),
            "classes": TensorSpec("classes", BY_NAME["INT32"], (-1, 5)),
        },
        max_batch_size=max_rows,
    )
    policy = HandlePolicy(BatchPolicy(max_rows), QueueLimits(max_count=1 << 20), instances)
    return ModelHandle(spec, policy, model, Mailbox(asyncio.get_running_loop()), Recorder())


async def measure(device: Device, crowd: Crowd, options: argparse.Namespace) -> Load:
    """Measure with this number of callers."""
    handle = _handle(Sleeper(device), options.rows, options.row_bytes, crowd.instances)
    await asyncio.to_thread(handle.start)
    row = {"x": np.zeros((1, options.row_bytes), np.uint8)}
    callers = Callers(handle, [row] * crowd.callers, ("classes", (1, 5)), int(options.front_us * NS_PER_US))
    answered = await callers.run(_WARM_UP_S, options.seconds, blocking=crowd.blocking)
    await asyncio.to_thread(handle.close, None)
    limit_per_s = options.rows * NS_PER_S / max(device.ns(options.rows), 1)
    return Load(
        rate_per_s=answered.per_s,
        of_device=answered.per_s / limit_per_s,
        cpu_us=answered.cores / answered.per_s * 1e6,
        rows=answered.mean_rows,
        p50_us=answered.percentile_us(50),
        p99_us=answered.percentile_us(99),
    )


def bare_p50_us(device_ns: int, seconds: float) -> float:
    """Duration of a sleep for one row's time on a thread that does nothing else."""
    times_ns: list[int] = []
    end_ns = monotonic_ns() + int(seconds * NS_PER_S)
    while (start_ns := monotonic_ns()) < end_ns:
        sleep_until(start_ns + device_ns)
        times_ns.append(monotonic_ns() - start_ns)
    return statistics.median(times_ns) / NS_PER_US


def _summary(loads: Sequence[Load]) -> dict[str, dict[str, float]]:
    return {key: asdict(Spread.of([asdict(load)[key] for load in loads])) for key in asdict(loads[0])}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="a measurement takes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=256, help="in the largest batch (default: %(default)s)")
    parser.add_argument("--row-bytes", type=int, default=16, help="of one request's input (default: %(default)s)")
    parser.add_argument("--front-us", type=float, default=0, help="busy time of the loop before each request")
    parser.add_argument("--only", nargs="*", default=[], help="cases, e.g. full-200000 single-500")
    parser.add_argument("--switch-interval-us", type=float, default=0, help="of the interpreter; 0: its own")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if options.switch_interval_us:
        sys.setswitchinterval(options.switch_interval_us / 1e6)
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # as the server has it
    results = {name: run(options) for name, run in CASES.items() if not options.only or name in options.only}
    print(json.dumps(results, indent=2) if options.json else _table(results))
    return 0


def _full(rate_per_s: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Many callers, a device that does so many rows a second in full batches."""
    device = Device(batch_ns=options.rows * NS_PER_S // rate_per_s, row_ns=0)
    return _summary([_run(device, Crowd(6 * options.rows), options) for _ in range(options.rounds)])


def _single(device_us: int, crowd: Crowd, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """One caller, a device that takes so long."""
    device = Device(batch_ns=device_us * NS_PER_US, row_ns=0)
    loads, added = [], []
    for _ in range(options.rounds):
        loads.append(_run(device, crowd, options))
        added.append(loads[-1].p50_us - bare_p50_us(device.batch_ns, options.seconds / 4))
    return {**_summary(loads), "added_p50_us": asdict(Spread.of(added))}


def _run(device: Device, crowd: Crowd, options: argparse.Namespace) -> Load:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measure(device, crowd, options))


CASES: dict[str, Callable[[argparse.Namespace], dict[str, dict[str, float]]]] = {
    "full-43000": partial(_full, 43_000),
    "full-68000": partial(_full, 68_000),
    "full-200000": partial(_full, 200_000),
    "single-0": partial(_single, 0, Crowd()),
    "blocking-0": partial(_single, 0, Crowd(blocking=True)),
    "single-500": partial(_single, 500, Crowd()),
    "single-500-2-instances": partial(_single, 500, Crowd(instances=2)),
    "blocking-500": partial(_single, 500, Crowd(blocking=True)),
    "blocking-500-2-instances": partial(_single, 500, Crowd(blocking=True, instances=2)),
}


def _table(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    head = [heading for heading, _, _ in _COLUMNS]
    lines = [f"| case | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for name, figures in results.items():
        cells = [f"{figures[key]['median']:,.{digits}f}" if key in figures else "-" for _, key, digits in _COLUMNS]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


_COLUMNS = (
    ("requests/s", "rate_per_s", 0),
    ("of the device", "of_device", 3),
    ("processor us a request", "cpu_us", 2),
    ("rows a batch", "rows", 1),
    ("p50 us", "p50_us", 0),
    ("p99 us", "p99_us", 0),
    ("added p50 us", "added_p50_us", 0),
)


if __name__ == "__main__":
    sys.exit(main())
