"""One instance on a GPU: batches overlap in three streams, and nothing is allocated for those whose shapes were seen at load.

    copy in:   | rows of k+2 |                 each stage waits for the one before by an event; the host waits once a batch,
    compute:           | k+1 |                 without the interpreter's lock, for the end of its copy out
    copy out:                 | k |

A batch is padded up to a bucket of rows: then its shapes have a CUDA graph. Only the rows that are there are copied. A small
batch is one graph from the first copy to the last, on the compute stream alone: one call queues it. That is so for all batches of
a bucket that have little to overlap, and for others while nothing else is in the air.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from headrace.backends.base import ExecutionLost, Flight
from headrace.backends.tensorrt.berths import Berth
from headrace.backends.tensorrt.dock import Dock, Placement, Shapes, Views
from headrace.backends.tensorrt.lanes import Lane, told
from headrace.backends.tensorrt.plan import Plan, Shape, choose_profile
from headrace.backends.tensorrt.stages import Joined, Ports
from headrace.backends.tensorrt.tuner import tuned
from headrace.core.errors import HeadraceError, ModelFailed
from headrace.core.tensor import Array
from headrace.cuda.driver import DeviceError, OutOfDeviceMemory, loaded, primary_context
from headrace.cuda.kernels.rows import RowGather
from headrace.cuda.signals import works

# What is remembered of batches that were seen; beyond that it is found out anew.
_REMEMBERED = 4096


class _Trip(NamedTuple):
    """A flight's way.

    Attributes:
        berth: whose memory it has.
        lane: which it takes.
        views: on that memory.
    """

    berth: Berth
    lane: Lane
    views: Views


class _Working:
    """The GPU current in a thread; an error after which it does nothing any more becomes `ExecutionLost`. Has no state."""

    def __init__(self, context: Any, device: int, name: str) -> None:
        self._context = context
        self._device = device
        self._name = name

    def __enter__(self) -> None:
        self._context.push()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The error itself is not raised anew: frames in a cycle would keep streams alive that must go while the GPU is current.
        try:
            if error is None or isinstance(error, OutOfDeviceMemory):
                return
            if not isinstance(error, (HeadraceError, loaded().Error)):
                return
            if not works():
                message = f"GPU {self._device} has failed, {self._name} runs there no more: {error}"
                raise ExecutionLost(message) from error
            if not isinstance(error, HeadraceError):
                raise DeviceError(f"running {self._name} failed on the GPU: {error}") from error
        finally:
            loaded().Context.pop()


class TensorRtExecution:
    """See `headrace.backends.base.PipelinedExecution`. Opened and closed by the instance's thread.

    Ownership: berths go from `_free` through a flight back to `_free` (a deque: both threads touch its ends); everything else is
    the instance's thread's.

    Args:
        plan: what runs, shared with the other instances on the GPU.
        placement: where and how.
        tell: is told once why a CUDA graph cannot be had.
        stages: what the GPU does before and behind the plan, by the plan's tensor.
        kernel: fetches resident rows; None: flights take none.

    Raises:
        ConfigError: the plan does not take batches of `max_rows` rows, or gives outputs that cannot be served.
        DeviceError: the GPU has no memory left, or has failed.
    """

    def __init__(
        self,
        plan: Plan,
        placement: Placement,
        tell: Callable[[str], None],
        stages: Mapping[str, Joined] | None = None,
        kernel: RowGather | None = None,
    ) -> None:
        self.depth = placement.depth
        self._plan = plan
        self._ports = Ports(plan, stages or {})
        self._given = self._ports.given
        self._batched = placement.max_rows > 0
        self._device = None if kernel is None else placement.device
        self._working = _Working(primary_context(placement.device), placement.device, plan.name)
        self._dock = Dock(plan, self._ports, placement, kernel, tell)
        self._free: deque[Berth] = deque()
        self._routes: dict[Shapes, Shapes] = {}
        self._views: dict[tuple[int, Shapes], Views] = {}
        with self._working:
            try:
                self._dock.open()
                if self._dock.fixed:
                    self._dock.prepare(tuned(self._dock, plan, placement))
                # With other shapes to come, `begin` may have to make a lane and capture its graph.
                self.prompt = self._dock.fixed
            except BaseException:
                self._dock.close()
                raise
        self._free.extend(self._dock.berths)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """All outputs; see `headrace.backends.base.Execution.run`."""
        rows = next(iter(inputs.values())).shape[0] if self._batched else 0
        flight = self._begin(inputs, rows)
        try:
            for name, array in inputs.items():
                np.copyto(flight.inputs[name], array)
        except BaseException:
            self.discard(flight)
            raise
        self.launch(flight)
        return self.finish(flight)

    def begin(self, like: Mapping[str, Array], rows: int) -> Flight:
        """A free flight; see `headrace.backends.base.PipelinedExecution.begin`."""
        return self._begin(like, rows if self._batched else 0)

    def launch(self, flight: Flight) -> None:
        """Queue copy in, compute and copy out."""
        berth, lane, views = _trip(flight)
        # From here on the GPU may read them, whatever becomes of the flight.
        berth.residents = flight.residents
        alone = len(self._free) == self.depth - 1
        try:
            with self._working:
                self._dock.launch(berth, lane, views, flight.residents, alone)
        except BaseException:
            # Some of it may be queued: nobody else may use the memory before it is over.
            with self._working:
                self._dock.synchronize()
            self._give_back(berth)
            raise

    def finish(self, flight: Flight) -> dict[str, Array]:
        """Wait for a flight, and copies of its outputs."""
        berth, _, views = _trip(flight)
        try:
            with self._working:
                berth.landing.wait()
            return {name: values.copy() for name, values in views.outputs.items()}
        finally:
            self._give_back(berth)

    def discard(self, flight: Flight) -> None:
        """Give a flight back that was not launched."""
        self._give_back(_trip(flight).berth)

    def close(self) -> None:
        """Give everything back, after what still runs."""
        # Views would keep pinned memory from going.
        self._views.clear()
        self._free.clear()
        with self._working:
            self._dock.close()

    def _begin(self, like: Mapping[str, Array], rows: int) -> Flight:
        self._check(like)
        asked = tuple([(rows, *like[name].shape[1:]) if rows else like[name].shape for name in self._given])
        padded = self._routes.get(asked)
        if padded is None:
            padded = self._remembered_route(asked, rows)
        berth = self._free.popleft()
        try:
            lane = self._dock.ready(berth, padded)
            if lane is None:
                with self._working:
                    lane = self._dock.lane(berth, padded)
            views = self._views.get((berth.index, asked))
            if views is None:
                views = self._remembered_views(berth, lane, asked, rows)
        except BaseException:
            self._free.append(berth)
            raise
        return Flight(dict(views.inputs), views.rows, _Trip(berth, lane, views), self._device)

    def _give_back(self, berth: Berth) -> None:
        berth.residents = []
        self._free.append(berth)

    def _check(self, like: Mapping[str, Array]) -> None:
        if like.keys() != self._given.keys():
            raise ModelFailed(f"{self._plan.name} takes {', '.join(self._given)}, it was given {', '.join(like)}")
        for name, dtype in self._given.items():
            if like[name].dtype != dtype:
                raise ModelFailed(f"{self._plan.name} takes '{name}' as {dtype}, it was given as {like[name].dtype}")

    def _remembered_route(self, asked: Shapes, rows: int) -> Shapes:
        """The shapes of the plan's inputs that are run for a batch."""
        if len(self._routes) >= _REMEMBERED:
            self._routes.clear()
        found = self._routes[asked] = self._route(dict(zip(self._given, asked, strict=True)), rows)
        return found

    def _route(self, asked: dict[str, Shape], rows: int) -> Shapes:
        exact, choice = self._ports.inward(asked), self._dock.choice
        if not rows:
            candidates: tuple[int, ...] = (0,)
        elif self._dock.fixed and rows <= choice.buckets[-1]:
            candidates = (choice.padded(rows),)
        else:
            candidates = tuple(bucket for bucket in choice.buckets if bucket >= rows)
        for run in candidates:
            shapes = {name: (run, *shape[1:]) for name, shape in exact.items()} if rows else exact
            if choose_profile(self._plan.profiles, shapes) is not None:
                return tuple(shapes.values())
        raise ModelFailed(f"{self._plan.name} was not built for {told(exact)}: see optimization.profiles")

    def _remembered_views(self, berth: Berth, lane: Lane, asked: Shapes, rows: int) -> Views:
        if len(self._views) >= _REMEMBERED:
            self._views.clear()
        fetched = {
            # Of an output's rows those that are not padding.
            name: (rows, *shape[1:]) if rows and shape and shape[0] == lane.rows else shape
            for name, shape in lane.outputs.items()
        }
        views = self._views[berth.index, asked] = Views(
            {name: berth.inputs[name].view(shape) for name, shape in zip(self._given, asked, strict=True)},
            {name: berth.outputs[name].view(shape) for name, shape in fetched.items()},
            rows or 1,
        )
        return views


def _trip(flight: Flight) -> _Trip:
    assert isinstance(flight.handle, _Trip), "a flight goes back to the execution that began it"
    return flight.handle
