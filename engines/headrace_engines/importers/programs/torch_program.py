"""PyTorch models to ONNX by `torch.onnx.export(dynamo=True)`: a factory in a Python file, an exported program, or torchvision."""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .exchange import MAX_INLINE_BYTES, ImportFault, Json, Report, Source, load_file, statistics, users_line

_DOWNLOAD_LIMIT_S = 30
# The exporter treats a size of 1 as fixed.
_BATCH = 2
SEED = 5
# Parameters below have no visible effect: layer scales begin at 1e-6 to 1e-5.
_SMALL = 1e-4


def open_source(request: Json, report: Report) -> Source:
    """Return the model of a request: "form" is "factory", "program" or "torchvision".

    Raises:
        ImportFault: there is no such model, or it cannot be loaded.
    """
    torch.manual_seed(SEED)
    report(0.05, "loads the model")
    if request["form"] == "torchvision":
        return _torchvision(request, report)
    if request["form"] == "program":
        return _program(request)
    return _factory(request)


class ModuleSource(Source):
    """A module and its example inputs.

    Args:
        module: the model, a `torch.nn.Module` or an exported program.
        examples: example tensors by input name, in the order of the call.
        keywords: names of the inputs that are passed by keyword.
        request: the request.
        facts: other entries of the description.
    """

    def __init__(
        self, module: Any, examples: dict[str, torch.Tensor], keywords: list[str], request: Json, facts: Json
    ) -> None:
        self._module = module
        self._request = request
        self._facts = facts
        self._keywords = keywords
        self._parameters = list(examples)
        names = request["input_names"] or self._parameters
        if len(names) != len(self._parameters):
            fault = f"--input-names has {len(names)} names, the model has {len(self._parameters)} inputs"
            raise ImportFault(f"{fault} ({', '.join(self._parameters)})", "name each input once, in this order")
        self._names: list[str] = list(names)
        self._examples = dict(zip(self._names, examples.values()))
        self._outputs: list[str] = []

    def export(self, path: str, report: Report) -> Json:
        """Write the ONNX file and return the description."""
        report(0.2, "runs the model once")
        examples = self._batched_examples()
        bf16 = [name for name, tensor in self._examples.items() if tensor.dtype == torch.bfloat16]
        if bf16:
            fault = f"input {bf16[0]} is BF16, which NumPy and the comparison do not have"
            raise ImportFault(
                fault, "import the model in FP32 (model.float()), and build it with headrace build --precision bf16"
            )
        outputs = flatten(self._call(list(examples.values())))
        self._outputs = self._output_names(list(outputs))
        stats = {name: statistics(tensor.numpy()) for name, tensor in self._examples.items()}
        report(0.3, "exports to ONNX")
        program = self._convert(examples)
        report(0.8, "writes the file")
        program.save(path, external_data=self._size_bytes() > MAX_INLINE_BYTES)
        return {
            "framework": f"torch {_version(torch)}",
            "inputs": [{"name": n, "dims": list(t.shape), **stats[n]} for n, t in examples.items()],
            "outputs": [{"name": name} for name in self._outputs],
            **self._facts,
        }

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the model in evaluation mode and return its outputs by name."""
        tensors = [torch.from_numpy(np.ascontiguousarray(inputs[name])) for name in self._names]
        values = flatten(self._call(tensors)).values()
        return {name: value.detach().numpy() for name, value in zip(self._outputs, values)}

    def _call(self, tensors: list[torch.Tensor]) -> Any:
        positional = [t for t, name in zip(tensors, self._parameters) if name not in self._keywords]
        keywords = {name: t for t, name in zip(tensors, self._parameters) if name in self._keywords}
        with torch.no_grad():
            return self._module(*positional, **keywords)

    def _convert(self, examples: dict[str, torch.Tensor]) -> Any:
        return torch.onnx.export(
            Adapter(self._module, self._parameters, self._keywords).eval(),
            tuple(examples.values()),
            dynamo=True,
            input_names=self._names,
            output_names=self._outputs,
            opset_version=self._request["opset"],
            dynamic_shapes=self._dynamic_shapes(examples),
            verbose=False,
        )

    def _size_bytes(self) -> int:
        tensors = [*self._module.parameters(), *self._module.buffers()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _dynamic_shapes(self, examples: Mapping[str, torch.Tensor]) -> Any:
        sizes: dict[str, Any] = {}
        shapes: list[dict[int, Any]] = []
        for parameter, name in zip(self._parameters, examples):
            free = self._free_dimensions(parameter, name)
            if self._request["dynamic_batch"]:
                free[0] = "batch"
            shapes.append({axis: sizes.setdefault(word, torch.export.Dim(word)) for axis, word in free.items()})
        return (tuple(shapes),) if any(shapes) else None

    def _free_dimensions(self, parameter: str, name: str) -> dict[int, str]:
        shape = self._request["shapes"].get(name) or self._request["shapes"].get(parameter) or []
        return {axis: word for axis, (word, _) in enumerate(shape) if word}

    def _batched_examples(self) -> dict[str, torch.Tensor]:
        """Return the examples; for a dynamic batch with at least two rows, as many in each."""
        if not self._request["dynamic_batch"]:
            return self._examples
        rows = {name: t.shape[0] if t.ndim else None for name, t in self._examples.items()}
        if len(set(rows.values())) != 1 or None in rows.values():
            text = ", ".join(f"{name} {list(self._examples[name].shape)}" for name in rows)
            fault = f"the inputs have no common first dimension, the batch ({text})"
            raise ImportFault(fault, "give the examples one batch dimension, or write --static-batch")
        (count,) = set(rows.values())
        if count is not None and count >= _BATCH:
            return self._examples
        return {name: torch.cat([tensor] * _BATCH) for name, tensor in self._examples.items()}

    def _output_names(self, names: list[str]) -> list[str]:
        chosen = self._request["output_names"] or names
        if len(chosen) != len(names):
            fault = f"--output-names has {len(chosen)} names, the model has {len(names)} outputs ({', '.join(names)})"
            raise ImportFault(fault, "name each output once, in this order")
        # A graph has one tensor of a name.
        return [f"{name}_output" if name in self._names else name for name in chosen]


class Adapter(torch.nn.Module):  # type: ignore[misc]
    """Calls a module with positional tensors and returns its outputs as a flat tuple.

    Args:
        module: the model.
        parameters: names of its arguments, in order.
        keywords: those that are passed by keyword.
    """

    def __init__(self, module: Any, parameters: list[str], keywords: list[str]) -> None:
        super().__init__()
        self.module = module
        self.parameter_names = parameters
        self.keyword_names = keywords

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the module."""
        positional = [t for t, name in zip(tensors, self.parameter_names) if name not in self.keyword_names]
        keywords = {name: t for t, name in zip(tensors, self.parameter_names) if name in self.keyword_names}
        return tuple(flatten(self.module(*positional, **keywords)).values())


