"""`headrace infer MODEL photo.jpg`: sends pictures or tensors to a running server and prints the results.

Pictures become tensors by the model's own `preprocess` section; the classification extension returns the best classes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import orjson
from headrace_reports.command_line import number_parser, open_console, plural, positive_count, printable, printable_json
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.core.clock import NS_PER_MS
from headrace.core.errors import BadRequest, HeadraceError, ModelFailed
from headrace.inference.pipelines.recipe import ImageRecipe, parameter_value
from headrace.server.commands import connection

if TYPE_CHECKING:
    from headrace.server.commands.infer_client import AnyArray, InferClient


# Datatypes to which the floats of a preprocessed picture can be converted.
_PIXEL_TYPES = {"FP32": np.float32, "FP16": np.float16, "UINT8": np.uint8}


@dataclass(frozen=True, slots=True)
class RankedClass:
    """One class of a picture.

    Attributes:
        score: output of the model, a probability or not.
        index: of the class.
        label: name of the class, "" if the server has none.
    """

    score: float
    index: int
    label: str


@dataclass(frozen=True, slots=True)
class Classified:
    """Best classes of one picture, best first."""

    file: str
    classes: list[RankedClass]


@dataclass(frozen=True, slots=True)
class PictureTask:
    """Input and output of a model that classifies pictures.

    Attributes:
        model: name of the model.
        recipe: preprocessing of a picture.
        input: name of the input tensor.
        datatype: datatype of the input tensor.
        batched: True if the first dimension is the batch; several pictures then share a request.
        one_dimension_less: True if the model takes one picture without a batch dimension of 1.
        output: name of the output with the scores.
        ranked: names of the outputs with scores, classes and, if there are names, labels, if the server ranks; else
            empty.
        pictures_per_request: maximum number of pictures in a request.
    """

    model: str
    recipe: ImageRecipe
    input: str
    datatype: str
    batched: bool
    one_dimension_less: bool
    output: str
    ranked: tuple[str, ...]
    pictures_per_request: int

    @classmethod
    def of(cls, config: Mapping[str, Any], metadata: Mapping[str, Any]) -> Self:
        """Read the task from the server's configuration and metadata of a model.

        Raises:
            BadRequest: the model takes no pictures; the message says what its configuration lacks.
            ConfigError: the `preprocess` section is wrong.
            ModelFailed: the server's response lacks a field.
        """
        try:
            return cls._read(config, metadata)
        except (KeyError, TypeError, AttributeError) as error:
            raise ModelFailed(
                f"the server's metadata or configuration of the model lack a field: {type(error).__name__} {error}"
            ) from error

    @classmethod
    def _read(cls, config: Mapping[str, Any], metadata: Mapping[str, Any]) -> Self:
        model: str = metadata["name"]
        recipe = ImageRecipe.from_parameters(config.get("parameters") or {}, f"the server's configuration of '{model}'")
        if recipe is None:
            raise BadRequest(
                f"model '{model}' has no preprocessing for pictures: add a `preprocess` section to its "
                f"config.yaml (`headrace.preprocess.*` parameters to a config.pbtxt), or send tensors with --raw FILE.npz"
            )
        inputs = {tensor["name"]: tensor for tensor in metadata["inputs"]}
        name = recipe.input or next(iter(inputs))
        if name not in inputs or (len(inputs) > 1 and not recipe.input):
            raise BadRequest(
                f"model '{model}' has the inputs {', '.join(inputs)}: its `preprocess.input` must name the one that takes "
                f"the picture{f', {recipe.input!r} is none of them' if recipe.input else ''}"
            )
        datatype: str = inputs[name]["datatype"]
        if datatype not in _PIXEL_TYPES:
            raise BadRequest(
                f"input '{name}' of '{model}' is {datatype}; pictures go to one of {', '.join(_PIXEL_TYPES)}"
            )
        labelled = [output["name"] for output in config.get("output", []) if output.get("label_filename")]
        max_batch_size = int(config.get("max_batch_size") or 0)
        return cls(
            model=model,
            recipe=recipe,
            input=name,
            datatype=datatype,
            batched=max_batch_size > 0,
            one_dimension_less=max_batch_size == 0 and len(inputs[name].get("shape", ())) == 3,
            output=labelled[0] if labelled else metadata["outputs"][0]["name"],
            ranked=_ranked_outputs(config.get("parameters") or {}, [tensor["name"] for tensor in metadata["outputs"]]),
            pictures_per_request=max(max_batch_size, 1),
        )

    def requests(self, pictures: int) -> int:
        """Number of requests for `pictures` pictures."""
        return -(-pictures // self.pictures_per_request)


def classify(client: InferClient, task: PictureTask, files: Sequence[str], top: int, version: str) -> list[Classified]:
    """Classify pictures and return the best classes of each, in the order of the files.

    Args:
        client: connection to the server.
        task: input and output of the model.
        files: paths of pictures.
        top: number of classes for each picture.
        version: version of the model; "" lets the server choose.

    Raises:
        BadRequest: a file cannot be read or is no picture; the message names it.
        HeadraceError: the server returns an error.
    """
    results: list[Classified] = []
    for start in range(0, len(files), task.pictures_per_request):
        batch = files[start : start + task.pictures_per_request]
        tensor = np.concatenate([picture_tensor(file, task) for file in batch])
        if task.one_dimension_less:
            tensor = tensor[0]
        if task.ranked:
            outputs = client.infer(task.model, {task.input: tensor}, version, dict.fromkeys(task.ranked, 0))
            results += _read_ranks(batch, [outputs.get(name) for name in task.ranked], top)
            continue
        outputs = client.infer(task.model, {task.input: tensor}, version, {task.output: top})
        lines = outputs.get(task.output)
        if lines is None or lines.dtype != object or (task.batched and lines.shape[:1] != (len(batch),)):
            raise ModelFailed(
                f"the server did not classify output '{task.output}': does it offer the classification extension?"
            )
        for file, row in zip(batch, lines.reshape(len(batch), -1).tolist(), strict=True):
            results.append(Classified(file, [_ranked(line) for line in row]))
    return results


def server_time_ns(before: tuple[int, int] | None, after: tuple[int, int] | None, requests: int) -> int | None:
    """Time that the server spent on our requests, from its statistics before and after them.

    Args:
        before, after: number of successful requests and their total time in ns; None from a server without statistics.
        requests: number of requests sent in between.

    Returns:
        Nanoseconds; None without statistics, or if the server had other requests meanwhile.
    """
    if before is None or after is None or after[0] - before[0] != requests:
        return None
    return after[1] - before[1]


def picture_tensor(file: str, task: PictureTask) -> AnyArray:
    """Read a picture as the tensor of a request, with a batch dimension of 1.

    Raises:
        BadRequest: the file cannot be read or is no picture.
    """
    # Imported here, so that commands without pictures do not load Pillow.
    from headrace.inference.pipelines.image import decode, prepare, to_pixels

    try:
        image = decode(Path(file).read_bytes())
        if task.recipe.by == "server":
            return to_pixels(image, task.recipe)
        pixels = prepare(image, task.recipe)
    except OSError as error:
        raise BadRequest(f"{file}: cannot be read: {error.strerror or error}") from None
    except BadRequest as error:
        raise type(error)(f"{file}: {error}") from None
    if task.datatype == "UINT8":
        return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
    return pixels.astype(_PIXEL_TYPES[task.datatype], copy=False)


def _ranked_outputs(parameters: Mapping[str, Any], output_names: Sequence[str]) -> tuple[str, ...]:
    """Names of the `postprocess` outputs in the model's parameters; empty if the server does not rank."""
    prefix = "headrace.postprocess."
    settings = {
        name.removeprefix(prefix): parameter_value(parameter.get("string_value", ""))
        for name, parameter in parameters.items()
        if name.startswith(prefix)
    }
    if int(settings.get("top_k", 0)) == 0:
        return ()
    names = [str(settings.get(field, field)) for field in ("scores", "classes", "labels")]
    return tuple(name for name in names if name in output_names)


