"""ONNX Runtime on a CPU as a target: the artefact is an ONNX file that any CPU can load.

ONNX Runtime fuses for the instructions of the machine when it loads a file. What it fused is not written: a graph with AVX-512
kernels in it is wrong on the next machine, while loading the portable one costs milliseconds more. Q/DQ pairs stay as they are
for the same reason: the session turns them into integer kernels.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from engines.errors import BuildError
from engines.onnx_graph import read_onnx, write_onnx
from engines.progress import Report
from engines.targets.base import Order
from engines.targets.onnxruntime_engine import OnnxRuntimeEngine, open_session, session_options
from server.config.machine import Machine, onnxruntime_machine

# ONNX Runtime writes its optimised graph as one protobuf, which holds 2 GiB; some room for what it adds.
_MOST_REWRITTEN_BYTES = 2**31 - 2**24
# What `Order.precision` "fp16" means for users; shown where precisions are compared.
FP16_REMARK = "most CPUs compute FP16 by way of FP32: smaller, not faster"


class OnnxRuntimeTarget:
    """Builds for the CPU of this machine; see `engines.targets.base.Target`."""

    name = "onnxruntime"
    suffix = ".onnx"

    def describe(self) -> Machine:
        """This machine."""
        return onnxruntime_machine()

    def refuses(self, precision: str) -> str:
        """FP8 always, BF16 where ONNX Runtime has no kernels for it; FP16 works, see `FP16_REMARK`."""
        if precision == "fp8":
            return "ONNX Runtime has no FP8 kernels for CPUs: use int8, or build on a GPU that has FP8"
        if precision == "bf16" and (missing := _missing_bf16()):
            return f"ONNX Runtime has no BF16 kernels for this CPU ({missing}): use int8 or fp32"
        return ""

    def refuses_fp8_convolutions(self) -> str:
        """Always: nothing is FP8 here."""
        return self.refuses("fp8")

    def build(self, model: onnx.ModelProto, order: Order, path: Path, report: Report) -> None:
        """Write the artefact; nothing is left behind when it fails.

        Raises:
            BuildError: an operator is not supported (named with its node), or the disk is full.
        """
        try:
            with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as name:
                folder = Path(name)
                report(0.0, "optimising for ONNX Runtime")
                written = _optimised(model, folder) if order.precision == "fp32" else model
                artefact = folder / path.name
                write_onnx(written, artefact)
                report(0.6, "loading the artefact")
                open_session(artefact, session_options())
                # The data before the model that names it.
                for file in sorted(folder.glob(f"{path.name}*"), reverse=True):
                    with file.open("rb") as stream:
                        os.fsync(stream.fileno())
                    file.replace(path.with_name(file.name))
        except OSError as error:
            reason = error.strerror or str(error)
            needs = f"it takes about {model.ByteSize() / 1e6:.0f} MB in {path.parent}"
            raise BuildError(f"the artefact cannot be written: {reason}: {needs}") from error
        report(1.0, "built")

    def open(self, path: Path, source: onnx.ModelProto | None = None) -> OnnxRuntimeEngine:
        """Load an artefact.

        Raises:
            BuildError: it cannot be loaded; says why.
        """
        return OnnxRuntimeEngine(path, source)


def _optimised(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """What ONNX Runtime makes of a model without a thought of the hardware: constants folded, dead nodes gone."""
    if model.ByteSize() > _MOST_REWRITTEN_BYTES:
        return model
    options = session_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    file = folder / "optimised.onnx"
    options.optimized_model_filepath = str(file)
    open_session(model.SerializeToString(), options)
    optimised = read_onnx(file)
    file.unlink()
    _drop_unused_opsets(optimised)
    return optimised


def _drop_unused_opsets(model: onnx.ModelProto) -> None:
    """ONNX Runtime imports all the operator sets that it knows; other readers may not."""
    used = {
        "",
        *_domains(model.graph.node),
        *(domain for f in model.functions for domain in (f.domain, *_domains(f.node))),
    }
    kept = [helper.make_opsetid(o.domain, o.version) for o in model.opset_import if o.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def _domains(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        found.add(node.domain)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                found |= _domains(inner.node)
    return found


def _missing_bf16() -> str:
    """The first operator of common models that has no BF16 kernel on this CPU, "" if all have."""
    for operator in ("MatMul", "Add", "Relu"):
        tensor = helper.make_tensor_value_info("x", TensorProto.BFLOAT16, [4, 4])
        out = helper.make_tensor_value_info("y", TensorProto.BFLOAT16, [4, 4])
        inputs = ["x"] if operator == "Relu" else ["x", "x"]
        graph = helper.make_graph([helper.make_node(operator, inputs, ["y"])], "probe", [tensor], [out])
        probe = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        try:
            open_session(probe.SerializeToString(), session_options())
        except BuildError:
            return operator
    return ""
