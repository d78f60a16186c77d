"""The cases of the benchmark, in the order in which they run and are reported."""

from __future__ import annotations

import json
import subprocess
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, helper

from loadtest import servers
from loadtest.bench.clients import CallLoad, Sample
from loadtest.bench.inprocess import WrongAnswer, rows_per_s_in_fresh_process
from loadtest.bench.results import (
    CaseResult,
    Comparison,
    Figure,
    Spread,
    Target,
    at_least,
    at_most,
    completion_rate,
    figures_of,
    ratios,
)
from loadtest.bench.session import Bench, Case, Question, answer, answered_message, interleave
from loadtest.grpc_protocol import MODEL_INFER, decode_answer
from loadtest.onnx_models import onnx_model
from loadtest.protocol import HttpRequest, json_request
from loadtest.servers import ROOT, Running, pinned

MODEL = "tiny"
HEADRACE, AGAINST = "headrace", "headrace of --against"
BARE, NAIVE, NAIVE_ASYNC = "bare ASGI", "naive FastAPI", "naive FastAPI, async handler"
ECHO = "bare grpc.aio echo"
_GRPC_CONNECTIONS = 4
_SAMPLES_A_PAIR = 2
_UNITS = {"requests_per_s": "requests/s", "p50_us": "p50 us", "p99_us": "p99 us"}

Measure = Callable[[], Sample]
Contenders = Mapping[str, Measure]


@dataclass(frozen=True, slots=True)
class Paired(Case):
    """A case of which two checkouts can be compared: `--against` replaces the other contenders.

    Two processes of the same code differ by 3 to 5 % (memory layout, hash seeds). So each round starts a new process of each.
    """

    def run(self, bench: Bench) -> CaseResult:
        """Compare with the other checkout if there is one, else with the other contenders."""
        if not bench.against:
            return self.beside_others(bench)
        samples: dict[str, list[Sample]] = {HEADRACE: [], AGAINST: []}
        for _ in range(bench.rounds):
            with ExitStack() as stack:
                contenders = {
                    name: stack.enter_context(self.headrace(replace(bench, python=python), name))
                    for name, python in ((HEADRACE, bench.python), (AGAINST, bench.against))
                }
                for name, values in interleave(contenders, _SAMPLES_A_PAIR).items():
                    samples[name] += values
        ours, theirs = samples[HEADRACE], samples[AGAINST]
        comparisons = [
            Comparison.ratio(f"{HEADRACE} / {AGAINST}, {unit}", quantity, ours, theirs)
            for quantity, unit in {**_UNITS, "server_us": "CPU us/request"}.items()
            if all(getattr(sample, quantity) for sample in theirs)
        ]
        return self.result(samples, comparisons)

    @abstractmethod
    def beside_others(self, bench: Bench) -> CaseResult:
        """Measure in interleaved rounds beside the contenders that are no Headrace."""

    @abstractmethod
    def headrace(self, bench: Bench, name: str) -> AbstractContextManager[Measure]:
        """Start Headrace, check its answer, warm it up; the value takes one sample."""

    def result(
        self, samples: Mapping[str, Sequence[Sample]], comparisons: Sequence[Comparison], *notes: str
    ) -> CaseResult:
        """Return the result with the usual figures."""
        every = [sample for rounds in samples.values() for sample in rounds]
        units = _UNITS | ({"server_us": "CPU us/request"} if all(sample.server_us for sample in every) else {})
        if busy := max(sample.client_busy for sample in every):
            notes = (*notes, f"the client used {busy:.0%} of its core at most")
        return CaseResult(self.name, self.title, figures_of(samples, units), comparisons, notes)


