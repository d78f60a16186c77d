"""Batches of requests of different shapes: padded batches; ragged ones are in `headrace.inference.scheduling.joining`.

`PaddedLayout` pads the inputs of requests of different length to one length, and cuts the outputs of each request back to its
own. Which dimensions of the outputs follow the length is found by two runs of different length; until then, and while the
measured times show no gain, requests of different length run one after the other. See docs/decisions/0020-padding.md.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from headrace.core.clock import Clock, monotonic_ns
from headrace.core.shapes import ExactShapeKey, PaddedShapeKey
from headrace.core.tensor import Array, ModelSpec, TensorSpec
from headrace.inference.scheduling.assembly import BatchLayout, Division, Staging, aligned, pad_rows
from headrace.inference.scheduling.joining import RaggedLayout
from headrace.inference.scheduling.length_table import LengthTable
from headrace.inference.scheduling.output_check import OutputMismatch
from headrace.inference.scheduling.policy import HandlePolicy, PaddingPolicy
from headrace.inference.scheduling.queue import Entry
from headrace.observability.counters import Recorder
from headrace.runtimes.base import Execution, ExecutionLost

logger = logging.getLogger("headrace.ragged")

Check = Callable[[Mapping[str, Array], int], None]

# Largest difference between the outputs of a padded and of an unpadded run, relative to the largest output.
_TOLERANCE = {"float64": 1e-4, "float32": 1e-3, "float16": 2e-2}
# A padded group must take less than this share of the time of its lengths one after the other. Estimates have errors of some
# percent, and the search finds the groups whose errors look like gains.
_WORTH = 0.9
# Share of a new time in the mean cost of a run beside its compute time, and that cost before it is known.
_SMOOTHING = 1 / 16
_RUN_NS = 50_000.0
# A trial runs so many batches with padded groups, and as many without. While padding pays, one of `_TRIAL` batches runs without
# it at first, one of `_MAX_INTERVAL` at last.
_TRIAL_BATCHES = 8
_TRIAL = 16
_MAX_INTERVAL = 256
_TRIAL_SMOOTHING = 1 / 32
# Padding must take less than this share of the time without; it ends when it takes more than the second one.
_BETTER = 0.95
_STILL_BETTER = 0.98
# A rest is so many times as long as its trial, and doubles up to `_MAX_RESTS` times.
_REST = 64
_MAX_RESTS = 6
# Of the batches that are no trials, and of runs after the first ones, one of so many is recorded: a record takes 10 us.
_MEASURED = 5
_RECORDED_FIRST = 256
# One of so many batches of equal lengths is recorded while nothing is padded.
_PLAIN_MEASURED = 32


def batch_layout(policy: HandlePolicy, spec: ModelSpec, recorder: Recorder | None = None) -> BatchLayout | None:
    """Return the layout of batches of requests of different shapes; None if a batch has requests of one shape only."""
    if policy.ragged is not None:
        return RaggedLayout(policy.ragged, spec)
    return None if policy.padding is None else PaddedLayout(policy.padding, spec, recorder)


class OutputLengths:
    """Finds the dimensions of outputs that follow the length of the inputs, from two unpadded runs of different length.

    A free dimension of an output follows the length if it equals it in both runs, and is independent of it if both runs have the
    same size. With any other sizes outputs of padded inputs cannot be cut back.

    Args:
        outputs: specs of the declared outputs; only dimensions of size -1 may follow the length.

    Attributes:
        axes: dimensions that follow the length, by output name; empty until `is_known`.
        is_known: True once two lengths were run and padded outputs can be cut.
        problem: reason why padded outputs cannot be cut; "" if none is known.
    """

    def __init__(self, outputs: Mapping[str, TensorSpec]) -> None:
        self._free = {
            name: tuple(axis for axis, size in enumerate(spec.shape) if size == -1 and axis > 0)
            for name, spec in outputs.items()
        }
        self._first: tuple[int, dict[str, tuple[int, ...]]] | None = None
        self.axes: dict[str, tuple[int, ...]] = {}
        self.is_known = False
        self.problem = ""

    def observe(self, length: int, outputs: Mapping[str, Array]) -> None:
        """Record the shapes of the outputs of an unpadded run."""
        if self.is_known or self.problem:
            return
        shapes = {name: outputs[name].shape for name in self._free}
        if self._first is None:
            self._first = length, shapes
        elif self._first[0] != length:
            self._compare(length, shapes)

    def _compare(self, length: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        assert self._first is not None
        first_length, first_shapes = self._first
        axes: dict[str, tuple[int, ...]] = {}
        for name, free in self._free.items():
            following: list[int] = []
            for axis in free:
                sizes = first_shapes[name][axis], shapes[name][axis]
                if sizes == (first_length, length):
                    following.append(axis)
                elif sizes[0] != sizes[1]:
                    self.problem = (
                        f"dimension {axis} of output '{name}' is {sizes[0]} for the length {first_length} and {sizes[1]} for "
                        f"{length}, so it cannot be cut back to the length of a request"
                    )
                    return
            if following:
                axes[name] = tuple(following)
        self.axes = axes
        self.is_known = True


class PaddingTrials:
    """Decides by experiment whether requests of different length share batches; any thread may call.

    A trial runs batches in turn with the search for padded groups and without it, and compares their times relative to the
    estimate without padding: estimates have errors, and the search itself takes time. Elapsed and processor time must both
    gain: a larger batch may be faster only because it takes cores that other work needs. Where padding does not pay, the queue
    groups by exact shapes until the next trial, as if nothing could be padded. Trials then become rarer: each rest is at least
    `_REST` times as long as the trial before it. Where padding pays, ever fewer batches run without it.

    Ownership: `_lock` guards every attribute; `is_grouping` is read without it.

    Args:
        clock: monotonic nanoseconds.

    Attributes:
        is_grouping: True while the queue groups by padded length.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.is_grouping = True
        self._pays = False  # True between trials that padding has won
        self._batches = 0
        self._interval = _TRIAL  # batches of which one runs without padding while it pays
        self._trial_counts = [0, 0]  # of the present trial: without the search, with it
        self._counts = [0, 0]
        self._logs = [0.0, 0.0]  # mean logarithms of times: a batch that something else delayed weighs little
        self._cpu_logs = [0.0, 0.0]
        self._trial_ns = 0  # time of the batches of the present trial
        self._rests = 0
        self._rest_end_ns = 0

    @property
    def gain(self) -> float:
        """Time of batches with padded groups as a share of the time without: elapsed or processor time, the larger share."""
        return math.exp(max(self._logs[1] - self._logs[0], self._cpu_logs[1] - self._cpu_logs[0]))

    def resume(self, now_ns: int) -> None:
        """Begin the next trial if the rest is over."""
        if self.is_grouping or now_ns < self._rest_end_ns:
            return
        with self._lock:
            self._trial_counts, self._trial_ns = [0, 0], 0
            # Batches of this trial weigh as much as all before it.
            self._counts = [min(count, _TRIAL_BATCHES) for count in self._counts]
            self.is_grouping = True

    def next(self) -> tuple[bool, bool]:
        """Return whether the next batch is divided by the search, and whether its time is recorded."""
        if not self.is_grouping:  # requests that were queued during the trial
            return False, False
        with self._lock:
            if not self._pays:
                return self._trial_counts[1] <= self._trial_counts[0], True
            self._batches += 1
            is_trial = self._batches % self._interval == 0
            return not is_trial, is_trial or self._batches % _MEASURED == 0

    def record(self, is_searched: bool, apart_ns: float, elapsed_ns: int, cpu_ns: int) -> None:
        """Record a batch.

        Args:
            is_searched: True if it was divided by the search.
            apart_ns: estimate of its time without padding.
            elapsed_ns: its time.
            cpu_ns: processor time of the process meanwhile.
        """
        with self._lock:
            self._counts[is_searched] += 1
            share = max(1 / self._counts[is_searched], _TRIAL_SMOOTHING)
            for logs, time_ns in ((self._logs, elapsed_ns), (self._cpu_logs, cpu_ns)):
                logs[is_searched] += (math.log(min(max(time_ns / apart_ns, 0.25), 4.0)) - logs[is_searched]) * share
            if not self.is_grouping:
                return
            self._trial_counts[is_searched] += 1
            self._trial_ns += elapsed_ns
            if self._pays:
                if not is_searched and self.gain > _STILL_BETTER:
                    self._rest(_TRIAL_BATCHES * elapsed_ns)
                elif not is_searched and self._trial_counts[0] % _TRIAL_BATCHES == 0:
                    self._interval = min(2 * self._interval, _MAX_INTERVAL)
            elif min(self._trial_counts) >= _TRIAL_BATCHES:
                if self.gain < _BETTER:
                    self._pays, self._interval, self._rests = True, _TRIAL, 0
                else:
                    self._rest(self._trial_ns)

    def _rest(self, trial_ns: int) -> None:
        self.is_grouping = self._pays = False
        self._rest_end_ns = self._clock() + (trial_ns * _REST << self._rests)
        self._rests = min(self._rests + 1, _MAX_RESTS)


