"""How far the simulator is right: the same requests through a real data plane and through `server.simulation`, side by side.

    python -m loadtest.bench.replayed

The real one is a `ModelHandle` with its threads and locks, in this process; its model sleeps as long as a device of a given speed
would take. What a batch takes longer than that is measured on one trace before (the mean) and told to the simulator, which knows
nothing else of this machine. A case is a trace and a policy; goodput counts answers within 20 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import uvloop

from loadtest.bench.dataplane import Device, Sleeper, _sleep_until
from loadtest.bench.report import markdown_table, number
from loadtest.bench.spread import Spread, ratios
from loadtest.protocol import Array
from server.backends.base import Execution
from server.core.clock import NS_PER_MS, NS_PER_US, monotonic_ns
from server.core.completion import LoopCompletion, Mailbox
from server.core.errors import HeadraceError
from server.core.request import BatchTimes, InferRequest
from server.core.tensor import BY_NAME, FP32, ModelSpec, TensorSpec
from server.dataplane.batching import BatchPolicy
from server.dataplane.handle import ModelHandle
from server.dataplane.policy import HandlePolicy
from server.dataplane.scheduler import QueueLimits
from server.simulation.profiles import Latency, Profile
from server.simulation.replay import ANSWERED, Batches, Replay, SimulatedModel, Tally, replay
from server.simulation.report import Figures, report
from server.simulation.traces import Load, Shape, Trace, make_trace

_SLO_MS = 20.0
_BATCH_US, _ROW_US, _ROWS = 2000, 200, 16
_CAPACITY_HZ = _ROWS / (_BATCH_US + _ROW_US * _ROWS) * 1e6
_HEAD_START_NS = 50 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked of whom.

    Attributes:
        share: of the device's capacity that is asked for, on average.
        shape: how the rate changes.
        delay_us: the policy's.
        depth: flights; 1: one batch after the other.
        queue: requests that may wait.
    """

    share: float
    shape: Shape = field(default_factory=Shape)
    delay_us: int = 0
    depth: int = 1
    queue: int = 4096


CASES = {
    "half load": Case(0.5),
    "half load, delay 5 ms": Case(0.5, delay_us=5000),
    "0.8 load": Case(0.8),
    "0.8 load, overlapped": Case(0.8, depth=2),
    "bursts, 0.5 load": Case(0.5, Shape("bursty", burst_factor=4, burst_s=0.3, calm_s=1.2)),
    "1.5 load, 32 may wait": Case(1.5, queue=32),
}


@dataclass
class Sleeping:
    """A model (and its execution) that takes one batch after the other, for as long as a device of that speed would."""

    device: Device

    def execution(self, index: int) -> Execution:
        """Itself."""
        return self

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Sleep."""
        rows = len(inputs["x"])
        _sleep_until(monotonic_ns() + self.device.ns(rows))
        return {"scores": np.zeros((rows, 1), np.float32)}

    def close(self) -> None:
        """Holds nothing."""


@dataclass
class Real:
    """A trace replayed by the clock."""

    trace: Trace
    handle: ModelHandle
    result: Replay
    start_ns: int = 0
    missing: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Until everything is answered."""
        self.start_ns, self.missing = monotonic_ns() + _HEAD_START_NS, len(self.trace)
        threading.Thread(target=self._feed, args=(asyncio.get_running_loop(),), daemon=True).start()
        await self.done.wait()

    def _feed(self, loop: asyncio.AbstractEventLoop) -> None:
        for which, time_ns in enumerate(self.trace.times_ns.tolist()):
            _sleep_until(self.start_ns + time_ns)
            loop.call_soon_threadsafe(self._ask, which, self.start_ns + time_ns)

    def _ask(self, which: int, due_ns: int) -> None:
        row = np.zeros((1, 1), np.uint8)
        request = InferRequest(inputs={"x": row}, rows=1, shape_key=None, received_ns=due_ns, size_bytes=1)
        try:
            completion = self.handle.infer(request)
        except HeadraceError as error:
            self._told(which, error.reason)
        else:
            completion.then(partial(self._answered, which, due_ns, completion))

    def _answered(self, which: int, due_ns: int, completion: LoopCompletion) -> None:
        self.result.latency_ns[which] = monotonic_ns() - due_ns
        outcome = completion.outcome
        self._told(which, outcome.reason if isinstance(outcome, HeadraceError) else ANSWERED)

    def _told(self, which: int, outcome: str) -> None:
        self.result.outcomes[which] = outcome
        self.missing -= 1
        if not self.missing:
            self.done.set()


