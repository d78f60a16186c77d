"""Python models beside ONNX models of the same work: an identity, of 16 values and of a picture, and calls of other models."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from loadtest import servers
from loadtest.bench.results import CaseResult, Comparison, Figure, Target, at_most
from loadtest.bench.session import Bench, Case, Question, interleave
from loadtest.bench.spread import Spread
from loadtest.bench.wrk import Sample
from loadtest.onnx_models import onnx_model
from loadtest.protocol import HttpRequest
from loadtest.servers import Running

SMALL, LARGE = 16, 3 * 224 * 224
PYTHON, ONNX = "Python model", "ONNX model"
CALLS = "Python model that calls both"
CODE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
        return responses
"""
CALLS_CODE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            for model in ("identity_onnx", "identity_onnx_2"):
                call = pb_utils.InferenceRequest(model_name=model, inputs=[x], requested_output_names=["y"])
                y = call.exec().output_tensors()[0]
                x = pb_utils.Tensor("x", y.as_numpy())
            responses.append(pb_utils.InferenceResponse([y]))
        return responses
"""


@dataclass(frozen=True, slots=True)
class PythonIdentity(Case):
    """An identity in Python and one in ONNX behind the same server, which has both cores; its client has one of them.

    Attributes:
        width: values of FP32 in a request.
        extra_p50_us: target of the median latency above that of the ONNX model; None for none.
    """

    width: int
    extra_p50_us: Target | None = None

    contenders = 2

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        plural = "s" if self.connections > 1 else ""
        return f"identity of {4 * self.width:,} bytes in Python and in ONNX, {self.connections} connection{plural}"

    def run(self, bench: Bench) -> CaseResult:
        """Write the models, check all answers, then measure in interleaved rounds."""
        ours = replace(bench, repository=bench.scratch / f"identity-{self.name}")
        write_models(ours.repository, self.width)
        question = ours.question("identity_onnx")
        with _server(ours, "identity_onnx", "identity_python") as server:
            requests = {ONNX: question.request, PYTHON: _renamed(question, "identity_python")}
            measures = {}
            for name, request in requests.items():
                bench.check(server, question, request)
                load = self.load(bench, request)
                bench.warm_up(server, load)
                measures[name] = partial(bench.measure, server, load)
            samples = interleave(measures, self.rounds(bench))
        return self._result(samples)

    def _result(self, samples: dict[str, list[Sample]]) -> CaseResult:
        figures = _figures(samples)
        comparisons = [
            Comparison.ratio(f"{PYTHON} / {ONNX}, requests/s", "requests_per_s", samples[PYTHON], samples[ONNX]),
            Comparison.p50_difference(f"{PYTHON} - {ONNX}, p50", samples[PYTHON], samples[ONNX], self.extra_p50_us),
        ]
        return CaseResult(self.name, self.title, figures, comparisons, ("server on both cores, client on one of them",))


@dataclass(frozen=True, slots=True)
class PythonCalls(Case):
    """A Python model that calls two ONNX models one after the other, beside a client that calls them."""

    contenders = 2

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return "a Python model that calls two ONNX models, and the same calls by the client, 1 connection"

    def run(self, bench: Bench) -> CaseResult:
        """Write the models, check all answers, then measure in interleaved rounds."""
        ours = replace(bench, repository=bench.scratch / f"identity-{self.name}")
        write_models(ours.repository, SMALL)
        write_calls(ours.repository)
        question = ours.question("identity_onnx")
        with _server(ours, "identity_onnx", "identity_onnx_2", "identity_calls") as server:
            calls, second = _renamed(question, "identity_calls"), _renamed(question, "identity_onnx_2")
            loads = {ONNX: self.load(bench, question.request, second), CALLS: self.load(bench, calls)}
            measures = {}
            for name, load in loads.items():
                for request in load.requests:
                    bench.check(server, question, request)
                bench.warm_up(server, load)
                measures[name] = partial(bench.measure, server, load)
            samples = interleave(measures, self.rounds(bench))
        # The client sends its calls one after the other: two of them are the work of one request to the Python model.
        twice = [replace(sample, p50_us=2 * sample.p50_us) for sample in samples[ONNX]]
        comparison = Comparison.p50_difference("Python model - both calls by the client, p50", samples[CALLS], twice)
        note = "server on both cores, client on one of them"
        return CaseResult(self.name, self.title, _figures(samples), [comparison], (note,))


def _figures(samples: dict[str, list[Sample]]) -> list[Figure]:
    return [
        Figure(name, unit, Spread.of([getattr(sample, quantity) for sample in rounds]))
        for quantity, unit in (("requests_per_s", "requests/s"), ("p50_us", "p50 us"), ("p99_us", "p99 us"))
        for name, rounds in samples.items()
    ]


def write_calls(repository: Path) -> None:
    """Write `identity_onnx_2`, a copy of `identity_onnx`, and `identity_calls`, which calls both."""
    shutil.copytree(repository / "identity_onnx", repository / "identity_onnx_2")
    shutil.copytree(repository / "identity_python", repository / "identity_calls")
    (repository / "identity_calls" / "1" / "model.py").write_text(CALLS_CODE)


def write_models(repository: Path, width: int) -> None:
    """Write `identity_onnx` and `identity_python`, which return a row `x` of FP32 as `y`."""
    x, y = ((TensorProto.FLOAT, ("rows", width)) for _ in range(2))
    folder = repository / "identity_onnx"
    (folder / "1").mkdir(parents=True)
    node = helper.make_node("Identity", ["x"], ["y"])
    onnx.save(onnx_model([node], {"x": x}, {"y": y}), folder / "1" / "model.onnx")
    (folder / "config.yaml").write_text(
        "max_batch_size: 64\ndynamic_batching: {}\ninstance_group: [{kind: KIND_CPU}]\n"
    )
    folder = repository / "identity_python"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(CODE)
    tensor = f"data_type: TYPE_FP32, dims: [{width}]"
    (folder / "config.yaml").write_text(
        f"backend: python\nmax_batch_size: 64\ndynamic_batching: {{}}\ninput: [{{name: x, {tensor}}}]\n"
        f"output: [{{name: y, {tensor}}}]\n"
    )


@contextmanager
def _server(bench: Bench, *models: str) -> Iterator[Running]:
    command = servers.headrace(bench.repository.resolve(), command=bench.command, models=models, cpus=bench.cores.both)
    with bench.start(command) as server:
        yield server


def _renamed(question: Question, model: str) -> HttpRequest:
    """Return the same request to another model."""
    return replace(question, model=model).request


CASES: tuple[Case, ...] = (
    PythonIdentity("python-identity-64", 64, width=SMALL),
    PythonIdentity("python-identity-1", 1, width=SMALL, extra_p50_us=at_most(250.0)),
    PythonIdentity("python-600k-16", 16, width=LARGE),
    PythonCalls("python-bls-c1", 1),
)
