"""Classifying pictures: the model's own recipe turns them into tensors, the classification extension names what is on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from headrace.commands.tensor_files import AnyArray
from headrace.core.errors import BadRequest, ModelFailed
from headrace.pipelines.recipe import ImageRecipe, parameter_value

# What a recipe's floats can be sent as.
_PIXEL_TYPES = {"FP32": np.float32, "FP16": np.float16, "UINT8": np.uint8}


class Client(Protocol):
    """A client of one server; see `headrace.commands.infer_client.InferClient`."""

    def infer(
        self, model: str, inputs: Mapping[str, AnyArray], version: str = "", outputs: Mapping[str, int] | None = None
    ) -> dict[str, AnyArray]:
        """Run a model; `outputs` has the number of classes to return, 0 for the tensor itself."""


@dataclass(frozen=True, slots=True)
class RankedClass:
    """One class of a picture.

    Attributes:
        score: what the model gave, a probability or not.
        index: of the class.
        label: its name, empty if the server has none.
    """

    score: float
    index: int
    label: str


@dataclass(frozen=True, slots=True)
class Classified:
    """A picture's best classes, best first."""

    file: str
    classes: list[RankedClass]


@dataclass(frozen=True, slots=True)
class PictureTask:
    """How one model takes pictures and names classes.

    Attributes:
        model: its name.
        recipe: how a picture becomes a tensor.
        input, datatype: of the tensor.
        batched: True if the tensor's first dimension is the batch; several pictures then share a request.
        one_dimension_less: True if the model takes a picture without a batch dimension of 1.
        output: the scores.
        ranked: names of the outputs with scores, classes and, where they have names, labels, if the server ranks them itself.
        pictures_per_request: at most.
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
        """Read it from the server's answers.

        Raises:
            BadRequest: the model takes no pictures; says what its configuration lacks.
            ConfigError: its recipe is wrong.
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
                f"model '{model}' does not say how a picture becomes its input: add a `preprocess` section to its "
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
        """How many requests so many pictures take."""
        return -(-pictures // self.pictures_per_request)


def classify(client: Client, task: PictureTask, files: Sequence[str], top: int, version: str = "") -> list[Classified]:
    """The best classes of every picture, in the order of the files.

    Args:
        client: of the server.
        task: of the model.
        files: paths of pictures.
        top: how many classes for each.
        version: of the model.

    Raises:
        BadRequest: a file cannot be read, or is no picture; names it.
        HeadraceError: the server refused or failed.
    """
    found: list[Classified] = []
    for start in range(0, len(files), task.pictures_per_request):
        some = files[start : start + task.pictures_per_request]
        tensor = np.concatenate([_tensor(file, task) for file in some])
        if task.one_dimension_less:
            tensor = tensor[0]
        if task.ranked:
            outputs = client.infer(task.model, {task.input: tensor}, version, dict.fromkeys(task.ranked, 0))
            found += _read_ranks(some, [outputs.get(name) for name in task.ranked], top)
            continue
        outputs = client.infer(task.model, {task.input: tensor}, version, {task.output: top})
        lines = outputs.get(task.output)
        if lines is None or lines.dtype != object or (task.batched and lines.shape[:1] != (len(some),)):
            raise ModelFailed(
                f"the server did not classify output '{task.output}': does it offer the classification extension?"
            )
        for file, row in zip(some, lines.reshape(len(some), -1).tolist(), strict=True):
            found.append(Classified(file, [_ranked(line) for line in row]))
    return found


def server_time_ns(before: tuple[int, int] | None, after: tuple[int, int] | None, requests: int) -> int | None:
    """Time that the server spent on our requests, by its statistics before and after them.

    Args:
        before, after: number of successful requests and their time in ns; None from a server without statistics.
        requests: how many were sent in between.

    Returns:
        Nanoseconds, or None if there are no statistics or the server had other requests meanwhile.
    """
    if before is None or after is None or after[0] - before[0] != requests:
        return None
    return after[1] - before[1]


def _tensor(file: str, task: PictureTask) -> AnyArray:
    # Pillow is loaded where a picture is, not by every `headrace serve`.
    from headrace.pipelines.image import decode, prepare, to_pixels

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


def _ranked_outputs(parameters: Mapping[str, Any], offered: Sequence[str]) -> tuple[str, ...]:
    """The outputs of `postprocess` by the model's parameters, none where the server does not rank."""
    prefix = "headrace.postprocess."
    told = {
        name.removeprefix(prefix): parameter_value(parameter.get("string_value", ""))
        for name, parameter in parameters.items()
        if name.startswith(prefix)
    }
    if int(told.get("top_k", 0)) == 0:
        return ()
    names = [str(told.get(field, field)) for field in ("scores", "classes", "labels")]
    return tuple(name for name in names if name in offered)


def _read_ranks(files: Sequence[str], outputs: Sequence[AnyArray | None], top: int) -> list[Classified]:
    """The classes that a server has ranked; `outputs` are scores, classes and perhaps labels, a row a picture."""
    if len(outputs) < 2 or any(output is None or output.size % len(files) for output in outputs):
        raise ModelFailed("the server's answer has no row of scores and classes for every picture")
    scores, classes, *labels = [
        output.reshape(len(files), -1)[:, :top].tolist() for output in outputs if output is not None
    ]
    found = []
    for number, file in enumerate(files):
        names = [text.decode("utf-8", "replace") for text in labels[0][number]] if labels else [""] * top
        ranks = zip(scores[number], classes[number], names, strict=False)
        found.append(Classified(file, [RankedClass(score, index, name) for score, index, name in ranks]))
    return found


def _ranked(line: bytes) -> RankedClass:
    """One element of the classification extension: b"score:index" or b"score:index:label"."""
    score, _, rest = line.decode("utf-8", "replace").partition(":")
    index, _, label = rest.partition(":")
    try:
        return RankedClass(float(score), int(index), label)
    except ValueError:
        raise ModelFailed(f"the server's answer {line[:64]!r} is no score:index:label") from None