def _read_ranks(files: Sequence[str], outputs: Sequence[AnyArray | None], top: int) -> list[Classified]:
    """Classes ranked by the server; `outputs` are scores, classes and optionally labels, one row for each picture."""
    if len(outputs) < 2 or any(output is None or output.size % len(files) for output in outputs):
        raise ModelFailed(
            "the server's response lacks a row of scores and classes for every picture: check the outputs of `postprocess`"
        )
    scores, classes, *labels = [
        output.reshape(len(files), -1)[:, :top].tolist() for output in outputs if output is not None
    ]
    results = []
    for number, file in enumerate(files):
        names = [text.decode("utf-8", "replace") for text in labels[0][number]] if labels else [""] * top
        ranks = zip(scores[number], classes[number], names, strict=False)
        results.append(Classified(file, [RankedClass(score, index, name) for score, index, name in ranks]))
    return results


def _ranked(line: bytes) -> RankedClass:
    """Parse one element of the classification extension: b"score:index" or b"score:index:label"."""
    score, _, rest = line.decode("utf-8", "replace").partition(":")
    index, _, label = rest.partition(":")
    try:
        return RankedClass(float(score), int(index), label)
    except ValueError:
        raise ModelFailed(
            f"the server's response has {line[:64]!r}, expected score:index:label: check its classification extension"
        ) from None


