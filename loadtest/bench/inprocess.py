"""ONNX Runtime without any server: right answers to check against, and the throughput that no server can beat.

    python -m loadtest.bench.inprocess model_repository/resnet50/1/model.onnx --batch 8 --threads 2 --seconds 20

runs in a fresh process and prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
from headrace.core.tensor import BY_ORT_NAME

from loadtest.protocol import Array
from loadtest.servers import ROOT, pinned


class WrongAnswer(RuntimeError):
    """A server's answer is not what ONNX Runtime computes for the same input."""


class Oracle:
    """One model in process: creates inputs for it and computes the expected outputs.

    Args:
        model_path: the ONNX file that the server serves.
        threads: intra-op threads of the session.
    """

    def __init__(self, model_path: Path, threads: int = 1) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        self._session = ort.InferenceSession(str(model_path), options, providers=["CPUExecutionProvider"])
        self._output_names = [output.name for output in self._session.get_outputs()]

    def example(self, rows: int, seed: int = 0) -> dict[str, Array]:
        """Random inputs of `rows` rows: normal for floats, small whole numbers for integers."""
        rng = np.random.default_rng(seed)
        inputs: dict[str, Array] = {}
        for spec in self._session.get_inputs():
            shape = [rows, *(size if isinstance(size, int) else 1 for size in spec.shape[1:])]
            dtype = BY_ORT_NAME[spec.type].dtype
            values = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 100, shape)
            inputs[spec.name] = values.astype(dtype)
        return inputs

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs by name."""
        return dict(zip(self._output_names, self._session.run(None, dict(inputs)), strict=True))

    def check(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Compare a server's outputs with our own.

        Raises:
            WrongAnswer: an output is missing, has another shape, or differs by more than rounding explains.
        """
        for name, expected in self.run(inputs).items():
            if name not in outputs:
                raise WrongAnswer(f"output '{name}' is missing, got {sorted(outputs)}")
            got = outputs[name]
            if got.shape != expected.shape:
                raise WrongAnswer(f"output '{name}' has shape {got.shape}, expected {expected.shape}")
            # Another batch size may take another kernel, hence another order of the sums.
            if not np.allclose(got, expected, rtol=1e-3, atol=1e-4 * max(1.0, float(np.abs(expected).max()))):
                worst = float(np.abs(got - expected).max())
                raise WrongAnswer(f"output '{name}' differs from ONNX Runtime by up to {worst:.3g}")


def rows_per_s(model_path: Path, batch: int, threads: int, seconds: float) -> float:
    """Rows a second of a session that runs one batch after the other, in this process."""
    oracle = Oracle(model_path, threads)
    inputs = oracle.example(batch)
    for _ in range(2):
        oracle.run(inputs)
    runs, start = 0, time.perf_counter()
    while True:
        oracle.run(inputs)
        runs += 1
        elapsed_s = time.perf_counter() - start
        if elapsed_s >= seconds:
            return runs * batch / elapsed_s


def rows_per_s_in_fresh_process(
    model_path: Path, batch: int, threads: int, seconds: float, cpus: tuple[int, ...] | None
) -> float:
    """The same in a process of its own, on these cores.

    Raises:
        subprocess.CalledProcessError: the process failed.
    """
    command = [*pinned(cpus), sys.executable, "-m", "loadtest.bench.inprocess", str(model_path.resolve())]
    command += ["--batch", str(batch), "--threads", str(threads), "--seconds", str(seconds)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(json.loads(finished.stdout)["rows_per_s"])


def main() -> None:
    """Start from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    rate = rows_per_s(options.model, options.batch, options.threads, options.seconds)
    print(json.dumps({"batch": options.batch, "threads": options.threads, "rows_per_s": rate}))


if __name__ == "__main__":
    main()