@dataclass(frozen=True, slots=True)
class OverHttp(Paired):
    """One row a request, the server on one core, the client on the other; bare ASGI and a server written by hand beside it.

    Attributes:
        encoding: of the tensor for Headrace and bare ASGI; the naive server takes JSON always.
        to_bare: target of requests a second over bare ASGI's.
        to_naive: the same over the naive server's.
        extra_p50_us: target of the median latency above bare ASGI's.
    """

    encoding: Literal["binary", "json"] = "binary"
    to_bare: Target | None = None
    to_naive: Target | None = None
    extra_p50_us: Target | None = None

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        plural = "s" if self.callers > 1 else ""
        return f"tiny over HTTP, {self.encoding} bodies, {self.callers} connection{plural}"

    @contextmanager
    def headrace(self, bench: Bench, name: str) -> Iterator[Measure]:
        """Start Headrace and yield its measure."""
        question = bench.question(MODEL)
        with bench.headrace(MODEL, name=name) as server:
            request = self._request(question)
            bench.check(server, question, request)
            yield self._contender(bench, server, request)

    def beside_others(self, bench: Bench) -> CaseResult:
        """Compare Headrace with the other servers."""
        question = bench.question(MODEL)
        request = self._request(question)
        body = json.dumps({"input": question.inputs["input"].tolist()}).encode()
        naive_request = HttpRequest("/predict", body, {"Content-Type": "application/json"})
        model, cpus = str(bench.model_path(MODEL).resolve()), bench.cores.server
        with ExitStack() as stack:
            ours = stack.enter_context(bench.headrace(MODEL, name=HEADRACE))
            size = len(bench.check(ours, question, request))
            bare = stack.enter_context(
                bench.start(servers.peer("bare_asgi", BARE, "--answer-bytes", str(size), cpus=cpus))
            )
            if len(answer(bare, request)[1]) != size:
                raise WrongAnswer(f"{BARE} does not answer with {size} bytes")
            contenders = {each.name: self._contender(bench, each, request) for each in (ours, bare)}
            for name, handler in ((NAIVE, "def"), (NAIVE_ASYNC, "async")):
                command = servers.peer("naive_fastapi", name, "--model", model, "--handler", handler, cpus=cpus)
                server = stack.enter_context(bench.start(command))
                _check_prediction(server, naive_request, question)
                contenders[name] = self._contender(bench, server, naive_request)
            samples = interleave(contenders, bench.rounds)
        targets = {BARE: self.to_bare, NAIVE: self.to_naive, NAIVE_ASYNC: None}
        comparisons = [
            Comparison.ratio(f"{HEADRACE} / {name}, requests/s", "requests_per_s", samples[HEADRACE], theirs, target)
            for (name, target), theirs in zip(targets.items(), map(samples.__getitem__, targets), strict=True)
        ]
        if self.extra_p50_us is not None:
            label = f"{HEADRACE} - {BARE}, p50"
            comparisons.append(Comparison.p50_difference(label, samples[HEADRACE], samples[BARE], self.extra_p50_us))
        note = f"request body {len(request.body)} bytes, answer body {size} bytes, the same for bare ASGI"
        return self.result(samples, comparisons, note)

    def _request(self, question: Question) -> HttpRequest:
        return question.request if self.encoding == "binary" else json_request(MODEL, question.inputs)

    def _contender(self, bench: Bench, server: Running, request: HttpRequest) -> Measure:
        return bench.contender(server, self.load(bench, request), bench.seconds(self.sample_s))


def _check_prediction(server: Running, request: HttpRequest, question: Question) -> None:
    """Check that the naive server computes the same; WrongAnswer if not."""
    _, body = answer(server, request)
    output = np.asarray(json.loads(body)["output"], dtype=np.float32)
    question.oracle.check(question.inputs, {"output": output})


@dataclass(frozen=True, slots=True)
class OverGrpc(Paired):
    """Unary ModelInfer of one row, beside a `grpc.aio` server that does nothing.

    Attributes:
        to_echo: target of calls a second over the bare server's.
    """

    to_echo: Target

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"tiny over gRPC, unary, {self.callers} in flight"

    @contextmanager
    def headrace(self, bench: Bench, name: str) -> Iterator[Measure]:
        """Start Headrace and yield its measure."""
        question = bench.question(MODEL)
        with bench.headrace(MODEL, name=name) as server:
            yield self._contender(bench, server, question.message, _checked_size(server, question))

    def beside_others(self, bench: Bench) -> CaseResult:
        """Compare Headrace with the other servers."""
        question = bench.question(MODEL)
        message = question.message
        with bench.headrace(MODEL, name=HEADRACE) as ours:
            size = _checked_size(ours, question)
            command = servers.peer(
                "grpc_echo", ECHO, "--answer-bytes", str(size), cpus=bench.cores.server, ready_path=""
            )
            with bench.start(command) as echo:
                contenders = {each.name: self._contender(bench, each, message, size) for each in (ours, echo)}
                samples = interleave(contenders, bench.rounds)
        label = f"{HEADRACE} / {ECHO}, requests/s"
        ratio = Comparison.ratio(label, "requests_per_s", samples[HEADRACE], samples[ECHO], self.to_echo)
        note = f"request message {len(message)} bytes, answer {size} bytes, the same for the bare server"
        return self.result(samples, [ratio], note)

    def _contender(self, bench: Bench, server: Running, message: bytes, answer_bytes: int) -> Measure:
        connections = min(self.callers, _GRPC_CONNECTIONS)
        in_flight, cpus = self.callers // connections, bench.cores.client
        load = CallLoad(MODEL_INFER, message, answer_bytes, connections, in_flight, 1, cpus)
        return bench.contender(server, load, bench.seconds(self.sample_s))


