"""`headrace lab conv`: measures convolution algorithms on the layers of a model, against cuDNN and TensorRT."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.runtimes.cuda.driver import current
from headrace.runtimes.cuda.kernels.code_files import CodeFiles
from headrace.runtimes.cuda.kernels.loading import keep_code
from headrace_engines.commands import add_repository, add_version, folder_path
from headrace_engines.errors import BuildError, CallError
from headrace_engines.onnx_graph import read_onnx
from headrace_engines.project import open_project
from headrace_engines.report import make_folder, print_text, save
from headrace_reports.command_line import nearest, number_parser, positive_count
from rich.console import Console

from headrace_lab.conv import ConvLab, MapOptions
from headrace_lab.kernels.algorithms import ALGORITHMS
from headrace_lab.kernels.base import Epilogue
from headrace_lab.layers import ConvLayer, kernel_size_layers, model_layers, resnet50_layers, shape_layer
from headrace_lab.page import conditions, map_page, show
from headrace_lab.references import show_list, show_references
from headrace_lab.results import DTYPES, ConvMap
from headrace_lab.summary import summarize_map

_BASELINES = ("cudnn", "tensorrt")
_EPILOGUE = ("bias", "residual", "relu")
_ROUNDS = 7
_BATCHES = (1, 8, 64)
_WORK = ("conv", "layer")
_PRUNE = 8.0
_KERNELS = Path("~/.cache/headrace/kernels")


def _list_of(allowed: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(word for word in dict.fromkeys(text.split(",")) if word and word != "none")
        for word in words:
            if word not in allowed:
                guess = nearest(word, allowed)
                hint = f"did you mean {guess}?" if guess else f"take some of {', '.join(allowed)}"
                raise argparse.ArgumentTypeError(f"{word!r} is unknown: {hint}")
        return words

    return parse


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(positive_count(word) for word in text.split(",")))


def names() -> tuple[str, ...]:
    """Return the names of our algorithms, in the order of their list."""
    return tuple(dict.fromkeys(algorithm.name for algorithm in ALGORITHMS))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lab conv`."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="name of a model in the repository, or its folder")
    add_version(parser)
    add_repository(parser, "folder of the model repository")
    add("--shape", action="append", default=[], metavar="N,C,H,W,K,R,S,STRIDE,PAD", help="a shape; may be repeated")
    text = "operations after the convolutions of --shape: bias, residual, relu, or none (default: bias,relu)"
    add("--epilogue", type=_list_of(_EPILOGUE), default=("bias", "relu"), metavar="OPERATION,...", help=text)
    add("--layers", choices=("resnet50",), help="the 22 distinct 3x3 and 1x1 layers of ResNet-50")
    _add_extent(parser)


def _add_extent(parser: argparse.ArgumentParser) -> None:
    """Add the options of what is measured on each layer."""
    add = parser.add_argument
    add("--batch", type=_numbers, default=None, metavar="N,...", help="batch sizes (default: 1,8,64)")
    text = "fp16, fp32 (default: both)"
    add("--precision", type=_list_of(tuple(DTYPES)), default=tuple(DTYPES), metavar="P,...", help=text)
    add("--algorithms", type=_list_of(names()), default=None, metavar="NAME,...", help="our algorithms (default: all)")
    text = "cudnn, tensorrt, or none (default: both)"
    add("--baselines", type=_list_of(_BASELINES), default=_BASELINES, metavar="NAME,...", help=text)
    text = "effort of TensorRT's builder, 0 to 5: less is a shorter build (3)"
    add("--optimization-level", type=int, choices=range(6), metavar="N", help=text)
    text = "conv: the convolution alone, layer: with its epilogue (default: both)"
    add("--work", type=_list_of(_WORK), default=_WORK, metavar="NAME,...", help=text)
    add("--kernel-sizes", type=_numbers, metavar="R,...", help="sweep of kernel sizes of one --shape")
    _add_effort(parser)


def _add_effort(parser: argparse.ArgumentParser) -> None:
    """Add the options of rounds, time and output."""
    add = parser.add_argument
    add("--rounds", type=positive_count, default=_ROUNDS, metavar="N", help=f"samples at most (default: {_ROUNDS})")
    factor = number_parser(float, lambda number: number >= 0, "is not a factor of 0 or more")
    text = (
        "leave out algorithms whose cost model predicts more than F times the roofline's time; 0 measures all "
        f"(default: {_PRUNE:g}; 0 with --algorithms or --kernel-sizes)"
    )
    add("--prune", type=factor, metavar="F", help=text)
    text = f"folder of compiled kernels, or none (default: {_KERNELS})"
    add("--kernel-cache", type=folder_path, default=_KERNELS, metavar="DIR", help=text)
    seconds = number_parser(float, lambda number: number > 0, "is not a number of seconds above 0")
    add("--budget", type=seconds, metavar="S", help="start no layer after this many seconds")
    add("--list", action="store_true", help="list the algorithms and their supported shapes; needs no GPU")
    text = "run the algorithms' NumPy references on the CPU and print their errors"
    add("--reference", action="store_true", help=text)
    add("--output", type=Path, metavar="DIR", help="write conv.json and conv.html")


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure the map and return 0; 1 if a result is wrong or there is no GPU.

    Raises:
        BuildError: there is no GPU, nothing to measure, or a file cannot be written.
    """
    if options.list:
        show_list(console, ALGORITHMS)
        return 0
    title, layers, notes = _layers(options)
    algorithms = tuple(a for a in ALGORITHMS if options.algorithms is None or a.name in options.algorithms)
    batches = options.batch or _batches(options) or _BATCHES
    if options.reference:
        return int(show_references(console, layers, batches, options.precision, algorithms) > 0)
    map_options = MapOptions(
        batches=batches,
        precisions=options.precision,
        algorithms=algorithms,
        baselines=options.baselines,
        work=options.work or _WORK,
        rounds=options.rounds,
        budget_s=options.budget,
        threads=len(os.sched_getaffinity(0)),
        tensorrt_level=options.optimization_level,
        prune=_prune(options),
    )
    if options.output is not None:
        make_folder(options.output)

    def complete(result: ConvMap) -> ConvMap:
        """Add notes and summary, and write the files."""
        result = replace(result, summary=tuple(summarize_map(result.cells)), notes=(*notes, *result.notes))
        if options.output is not None:
            save(options.output / "conv.json", json.dumps(result.to_json(), indent=1, allow_nan=False) + "\n")
            save(options.output / "conv.html", map_page(result))
        return result

    try:
        with current(map_options.device), keep_code(_kernel_files(options)):
            lab = ConvLab(map_options, lambda line: print_text(console, line), complete)
            result = complete(lab.measure(title, layers))
    except BuildError:
        raise
    except HeadraceError as error:
        raise BuildError(f"the map needs a GPU: {error}; --list and --reference need none") from error
    show(console, result)
    for line in (*conditions(result), *(f"note: {note}" for note in result.notes), *result.summary):
        print_text(console, line)
    if options.output is not None:
        print_text(console, f"The page is in {options.output / 'conv.html'}, all figures in conv.json beside it.")
    return int(any(r.errors is not None and not r.errors.is_right for cell in result.cells for r in cell.results))


