"""`headrace optimize`: publishes a model with fewer channels after distillation in PyTorch.

The loss target is held on samples that nothing was trained on. If even the weakest candidate misses it, nothing is published.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
from headrace.config.optimization_config import PRECISIONS
from headrace_reports.command_line import pickup_text, printable
from rich.console import Console

from headrace_engines.accuracy import Accuracy, measure
from headrace_engines.commands import (
    add_cache,
    add_installation,
    add_repository_and_target,
    add_version,
    confirm_installation,
)
from headrace_engines.errors import BuildError, CallError
from headrace_engines.onnx_graph import OnnxRunner, write_onnx
from headrace_engines.optimize import search, source_model
from headrace_engines.optimize.figures import MeasuredModel, ModelFigures, measure_models
from headrace_engines.optimize.model_writer import staged_model
from headrace_engines.optimize.pruning_program.jobs import Job
from headrace_engines.optimize.result_table import show_result, write_page
from headrace_engines.optimize.torch_job import TorchResult, run_torch_job
from headrace_engines.precision.lowering import ROWS
from headrace_engines.progress import Report, part, silent, with_progress_lines
from headrace_engines.project import open_project, read_spec
from headrace_engines.quantization.samples import Samples
from headrace_engines.report import BuildDisplay, finite, make_folder, print_text
from headrace_engines.simplify import simplify
from headrace_engines.store import Store
from headrace_engines.targets import choose_target

# PyTorch before 2.6 has no exporter with free dimensions that is checked here.
REQUIREMENTS = ("torch>=2.6", "torchvision", "onnx", "onnxscript", "numpy")
_EVERY_SAMPLE = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `optimize`."""
    add = parser.add_argument
    text = "name of a model in the repository, its folder, or FILE.py:function for PyTorch code"
    add("model", metavar="MODEL", help=text)
    add_version(parser)
    add("--prune", type=_kind, choices=("channels",), default="channels", help="fewer channels (channels)")
    text = "largest loss in points of accuracy, or of agreement without labels (1)"
    add("--target-loss", type=float, default=1.0, metavar="P", help=text)
    add("--name", metavar="NAME", help="name of the result (default: MODEL_pruned)")
    add("--data", type=Path, metavar="PATH", help="samples of the training, in place of the configuration's")
    add("--held-out", type=Path, metavar="PATH", help="samples of the loss target, in place of the configuration's")
    add("--samples", type=int, default=_EVERY_SAMPLE, metavar="N", help="largest number of samples (all)")
    add("--max-batch-size", type=int, default=64, metavar="N", help="for PyTorch code: max_batch_size (64)")
    add("--precision", choices=PRECISIONS[:-1], help="precision of the measured engines (the configuration's)")
    add("--seconds", type=float, default=1.0, metavar="S", help="timing of each engine at each batch size (1)")
    text = "effort of TensorRT's builder for the measured engines, 0 to 5: less is a shorter build (3)"
    add("--optimization-level", type=int, choices=range(6), metavar="N", help=text)
    add("--output", type=Path, metavar="DIR", help="write optimize.json and optimize.html here")
    add("--progress", action="store_true", help="print lines of `progress SHARE PHASE`, for programs")
    _add_training(parser)
    add_repository_and_target(parser)
    add_cache(parser)


def _kind(text: str) -> str:
    if text == "2:4":
        raise argparse.ArgumentTypeError("2:4 is gone, it was at most 1.1 times as fast: write channels")
    return text


