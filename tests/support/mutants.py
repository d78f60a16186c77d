"""`python -m tests.support.mutants [NAME ...]`: seeded faults, each of which some test must find.

Each mutant is a small change of the product: a text that occurs once in its source, and what stands there instead. It is applied
in a copy of the tree, where the tests run that should fail; a mutant that they let pass has survived.
`tests/unit/support/test_mutants.py` checks that the texts and the tests are still there, so that a rename cannot silently switch
one off.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("server", "engines")
COPIED = (*SOURCES, "tests", "loadtest", "deploy", "docs", "pyproject.toml", "README.md", "Makefile")
TEST_TIMEOUT_S = 30


class Mutant(NamedTuple):
    """A seeded fault.

    Attributes:
        name: what goes wrong.
        old: text that occurs exactly once in the product's source.
        new: what stands there instead.
        tests: names of test functions, at least one of which must fail.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]


SCHEDULING = (
    Mutant(
        "a batch that is exactly full leaves its last request behind",
        "        if rows > max_rows:\n            break\n        count += 1\n",
        "        if rows >= max_rows:\n            break\n        count += 1\n",
        ("test_decides",),
    ),
    Mutant(
        "a batch is one moment too long in coming",
        "    if now_ns >= closes_ns:\n        return Take(count, CloseReason.DELAY)\n",
        "    if now_ns > closes_ns:\n        return Take(count, CloseReason.DELAY)\n",
        ("test_decides", "test_never_overfills_and_never_waits_too_long"),
    ),
    Mutant(
        "the last member of a batch does not count for its time",
        "        if now_ns + promises_ns[min(next_rows, max_rows)] > due_ns:\n",
        "        if now_ns + promises_ns[min(rows, max_rows)] > due_ns:\n",
        ("test_decides_by_deadlines", "test_batches_by_due_times_are_as_promised"),
    ),
    Mutant(
        "lower priority levels go first",
        "        return key + level * self.handicap_ns if level else key\n",
        "        return key - level * self.handicap_ns if level else key\n",
        ("test_a_far_due_does_not_undo_a_priority", "test_levels_that_do_not_age_are_strict"),
    ),
    Mutant(
        "no instance is woken for work that is left behind",
        "                    if self.queue.count and self._sleepers and self._should_wake():\n",
        "                    if False and self._sleepers and self._should_wake():\n",
        (
            "test_an_interrupted_sleeper_passes_its_wake_up_on",
            "test_many_callers_on_many_instances_get_their_own_results",
        ),
    ),
    Mutant(
        "dead entries of a lane are not counted",
        "            self.due_count -= 1\n        self._dead += 1\n        self._trim()\n",
        "            self.due_count -= 1\n        self._trim()\n",
        ("test_cancelled_entries_behind_a_stalled_front_do_not_accumulate", "test_counts_stay_exact"),
    ),
    Mutant(
        "admission forgets the batches that wait ahead",
        "            return max(free_ns[0], now_ns) + batches * cycle_ns, batches, before\n",
        "            return max(free_ns[0], now_ns), batches, before\n",
        ("test_running_and_queued_batches_delay_a_request", "test_more_work_is_never_done_earlier"),
    ),
)

COMPLETION = (
    Mutant(
        "a settled completion is settled again with its batch",
        "        if not completion._once.acquire(False):  # `claim` and `finish`, inlined\n            lost.append(completion)\n"
        "            continue\n",
        "        completion._once.acquire(False)\n",
        (
            "test_a_request_cancelled_in_flight_does_not_affect_the_others",
            "test_every_request_is_settled_once_with_its_own_rows",
        ),
    ),
    Mutant(
        "the mailbox is not armed again after its first wake-up",
        "        self.is_armed = False\n        settled = self._settled\n",
        "        settled = self._settled\n",
        ("test_each_batch_wakes_the_loop_once",),
    ),
    Mutant(
        "timers of a settled completion go on",
        "            timer.cancel()\n        callback, self._callback = self._callback, None\n",
        "            timer.when()\n        callback, self._callback = self._callback, None\n",
        ("test_a_settled_completion_stops_its_timers",),
    ),
    Mutant(
        "an await of an outcome that is there already waits for ever",
        "            if self.woken:\n                self._resolve(future)\n",
        "            if not self.woken:\n                self._resolve(future)\n",
        ("test_late_and_repeated_awaits_return_the_outcome", "test_waiters_get_values_and_errors"),
    ),
    Mutant(
        "rows of a batch are cut one too far",
        "            results.append(rows)\n            start = stop\n",
        "            results.append(rows)\n            start = stop - 1\n",
        ("test_rows_return_to_their_callers_from_one_batch",),
    ),
)

