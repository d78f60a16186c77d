"""Proof of batch sizes on public networks with random weights, as engines of TensorRT: false alarms, and the time of a proof.

    python -m loadtest.proofs [NAME ...] [--precisions fp32,fp16,int8] [--max-rows 64] [--onnx FOLDER] [--limit-s 540]
        [--processes 8] [--results FILE]

Needs TensorRT, a GPU, and PyTorch with torchvision, timm and transformers, or ONNX files NAME.onnx in FOLDER. Each network is
exported with a free batch into FOLDER, built, compared with ONNX Runtime, loaded until the idle server has tested all sizes,
and loaded again. Several processes share the GPU: their times are those of a busy machine. Networks that were never measured on
a GPU come first. A row is written as soon as it is measured; those of FILE with verified sizes are not measured again:

    build s               of the engine, at optimization level 1
    differs               largest difference to the rows alone on ONNX Runtime's CPU in FP32, as a share of the output's range: of
                          a batch there, of one row in the engine, and of its batches of 2, 3, 8 and most rows
    first, second         milliseconds of the tests at the first and at the second load, of those with the start of an instance
    idle s                from the first load until all sizes were tested
    verified, reason      sizes that are proven, and why another is not

Exit status: 1 if a size of a network is not proven. A network that cannot be exported, built or loaded is a row with the reason.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import headrace
import numpy as np
import onnx
from headrace.config.model_folder import read_model_folder
from headrace.config.optimization_config import Calibration
from headrace.core.tensor import BY_ORT_NAME
from headrace.models import proof_run
from headrace.models.proof_run import BOUNDS, LARGEST_BOUND
from headrace_engines.precision.casting import cast_model
from headrace_engines.progress import silent
from headrace_engines.quantization.calibration import calibrate
from headrace_engines.quantization.placement import tensors_to_calibrate
from headrace_engines.quantization.qdq import quantize
from headrace_engines.quantization.samples import Samples, random_samples
from headrace_engines.simplify import simplify
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from loadtest.proof_networks import NETWORKS, export

_LIMIT_S, _PAUSE_S = 120.0, 0.05
# Samples for the ranges of INT8 and for the comparison with ONNX Runtime.
_SAMPLES = 4
# After the limit a process that has begun an engine is ended.
_GRACE_S = 45.0
COLUMNS = ("network", "precision", "build s", "differs", "first", "second", "idle s", "verified", "reason")
Row = dict[str, str]


def config_of(path: Path, rows: int) -> str:
    """Return the configuration of an ONNX file with one input; the first dimension is the batch."""
    import onnxruntime as ort

    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    lines = ["backend: tensorrt", f"max_batch_size: {rows}", "dynamic_batching: {}"]
    for side, nodes in (("input", session.get_inputs()), ("output", session.get_outputs())):
        tensors = [
            f"{{name: {node.name}, data_type: {BY_ORT_NAME[node.type].config_name}, "
            f"dims: {[size if isinstance(size, int) else -1 for size in node.shape[1:]]}}}"
            for node in nodes
        ]
        lines.append(f"{side}: [{', '.join(tensors)}]")
    return "\n".join(lines) + "\n"


def samples_of(folder: Path) -> Samples:
    """Return random rows for a model."""
    return random_samples(read_model_folder(folder, folder.parent).config, _SAMPLES)


def lowered(model: onnx.ModelProto, precision: str, folder: Path) -> onnx.ModelProto:
    """Return a model in a precision; INT8 with ranges of random values."""
    if precision == "fp32":
        return model
    if precision != "int8":
        return cast_model(model, precision)
    ranges = calibrate(model, tensors_to_calibrate(model), samples_of(folder), Calibration(), None, silent)
    return quantize(model, ranges, "tensorrt")


@contextmanager
def _proof_log() -> Iterator[list[str]]:
    """Collect the lines of the proofs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("headrace.proof")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def differences(source: Path, plan: Path, folder: Path, rows: int) -> str:
    """Return the column "differs"; see the module."""
    import onnxruntime as ort

    session = ort.InferenceSession(str(source), providers=["CPUExecutionProvider"])
    ((name, samples),) = next(samples_of(folder).batches(_SAMPLES)).items()
    alone = np.concatenate([session.run(None, {name: samples[row : row + 1]})[0] for row in range(_SAMPLES)])

    def share(outputs: Any, order: Any) -> float:
        return float(np.abs(outputs.astype(np.float64) - alone[order]).max() / (np.ptp(alone) or 1.0))

    of_runtime = share(session.run(None, {name: samples})[0], np.arange(_SAMPLES))
    with closing(TensorRtTarget().open(plan)) as engine:
        shares = {}
        for size in sorted({min(size, rows) for size in (1, 2, 3, 8, rows)}):
            order = np.arange(size) % _SAMPLES
            (outputs,) = engine.run({name: samples[order]}).values()
            shares[size] = share(outputs, order)
    return f"{of_runtime:.1g}, {shares.pop(1):.1g}, {max(shares.values()):.1g}"