class ProgramSource(ModuleSource):
    """An exported program (.pt2): its own dynamic dimensions count."""

    def __init__(self, program: Any, examples: dict[str, torch.Tensor], keywords: list[str], request: Json) -> None:
        super().__init__(program.module(), examples, keywords, request, {"notes": []})
        self._program = program

    def _batched_examples(self) -> dict[str, torch.Tensor]:
        return self._examples

    def _convert(self, examples: dict[str, torch.Tensor]) -> Any:
        del examples
        return torch.onnx.export(
            self._program,
            dynamo=True,
            input_names=self._names,
            output_names=self._outputs,
            opset_version=self._request["opset"],
            verbose=False,
        )

    def _size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._program.state_dict.values())


def flatten(value: Any, name: str = "output") -> dict[str, torch.Tensor]:
    """Return the tensors of a model's result by name: keys of mappings, fields of named tuples, numbers; None is left out.

    Raises:
        ImportFault: the result has something else.
    """
    if isinstance(value, torch.Tensor):
        return {name: value}
    if value is None:
        return {}
    if isinstance(value, Mapping):
        parts = {str(key): part for key, part in value.items()}
    elif hasattr(value, "_fields"):
        parts = dict(zip(value._fields, value))
    elif isinstance(value, (list, tuple)):
        parts = {name: value[0]} if len(value) == 1 else {f"{name}_{i}": part for i, part in enumerate(value)}
    else:
        fault = f"the model returns a {type(value).__name__} in its result"
        raise ImportFault(fault, "return tensors, or tuples, lists and mappings of tensors")
    result: dict[str, torch.Tensor] = {}
    for key, part in parts.items():
        for inner, tensor in flatten(part, key).items():
            result[inner if inner not in result else f"{key}_{inner}"] = tensor
    return result