SHARED_MEMORY = (
    Mutant(
        "a write makes a truncated file grow again",
        "            if os.fstat(self._descriptor).st_size < position + rest.nbytes:\n",
        "            if os.fstat(self._descriptor).st_size < 0:\n",
        ("test_truncated_memory_is_an_error_and_no_signal",),
    ),
    Mutant(
        "a range may reach a byte past its region",
        "    if offset < 0 or size_bytes < 0 or offset + size_bytes > region_bytes:\n",
        "    if offset < 0 or size_bytes < 0 or offset + size_bytes > region_bytes + 1:\n",
        ("test_any_range_is_read_right_or_refused", "test_writes_out_of_the_region_change_nothing"),
    ),
    Mutant(
        "rows in a pinned region are read from its beginning",
        "            return ResidentRows(base + offset, PINNED, _BYTES, (size_bytes,), pinned, copy)\n",
        "            return ResidentRows(base, PINNED, _BYTES, (size_bytes,), pinned, copy)\n",
        (
            "test_the_first_gpu_model_pins_it_and_later_requests_are_located",
            "test_a_host_copy_is_read_from_the_file_and_not_through_the_mapping",
        ),
    ),
    Mutant(
        "links in the folder of shared memory are followed",
        "    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW\n",
        "    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY\n",
        ("test_only_regular_files_are_opened_and_the_error_hides_the_type",),
    ),
    Mutant(
        "unregistering takes away regions of the other kind",
        "            if registration is not None and registration.kind == kind:\n",
        "            if registration is not None:\n",
        ("test_unregister_removes_one_or_all_of_a_kind",),
    ),
)

GPU_PIPELINE = (
    Mutant(
        "the kernels do not wait for the copy of their inputs",
        "        slot.copied_in.block(self.computing)\n",
        "",
        ("test_batches_of_every_size", "test_batches_in_flight_overlap_and_finish_in_launch_order"),
    ),
    Mutant(
        "the copy of the outputs does not wait for the kernels",
        "        slot.computed.block(self.copying_out)\n",
        "",
        ("test_batches_of_every_size", "test_batches_in_flight_overlap_and_finish_in_launch_order"),
    ),
    Mutant(
        "answers are views of memory that the next batch uses",
        "                name: as_input(resident[name]) if name in resident else values.copy()\n",
        "                name: as_input(resident[name]) if name in resident else values\n",
        ("test_answers_belong_to_the_caller",),
    ),
    Mutant(
        "rows that a GPU reads are not kept until the flight has landed",
        "        slot.resident_inputs = batch.resident_inputs\n        alone = ",
        "        slot.resident_inputs = []\n        alone = ",
        ("test_the_memory_is_referenced_until_the_batch_has_finished",),
    ),
    Mutant(
        "one flight too many is in the air",
        "            while self._open >= depth or not self._finished.empty():\n",
        "            while self._open > depth or not self._finished.empty():\n",
        ("test_batches_respect_the_depth_and_finish_in_order",),
    ),
    Mutant(
        "rows that are copied beside resident ones land in the wrong place",
        "                copies.append((buffer[start:row], copied))\n                copied = []\n            start = stop\n",
        "                copies.append((buffer[start:row], copied))\n                copied = []\n            start = row\n",
        ("test_every_row_is_at_its_device_offset", "test_each_input_is_resident_or_copied_separately"),
    ),
    Mutant(
        "a discarded flight's memory is lost",
        "        self._release_slot(_batch_state(batch).slot)\n",
        "        _batch_state(batch)\n",
        ("test_a_discarded_batch_frees_its_slot",),
    ),
)