def load(folder: Path, state: Path) -> tuple[Row, str]:
    """Load a model until all sizes are tested; return columns, and the times of the proof at the load ("0" for none)."""
    reason, begun_s = "idle", time.monotonic()
    with _proof_log() as lines, headrace.Server(folder, state_dir=state, trial_limit_s=0, profile_s=0) as server:
        at_load = " of ".join(re.findall(r"(?:tests of its batches for|took) (\d+) ms", "\n".join(lines))[:2]) or "0"
        while "idle" in reason and time.monotonic() < begun_s + _LIMIT_S:
            time.sleep(_PAUSE_S)
            parameters = server.model(folder.name).spec.parameters
            reason = str(parameters.get("headrace.unproven_batches", ""))
    verified = str(parameters.get("headrace.verified_batches", "")).replace(", ", " ")
    idle = f"{time.monotonic() - begun_s:.1f}"
    return {"idle s": idle, "verified": verified, "reason": reason or "-"}, at_load


def prove(source: Path, precision: str, rows: int, work: Path) -> Row:
    """Build an engine, compare it, and load it twice; return columns of the table."""
    folder = work / source.stem
    (folder / "1").mkdir(parents=True)
    (folder / "config.yaml").write_text(config_of(source, rows))
    model = onnx.load(source)
    onnx.save(model, folder / "1" / "model.onnx")  # without external tensors, which have the name of the source
    model = simplify(model)
    profile = {
        value.name: tuple(
            (count, *(dim.dim_value for dim in value.type.tensor_type.shape.dim[1:]))
            for count in (1, min(8, rows), rows)
        )
        for value in model.graph.input
    }
    spec = TargetSpec(precision, (ShapeRange(profile),))  # type: ignore[arg-type]
    plan, model = folder / "1" / "model.plan", lowered(model, precision, folder)
    begun_s = time.monotonic()
    TensorRtTarget(optimization_level=1).build(model, spec, plan, silent)
    row = {"build s": f"{time.monotonic() - begun_s:.0f}"}
    print(f"{source.stem} {precision}: built in {row['build s']} s", file=sys.stderr, flush=True)
    row["differs"] = differences(source, plan, folder, rows)
    print(f"{source.stem} {precision}: differs by {row['differs']}", file=sys.stderr, flush=True)
    # A plan of a builder has a stamp with its precision, which this one has not.
    bound = BOUNDS.get("tf32" if precision == "fp32" else precision, LARGEST_BOUND)
    with patch.object(proof_run, "smallest_bound", lambda _plan: bound), tempfile.TemporaryDirectory() as state:
        columns, row["first"] = load(folder, Path(state))
        _, row["second"] = load(folder, Path(state))
    return row | columns


