"""Runs one job: loads the network, prunes and trains it, writes it to ONNX with the outputs that a check compares.

python -c "...; main()" FOLDER            starts the other data-parallel processes itself, as FOLDER --rank R
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn import functional

from headrace_engines.optimize.pruning_program import jobs, surgery, training
from headrace_engines.optimize.pruning_program.channels import ChannelMap, NotUnderstood, map_channels
from headrace_engines.optimize.pruning_program.jobs import Job, PrunedNetwork
from headrace_engines.optimize.pruning_program.onnx_module import read_network
from headrace_engines.optimize.pruning_program.training import TrainingData, TrainingOptions, Workers

Report = Callable[[float, str], None]
Array = np.ndarray[Any, Any]
# Share of the progress: before the training, and after it.
_SCORED, _TRAINED = 0.1, 0.9
_SCORE_BATCHES, _SCORE_ROWS = 64, 32
_ANSWER_ROWS = 64
# Steps this small gain nothing from threads and are slow on busy cores.
_SMALL_STEP_MACS = 1e9
_OPSET = 18
_TIMEOUT = timedelta(minutes=10)
# Largest difference of the converted network from ONNX Runtime's outputs, relative to the largest output.
CONVERSION_BOUND = 1e-3


class JobError(Exception):
    """The job cannot be done; the message has the reason and the remedy."""


def main(arguments: list[str] | None = None) -> int:
    """Run the job of a folder; return 0, or 3 with the reason in `error.json`."""
    # An exception unwinds, so that the other processes are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(prog="pruning_program")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args(arguments)
    # Libraries and the user's code print to standard output, too: theirs goes to standard error.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    report = jobs.progress_lines(lines) if options.rank == 0 else lambda *_: None
    job = Job.read(options.folder)
    try:
        with ExitStack() as stack:
            workers = _join_workers(job, options.folder, options.rank, stack)
            _Run(job, options.folder, workers, _device(job, options.rank), report).run()
    except (JobError, NotUnderstood, ValueError) as error:
        jobs.write_json(options.folder / jobs.ERROR_FILE, {"message": str(error)})
        return jobs.ERROR_STATUS
    except torch.cuda.OutOfMemoryError:
        cure = "lower --batch-size, or close what else uses the GPU"
        jobs.write_json(options.folder / jobs.ERROR_FILE, {"message": f"the GPU has not enough memory: {cure}"})
        return jobs.ERROR_STATUS
    return 0


def _device(job: Job, rank: int) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if job.device == "cuda" or (job.device == "auto" and gpus):
        if gpus < job.devices:
            raise JobError(
                f"--devices is {job.devices}, this machine has {gpus} GPUs: lower it, or train with --device cpu"
            )
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    torch.set_num_threads(max((os.cpu_count() or 1) // job.devices, 1))
    return torch.device("cpu")


def _join_workers(job: Job, folder: Path, rank: int, stack: ExitStack) -> Workers:
    """Start the other processes, from the first one, and join the process group."""
    if job.devices == 1 or job.task != "prune":
        return Workers()
    device = _device(job, rank)
    if rank == 0:
        root = str(Path(__file__).parents[3])
        for other in range(1, job.devices):
            command = [sys.executable, "-c", jobs.START, root, str(folder), "--rank", str(other)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=(folder / f"group-{job.devices}").resolve().as_uri(),
        rank=rank,
        world_size=job.devices,
        timeout=_TIMEOUT,
    )
    stack.callback(dist.destroy_process_group)
    return Workers(rank, job.devices)


@dataclass(frozen=True, slots=True)
class _Run:
    job: Job
    folder: Path
    workers: Workers
    device: torch.device
    report: Report

    def run(self) -> None:
        options = TrainingOptions(**self.job.training)
        torch.manual_seed(options.seed)
        # Sums on a GPU have no fixed order in any case: its convolutions use the algorithms that are measured to be fastest.
        torch.backends.cudnn.benchmark = self.device.type == "cuda"
        self.report(0.0, "loading the network")
        network = self._load()
        check = np.load(self.folder / jobs.CHECK_FILE)
        self._check_conversion(network, check)
        sample = torch.from_numpy(np.resize(check, (2, *check.shape[1:])).copy())
        if self.job.task == "export":
            channels = map_channels(network, sample)
            macs, parameters = channels.macs(), _parameters(network)
            self._write(channels.graph, check, sample, PrunedNetwork(macs, macs, parameters, parameters))
            return
        self._prune(network, check, sample, options)

    def _prune(self, network: nn.Module, check: Array, sample: torch.Tensor, options: TrainingOptions) -> None:
        teacher = map_channels(copy.deepcopy(network), sample).graph.to(self.device)
        channels = map_channels(network, sample)
        if not channels.groups:
            raise JobError("the network has no channels that can be removed: each one reaches its output directly")
        channels.graph.to(self.device)
        source_macs, source_parameters = channels.macs(), _parameters(network)
        data = self._data()
        if len(data.inputs) < self.workers.count:
            raise JobError(
                f"{len(data.inputs)} samples cannot be divided among {self.workers.count} devices: lower --devices"
            )
        kept = surgery.select_units(
            channels, self._scores(channels, data, options), self.job.flops_share, self.job.multiple
        )
        macs = channels.macs(kept)
        layers = {
            layer.name: (len(layer.outputs), int(sum(int(unit) in kept for unit in layer.outputs)))
            for layer in channels.layers
            if not layer.is_norm
        }
        if self.device.type == "cpu" and macs * options.batch < _SMALL_STEP_MACS:
            torch.set_num_threads(1)
        student = channels.graph
        expected = _answer_shape(student, sample, self.device)
        surgery.remove_units(channels, kept)
        if _answer_shape(student, sample, self.device) != expected:
            raise JobError(
                "the pruned network has another output shape: this is a fault of the pruning, please report it"
            )
        if map_channels(copy.deepcopy(student).cpu(), sample).macs() != macs:
            raise JobError(
                "the pruned network has another size than planned: this is a fault of the pruning, please report it"
            )
        started_s = time.monotonic()
        loss = training.distil(
            student,
            training.logits_network(teacher),
            data,
            options,
            self.device,
            self.workers,
            lambda done, note: self.report(_SCORED + (_TRAINED - _SCORED) * done, note),
        )
        seconds = time.monotonic() - started_s
        if self.workers.rank:
            return
        precision = str(training.amp_type(self.device, options) or "fp32").removeprefix("torch.")
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        result = PrunedNetwork(
            macs, source_macs, _parameters(student), source_parameters, name, precision, round(seconds, 3), loss, layers
        )
        self._write(student.cpu(), check, sample, result)

    # Inputs

    def _load(self) -> nn.Module:
        if self.job.source == "onnx":
            return read_network(self.job.path)
        path = Path(self.job.path)
        sys.path.insert(0, str(path.parent))
        specification = importlib.util.spec_from_file_location("headrace_user_model", path)
        if specification is None or specification.loader is None:
            raise JobError(f"{path} is not a Python file: write FILE.py:factory")
        module = importlib.util.module_from_spec(specification)
        sys.modules[specification.name] = module
        try:
            specification.loader.exec_module(module)
            network = getattr(module, self.job.factory)()
        except Exception as error:  # code of the user
            line = traceback.extract_tb(error.__traceback__)[-1]
            raise JobError(
                f"{path.name}:{self.job.factory} fails at {Path(line.filename).name}:{line.lineno}: {error!r}"
            ) from error
        if not isinstance(network, nn.Module):
            raise JobError(
                f"{path.name}:{self.job.factory} returned {type(network).__name__}: return a torch.nn.Module with its weights"
            )
        return network.float().cpu().eval()

    def _check_conversion(self, network: nn.Module, check: Array) -> None:
        path = self.folder / jobs.REFERENCE_FILE
        if not path.exists():
            return
        expected = np.load(path)
        actual = training.answers(network, check, torch.device("cpu"), _ANSWER_ROWS)
        scale = float(np.abs(expected).max(initial=0.0)) or 1.0
        if (
            actual.shape != expected.shape
            or not float(np.abs(actual - expected).max(initial=0.0)) <= CONVERSION_BOUND * scale
        ):
            raise JobError(
                "the network converted from ONNX gives other outputs than ONNX Runtime: give PyTorch code, FILE.py:factory"
            )

    def _data(self) -> TrainingData:
        labels = self.folder / jobs.LABELS_FILE
        inputs = np.load(self.folder / jobs.INPUTS_FILE, mmap_mode="r")
        return TrainingData(inputs, torch.from_numpy(np.load(labels)) if labels.exists() else None)

    # Importance

    def _scores(self, channels: ChannelMap, data: TrainingData, options: TrainingOptions) -> surgery.Scores:
        self.report(0.02, "scoring channels")
        if self.job.importance == "magnitude":
            scores = surgery.magnitude_scores(channels)
        else:
            scores = surgery.taylor_scores(channels, self._losses(channels.graph, data, options))
        if self.workers.count > 1:
            # Sums on GPUs differ in the last bits: all processes must cut the same channels.
            units = sorted(int(unit) for group in channels.groups for unit in group)
            values = torch.tensor([scores.get(unit, 0.0) for unit in units], dtype=torch.float64, device=self.device)
            dist.broadcast(values, 0)
            scores = dict(zip(units, values.tolist(), strict=True))
        return scores

    def _losses(
        self, graph: fx.GraphModule, data: TrainingData, options: TrainingOptions
    ) -> Iterator[Callable[[], torch.Tensor]]:
        network = training.logits_network(graph)
        network.eval()
        order = np.random.default_rng([options.seed, 1 << 20]).permutation(len(data.inputs))
        for start in range(0, min(len(order), _SCORE_BATCHES * _SCORE_ROWS), _SCORE_ROWS):
            inputs, labels = data.rows(np.sort(order[start : start + _SCORE_ROWS]), self.device)

            def loss(inputs: torch.Tensor = inputs, labels: torch.Tensor | None = labels) -> torch.Tensor:
                logits = training.class_logits(network(inputs))
                return functional.cross_entropy(logits, logits.detach().argmax(1) if labels is None else labels)

            yield loss

    # Outputs

    def _write(self, network: fx.GraphModule, check: Array, sample: torch.Tensor, result: PrunedNetwork) -> None:
        self.report(_TRAINED, "writing ONNX")
        network.eval()
        np.save(self.folder / jobs.ANSWERS_FILE, training.answers(network, check, torch.device("cpu"), _ANSWER_ROWS))
        torch.onnx.export(
            network,
            (sample,),
            str(self.folder / jobs.MODEL_FILE),
            input_names=[self.job.input_name],
            output_names=[self.job.output_name],
            opset_version=_OPSET,
            dynamo=True,
            external_data=False,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=1 << 16)},),
            verbose=False,
        )
        result.write(self.folder)
        self.report(1.0, "written")


def _parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def _answer_shape(network: nn.Module, sample: torch.Tensor, device: torch.device) -> tuple[int, ...]:
    with torch.no_grad():
        output = network(sample.to(device))
    return tuple((output[0] if isinstance(output, (tuple, list)) else output).shape)