_EIGHTHS = " ▏▎▍▌▋▊▉"
_MAX_BAR, _MIN_BAR = 40, 4
_MAX_LABEL = 40
_FIRST_VALUES = 4


def print_classes(console: Console, results: Sequence[Classified]) -> None:
    """Print each picture's file name and its classes, each with a bar.

    Scores between 0 and 1 that add up to at most 1 are probabilities: they are printed in percent, with bars from 0
    to 1. Other scores are printed as they are, with bars in proportion to the picture's best score.
    """
    percent = all(_are_probabilities([c.score for c in result.classes]) for result in results)
    for result in results:
        console.print(Text(_fit_encoding(console, printable(result.file)), style="bold"), soft_wrap=True)
        ratios = [c.score for c in result.classes] if percent else _ratios([c.score for c in result.classes])
        scores = [f"{c.score:.1%}" if percent else f"{c.score:.3f}" for c in result.classes]
        for line in _lines(console, [_label(console, c) for c in result.classes], scores, ratios):
            console.print(line, no_wrap=True, overflow="crop")


def print_times(console: Console, pictures: int, requests: int, total_ns: int, server_ns: int | None) -> None:
    """Print one line with the number of requests and their duration.

    Args:
        console: output.
        pictures: number of pictures, 0 if tensors were sent.
        requests: number of requests.
        total_ns: time from the first request to the last response, preprocessing included.
        server_ns: part of it that the server needed; None if unknown.
    """
    count = f"{plural(pictures, 'picture')} in " if pictures else ""
    server = "" if server_ns is None else f", {server_ns / NS_PER_MS:.1f} ms of it in the server"
    console.print(
        Text(f"{count}{plural(requests, 'request')}: {total_ns / NS_PER_MS:.1f} ms{server}", style="dim"),
        soft_wrap=True,
    )


