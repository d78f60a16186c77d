"""TensorRT plug-in that runs our convolution kernels in an engine: convolution, bias, residual and ReLU in one layer.

The builder replaces layers of a network by the plug-in (`headrace build --plugins`), the server registers it when a
plan has it. A plan holds each layer's algorithm, shape and weights, and the digest of the kernels' sources; both sides
compile the kernels from their own sources, so a plan runs only with the sources that it was measured with (`plugin_problem`).

    build    creator(index of the layer) -> plug-in -> fields in the plan
    serve    fields -> creator -> plug-in -> one clone for each execution context -> launches on TensorRT's stream

Clones share the weights on the GPU if their algorithm needs no scratch memory; else each has its own. `destroy` frees them.
Nothing is allocated in `enqueue`, so that CUDA graphs capture it. Without a graph TensorRT calls `enqueue` with the
interpreter's lock.

Nothing of TensorRT is imported here: callers pass the module `tensorrt`. Interfaces: TensorRT developer guide, "Adding Custom
Layers using the Python API", `IPluginV3`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from headrace.core.tensor import Array
from headrace.runtimes.cuda.convolution_plugin import PLUGIN, PluginRefused, other_plugin, refuse
from headrace.runtimes.cuda.driver import BorrowedStream, current_device
from headrace.runtimes.cuda.kernels.loading import HALF, for_borrowed_streams

from headrace_lab.kernels import algorithms
from headrace_lab.kernels.base import Convolution, ConvShape, Epilogue
from headrace_lab.kernels.resources import Algorithm

VERSION = "1"
NAMESPACE = ""
INDEX_FIELD = "layer"
"""Attribute of the ONNX node: index of the layer in the list that the builder passes to `Creator.building`."""

_CONTENT_FIELD = "content"
_FORMAT = 1
_SEAL_BYTES = 32
_KERNELS = Path(__file__).parent
_SOURCES = frozenset({".cu", ".cuh", ".py", ".csv"})


@functools.cache
def sources_digest() -> str:
    """Return the SHA-256, in hex, of the sources of the convolution kernels and of the code that launches them."""
    digest = hashlib.sha256()
    files = [path for path in _KERNELS.rglob("*") if path.suffix in _SOURCES and path.is_file()]
    for path in sorted([*files, HALF], key=lambda path: path.name):
        digest.update(f"{path.name}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def plugin_digest(layers: Mapping[str, str]) -> str:
    """Return the SHA-256, in hex, of the kernels' sources and of the parameters of an engine's plug-in layers.

    Args:
        layers: by name of the layer, its parameters as in `PluginLayer.parameters`.
    """
    document = [PLUGIN, VERSION, sources_digest(), sorted(layers.items())]
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def plugin_problem(version: str, digest: str, layers: Mapping[str, str]) -> str:
    """Return the reason why an engine with a plug-in does not run with this Headrace; "" if it does.

    Args:
        version: of the plug-in, from the engine's manifest.
        digest: `plugin_digest` at the time of the build.
        layers: parameters of the layers, as for `plugin_digest`.
    """
    if version != VERSION:
        return f"built with version {version!r:.20} of the plug-in {PLUGIN}, this Headrace has version {VERSION}"
    if digest != plugin_digest(layers):
        return f"built with other kernels of the plug-in {PLUGIN} (digest {digest[:12]})"
    return ""


def sealed(content: bytes) -> bytes:
    """Return the content after its SHA-256, with which `is_sealed` finds damage."""
    return hashlib.sha256(content).digest() + content


def is_sealed(content: bytes) -> bool:
    """Return True if the content begins with the SHA-256 of its rest."""
    return content[:_SEAL_BYTES] == hashlib.sha256(content[_SEAL_BYTES:]).digest()


@dataclass(frozen=True, slots=True)
class PluginLayer:
    """One convolution of an engine.

    Attributes:
        algorithm: name of the algorithm.
        variant: its variant.
        shape: the convolution; `n` is the largest batch.
        epilogue: operations on the sums.
        weights: float16, `shape.weights_shape`.
        bias: float32 (k,), if the epilogue has a bias.
    """

    algorithm: str
    variant: str
    shape: ConvShape
    epilogue: Epilogue
    weights: Array
    bias: Array | None = None

    @property
    def parameters(self) -> str:
        """Algorithm, variant, shape and epilogue in one line."""
        additions = " ".join(name for name, used in asdict(self.epilogue).items() if used)
        return " | ".join(filter(None, (self.algorithm, self.variant, str(self.shape), additions)))

    def to_bytes(self) -> bytes:
        """Return the layer's content in a plan: SHA-256 of the rest, a line of JSON, weights, bias if there is one."""
        header = {
            "format": _FORMAT,
            "plugin": PLUGIN,
            "version": VERSION,
            "sources": sources_digest(),
            "algorithm": self.algorithm,
            "variant": self.variant,
            "shape": asdict(self.shape),
            "epilogue": asdict(self.epilogue),
        }
        parts = [json.dumps(header).encode() + b"\n", np.ascontiguousarray(self.weights, "<f2").tobytes()]
        if self.bias is not None:
            parts.append(np.ascontiguousarray(self.bias, "<f4").tobytes())
        return sealed(b"".join(parts))

    @staticmethod
    def from_bytes(content: bytes) -> PluginLayer:
        """Read the content of a plan.

        Raises:
            PluginRefused: it was written by another version of the plug-in or with other kernels, or is damaged.
        """
        if not is_sealed(content):
            raise PluginRefused(f"has a layer of the plug-in {PLUGIN} whose content differs from its checksum")
        line, _, values = content[_SEAL_BYTES:].partition(b"\n")
        try:
            header = json.loads(line)
            name, version = str(header["plugin"]), str(header["version"])
            if (name, version) != (PLUGIN, VERSION):
                raise PluginRefused(f"was {other_plugin(name) or plugin_problem(version, '', {})}")
            sources = header["sources"] if header["format"] == _FORMAT else ""
            shape, epilogue = ConvShape(**header["shape"]), Epilogue(**header["epilogue"])
            algorithm, variant = str(header["algorithm"]), str(header["variant"])
        except (ValueError, TypeError, KeyError) as error:
            raise PluginRefused(
                f"has a layer of the plug-in {PLUGIN} that cannot be read as format {_FORMAT} ({error})"
            ) from error
        if sources != sources_digest():
            raise PluginRefused(
                f"was built with other kernels of the plug-in {PLUGIN} ({sources[:12] or 'of another format'}), this Headrace "
                f"has {sources_digest()[:12]}"
            )
        weights_bytes = 2 * int(np.prod(shape.weights_shape))
        bias_bytes = 4 * shape.k if epilogue.bias else 0
        if len(values) != weights_bytes + bias_bytes:
            raise PluginRefused(
                f"has a layer of the plug-in {PLUGIN} with {len(values)} bytes of weights, its shape ({shape}) has "
                f"{weights_bytes + bias_bytes}"
            )
        weights = np.frombuffer(values, "<f2", weights_bytes // 2).reshape(shape.weights_shape)
        bias = np.frombuffer(values, "<f4", offset=weights_bytes) if epilogue.bias else None
        return PluginLayer(algorithm, variant, shape, epilogue, weights, bias)

    def open(self, device: int) -> Convolution:
        """Prepare the layer's algorithm on a GPU, for streams of TensorRT.

        Raises:
            PluginRefused: this Headrace has no such algorithm.
            Unsupported: there is no compiler for the GPU.
            DeviceError: the driver refuses.
        """
        algorithm = find_algorithm(self.algorithm, self.variant, self.shape)
        bias = None if self.bias is None else self.bias.astype(np.float32)
        with for_borrowed_streams():
            return algorithm.open(device, self.shape, np.float16, self.epilogue, self.weights.astype(np.float32), bias)


def find_algorithm(name: str, variant: str, shape: ConvShape) -> Algorithm:
    """Return one of our algorithms by its name and variant.

    Raises:
        PluginRefused: there is no such algorithm for the shape.
    """
    for algorithm in algorithms.ALGORITHMS:
        if algorithm.name == name:
            # Fewer images allow more ways to split the work.
            for one in (algorithm, *algorithm.variants(replace(shape, n=1))):
                if one.variant == variant:
                    return one
    names = ", ".join(dict.fromkeys(each.name for each in algorithms.ALGORITHMS)) or "none"
    raise PluginRefused(f"needs the convolution algorithm '{name}' '{variant}', this Headrace has {names}")


class _OpenConvolution:
    """A convolution on a GPU; closed with the last plug-in that uses it."""

    def __init__(self, convolution: Convolution) -> None:
        self.launch = convolution.launch
        self.workspace_bytes = convolution.workspace_bytes
        # Not at the end of the process: the driver may be gone by then.
        weakref.finalize(self, convolution.close).atexit = False


# Guards `_shared`: contexts are created on several threads.
_lock = threading.Lock()
_shared: weakref.WeakValueDictionary[tuple[int, bytes], _OpenConvolution] = weakref.WeakValueDictionary()


def _open(layer: PluginLayer, digest: bytes) -> _OpenConvolution:
    """Return the layer's convolution on the current GPU: a shared one if it needs no scratch memory."""
    key = current_device(), digest
    with _lock:
        convolution = _shared.get(key)
        if convolution is None:
            convolution = _OpenConvolution(layer.open(key[0]))
            if not convolution.workspace_bytes:
                _shared[key] = convolution
        return convolution


class Creator:
    """Our entry in TensorRT's registry of plug-ins.

    Args:
        trt: the module `tensorrt`.

    Attributes:
        handle: the `IPluginCreatorV3One`; the registry keeps no reference to it.
    """

    def __init__(self, trt: Any) -> None:
        self._layers: Sequence[PluginLayer] = ()
        self._plugin = plugin_class(trt)
        self.handle = _creator(trt, self)

    @contextlib.contextmanager
    def building(self, layers: Sequence[PluginLayer]) -> Iterator[None]:
        """Create plug-ins from these layers in the block, for nodes whose attribute `layer` is an index of the list."""
        self._layers = layers
        try:
            yield
        finally:
            self._layers = ()

    def create(self, fields: Any, phase: Any) -> Any:
        """Create a plug-in from an ONNX node's attributes, or from its fields in a plan.

        Args:
            fields: PluginFieldCollection.
            phase: TensorRTPhase.

        Returns:
            IPluginV3. TensorRT 10.6 does not survive a missing one, so a refused layer becomes a plug-in without kernels;
            the reader of the plan raises the error of `collect_refusals`.
        """
        try:
            return self._plugin(self._layer(fields), phase)
        except Exception as error:
            refuse(error)
            return self._plugin(None, phase)

    def _layer(self, fields: Any) -> PluginLayer:
        named = {field.name: field for field in fields}
        if _CONTENT_FIELD in named:
            return PluginLayer.from_bytes(_field_bytes(named[_CONTENT_FIELD]))
        index = int(np.asarray(named[INDEX_FIELD].data).ravel()[0]) if INDEX_FIELD in named else -1
        if not 0 <= index < len(self._layers):
            raise PluginRefused(f"has a node of the plug-in {PLUGIN} without a layer ({index} of {len(self._layers)})")
        return self._layers[index]


class _Field(ctypes.Structure):
    """`nvinfer1::PluginField` (NvInferRuntimePlugin.h)."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    )


def _field_bytes(field: Any) -> bytes:
    """Return the content that `PluginLayer.to_bytes` wrote into a PluginField of type INT8.

    With NumPy 2 the bindings of TensorRT 10 (10.0 to 10.14 seen) fill `PluginField.data` with copies of the first element, for
    every type; that of 11.4 does not. Then the C structure behind the field is read: pybind11 keeps its address behind the head
    of the Python object. The checksum in the content shows whether either reading is right.

    Raises:
        PluginRefused: the object has another layout.
    """
    content = np.asarray(field.data).tobytes()
    if is_sealed(content):
        return content
    address = ctypes.c_void_p.from_address(id(field) + object.__basicsize__).value or 0
    raw = _Field.from_address(address) if address else _Field()
    if raw.length != field.size or raw.name != field.name.encode() or not raw.data:
        raise PluginRefused(f"has a layer of the plug-in {PLUGIN} that this TensorRT's Python API cannot pass on")
    return ctypes.string_at(raw.data, field.size)


_registered: dict[int, Creator] = {}


def register(trt: Any) -> Creator | None:
    """Register the plug-in once in a process; None if this TensorRT has no `IPluginV3`.

    Args:
        trt: the module `tensorrt`.
    """
    if not hasattr(trt, "IPluginV3"):
        return None
    with _lock:
        creator = _registered.get(id(trt))
        if creator is None:
            creator = _registered[id(trt)] = Creator(trt)
            trt.get_plugin_registry().register_creator(creator.handle, NAMESPACE)
        return creator


def _creator(trt: Any, creator: Creator) -> Any:
    class ConvolutionCreator(trt.IPluginCreatorV3One):  # type: ignore[misc]  # the base is known at run time only
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name = PLUGIN
            self.plugin_version = VERSION
            self.plugin_namespace = NAMESPACE
            # Kept: the binding copies the pointers of the fields.
            self.fields = [trt.PluginField(INDEX_FIELD, np.zeros(1, np.int32), trt.PluginFieldType.INT32)]
            self.field_names = trt.PluginFieldCollection(self.fields)

        def create_plugin(self, name: str, field_collection: Any, phase: Any) -> Any:
            return creator.create(field_collection, phase)

    return ConvolutionCreator()


_NO_LAYER = PluginLayer("", "", ConvShape(1, 8, 1, 1, 8, 1, 1), Epilogue(), np.zeros((8, 1, 1, 8), np.float16))


def _never_end(plugin: object) -> None:
    """Add a reference to a plug-in's Python object that nothing releases.

    The binding of TensorRT 10.6 deletes the C++ object a second time with the Python object. The last reference of that ends when
    TensorRT deletes a clone whose interfaces it never requested, or with the interpreter.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(plugin))