FRONT_ENDS = (
    Mutant(
        "freed neighbours in the arena stay apart",
        "            self._free[order].remove(buddy)\n            start = min(start, buddy)\n            order += 1\n",
        "            break\n",
        ("test_blocks_never_overlap_and_join_again",),
    ),
    Mutant(
        "a late release of an earlier generation frees the slot of another request",
        "self._generations[slot] == generation and slot in self._users:",
        "slot in self._users:",
        ("test_a_slot_is_free_when_front_end_and_engine_have_ended_it",),
    ),
    Mutant(
        "a slot is used again while the engine reads it",
        "        self._users[slot] += 1\n",
        "        self._users[slot] += 0\n",
        ("test_a_slot_is_free_when_front_end_and_engine_have_ended_it",),
    ),
)

PYTHON_MODELS = (
    Mutant(
        "memory of a process that can shrink is accepted",
        "        if not seals & _F_SEAL_SHRINK or os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:\n",
        "        if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:\n",
        ("test_memory_that_can_be_made_smaller_is_refused",),
    ),
    Mutant(
        "a range that the other process names may exceed the shared memory",
        "            if offset < 0 or size < 0 or end > os.fstat(self.fd).st_size:\n",
        "            if offset < 0 or size < 0:\n",
        ("test_ranges_outside_of_the_memory_are_refused",),
    ),
    Mutant(
        "the process of a model is not notified of a cancelled request",
        "                    self._has_cancelled = True\n",
        "                    self._has_cancelled = False\n",
        ("test_the_model_sees_a_cancelled_request", "test_a_cancellation_does_not_wait_for_the_next_look"),
    ),
)

PIPELINES = (
    Mutant(
        "a request that enters a limited step takes no place",
        "        if self._free:\n            self._free -= 1\n            return True\n",
        "        if self._free:\n            return True\n",
        ("test_max_inflight_requests_bounds_each_step",),
    ),
    Mutant(
        "an output of a pipeline is dropped once the steps have read it",
        "    for _, tensor in pairs:\n        readers[tensor] = readers.get(tensor, 0) + 1\n",
        "    for _, tensor in pairs:\n        readers[tensor] = readers.get(tensor, 0)\n",
        (
            "test_a_step_starts_when_all_its_inputs_are_ready",
            "test_steps_that_no_output_needs_are_neither_leased_nor_run",
        ),
    ),
    Mutant(
        "all rows of a request start at once",
        " and len(self._running) < MAX_RUNNING_ROWS and not self.is_over:\n",
        " and not self.is_over:\n",
        ("test_many_rows_start_as_others_end",),
    ),
)

SEQUENCES = (
    Mutant(
        "a request after END joins the sequence that it ended",
        "        sequence.is_closed = entry.is_end or self.policy.is_iterative\n",
        "        sequence.is_closed = self.policy.is_iterative\n",
        ("test_without_start_or_after_end_a_request_is_refused", "test_start_after_end_joins_the_backlog"),
    ),
    Mutant(
        "a sequence that has ended keeps its slot",
        "            elif sequence.is_closed:\n                self._finish(sequence, _ENDED)\n",
        "            elif sequence.is_closed:\n                pass\n",
        ("test_the_backlog_is_served_in_the_order_of_arrival", "test_without_start_or_after_end_a_request_is_refused"),
    ),
    Mutant(
        "sequences fill one instance after the other",
        'min(free, key=attrgetter("used", "index"))',
        'min(free, key=attrgetter("index"))',
        ("test_sequences_go_to_the_instance_with_the_fewest",),
    ),
)