def _version(module: Any) -> str:
    """Return a version without the platform that it was built for."""
    return str(module.__version__).partition("+")[0]


# A factory in a file


def _factory(request: Json) -> Source:
    path, function = request["path"], request["function"]
    file = os.path.basename(path)
    module = load_file(path)
    factory = getattr(module, function, None)
    if not callable(factory):
        there = ", ".join(name for name, value in vars(module).items() if inspect.isfunction(value)) or "none"
        fault = f"{file} has no function {function} (functions there: {there})"
        raise ImportFault(fault, f"write {file}:FUNCTION with a function that returns the model")
    try:
        made = factory()
    except BaseException as error:
        place = users_line(error, path)
        where = f" ({place})" if place else ""
        fault = f"{file}:{function}() fails: {type(error).__name__}: {error}{where}"
        raise ImportFault(fault, "correct the function; it is called without arguments") from error
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if isinstance(model, torch.export.ExportedProgram):
        return _exported_program(model, request)
    if not isinstance(model, torch.nn.Module):
        fault = f"{file}:{function}() returns a {type(model).__name__}, not a torch.nn.Module"
        raise ImportFault(fault, "return the model, or the model and its example inputs")
    if isinstance(model, torch.jit.ScriptModule):
        fault = f"{file}:{function}() returns a TorchScript module, which this exporter does not take"
        raise ImportFault(fault, "return the Python module that it was made of")
    model.eval()
    for candidate in (given, getattr(model, "example_inputs", None), getattr(model, "example_input_array", None)):
        if candidate is not None:
            given = candidate
            break
    examples, keywords = _examples(model, given, request)
    return ModuleSource(model, examples, keywords, request, {})


def _examples(model: torch.nn.Module, given: Any, request: Json) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return example tensors by parameter of `forward`, and the parameters that are passed by keyword."""
    parameters = inspect.signature(model.forward).parameters.values()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in parameters if p.name in positional and p.default is p.empty]
    keywords: list[str] = []
    examples: dict[str, torch.Tensor] = {}
    if isinstance(given, Mapping):
        examples = {str(name): value for name, value in given.items()}
        keywords = list(examples)
    elif given is not None:
        tensors = list(given) if isinstance(given, (list, tuple)) else [given]
        names = positional + [f"input_{number}" for number in range(len(positional), len(tensors))]
        examples = dict(zip(names, tensors))
    wrong = [name for name, value in examples.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        fault = f"the example of {wrong[0]} is a {type(examples[wrong[0]]).__name__}, not a tensor"
        raise ImportFault(fault, "give tensors; wrap the model in a module that fills in other arguments")
    return _with_shapes(model, examples, keywords, required, positional, request)


def _with_shapes(
    model: torch.nn.Module,
    examples: dict[str, torch.Tensor],
    keywords: list[str],
    required: list[str],
    positional: list[str],
    request: Json,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Add and replace examples by the shapes of the command line."""
    shapes = request["shapes"]
    renamed = dict(zip(request["input_names"] or (), list(examples) or required))
    names = {renamed.get(name, name): name for name in shapes}
    unknown = [name for parameter, name in names.items() if parameter not in (*examples, *positional)]
    if unknown:
        known = ", ".join(dict.fromkeys([*examples, *positional])) or "none"
        fault = f"--input-shape names {', '.join(unknown)}, the inputs are {known}"
        raise ImportFault(fault, "write one of these names")
    floating = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)
    for parameter in [p for p in dict.fromkeys([*examples, *positional]) if p in names]:
        size = [number for _, number in shapes[names[parameter]]]
        word = request["dtypes"].get(names[parameter], "")
        present = examples.get(parameter)
        dtype = getattr(torch, word) if word else present.dtype if present is not None else floating
        if not examples or parameter not in examples:
            keywords.append(parameter)
        examples[parameter] = random_tensor(size, dtype)
    missing = [name for name in required if name not in examples]
    if missing or not examples:
        text = ", ".join(missing) or "its inputs"
        cure = (
            "return (model, example_inputs) from the function, or write --input-shape NAME=1,3,224,224 for each input"
        )
        raise ImportFault(f"the shape of {text} is not known", cure)
    return examples, keywords