def _prune(options: argparse.Namespace) -> float:
    """Limit of the cost models; what a caller names is measured."""
    if options.prune is not None:
        return float(options.prune)
    return 0.0 if options.algorithms is not None or options.kernel_sizes else _PRUNE


def _kernel_files(options: argparse.Namespace) -> CodeFiles | None:
    folder: Path = options.kernel_cache
    return None if str(folder) == "none" else CodeFiles(folder.expanduser())


def _layers(options: argparse.Namespace) -> tuple[str, list[ConvLayer], list[str]]:
    """Title, layers and notes."""
    given = [bool(options.model), bool(options.shape), bool(options.layers)]
    if sum(given) != 1:
        raise CallError(
            f"lab conv has {sum(given)} sources of layers: name one of MODEL, --shape and --layers, "
            "e.g. headrace lab conv --layers resnet50"
        )
    epilogue = Epilogue(**dict.fromkeys(options.epilogue, True))
    if options.kernel_sizes:
        if len(options.shape) != 1:
            raise CallError("--kernel-sizes varies the kernel of one --shape: write exactly one")
        base = shape_layer(options.shape[0])
        return f"kernel sizes of {base.name}", kernel_size_layers(base.shape, options.kernel_sizes, epilogue), []
    if options.shape:
        layers = [shape_layer(text, epilogue) for text in options.shape]
        return "shapes", list({layer.name: layer for layer in layers}.values()), []
    if options.layers:
        return "ResNet-50", resnet50_layers(), []
    project = open_project(options.model, options.model_repository, options.version)
    layers, skipped = model_layers(read_onnx(project.source))
    return options.model, layers, [f"{line} is not measured" for line in skipped]


def _batches(options: argparse.Namespace) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(text.split(",")[0]) for text in options.shape))
