"""Proof of batch sizes on public networks with random weights, as engines of TensorRT: false alarms, and the time of a proof.

    python -m loadtest.proofs [NAME ...] [--precisions fp32,fp16,int8] [--max-rows 64] [--onnx FOLDER] [--limit-s 540]

Needs TensorRT, a GPU, and PyTorch with torchvision, timm and transformers, or ONNX files NAME.onnx in FOLDER. Each network is
exported with a free batch, built, and loaded until the idle server has tested all sizes. A row of the table has the verified
sizes, milliseconds of the first proof, seconds until all sizes were tested, and the reason if a size is
not proven. Exit status: 1 if a size of a network is not proven.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import headrace
import onnx
from headrace.config.model_folder import read_model_folder
from headrace.config.optimization_config import Calibration
from headrace.core.tensor import BY_ORT_NAME
from headrace.models import batch_proofs
from headrace.models.batch_proofs import BOUNDS, LARGEST_BOUND
from headrace_engines.errors import BuildError
from headrace_engines.precision.lowering import cast_model
from headrace_engines.progress import silent
from headrace_engines.quantization.calibration import calibrate
from headrace_engines.quantization.placement import tensors_to_calibrate
from headrace_engines.quantization.qdq import quantize
from headrace_engines.quantization.samples import random_samples
from headrace_engines.simplify import simplify
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from loadtest.proof_networks import NETWORKS, export

_LIMIT_S, _PAUSE_S = 120.0, 0.05
_CALIBRATION_ROWS = 4


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


def lowered(model: onnx.ModelProto, precision: str, folder: Path) -> onnx.ModelProto:
    """Return a model in a precision; INT8 with ranges of random values."""
    if precision == "fp32":
        return model
    if precision != "int8":
        return cast_model(model, precision)
    config = read_model_folder(folder, folder.parent).config
    samples = random_samples(config, _CALIBRATION_ROWS)
    ranges = calibrate(model, tensors_to_calibrate(model), samples, Calibration(), None, silent)
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


def prove(source: Path, precision: str, rows: int, work: Path) -> tuple[bool, str]:
    """Build an engine, load it until all sizes are tested, and return True without a fault, and the row of the table."""
    folder = work / source.stem
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "1").mkdir(parents=True)
    (folder / "config.yaml").write_text(config_of(source, rows))
    for file in source.parent.glob(source.name + "*"):  # with its external tensors
        shutil.copy(file, folder / "1" / file.name.replace(source.name, "model.onnx"))
    shutil.copy(source, folder / "1" / "model.onnx")
    model = simplify(onnx.load(source))
    profile = {
        value.name: tuple(
            (count, *(dim.dim_value for dim in value.type.tensor_type.shape.dim[1:])) for count in (1, 8, rows)
        )
        for value in model.graph.input
    }
    spec = TargetSpec(precision, (ShapeRange(profile),))  # type: ignore[arg-type]
    begun_s = time.monotonic()
    plan = folder / "1" / "model.plan"
    TensorRtTarget(optimization_level=1).build(lowered(model, precision, folder), spec, plan, silent)
    built_s = time.monotonic() - begun_s
    reason = "idle"
    # A plan of a builder has a stamp with its precision, which this one has not.
    bound = BOUNDS.get("tf32" if precision == "fp32" else precision, LARGEST_BOUND)
    stamped = patch.object(batch_proofs, "smallest_bound", lambda _plan: bound)
    with stamped, _proof_log() as lines, tempfile.TemporaryDirectory() as state:
        with headrace.Server(folder, state_dir=state, trial_limit_s=0, profile_s=0) as server:
            begun_s = time.monotonic()
            while "idle" in reason and time.monotonic() < begun_s + _LIMIT_S:
                time.sleep(_PAUSE_S)
                parameters = server.model(source.stem).spec.parameters
                reason = str(parameters.get("headrace.unproven_batches", ""))
            idle_s = time.monotonic() - begun_s
        sizes = str(parameters.get("headrace.verified_batches", ""))
        took = [line for line in lines if "to prove" in line]
        first_ms = took[0].split(" took ")[1].split(" ms")[0] if took else ""
    row = [source.stem, precision, sizes.replace(", ", " "), first_ms, f"{idle_s:.1f}", f"{built_s:.0f}", reason or "-"]
    return not reason, "| " + " | ".join(row) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="networks (all, or all files of --onnx)")
    parser.add_argument("--precisions", default="fp32,fp16,int8")
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--onnx", type=Path, help="folder of ONNX files, which are not exported")
    parser.add_argument("--limit-s", type=float, default=540.0, help="no engine is begun later")
    options = parser.parse_args(arguments)
    end_s, faults = time.monotonic() + options.limit_s, 0
    print("| network | precision | verified | first proof ms | idle s | build s | reason |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as work:
        files = sorted(options.onnx.glob("*.onnx")) if options.onnx else []
        names = options.names or [file.stem for file in files] or list(NETWORKS)
        for name in names:
            source = options.onnx / f"{name}.onnx" if options.onnx else Path(work) / "exported" / f"{name}.onnx"
            for precision in options.precisions.split(","):
                if time.monotonic() > end_s:
                    print(f"| {name} | {precision} | no time left |", flush=True)
                    continue
                try:
                    if not source.is_file():
                        source.parent.mkdir(exist_ok=True)
                        export(name, source)
                    is_proven, row = prove(source, precision, options.max_rows, Path(work) / "models")
                except (BuildError, headrace.HeadraceError, RuntimeError, ImportError, ValueError) as error:
                    is_proven, row = True, f"| {name} | {precision} | {type(error).__name__}: {str(error)[:200]!r} |"
                faults += not is_proven
                print(row, flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