class Table:
    """Table that is written row by row, by several processes.

    Args:
        results: file that gets each row as a line of JSON.
    """

    def __init__(self, results: Path) -> None:
        self._results = results

    def add(self, row: Row) -> None:
        """Print a row and append it to the file."""
        text = json.dumps(row) + "\n"
        with self._results.open("a") as stream:
            stream.write(text)
        print("| " + " | ".join(row.get(column, "") for column in COLUMNS) + " |\n", end="", flush=True)

    def rows(self, pair: tuple[str, str]) -> list[Row]:
        """Return the rows of a network in a precision."""
        lines = self._results.read_text().splitlines() if self._results.exists() else []
        return [row for row in map(json.loads, lines) if (row["network"], row["precision"]) == pair]


def run_here(options: argparse.Namespace, table: Table, end_s: float, pair: tuple[str, str]) -> None:
    """Add the row of a network in a precision."""
    name, precision = pair
    row = {"network": name, "precision": precision, "reason": "no time left"}
    source: Path = options.onnx / f"{name}.onnx"
    if time.monotonic() < end_s:
        try:
            with open(source.with_suffix(".lock"), "w") as lock:  # each process waits for the one that exports
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not source.is_file():
                    with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # PyTorch has a CUDA of its own
                        apart.submit(export, name, source).result()
            with tempfile.TemporaryDirectory() as work:
                row |= prove(source, precision, options.max_rows, Path(work))
        except Exception as error:  # of the exporter or of TensorRT: the other rows are still of use
            row["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    table.add(row)


def run_apart(options: argparse.Namespace, table: Table, end_s: float, pair: tuple[str, str]) -> None:
    """Add the row of a network in a precision by a process of its own, which ends at the limit at the latest."""
    left_s = max(0.0, end_s - time.monotonic())
    arguments = {
        "--precisions": pair[1],
        "--processes": 0,
        "--limit-s": left_s,
        "--max-rows": options.max_rows,
        "--results": options.results,
        "--onnx": options.onnx,
    }
    command = [sys.executable, "-W", "ignore", "-m", "loadtest.proofs", pair[0]]
    command += [str(part) for option in arguments.items() for part in option]
    threads = max(1, (os.cpu_count() or 1) // options.processes)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    before = len(table.rows(pair))
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        reason = f"ended with status {process.wait(left_s + _GRACE_S)}"
    except subprocess.TimeoutExpired:
        reason = "ended at the limit of time"
        os.killpg(process.pid, signal.SIGKILL)  # with its exporter
        process.wait()
    if len(table.rows(pair)) == before:
        table.add({"network": pair[0], "precision": pair[1], "reason": f"its process {reason}"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="networks (all, or all files of --onnx)")
    parser.add_argument("--precisions", default="fp32,fp16,int8")
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--onnx", type=Path, help="folder of ONNX files; those of it are not exported")
    parser.add_argument("--limit-s", type=float, default=540.0, help="no engine is begun later; 45 s later all ends")
    parser.add_argument(
        "--processes", type=int, default=1, help="engines at once; with 1 in this process, 0: no heading"
    )
    parser.add_argument("--results", type=Path, help="file that gets each row as a line of JSON")
    options = parser.parse_args(arguments)
    end_s = time.monotonic() + options.limit_s
    with tempfile.TemporaryDirectory() as folder:
        files = sorted(options.onnx.glob("*.onnx")) if options.onnx else []
        names = options.names or [file.stem for file in files] or list(NETWORKS)
        options.onnx = options.onnx or Path(folder)
        options.results = options.results or Path(folder, "results")
        table = Table(options.results)
        pairs = [(name, precision) for precision in options.precisions.split(",") for name in names]
        left = [pair for pair in pairs if not any("verified" in row for row in table.rows(pair))]
        if options.processes:
            print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
        if options.processes > 1:
            with ThreadPoolExecutor(options.processes) as pool:
                list(pool.map(partial(run_apart, options, table, end_s), left))
        else:
            for pair in left:
                run_here(options, table, end_s, pair)
        rows = [row for pair in pairs for row in table.rows(pair)]
    return int(any("verified" in row and row["reason"] != "-" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
