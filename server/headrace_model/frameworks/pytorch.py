"""Models of PyTorch: TorchScript (`model.pt`), programs of `torch.export` and packages of AOTInductor (both `model.pt2`)."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
import zipfile
from typing import Any

from headrace_model.frameworks import Array, Batch, Tensors
from headrace_model.predict_form import ModelContext

_NUMBERED = re.compile(r"(.*)__([0-9]+)")


class TorchModel:
    """A module. Inputs are its arguments, and outputs are its results.

    Inputs are passed by name if the names of all are those of arguments; else in the order of the numbers in names such as
    `INPUT__0`, or in that of the configuration. Results in a dict are taken by name, all others in the same order.
    """

    def load(self, context: ModelContext) -> None:
        """Read the model's file to the device of the instance."""
        try:
            import torch
        except ImportError as error:
            raise ImportError(
                f"torch is not installed: write it into requirements.txt of the model ({error})"
            ) from error
        self._torch, self._tensors = torch, Tensors(context.config)
        threads = self._tensors.threads or int(self._tensors.parameter("INTRA_OP_THREAD_COUNT") or 0)
        if threads:
            torch.set_num_threads(threads)
        self._device = _device(torch, context.args)
        if not context.file.endswith(".pt2"):
            self._module = torch.jit.load(context.file, map_location=self._device).eval()
            arguments = [argument.name for argument in self._module.forward.schema.arguments[1:]]
        elif (metadata := _compiled_metadata(context.file)) is None:
            self._module = torch.export.load(context.file).module().to(self._device)
            arguments = list(inspect.signature(self._module.forward).parameters)
        else:
            self._module = _load_compiled(torch, context.file, metadata, self._device)
            arguments = []  # without names
        inputs = self._tensors.inputs
        is_named = set(inputs) == set(arguments)
        self._inputs = arguments if is_named else in_order(inputs)
        self._outputs = in_order(self._tensors.outputs)

    def predict(self, batch: Batch) -> Batch:
        """Call the module once."""
        torch = self._torch
        with torch.inference_mode():
            results = self._module(*[torch.from_numpy(batch[name]).to(self._device) for name in self._inputs])
            if not isinstance(results, dict):
                values = results if isinstance(results, (list, tuple)) else [results]
                if len(values) < len(self._outputs):
                    raise ValueError(f"the module returned {len(values)} tensors for {len(self._outputs)} outputs")
                results = dict(zip(self._outputs, values))
            return {name: self._tensors.result(name, self._array(results[name])) for name in self._outputs}

    def _array(self, value: Any) -> Array:
        value = value.detach().cpu()
        # NumPy has no bfloat16.
        return (value.float() if value.dtype is self._torch.bfloat16 else value).numpy()


def _compiled_metadata(file: str) -> list[dict[str, str]] | None:
    """Return what AOTInductor wrote about its libraries in a package; None for any other file."""
    if not zipfile.is_zipfile(file):
        return None
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if "/data/aotinductor/" in name]
        return [json.loads(archive.read(name)) for name in names if name.endswith("_metadata.json")] if names else None


def _load_compiled(torch: Any, file: str, metadata: list[dict[str, str]], device: str) -> Any:
    """Load a package of AOTInductor: native code for one kind of device, by the installed version of torch.

    Raises:
        ValueError: it is for another kind of device, or cannot be loaded.
    """
    kind, _, index = device.partition(":")
    wrong = {each["AOTI_DEVICE_KEY"] for each in metadata if "AOTI_DEVICE_KEY" in each} - {kind}
    if wrong:
        raise ValueError(
            f"the package is compiled for {min(wrong)}, the instance runs on {kind}: compile it for {kind}"
        )
    # Without it the compiled code does not look at the shapes of its inputs, and reads past them.
    os.putenv("AOTI_RUNTIME_CHECK_INPUTS", "1")
    try:
        return importlib.import_module("torch._inductor").aoti_load_package(file, device_index=int(index or -1))
    except Exception as error:
        raise ValueError(
            f"torch {torch.__version__} cannot load the package, compile it with this version: {error}"
        ) from error


def in_order(names: list[str]) -> list[str]:
    """Return names such as `OUTPUT__0` by number if all have one, else as they are."""
    numbers = [_NUMBERED.fullmatch(name) for name in names]
    if not all(numbers):
        return names
    return sorted(names, key=lambda name: int(name.rpartition("__")[2]))


def _device(torch: Any, args: dict[str, str]) -> str:
    if args.get("model_instance_kind") != "GPU":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda:" + args.get("model_instance_device_id", "0")
    sys.stderr.write("KIND_GPU is requested, but torch has no GPU: the instance runs on the CPU\n")
    return "cpu"