def print_tensors(console: Console, outputs: Mapping[str, AnyArray], datatypes: Mapping[str, str]) -> None:
    """Print datatype, shape, range and first values of every output.

    Args:
        console: output.
        outputs: arrays by name.
        datatypes: the protocol's datatype of each output.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("output", "datatype", "shape", "min", "mean", "max", "first values"):
        table.add_column(title, overflow="fold")
    for name, array in outputs.items():
        datatype = datatypes[name]
        if datatype == "BF16":  # NumPy's min, mean and max do not support BF16
            array = array.astype(np.float32)
        numbers = array.astype(np.float64) if array.size and array.dtype.kind in "fiub" else None
        figures = () if numbers is None else (np.min(numbers), np.mean(numbers), np.max(numbers))
        spread = [f"{figure:.6g}" for figure in figures] or ["", "", ""]
        first = " ".join(_value(value) for value in array.ravel()[:_FIRST_VALUES].tolist())
        ellipsis = " ..." if array.size > _FIRST_VALUES else ""
        cells = [printable(name), datatype, str(list(array.shape)), *spread, first + ellipsis]
        table.add_row(*(Text(_fit_encoding(console, cell)) for cell in cells))
    console.print(table)


def tensor_as_json(array: AnyArray, datatype: str) -> dict[str, Any]:
    """Output as JSON: datatype, shape, and its elements as a flat list; bytes as text, BF16 as bit patterns."""
    elements = (array.view(np.uint16) if datatype == "BF16" else array).ravel().tolist()
    if array.dtype == object:
        elements = [element.decode("utf-8", "replace") for element in elements]
    return {"datatype": datatype, "shape": list(array.shape), "data": elements}


def bar(ratio: float, width: int, ascii_only: bool = False) -> str:
    """Draw a bar of `ratio` of `width` cells, to an eighth of a cell, padded with blanks."""
    ratio = min(max(ratio, 0.0), 1.0) if math.isfinite(ratio) else 0.0
    if ascii_only:
        return ("#" * round(ratio * width)).ljust(width)
    full, eighths = divmod(round(ratio * width * 8), 8)
    return ("█" * full + _EIGHTHS[eighths].strip()).ljust(width)


def _lines(console: Console, labels: list[str], scores: list[str], ratios: list[float]) -> list[Text]:
    """Lines "  label  bar  score" that fit the console; on a narrow console the bar is shortened first."""
    score_width = max((len(score) for score in scores), default=0)
    room = console.width - 2 - 1 - score_width
    label_width = min(max((cell_len(label) for label in labels), default=0), _MAX_LABEL)
    bar_width = min(room - label_width - 1, _MAX_BAR)
    if bar_width < _MIN_BAR:
        bar_width = _MIN_BAR if room >= 3 * _MIN_BAR else 0
        label_width = min(label_width, max(room - bar_width - (1 if bar_width else 0), 1))
    ascii_only = console.options.ascii_only
    lines: list[Text] = []
    for label, score, ratio in zip(labels, scores, ratios, strict=True):
        name = Text(label)
        name.truncate(label_width, overflow="crop" if ascii_only else "ellipsis", pad=True)
        drawn = Text(bar(ratio, bar_width, ascii_only) + " " if bar_width else "", style="cyan")
        lines.append(Text.assemble("  ", name, " ", drawn, score.rjust(score_width)))
    return lines


def _label(console: Console, ranked: RankedClass) -> str:
    return _fit_encoding(console, printable(ranked.label or f"class {ranked.index}"))


def _fit_encoding(console: Console, text: str) -> str:
    """Replace characters that the terminal's or pipe's encoding lacks by "?"."""
    return text.encode(console.encoding, "replace").decode(console.encoding)


def _are_probabilities(scores: Sequence[float]) -> bool:
    return all(0.0 <= score <= 1.0 for score in scores) and sum(scores) <= 1.0001


def _ratios(scores: Sequence[float]) -> list[float]:
    """Ratio of each score to the best one; of negative scores the best is the one closest to 0."""
    best = max(scores, default=0.0)
    if best > 0:
        return [score / best for score in scores]
    return [best / score if score else 1.0 for score in scores]


def _value(value: object) -> str:
    if isinstance(value, bytes):
        return repr(value.decode("utf-8", "replace"))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_seconds = number_parser(float, lambda number: 0 < number < 1e6, "is not a number of seconds over 0")


def add_arguments(
    parser: argparse.ArgumentParser, api_key: str = "", address: connection.ServerAddress = connection.DEFAULT_ADDRESS
) -> None:
    """Declare the command's options; `api_key` is the value of HEADRACE_API_KEY, `address` that of the server."""
    add = parser.add_argument
    add("model", help="name of the model")
    add("files", nargs="*", metavar="PICTURE", help="pictures to classify: JPEG, PNG, WebP, GIF, BMP, TIFF")
    text = "the server's gRPC address (%(default)s); grpcs://HOST:PORT for TLS"
    add("--url", default=address.grpc_target, metavar="ADDRESS", help=text)
    add("--model-version", default="", metavar="N", help="version of the model (the one the server chooses)")
    add("--top", type=positive_count, default=5, metavar="N", help="best labels to print for a picture (%(default)s)")
    add("--timeout", type=_seconds, default=60.0, metavar="S", help="seconds to wait for an answer (%(default)g)")
    add("--raw", type=Path, metavar="FILE.npz", help="send the named arrays of this file instead of pictures")
    add("--json-input", type=Path, metavar="FILE.json", help='send {"inputs": [...]} of this file instead of pictures')
    add("--json", action="store_true", help="print JSON")
    connection.add_arguments(parser, api_key)