class PaddedLayout:
    """Pads requests of different length to one length where that is faster; any thread may call.

    Args:
        policy: inputs, their padding values, and the multiple.
        spec: spec of the model.
        recorder: counters of the version; None for counters of its own.
        clock: monotonic nanoseconds.

    Attributes:
        policy: as in the argument.
        outputs: names of the declared outputs.
        model: name of the model, for messages.
        lengths: compute times by rows and length.
        output_lengths: dimensions of the outputs that follow the length.
        always: True on a GPU: every request is padded to a multiple, even without a measured gain. Each shape needs a context.
        is_checked: True once padded requests have had the outputs of unpadded ones.
        problem: reason why nothing is padded; "" if padding is possible.
        recorder: counters of the version; None for counters of its own.
    """

    def __init__(
        self, policy: PaddingPolicy, spec: ModelSpec, recorder: Recorder | None = None, clock: Clock = monotonic_ns
    ) -> None:
        self.policy = policy
        self.outputs = tuple(spec.outputs)
        self.model = spec.name
        self.lengths = LengthTable()
        self.output_lengths = OutputLengths(spec.outputs)
        self.always = False
        self.is_checked = False
        self.problem = ""
        self.recorder = Recorder() if recorder is None else recorder
        self._run_ns = _RUN_NS  # mean time of a run beside its compute time
        # Mean ratios of compute times to their estimates: errors of the interpolation differ between the two kinds of batches.
        self._alone_ratio = self._padded_ratio = 1.0
        self.trials = PaddingTrials(clock)
        self._names, self._axis = tuple(policy.values), policy.inputs.axis
        self._recorded = self._plain = 0

    def report(self) -> dict[str, str]:
        """Return `state` ("on" or "off") and `reason` for `headrace explain`."""
        if self.problem:
            return {"state": "off", "reason": self.problem}
        if not self.is_ready:
            return {"state": "off", "reason": "padded and unpadded outputs have not been compared yet"}
        if self.always:
            return {"state": "on", "reason": "every request is padded on a GPU"}
        if not self.lengths:
            return {"state": "off", "reason": "no times by length were measured before it served"}
        share = f"batches with padded groups take {self.trials.gain:.0%} of the time of those without"
        return {"state": "on" if self.trials.is_grouping else "off", "reason": share}

    @property
    def is_ready(self) -> bool:
        """True if requests may be padded: the check has passed, and their outputs can be cut."""
        return self.is_checked and self.output_lengths.is_known and not self.problem

    def queue_key(self, shape_key: object) -> object:
        """Return the key by which the queue groups a request: by its padded lengths, or by its shapes while padding does not pay.

        Args:
            shape_key: `InferRequest.shape_key`.
        """
        if type(shape_key) is not PaddedShapeKey:
            return shape_key
        if self.problem or not (self.always or (self.lengths and self.trials.is_grouping)):
            return shape_key.exact
        return shape_key.padded

    def is_plain(self, entries: list[Entry], now_ns: int) -> bool:
        """Return True if the entries have equal shapes, and their batch needs no arrangement; counts it then.

        Args:
            entries: entries of a batch.
            now_ns: monotonic time; begins the next trial when it is due.
        """
        if type(entries[0].shape_key) is not ExactShapeKey:
            return False
        if self.lengths and not self.problem:
            self.trials.resume(now_ns)
        self._plain += 1
        if not self.problem and (not self.output_lengths.is_known or self._plain % _PLAIN_MEASURED == 0):
            return False
        positions = sum([entry.rows for entry in entries]) * self.length(entries[0].inputs)
        self.recorder.record_padding(positions, positions)
        return True

    def runs_in_groups(self, entries: list[Entry]) -> bool:
        """Return True if the lengths of the entries differ, and they cannot share a padded batch yet."""
        if self.is_ready and self.always:
            return False
        first = self.length(entries[0].inputs)
        return any(self.length(entry.inputs) != first for entry in entries)

    def length(self, inputs: Mapping[str, Array]) -> int:
        """Return the length of a request's padded inputs; 0 if they differ or it has none."""
        axis, length = self._axis, -1
        for name in self._names:
            array = inputs.get(name)
            if array is None:
                continue
            size = array.shape[axis]
            if size != length:
                if length >= 0:
                    return 0
                length = size
        return max(length, 0)

    def disable(self, problem: str) -> None:
        """Pad nothing any more; logs the reason once."""
        if not self.problem:
            self.problem = problem
            logger.warning("model %s: its requests are not padded: %s", self.model, problem)

    def check(self, execution: Execution, requests: Sequence[Mapping[str, Array]]) -> None:
        """Run requests alone and padded in one batch, and compare their outputs; if they differ, nothing is padded any more.

        Args:
            execution: execution of the calling instance.
            requests: of different length.

        Raises:
            Exception: the model failed.
        """
        alone = []
        for request in requests:
            arrangement = PaddedArrangement(self, [request])
            outputs = execution.run(arrangement.stack(Staging(1)))
            arrangement.record(outputs, 0, 0)
            alone.append(outputs)
        lengths = self.output_lengths
        if not lengths.is_known:
            self.disable(lengths.problem or "the lengths of its outputs could not be found")
            return
        arrangement = PaddedArrangement(self, requests)
        outputs = execution.run(arrangement.stack(Staging(sum(arrangement.rows))))
        together = arrangement.split(outputs, lambda _outputs, _rows: None)
        for expected, padded in zip(alone, together, strict=True):
            for name in self.outputs:
                if outputs_differ(expected[name], padded[name]):
                    self.disable(
                        f"output '{name}' of a request changes when it is padded, so the model does not mask its padding: "
                        "remove pad, or pad the attention mask as well"
                    )
                    return
        self.is_checked = True

    def _first_use_check(self, entries: list[Entry]) -> Callable[[Execution], None] | None:
        """Return the check with a row of the shortest and of the longest request, copied; None if no check is due."""
        if self.is_checked or self.problem or not self.always:
            return None
        by_length = {self.length(entry.inputs): entry.inputs for entry in entries}
        requests = [
            {name: np.array(array[:1]) for name, array in by_length[length].items()}
            for length in (min(by_length), max(by_length))
        ]

        def check(execution: Execution) -> None:
            try:
                self.check(execution, requests)
            except ExecutionLost:
                raise
            except Exception as error:
                self.disable(f"the check with its first requests failed ({type(error).__name__}: {error})")

        return check

    def divide(self, entries: list[Entry]) -> Division:
        """Divide the entries of a batch into those that run together, padded if they differ in length.

        Args:
            entries: entries with equal padded lengths, in the order of serving.

        Returns:
            Groups in the order of serving of their first entry.
        """
        by_length: dict[int, list[int]] = {}
        for position, entry in enumerate(entries):
            by_length.setdefault(self.length(entry.inputs), []).append(position)
        if len(by_length) == 1:
            return Division([entries])
        if self.output_lengths.problem:
            self.disable(self.output_lengths.problem)
        groups = [[entries[position] for position in positions] for positions in by_length.values()]
        if 0 in by_length:
            return Division(groups)
        if not self.is_ready:
            return Division(groups, check=self._first_use_check(entries))
        if self.always:
            return Division([entries])
        if not self.lengths:
            return Division(groups)
        is_searched, is_measured = self.trials.next()
        if not (is_searched or is_measured):
            return Division(groups)
        lengths = sorted(by_length)
        rows = [sum([entries[position].rows for position in by_length[length]]) for length in lengths]
        apart_ns = 0.0
        if is_measured:
            apart_ns = sum([self._apart_ns(*size) for size in zip(rows, lengths, strict=True)])
        if is_searched:
            divided = [
                sorted([position for length in lengths[start:stop] for position in by_length[length]])
                for start, stop in self.cheapest(rows, lengths)
            ]
            groups = [[entries[position] for position in positions] for positions in sorted(divided)]
            return Division(groups, apart_ns, True)
        return Division(groups, apart_ns)

    def record_division(self, division: Division, elapsed_ns: int, cpu_ns: int) -> None:
        """Record the time of all groups of a batch."""
        if division.apart_ns:
            self.trials.record(division.is_searched, division.apart_ns, elapsed_ns, cpu_ns)

    def _apart_ns(self, rows: int, length: int) -> float:
        return self.lengths.estimate_ns(rows, length) * self._alone_ratio + self._run_ns

    def cheapest(self, rows: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Divide lengths into the groups that take the least time one after the other.

        Args:
            rows: rows of each length.
            lengths: ascending; all are padded to the same length.

        Returns:
            Groups as (start, stop) in `lengths`; each length alone unless padding a group takes less than 90 % of that time.
        """
        count, estimate_ns, run_ns = len(lengths), self.lengths.estimate_ns, self._run_ns
        padded_length, padded_ratio = self.policy.inputs.padded_length(lengths[-1]), self._padded_ratio / _WORTH
        alone_ns = [self._apart_ns(*size) for size in zip(rows, lengths, strict=True)]
        best_ns, starts = [0.0], [0]
        for stop in range(1, count + 1):
            start = group_start = stop - 1
            group_rows, best = rows[start], best_ns[start] + alone_ns[start]
            while start:
                start -= 1
                group_rows += rows[start]
                total = best_ns[start] + estimate_ns(group_rows, padded_length) * padded_ratio + run_ns
                if total < best:
                    best, group_start = total, start
            best_ns.append(best)
            starts.append(group_start)
        groups, stop = [], count
        while stop:
            groups.append((starts[stop], stop))
            stop = starts[stop]
        return groups[::-1]

    def record(self, rows: int, length: int, compute_ns: int, is_padded: bool) -> None:
        """Record the compute time of a batch.

        Args:
            rows: rows of the batch.
            length: length of its inputs.
            compute_ns: compute time in nanoseconds.
            is_padded: True if its requests had different lengths.
        """
        self._recorded += 1
        if self._recorded > _RECORDED_FIRST and self._recorded % _MEASURED and not is_padded:
            return
        estimate_ns = self.lengths.estimate_ns(rows, length)
        if estimate_ns:
            ratio = min(max(compute_ns / estimate_ns, 0.5), 2.0)
            if is_padded:
                self._padded_ratio += (ratio - self._padded_ratio) * _SMOOTHING
            else:
                self._alone_ratio += (ratio - self._alone_ratio) * _SMOOTHING
        self.lengths.observe(rows, length, compute_ns)

    def record_overhead(self, overhead_ns: int) -> None:
        """Record the time of a run beside its compute time: assembly and split."""
        self._run_ns += (overhead_ns - self._run_ns) * _SMOOTHING

    def arrange(self, requests: Sequence[Mapping[str, Array]]) -> PaddedArrangement:
        """Return the arrangement of the requests of one batch, by their inputs."""
        return PaddedArrangement(self, requests)


class PaddedArrangement:
    """Inputs of one batch, padded if the lengths of its requests differ, and the way back; see `Arrangement`.

    Args:
        layout: padding of the model.
        requests: inputs of each request.

    Attributes:
        rows: rows of each request.
        length: length of the batch.
    """

    def __init__(self, layout: PaddedLayout, requests: Sequence[Mapping[str, Array]]) -> None:
        self._layout = layout
        self._requests: Sequence[Mapping[str, Array]] = requests
        self.rows = [next(iter(request.values())).shape[0] for request in requests]
        self._lengths = [layout.length(request) for request in requests]
        longest = max(self._lengths)
        padded_length = layout.policy.inputs.padded_length(longest)
        self._is_padded = len(set(self._lengths)) > 1
        if layout.always and longest and padded_length != longest:
            self._is_padded = self._is_padded or layout.is_ready
        self.length = padded_length if self._is_padded else longest

    def stack(self, staging: Staging) -> dict[str, Array]:
        """Return the inputs of the batch, padded if the lengths differ."""
        values, axis = self._layout.policy.values, self._layout.policy.inputs.axis
        requests, rows = self._requests, sum(self.rows)
        inputs: dict[str, Array] = {}
        for name in requests[0]:
            parts = [aligned(request[name]) for request in requests]
            if self._is_padded and name in values:
                inputs[name] = staging.pad(name, parts, rows, (axis, self.length, values[name]))
            elif len(parts) == 1:
                inputs[name] = parts[0]
            else:
                inputs[name] = staging.join(name, parts, rows)
        self._requests = ()
        return inputs

    def like(self) -> Mapping[str, Array]:
        """Return arrays with the row shapes and dtypes of the batch, for `OverlappedExecution.begin`."""
        first = self._requests[0]
        if not self._is_padded:
            return first
        axis, length = self._layout.policy.inputs.axis, self.length
        return {
            name: np.broadcast_to(array.dtype.type(0), (1, *array.shape[1:axis], length, *array.shape[axis + 1 :]))
            if name in self._layout.policy.values
            else array
            for name, array in first.items()
        }

    def fill(self, buffers: Mapping[str, Array]) -> None:
        """Copy the rows of all requests into the buffers of a batch, padded.

        Args:
            buffers: arrays by input name, of shape (rows of the batch, ...) as `like`.
        """
        values, axis = self._layout.policy.values, self._layout.policy.inputs.axis
        for name, buffer in buffers.items():
            parts = [np.asarray(request[name]) for request in self._requests]
            if self._is_padded and name in values:
                pad_rows(buffer, parts, axis, values[name])
            else:
                np.concatenate(parts, out=buffer, casting="equiv")
        self._requests = ()

    def split(self, outputs: dict[str, Array], check: Check) -> list[dict[str, Array]]:
        """Return the rows of each request, cut back to its length."""
        check(outputs, sum(self.rows))
        axes = self._layout.output_lengths.axes if self._is_padded else {}
        for name, following in axes.items():
            if any(outputs[name].shape[axis] != self.length for axis in following):
                shape = list(outputs[name].shape)
                raise OutputMismatch(
                    f"model '{self._layout.model}' returned output '{name}' with the shape {shape} for inputs padded to "
                    f"{self.length}, expected that size in dimension {following[0]}. Its requests run alone"
                )
        results: list[dict[str, Array]] = []
        start = 0
        for rows, length in zip(self.rows, self._lengths, strict=True):
            result = {name: outputs[name][start : start + rows] for name in self._layout.outputs}
            if length != self.length:
                for name, following in axes.items():
                    result[name] = np.ascontiguousarray(result[name][_cut(following, length)])
            results.append(result)
            start += rows
        return results

    def record(self, outputs: Mapping[str, Array], compute_ns: int, overhead_ns: int) -> None:
        """Record the compute time by rows and length, and the shapes of unpadded outputs."""
        layout, rows = self._layout, sum(self.rows)
        layout.record_overhead(overhead_ns)
        request_positions = sum([count * length for count, length in zip(self.rows, self._lengths, strict=True)])
        layout.recorder.record_padding(rows * self.length, request_positions)
        if self.length:
            layout.record(rows, self.length, compute_ns, self._is_padded)
            if not self._is_padded:
                layout.output_lengths.observe(self.length, outputs)


def outputs_differ(expected: Array, padded: Array) -> bool:
    """Return True if an output of a padded request is not that of the request alone, within the tolerance of its dtype."""
    if expected.shape != padded.shape or expected.dtype != padded.dtype:
        return True
    tolerance = _TOLERANCE.get(expected.dtype.name)
    if tolerance is None or not expected.size:
        return not np.array_equal(expected, padded)
    largest = float(np.nanmax(np.abs(expected.astype(np.float64)), initial=0.0))
    return not np.allclose(padded, expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _cut(axes: Iterable[int], length: int) -> tuple[slice, ...]:
    following = set(axes)
    return tuple(slice(length) if axis in following else slice(None) for axis in range(max(following) + 1))