def _checked_size(server: Running, question: Question) -> int:
    """Return the size of one right answer in bytes; WrongAnswer if it is wrong."""
    message = answered_message(server.grpc_port, server.name, question.message)
    question.oracle.check(question.inputs, decode_answer(message))
    return len(message)


@dataclass(frozen=True, slots=True)
class InProcess(Paired):
    """Callers of `headrace.Server` in one process, without a network."""

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"tiny by `Model.infer_async` in process, {self.callers} in flight"

    @contextmanager
    def headrace(self, bench: Bench, name: str) -> Iterator[Measure]:
        """Start Headrace and yield its measure."""
        program = ROOT / "loadtest" / "bench" / "embedded.py"
        command = [
            *pinned(bench.cores.server),
            bench.python,
            "-P",
            str(program),
            str(bench.repository.resolve()),
            MODEL,
        ]
        command += ["--callers", str(self.callers), "--seconds", str(bench.seconds(self.sample_s))]

        def measure() -> Sample:
            bench.progress(name)
            finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            return Sample(**json.loads(finished.stdout))

        yield measure

    def beside_others(self, bench: Bench) -> CaseResult:
        """Measure Headrace alone."""
        with self.headrace(bench, HEADRACE) as measure:
            return self.result(interleave({HEADRACE: measure}, bench.rounds), ())


@dataclass(frozen=True, slots=True)
class ModelThroughput(Case):
    """A served model beside the same model in process; server, client and ONNX Runtime have the same cores.

    Attributes:
        model: name of the model.
        ratio: target of images a second over those in process.
    """

    model: str
    ratio: Target

    sample_s = 20

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"{self.model}, binary bodies, {self.callers} connections, everything on the same cores"

    def run(self, bench: Bench) -> CaseResult:
        """Find the best batch size in process, then measure in interleaved rounds."""
        sweep = {batch: self._alone(bench, batch, bench.seconds(6)) for batch in self._batches(bench)}
        best = max(sweep, key=lambda batch: sweep[batch])
        question = bench.question(self.model)
        load = replace(self.load(bench, question.request), cpus=bench.cores.both, record_completions=True)
        with bench.headrace(self.model, cpus=bench.cores.both) as server:
            bench.check(server, question)
            del question  # its session holds memory
            served = bench.contender(server, load, load.seconds)
            costs: list[Sample] = []

            def images_per_s() -> float:
                """From the first answers after the ramp (one on each connection) to the last."""
                costs.append(served())
                return completion_rate(costs[-1].completions_s[self.callers :])

            alone = partial(self._alone, bench, best, bench.seconds(self.sample_s))
            contenders: dict[str, Callable[[], float]] = {HEADRACE: images_per_s, "in process": alone}
            rates = interleave(contenders, bench.rounds)
        figures = (
            Figure(HEADRACE, "images/s", Spread.of(rates[HEADRACE])),
            Figure(f"ONNX Runtime in process, batches of {best}", "images/s", Spread.of(rates["in process"])),
            Figure(HEADRACE, "CPU ms/image", Spread.of([sample.server_us / 1e3 for sample in costs])),
        )
        label = f"{HEADRACE} / ONNX Runtime in process, images/s"
        comparison = Comparison(label, "", ratios(rates[HEADRACE], rates["in process"]), self.ratio)
        swept = ", ".join(f"{batch}: {rate:.1f}" for batch, rate in sweep.items())
        return CaseResult(self.name, self.title, figures, (comparison,), (f"in process, images/s by batch: {swept}",))

    def _batches(self, bench: Bench) -> tuple[int, ...]:
        return (1, 8) if bench.quick else (1, 2, 4, 8, 16)

    def _alone(self, bench: Bench, batch: int, seconds: int) -> float:
        """Images a second of ONNX Runtime alone."""
        bench.progress(f"{self.model} in process, batches of {batch}")
        cpus = bench.cores.both
        return rows_per_s_in_fresh_process(bench.model_path(self.model), batch, len(cpus), seconds, cpus)