def main(args: argparse.Namespace, console: Console | None = None, errors: Console | None = None) -> int:
    """Classify pictures, or send tensors, and print the results.

    Args:
        args: options of `add_arguments`.
        console: output of the results; None uses standard output.
        errors: output of an error; None uses standard error.

    Returns:
        0; 1 if the server or a file failed; 2 if the arguments do not fit together.
    """
    console = console or open_console(highlight=False)
    errors = errors or open_console(stderr=True, highlight=False)
    if (bool(args.files), args.raw is not None, args.json_input is not None).count(True) != 1:
        _complain(errors, "give pictures, or --raw FILE.npz, or --json-input FILE.json: exactly one of them")
        return 2
    # tritonclient takes 0.3 s to import: only this command pays for it.
    from headrace.server.commands.infer_client import InferClient

    try:
        options = connection.ConnectionOptions.from_arguments(args)
        client = InferClient(args.url, args.timeout, options)
        if client.warning:
            errors.print(Text.assemble(("warning: ", "yellow"), printable(client.warning)), soft_wrap=True)
        with client:
            if args.files:
                _classify(client, args, console)
            else:
                _send_tensors(client, args, console)
    except HeadraceError as error:
        _complain(errors, str(error))
        return 1
    return 0


def _classify(client: InferClient, args: argparse.Namespace, console: Console) -> None:
    model, version, files = args.model, args.model_version, args.files
    start_ns = time.monotonic_ns()
    task = PictureTask.of(client.config(model, version), client.metadata(model, version))
    before = client.successes(model, version)
    results = classify(client, task, files, args.top, version)
    server_ns = server_time_ns(before, client.successes(model, version), task.requests(len(files)))
    total_ns = time.monotonic_ns() - start_ns
    if args.json:
        document = {
            "model": model,
            "results": [{"file": r.file, "classes": [asdict(c) for c in r.classes]} for r in results],
            "total_ms": total_ns / NS_PER_MS,
            "server_ms": None if server_ns is None else server_ns / NS_PER_MS,
        }
        _print_json(console, document)
        return
    print_classes(console, results)
    print_times(console, len(files), task.requests(len(files)), total_ns, server_ns)


def _send_tensors(client: InferClient, args: argparse.Namespace, console: Console) -> None:
    from headrace.server.commands.infer_client import bfloat16_inputs, datatype_of, read_npz
    from headrace.wire.http.request_file import read_json

    metadata = client.metadata(args.model, args.model_version)
    if args.raw is not None:
        inputs = read_npz(args.raw)
        datatypes = {tensor.get("name"): tensor.get("datatype") for tensor in metadata.get("inputs", [])}
    else:
        tensors = read_json(args.json_input)
        inputs = {spec.name: array for spec, array in tensors}
        datatypes = {spec.name: spec.datatype.name for spec, _ in tensors}
    inputs = bfloat16_inputs(datatypes, inputs)
    start_ns = time.monotonic_ns()
    outputs = client.infer(args.model, inputs, args.model_version)
    total_ns = time.monotonic_ns() - start_ns
    datatypes = {name: datatype_of(array, name) for name, array in outputs.items()}
    if args.json:
        plain = {name: tensor_as_json(array, datatypes[name]) for name, array in outputs.items()}
        _print_json(console, {"model": args.model, "outputs": plain})
        return
    print_tensors(console, outputs, datatypes)
    print_times(console, 0, 1, total_ns, None)


def _print_json(console: Console, value: object) -> None:
    console.print(printable_json(orjson.dumps(value).decode()), markup=False, soft_wrap=True)


def _complain(errors: Console, message: str) -> None:
    errors.print(Text.assemble(("headrace infer: ", "bold red"), printable(message)), soft_wrap=True)