def random_tensor(size: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return standard normal floats, or integers 0 and 1, which are valid as indices and as masks."""
    if dtype.is_floating_point:
        return torch.randn(size).to(dtype)
    return torch.randint(0, 2, size).to(dtype)


# An exported program


def _program(request: Json) -> Source:
    path = request["path"]
    file = os.path.basename(path)
    try:
        program = torch.export.load(path)
    except Exception as error:
        fault = f"{file} is no exported program of torch.export.save: {type(error).__name__}: {str(error)[:300]}"
        cure = "save it with torch.export.save(torch.export.export(model, args), PATH); for weights alone write FILE.py:factory"
        raise ImportFault(fault, cure) from error
    return _exported_program(program, request)


def _exported_program(program: Any, request: Json) -> Source:
    if request["shapes"]:
        fault = "an exported program has the shapes that it was exported with, and --input-shape is given"
        raise ImportFault(fault, "leave --input-shape out, or export the program with other shapes")
    training = sorted({str(n.target) for n in program.graph.nodes if n.op == "call_function" and _trains(n)})
    if training:
        fault = f"the program was exported in training mode ({', '.join(training)})"
        raise ImportFault(fault, "call model.eval() before torch.export.export, and save it again")
    if program.example_inputs is None:
        raise ImportFault(
            "the program has no example inputs", "save it with the torch.export.save of PyTorch 2.6 or later"
        )
    args, kwargs = program.example_inputs
    names = [str(name) for name in program.graph_signature.user_inputs]
    values = [*args, *kwargs.values()]
    if len(values) != len(names) or not all(isinstance(value, torch.Tensor) for value in values):
        fault = "the program takes arguments that are no tensors"
        raise ImportFault(fault, "export a module whose forward takes tensors only")
    names = [*names[: len(args)], *kwargs]
    return ProgramSource(program, dict(zip(names, values)), list(kwargs), request)


def _trains(node: Any) -> bool:
    """Return whether a node is a dropout or a batch normalisation in training mode."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    names = [argument.name for argument in schema.arguments]
    values = {**dict(zip(names, node.args)), **node.kwargs}
    is_dropout = "dropout" in str(node.target) and values.get("train") is True
    return is_dropout or ("batch_norm" in str(node.target) and values.get("training") is True)


# torchvision


def _torchvision(request: Json, report: Report) -> Source:
    import torchvision
    from torchvision.models import get_model_weights, list_models

    name = request["model"]
    if name not in list_models():
        import difflib

        close = difflib.get_close_matches(name, list_models(), 3)
        guess = f"did you mean {' or '.join(close)}?" if close else "torchvision.models.list_models() has the names"
        raise ImportFault(f"torchvision {_version(torchvision)} has no model {name}", guess)
    weights = _choose_weights(list(get_model_weights(name)), get_model_weights(name), request["weights"], name)
    report(0.1, "loads the weights")
    model, origin, notes = _load_torchvision(name, weights, request)
    model.eval()
    facts = _vision_facts(weights)
    shape = request["shapes"].get("x") or request["shapes"].get("input")
    size = [number for _, number in shape] if shape else facts.pop("size", None)
    facts.pop("size", None)
    if size is None:
        raise ImportFault(f"the input size of {name} is not known", "write --input-shape input=1,3,224,224")
    request["input_names"] = request["input_names"] or ["input"]
    if origin == "random":
        report(0.15, "scales the random weights")
        scale_weights(model, torch.randn([_BATCH, *size[1:]]))
    described = {
        **facts,
        "notes": notes,
        "weights": origin,
        "framework_model": f"torchvision {_version(torchvision)} {name}",
    }
    return ModuleSource(model, {"input": torch.randn(size)}, [], request, described)


def _choose_weights(members: list[Any], enumeration: Any, word: str, name: str) -> Any:
    if word in ("", "none"):
        return getattr(enumeration, "DEFAULT", None) if members else None
    if word == "DEFAULT" or word in [member.name for member in members]:
        return getattr(enumeration, word)
    there = ", ".join(["none", *(member.name for member in members)])
    raise ImportFault(f"{name} has no weights {word}", f"choose from {there}")


def _load_torchvision(name: str, weights: Any, request: Json) -> tuple[torch.nn.Module, str, list[str]]:
    """Return the model, the name of its weights, and notes."""
    from torchvision.models import get_model

    if weights is not None and request["weights"] != "none":
        socket.setdefaulttimeout(_DOWNLOAD_LIMIT_S)
        try:
            return get_model(name, weights=weights, progress=False), f"{weights}", []
        # The reasons: no network, a refusal, an incomplete file.
        except (OSError, RuntimeError) as error:
            if request["weights"]:
                cure = "connect this machine, put the file into the cache of torch.hub, or leave --weights out for random weights"
                raise ImportFault(f"the weights {weights} cannot be fetched: {error}", cure) from error
            reason = getattr(error, "reason", error)
            note = f"random weights: {weights} cannot be fetched ({reason}). The answers have no meaning."
    else:
        note = "random weights (--weights none). The answers have no meaning."
    torch.manual_seed(SEED)
    # Segmentation models fetch the weights of their backbone otherwise.
    backbone = {"weights_backbone": None} if _takes_backbone(name) else {}
    return get_model(name, weights=None, **backbone), "random", [note]


def scale_weights(model: torch.nn.Module, example: torch.Tensor) -> None:
    """Change random weights so that every layer has an effect on the output, which a comparison then sees.

    Initial weights hide layers: constants, layer scales of 1e-6, and activations that vanish from layer to layer. Constant
    parameters and the statistics of batch normalisation get random values. Weights of convolutions and linear layers are divided
    by the standard deviation of the layer's output, one layer after the other (Mishkin and Matas, "All you need is a good
    init", 2016).

    Args:
        model: the model, in evaluation mode.
        example: input tensor.
    """
    torch.manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.abs().max() < _SMALL or parameter.min() == parameter.max():
                middle = 0.0 if parameter.abs().max() == 0 else 1.0
                parameter.copy_(middle + 0.1 * torch.randn_like(parameter))
        for module in model.modules():
            if getattr(module, "running_var", None) is not None:
                module.running_mean.copy_(0.1 * torch.randn_like(module.running_mean))
                module.running_var.copy_(0.5 + torch.rand_like(module.running_var))

        def divide(module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
            scale = output.std()
            if module in scaled or not scale > 0:
                return output
            scaled.add(module)
            module.weight.div_(scale)
            if module.bias is not None:
                module.bias.div_(scale)
            return output / scale

        scaled: set[Any] = set()
        kinds = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.Linear)
        hooks = [m.register_forward_hook(divide) for m in model.modules() if isinstance(m, kinds)]
        model(example)
        for hook in hooks:
            hook.remove()


def _takes_backbone(name: str) -> bool:
    from torchvision.models import get_model_builder

    return "weights_backbone" in inspect.signature(get_model_builder(name)).parameters


def _vision_facts(weights: Any) -> Json:
    """Return labels, preprocessing and input size of torchvision's weights; they need no download."""
    if weights is None:
        return {}
    facts: Json = {}
    preset = weights.transforms()
    kind = type(preset).__name__
    if weights.meta.get("categories"):
        facts["labels"] = list(weights.meta["categories"])
    if kind == "ImageClassification":
        crop, resize = int(preset.crop_size[0]), int(preset.resize_size[0])
        facts["size"] = [1, 3, crop, crop]
        word = str(getattr(preset.interpolation, "value", preset.interpolation))
        if word in ("bilinear", "bicubic"):
            facts["preprocess"] = {
                "color": "rgb",
                "resize_short_side": resize,
                "crop": [crop, crop],
                "interpolation": word,
                "mean": [round(255 * value, 4) for value in preset.mean],
                "std": [round(255 * value, 4) for value in preset.std],
                "layout": "nchw",
            }
    elif kind == "SemanticSegmentation":
        facts["size"] = [1, 3, int(preset.resize_size[0]), int(preset.resize_size[0])]
        facts.pop("labels", None)  # names of pixels' classes are not those of a vector
    elif kind == "VideoClassification":
        facts["size"] = [1, 3, 16, int(preset.crop_size[0]), int(preset.crop_size[1])]
    elif kind == "ObjectDetection":
        fault = "detection models take a list of images of any size and return lists, not a batch"
        raise ImportFault(fault, "write FILE.py:factory with a module that takes a tensor and returns tensors")
    return facts