class _ConvolutionPlugin:
    """Methods of the plug-in that TensorRT calls; `plugin_class` adds TensorRT's interfaces.

    Args:
        layer: the convolution; None if it is refused.
        phase: TensorRTPhase.
        content: `layer` as in a plan; b"" to write it.
    """

    trt: Any  # the module `tensorrt`

    def __init__(self, layer: PluginLayer | None, phase: Any, content: bytes = b"") -> None:
        self.num_outputs = 1
        self.plugin_name = PLUGIN
        self.plugin_version = VERSION
        self.plugin_namespace = NAMESPACE
        self.timing_cache_id = ""
        self.refused = layer is None
        self.layer = _NO_LAYER if layer is None else layer
        self.phase = phase
        self.content = content or self.layer.to_bytes()
        self.convolution: _OpenConvolution | None = None  # the kernels on the GPU; None before they are needed
        self.values: Any = None
        self.fields: Any = None
        self.collection: Any = None
        _never_end(self)

    def get_capability_interface(self, type: Any) -> Any:  # noqa: A002  # the name of the interface
        return self

    def clone(self) -> Any:
        clone = type(self)(None if self.refused else self.layer, self.phase, self.content)
        clone.convolution = self.convolution
        return clone

    def destroy(self) -> None:
        # Before TensorRT deletes it. The object itself stays, see `_never_end`: only this frees weights on GPU and host.
        self.convolution = None
        self.refused, self.layer, self.content = True, _NO_LAYER, b""
        self.values = self.fields = self.collection = None

    # Building

    def get_output_data_types(self, input_types: Any) -> Any:
        return [input_types[0]]

    def get_output_shapes(self, inputs: Any, shape_inputs: Any, expr_builder: Any) -> Any:
        output, shape = self.trt.DimsExprs(inputs[0]), self.layer.shape
        for axis, size in ((1, shape.k), (2, shape.out_h), (3, shape.out_w)):
            output[axis] = expr_builder.constant(size)
        return [output]

    def supports_format_combination(self, pos: int, in_out: Any, num_inputs: int) -> bool:
        # Channels last; 8 divides the channels, so none are padded.
        tensor = in_out[pos].desc
        return bool(tensor.type == self.trt.DataType.HALF and tensor.format == self.trt.TensorFormat.HWC8)

    def configure_plugin(self, inp: Any, out: Any) -> None:
        pass

    def get_workspace_size(self, inp: Any, out: Any) -> int:
        return 0

    def get_valid_tactics(self) -> Any:
        return []

    def get_fields_to_serialize(self) -> Any:
        # Kept: the binding copies the pointers of the fields.
        self.values = np.frombuffer(self.content, np.int8)
        self.fields = [self.trt.PluginField(_CONTENT_FIELD, self.values, self.trt.PluginFieldType.INT8)]
        self.collection = self.trt.PluginFieldCollection(self.fields)
        return self.collection

    # Running

    def attach_to_context(self, context: Any) -> Any:
        attached = type(self)(None if self.refused else self.layer, self.phase, self.content)
        try:
            attached.open()
        except Exception as error:
            # The creator of the context raises it; without kernels `enqueue` fails.
            refuse(error)
        return attached

    def on_shape_change(self, inp: Any, out: Any) -> None:
        rows = inp[0].dims[0]
        if rows > self.layer.shape.n:
            error = PluginRefused(f"{PLUGIN} runs at most {self.layer.shape.n} rows, the batch has {rows}")
            refuse(error)
            raise error
        self.open()

    def set_tactic(self, tactic: int) -> None:
        pass

    def open(self) -> _OpenConvolution:
        """Prepare the kernels on the current GPU, unless it is done."""
        if self.refused:
            raise PluginRefused(f"has a refused layer of the plug-in {PLUGIN}")
        if self.convolution is None:
            self.convolution = _open(self.layer, hashlib.sha256(self.content).digest())
        return self.convolution

    def enqueue(
        self, input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: int, stream: int
    ) -> None:
        convolution = self.convolution or self.open()
        residual = inputs[1] if self.layer.epilogue.residual else 0
        rows = input_desc[0].dims[0]
        convolution.launch(BorrowedStream(stream), inputs[0], outputs[0], residual, rows)


def plugin_class(trt: Any) -> Any:
    """Return the class of the plug-in for one TensorRT."""
    module = trt

    class ConvolutionPlugin(
        _ConvolutionPlugin,
        trt.IPluginV3,  # type: ignore[misc]
        trt.IPluginV3OneCore,  # type: ignore[misc]
        trt.IPluginV3OneBuild,  # type: ignore[misc]
        trt.IPluginV3OneRuntime,  # type: ignore[misc]
    ):
        trt = module

        def __init__(self, layer: PluginLayer | None, phase: Any, content: bytes = b"") -> None:
            # Each interface before any attribute: the binding creates its object there.
            module.IPluginV3.__init__(self)
            module.IPluginV3OneCore.__init__(self)
            module.IPluginV3OneBuild.__init__(self)
            module.IPluginV3OneRuntime.__init__(self)
            _ConvolutionPlugin.__init__(self, layer, phase, content)

    return ConvolutionPlugin