class Timed(Tally):
    """Remembers what batches took longer than their device.

    Attributes:
        added_ns: of each, from being pulled to being answered.
    """

    def __init__(self, batches: Batches, device: Device) -> None:
        super().__init__(batches)
        self._device = device
        self.added_ns: list[int] = []

    def batch(
        self,
        rows: int,
        batch_rows: int,
        reason: str,
        times: BatchTimes,
        queue_ns: list[int],
        total_ns: list[int],
        busy_ns: int = 0,
        shape: object = None,
    ) -> None:
        """A batch was run and answered."""
        super().batch(rows, batch_rows, reason, times, queue_ns, total_ns, busy_ns, shape)
        self.added_ns.append(times.split_ns - times.taken_ns - self._device.ns(batch_rows))


async def for_real(trace: Trace, case: Case) -> tuple[Replay, Timed]:
    """Replay a trace by the clock."""
    device = Device(_BATCH_US * NS_PER_US, _ROW_US * NS_PER_US, case.depth)
    model = Sleeping(device) if case.depth == 1 else Sleeper(device)
    names = ("scores",) if case.depth == 1 else ("scores", "classes")
    outputs = {name: TensorSpec(name, FP32, (-1, 1)) for name in names}
    spec = ModelSpec("sleeper", "1", "none", {"x": TensorSpec("x", BY_NAME["UINT8"], (-1, 1))}, outputs, _ROWS)
    batches = Batches()
    recorder = Timed(batches, device)
    handle = ModelHandle(spec, _policy(case), model, Mailbox(asyncio.get_running_loop()), recorder)
    await asyncio.to_thread(handle.start)
    result = Replay(trace, [0] * len(trace), [""] * len(trace), [batches], [0])
    await Real(trace, handle, result).run()
    await asyncio.to_thread(handle.close, None)
    return result, recorder


def _policy(case: Case) -> HandlePolicy:
    return HandlePolicy(BatchPolicy(_ROWS, max_delay_ns=case.delay_us * NS_PER_US), QueueLimits(max_count=case.queue))


def _real(case: Case, seconds: float, seed: int) -> tuple[Replay, Timed]:
    load = Load(case.share * _CAPACITY_HZ, seconds, case.shape)
    trace = make_trace(load, ["sleeper"], np.random.default_rng(seed))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(for_real(trace, case))


def compared(case: Case, seconds: float, seed: int, added_us: float) -> tuple[Figures, Figures]:
    """The real replay, and the simulated one.

    Args:
        case: a trace and a policy.
        seconds: how long the trace is.
        seed: of the trace.
        added_us: what a batch takes besides its time on the device.
    """
    real, _ = _real(case, seconds, seed)
    profile = Profile(Latency.line(_BATCH_US, _ROW_US), fill=Latency.line(added_us))
    simulated = replay(real.trace, [SimulatedModel(_policy(case), profile, case.depth)])
    return report(real, [_SLO_MS]).total, report(simulated, [_SLO_MS]).total


def _told(figures: Figures) -> dict[str, float]:
    p50_us, _, p99_us, _ = figures.percentiles_us
    return {
        "p50 ms": p50_us / 1000,
        "p99 ms": p99_us / 1000,
        "goodput/s": figures.goodput_hz or 0.0,
        "rows a batch": figures.mean_rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="a trace takes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="traces of each case (default: %(default)s)")
    parser.add_argument("--only", nargs="*", default=[], help="cases by name")
    options = parser.parse_args(arguments)
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # as the server has it
    _, before = _real(Case(0.5), options.seconds, seed=options.rounds)
    added_us = statistics.fmean(before.added_ns) / NS_PER_US
    lines = []
    for name, case in CASES.items():
        if options.only and name not in options.only:
            continue
        rounds = [compared(case, options.seconds, seed, added_us) for seed in range(options.rounds)]
        real, simulated = ([_told(figures) for figures in column] for column in zip(*rounds, strict=True))
        for what in real[0]:
            ours, theirs = [each[what] for each in simulated], [each[what] for each in real]
            ratio = ratios(ours, theirs)
            told = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
            lines.append((name, what, number(Spread.of(theirs).median), number(Spread.of(ours).median), told))
    print(f"a batch takes {added_us:.0f} us longer than its device, on average\n")
    print("\n".join(markdown_table(("case", "", "real", "simulated", "simulated / real"), lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