ROWS = (
    Mutant(
        "the number of rows may be data of an operator that has a shape as input",
        "not (counted == [_SHAPE_INPUTS.get(node.op_type)] and _is_multiple(inputs[counted[0]])):\n",
        "not (node.op_type in _SHAPE_INPUTS and all(_is_multiple(inputs[index]) for index in counted)):\n",
        ("test_random_graphs_that_are_proven_compute_each_request_alone",),
    ),
    Mutant(
        "half the number of rows is a constant",
        "        return np.asarray(first // values[1]) if exact.all() else None\n",
        "        return np.asarray(first // values[1])\n",
        ("test_the_number_of_rows_is_no_value",),
    ),
)

MUTANTS = (
    *SCHEDULING,
    *COMPLETION,
    *SHARED_MEMORY,
    *GPU_PIPELINE,
    *FRONT_ENDS,
    *PYTHON_MODELS,
    *PIPELINES,
    *SEQUENCES,
    *ROWS,
)


def sources(tree: Path) -> Iterator[Path]:
    """The product's Python files."""
    for name in SOURCES:
        yield from sorted((tree / name).rglob("*.py"))


def places(mutant: Mutant, tree: Path) -> list[Path]:
    """Files with the text, each as often as it is there."""
    return [path for path in sources(tree) for _ in range(path.read_text(encoding="utf-8").count(mutant.old))]


def killers(mutant: Mutant, tree: Path) -> list[str]:
    """Its tests as pytest names them, wherever they are now; empty if one of them is nowhere."""
    result = []
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((tree / "tests").rglob("test_*.py"))}
    for name in mutant.tests:
        named = [f"{path.relative_to(tree)}::{name}" for path, text in texts.items() if f"def {name}(" in text]
        if not named:
            return []
        result += named
    return result


def copy_tree(folder: Path) -> Path:
    """A copy of what tests need."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    return folder


def run_tests(tree: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run some tests of a tree against its own source."""
    options = ["-x", "-p", "no:cacheprovider", "-p", "no:randomly", f"--timeout={TEST_TIMEOUT_S}", "--tb=line"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=tree,
        env={**os.environ, "CI": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def judge(mutant: Mutant) -> str:
    """ "" if the mutant is killed; else what is wrong."""
    with tempfile.TemporaryDirectory() as name:
        tree = copy_tree(Path(name))
        files, tests = places(mutant, tree), killers(mutant, tree)
        if len(files) != 1 or not tests:
            return f"its text is there {len(files)} times, its tests are {tests}"
        text = files[0].read_text(encoding="utf-8").replace(mutant.old, mutant.new)
        ast.parse(text)
        files[0].write_text(text, encoding="utf-8")
        ran = run_tests(tree, tests)
        if ran.returncode == 0:
            return f"SURVIVED {' '.join(tests)}"
        if ran.returncode != 1:
            return f"pytest ended with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
    return ""


def check_tests(mutants: Sequence[Mutant]) -> str:
    """ "" if the tests pass without any mutant; else what they print."""
    with tempfile.TemporaryDirectory() as name:
        tree = copy_tree(Path(name))
        tests = sorted({test for mutant in mutants for test in killers(mutant, tree)})
        ran = run_tests(tree, tests)
        return f"{ran.stdout[-4000:]}{ran.stderr[-2000:]}" if ran.returncode else ""


def main() -> int:
    """Judge the mutants whose names contain one of the words given, or all; 1 if any is not killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutants")
    parser.add_argument("word", nargs="*", help="part of a mutant's name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at the same time")
    options = parser.parse_args()
    chosen = [each for each in MUTANTS if not options.word or any(word in each.name for word in options.word)]
    if failure := check_tests(chosen):
        print(f"the tests fail without a mutant:\n{failure}")
        return 1
    survivors = 0
    with ThreadPoolExecutor(options.jobs) as threads:
        for mutant, problem in zip(chosen, threads.map(judge, chosen), strict=True):
            survivors += bool(problem)
            print(
                f"{'NOT killed' if problem else 'killed    '}  {mutant.name}{': ' if problem else ''}{problem}",
                flush=True,
            )
    print(f"{len(chosen) - survivors} of {len(chosen)} killed")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