def _add_training(parser: argparse.ArgumentParser) -> None:
    """Add the options of channel pruning and its training."""
    add = parser.add_argument
    add("--flops", type=float, metavar="S", help="prune to this share of the FLOPs, without a search")
    add("--importance", choices=("taylor", "magnitude"), default="taylor", help="order of the channels (taylor)")
    add("--multiple", type=int, default=8, metavar="N", help="round channels up to a multiple (8)")
    add("--epochs", type=int, default=30, metavar="N", help="passes over the samples (30)")
    add("--batch-size", type=int, default=64, metavar="N", help="samples of a training step (64)")
    add("--learning-rate", type=float, default=1e-3, metavar="R", help="largest learning rate (0.001)")
    add("--temperature", type=float, default=4.0, metavar="T", help="temperature of the distillation (4)")
    add("--distillation", type=float, default=0.7, metavar="W", help="weight of the teacher against labels (0.7)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the training (0)")
    add("--devices", type=int, default=1, metavar="N", help="GPUs, or processes on the CPU, of the training (1)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="device of the training (auto)")
    add("--python", type=Path, metavar="PATH", help="interpreter with PyTorch (default: one is found or made)")
    add_installation(parser)


@dataclass(frozen=True, slots=True)
class _Smaller:
    """A smaller model that holds the target."""

    model: onnx.ModelProto  # its ONNX model
    accuracy: Accuracy  # its accuracy against the original one
    details: dict[str, Any] = field(default_factory=dict)  # JSON data for the report
    remarks: tuple[str, ...] = ()  # lines for the user


def run(options: argparse.Namespace, console: Console) -> int:
    """Optimise one model and publish it; return 0.

    Raises:
        BuildError: no candidate holds the target, or the model cannot be optimised; nothing is published then.
    """
    started_s = time.monotonic()
    _check_options(options)
    code = source_model.parse_code(options.model)
    if options.output is not None:
        make_folder(options.output)
    target = choose_target(options.target)
    confirm_installation(options, console, REQUIREMENTS)
    with (
        tempfile.TemporaryDirectory(prefix="headrace-optimize-") as name,
        BuildDisplay(console, [options.model], is_logged=not options.progress) as display,
    ):
        report = display.report(options.model)
        report = with_progress_lines(report) if options.progress else report
        folder = Path(name)
        python = _python(options, report)
        original = _open(options, code, python, folder, report)
        smaller = _pruned(original, options, part(report, 0.05, 0.85), python, folder)
        result_name = options.name or f"{original.project.name if code is None else code.path.stem}_pruned"
        with staged_model(original.project, smaller.model, result_name, options.model_repository) as staged:
            spec = read_spec(original.project.config, options.precision or "")
            spec = spec.at("fp32") if spec.precision == "best" else spec
            spec = replace(spec, optimization_level=options.optimization_level)
            accuracy = smaller.accuracy
            before = MeasuredModel("before", original.project, accuracy.reference_accuracy, None)
            after = MeasuredModel("after", staged.project, accuracy.accuracy, accuracy.top1_agreement)
            store = Store(options.cache)
            figures = measure_models([before, after], spec, target, store, options.seconds, part(report, 0.85, 1.0))
            document = _document(options, original, smaller, figures, str(target.describe()), started_s)
            if options.output is not None:
                write_page(document, options.output)
            staged.publish(document)
        display.finish(options.model, "published")
    show_result(console, document)
    for remark in smaller.remarks:
        print_text(console, printable(remark))
    print_text(console, f"{result_name} version {staged.final.name} is published in {options.model_repository}.")
    print_text(console, pickup_text(result_name, str(options.model_repository)))
    return 0


def _check_options(options: argparse.Namespace) -> None:
    """Check the ranges of the options.

    Raises:
        CallError: an option has an invalid value.
    """
    ranges: list[tuple[str, bool, str]] = [
        ("--target-loss", 0 <= options.target_loss <= 100, "points from 0 to 100"),
        ("--flops", options.flops is None or 0 < options.flops < 1, "a share between 0 and 1, e.g. 0.5"),
        ("--samples", options.samples >= 2, "2 or more"),
        ("--multiple", options.multiple >= 1, "1 or more"),
        ("--epochs", options.epochs >= 1, "1 or more"),
        ("--batch-size", options.batch_size >= options.devices, "at least one sample for each device"),
        ("--learning-rate", 0 < options.learning_rate <= 1, "a number above 0, 1 at most"),
        ("--temperature", 0 < options.temperature <= 100, "a number above 0, 100 at most"),
        ("--distillation", 0 <= options.distillation <= 1, "a share from 0 to 1"),
        ("--devices", 1 <= options.devices <= 64, "1 to 64"),
        ("--max-batch-size", options.max_batch_size >= 1, "1 or more"),
        ("--seconds", 0 < options.seconds <= 3600, "a number above 0, 3600 at most"),
        ("--seed", options.seed >= 0, "0 or more"),
    ]
    for name, fits, allowed in ranges:
        if not fits:
            value = getattr(options, name[2:].replace("-", "_"))
            raise CallError(f"{name} is {value}: write {allowed}")


def _python(options: argparse.Namespace, report: Report) -> Path:
    from headrace_engines.importers.environment import framework_python

    return framework_python(REQUIREMENTS, report, python=options.python)


def _open(
    options: argparse.Namespace,
    code: source_model.PyTorchCode | None,
    python: Path,
    folder: Path,
    report: Report,
) -> source_model.Original:
    if code is None:
        project = open_project(options.model, options.model_repository, options.version)
        source_model.check_channels(project)
        return source_model.open_original(project, options.data, options.held_out, options.samples)
    if options.data is None:
        raise CallError(f"{options.model} is PyTorch code, which has no samples: give an .npz file with --data")
    name = options.name or code.path.stem
    project = source_model.import_code(
        code, python, name, options.data, options.max_batch_size, folder / "models", part(report, 0, 0.05)
    )
    original = source_model.open_original(project, options.data, options.held_out, options.samples)
    return source_model.Original(project, original.model, original.train, original.held_out, original.output, code)


def _comparison(original: source_model.Original, samples: Samples) -> Callable[[onnx.ModelProto], Accuracy]:
    """Return a function that compares a model with the original one on samples."""
    reference, rows = OnnxRunner(original.model), min(ROWS, max(original.project.config.max_batch_size, 1))

    def compare(model: onnx.ModelProto) -> Accuracy:
        return measure(reference, OnnxRunner(model), samples, rows, silent, output=original.output)

    return compare


def _pruned(
    original: source_model.Original, options: argparse.Namespace, report: Report, python: Path, folder: Path
) -> _Smaller:
    """Return the model with the strongest channel pruning that holds the target.

    Raises:
        BuildError: the network cannot be pruned, or even the weakest pruning misses the target.
    """
    training = folder / "train.npy"
    report(0.0, "writing samples")
    source_model.write_training(original.train, training)
    inputs = source_model.torch_inputs(original, training)
    path = original.project.source if original.code is None else original.code.path
    if original.code is None and not any(node.op_type == "BatchNormalization" for node in original.model.graph.node):
        # Folded constants leave fewer forms of a graph; batch norms stay for the training, which simplify would fuse.
        path = folder / "source.onnx"
        write_onnx(simplify(original.model), path)
    (input_name,), (output_name,) = _tensor_names(original.model)
    job = Job(
        "prune",
        "onnx" if original.code is None else "code",
        str(path.resolve()),
        "" if original.code is None else original.code.factory,
        input_name=input_name,
        output_name=output_name,
        importance=options.importance,
        multiple=options.multiple,
        devices=options.devices,
        device=options.device,
        training=_training_options(options),
    )
    compare = _comparison(original, original.held_out)

    def prune(share: float, inner: Report) -> TorchResult:
        return run_torch_job(python, job.with_share(share), inputs, inner)

    ladder = search.LADDER if options.flops is None else (options.flops,)
    trials = search.search_strength(prune, lambda result: compare(result.model), options.target_loss, report, ladder)
    best = search.best_trial(trials)
    if best is None:
        weakest = max(trials, key=lambda trial: trial.result.network.macs)
        left = weakest.result.network.macs / max(weakest.result.network.source_macs, 1)
        raise BuildError(
            f"even the weakest pruning, to {left:.0%} of the FLOPs, misses the target: {'; '.join(weakest.refusal)}"
        )
    details = {"trials": [_trial_json(trial) for trial in trials], "network": asdict(best.result.network)}
    return _Smaller(best.result.model, best.accuracy, details, tuple(_trial_text(trial) for trial in trials))


def _tensor_names(model: onnx.ModelProto) -> tuple[list[str], list[str]]:
    constants = {tensor.name for tensor in model.graph.initializer}
    return [v.name for v in model.graph.input if v.name not in constants], [v.name for v in model.graph.output]


def _training_options(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "epochs": options.epochs,
        "batch": options.batch_size,
        "learning_rate": options.learning_rate,
        "temperature": options.temperature,
        "distillation": options.distillation,
        "seed": options.seed,
    }


def _trial_json(trial: search.Trial) -> dict[str, Any]:
    network = trial.result.network
    return {
        "flops_share": trial.flops_share,
        "macs": network.macs,
        "source_macs": network.source_macs,
        "points_lost": finite(search.points_lost(trial.accuracy)),
        "refusal": list(trial.refusal),
        "seconds": network.seconds,
        "export_difference": trial.result.difference,
    }


def _trial_text(trial: search.Trial) -> str:
    network = trial.result.network
    result = "misses the target" if trial.refusal else "holds the target"
    share, lost = (
        network.macs / max(network.source_macs, 1),
        search.loss_text(search.points_lost(trial.accuracy), search.loss_measure(trial.accuracy)),
    )
    trained = f"trained {network.seconds:.0f} s on {network.device}, {network.precision}"
    return f"{share:.1%} of the FLOPs: {lost}, {result} ({trained})"


def _document(
    options: argparse.Namespace,
    original: source_model.Original,
    smaller: _Smaller,
    figures: list[ModelFigures],
    machine: str,
    started_s: float,
) -> dict[str, Any]:
    """Return the report as JSON data."""
    document = {
        "format": 1,
        "model": original.project.name,
        "version": original.project.version,
        "prune": options.prune,
        "target_loss": options.target_loss,
        "loss": search.loss_measure(smaller.accuracy),
        "points_lost": search.points_lost(smaller.accuracy),
        "data": smaller.accuracy.data,
        "machine": machine,
        "accuracy": smaller.accuracy.to_json(),
        "models": [asdict(model) for model in figures],
        "seconds": round(time.monotonic() - started_s, 1),
        **smaller.details,
    }
    checked: dict[str, Any] = finite(document)
    return checked