PLAIN, PYTHON, CACHED, PIPELINE = "plain", "python", "cached", "pipeline"
# A model in Python that returns its input; to format with the names of input and output.
IDENTITY_CODE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            rows = pb_utils.get_input_tensor_by_name(request, "{input}").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("{output}", rows)]))
        return responses
"""


@dataclass(frozen=True, slots=True)
class Feature(Case):
    """An identity with a feature beside the plain ONNX model, both on one server with all cores.

    Attributes:
        model: the model with the feature, see `write_features`.
        extra_p50_us: target of the median latency above that of the plain model.
    """

    model: str
    extra_p50_us: Target | None = None

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"identity of 64 bytes: {self.model} beside a plain ONNX model, {self.callers} in flight"

    def run(self, bench: Bench) -> CaseResult:
        """Write the models, check the answers, then measure in interleaved rounds."""
        ours = replace(bench, repository=bench.scratch / "features")
        write_features(ours.repository)
        question, options = ours.question(PLAIN), ("--cache-config", "local,size=64MiB")
        with ours.headrace(options=options, cpus=bench.cores.both) as server:
            contenders: dict[str, Measure] = {}
            for model in (PLAIN, self.model):
                request = replace(question, model=model).request
                for _ in range(2):  # the second answer comes from the cache
                    bench.check(server, question, request)
                contenders[model] = bench.contender(server, self.load(bench, request), bench.seconds(self.sample_s))
            samples = interleave(contenders, bench.rounds)
        comparisons = (
            Comparison.ratio(
                f"{self.model} / {PLAIN}, requests/s", "requests_per_s", samples[self.model], samples[PLAIN]
            ),
            Comparison.p50_difference(
                f"{self.model} - {PLAIN}, p50", samples[self.model], samples[PLAIN], self.extra_p50_us
            ),
        )
        return CaseResult(self.name, self.title, figures_of(samples, _UNITS), comparisons)


def write_features(repository: Path) -> None:
    """Write models that return a row `x` of 16 values as `y`: in ONNX, the same cached, in Python, a pipeline of three steps."""
    if repository.exists():
        return
    x, y = ((TensorProto.FLOAT, ("rows", 16)) for _ in range(2))
    model = onnx_model([helper.make_node("Identity", ["x"], ["y"])], {"x": x}, {"y": y})
    tensors = "input: [{name: x, data_type: fp32, dims: [16]}]\noutput: [{name: y, data_type: fp32, dims: [16]}]\n"
    batched = "max_batch_size: 64\ndynamic_batching: {}\n"
    steps = "".join(
        f"    step{number}: {{model: {PLAIN}, inputs: {{x: {read}}}, outputs: {{y: {written}}}}}\n"
        for number, (read, written) in enumerate((("x", "t0"), ("t0", "t1"), ("t1", "y")))
    )
    configs = {
        PLAIN: batched,
        CACHED: f"{batched}response_cache: {{enable: true}}\n",
        PYTHON: f"backend: python\n{tensors}{batched}",
        PIPELINE: f"{tensors}max_batch_size: 64\npipeline:\n  steps:\n{steps}",
    }
    for name, config in configs.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.yaml").write_text(config)
        if name in (PLAIN, CACHED):
            onnx.save(model, repository / name / "1" / "model.onnx")
    (repository / PYTHON / "1" / "model.py").write_text(IDENTITY_CODE.format(input="x", output="y"))


CASES: tuple[Case, ...] = (
    OverHttp("tiny-64", 64, to_bare=at_least(0.5), to_naive=at_least(5.0)),
    OverHttp("tiny-1", 1, extra_p50_us=at_most(120.0)),
    OverHttp("tiny-json-64", 64, "json"),
    OverGrpc("grpc-tiny-64", 64, to_echo=at_least(8.0)),
    OverGrpc("grpc-tiny-1", 1, to_echo=at_least(1.2)),
    InProcess("in-process-64", 64),
    InProcess("in-process-1", 1),
    ModelThroughput("resnet50", 16, "resnet50", ratio=at_least(0.95)),
    ModelThroughput("efficientnet_lite0", 16, "efficientnet_lite0", ratio=at_least(0.95)),
    Feature("python-1", 1, PYTHON, extra_p50_us=at_most(250.0)),
    Feature("cache-1", 1, CACHED),
    Feature("pipeline-1", 1, PIPELINE, extra_p50_us=at_most(180.0)),
)
