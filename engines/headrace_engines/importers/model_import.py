"""Import of a model of another framework: export, comparison, configuration, and publishing if the comparison passes."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from headrace.config.model_config import ModelConfig
from headrace.core.tensor import BY_CONFIG_NAME

from headrace_engines.errors import BuildError
from headrace_engines.importers import import_folder
from headrace_engines.importers.cases import Case, input_forms, random_cases, sample_cases
from headrace_engines.importers.check import ImportCheck, compare
from headrace_engines.importers.environment import DEFAULT_ENVIRONMENTS, framework_python
from headrace_engines.importers.exported_graph import load_failure, mend_graph
from headrace_engines.importers.source import PROGRAM, ImportRequest, SourceProcess
from headrace_engines.progress import Report, part, silent
from headrace_engines.report import finite, size
from headrace_engines.targets.onnxruntime_session import open_session, session_options

Array = npt.NDArray[Any]
FORMAT = 1
DEFAULT_ROWS = 8
_STATIC_CURES = {
    "program": "export the program with dynamic_shapes for its first dimensions, or write --static-batch",
    "": "write --static-batch; `headrace import onnx FILE --dynamic-batch` frees the batch of many such models afterwards",
}


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Options of an import beside the request to the framework.

    Attributes:
        repository: folder of the model repository.
        name: name of the model.
        requirements: packages of the framework, and further ones of the user.
        max_batch_size: rows of a batch in the configuration.
        labels: file with names of classes; None without one.
        samples: samples of the user, "" without any: an .npz file, a folder of pictures or FILE.py:function.
        replace: replace an existing model.
        python: interpreter that the user names.
        environments: folder of the environments.
    """

    repository: Path
    name: str
    requirements: tuple[str, ...]
    max_batch_size: int = DEFAULT_ROWS
    labels: Path | None = None
    samples: str = ""
    replace: bool = False
    python: Path | None = None
    environments: Path = DEFAULT_ENVIRONMENTS


@dataclass(frozen=True, slots=True)
class ImportOutcome:
    """Result of an import.

    Attributes:
        folder: folder of the model in the repository; it exists only if the check has passed.
        check: result of the comparison.
        framework: name and version of the framework.
        opset: version of the operators.
        size_bytes: size of the ONNX file with its external data.
        notes: sentences for the user.
        remarks: warnings of the server on the folder.
    """

    folder: Path
    check: ImportCheck
    framework: str
    opset: int
    size_bytes: int
    notes: tuple[str, ...] = field(default=())
    remarks: tuple[str, ...] = field(default=())


def import_model(
    request: ImportRequest, options: ImportOptions, report: Report = silent, program: Path = PROGRAM
) -> ImportOutcome:
    """Export a model to ONNX, compare it with its framework, and publish it if it passes.

    Args:
        request: the model, for the process with the framework.
        options: name, repository and data.
        report: progress callback.
        program: the program of the process.

    Returns:
        The result. Nothing is published if the check has failed.

    Raises:
        BuildError: the model cannot be loaded, exported, configured or published.
    """
    target = options.repository / options.name
    if not options.name or "/" in options.name or options.name.startswith("."):
        raise BuildError(f"a model cannot be called '{options.name}': write --name with letters, digits, - and _")
    import_folder.check_free(target, options.replace)
    labels = import_folder.read_label_names(options.labels) if options.labels else ()
    python = framework_python(
        options.requirements, part(report, 0.0, 0.05), python=options.python, root=options.environments
    )
    with (
        _staging(options.repository, options.name) as staged,
        SourceProcess(python, request, staged.parent, program) as source,
    ):
        description = source.export(part(report, 0.05, 0.6))
        model = _take_model(staged)
        entries = [*description["inputs"], *description["outputs"]]
        names = {str(entry.get("onnx", entry["name"])): str(entry["name"]) for entry in entries}
        opset = mend_graph(model, names, request.opset)
        if request.dynamic_batch:
            import_folder.check_batch(model, _STATIC_CURES.get(request.form, _STATIC_CURES[""]))
        plan = import_folder.FolderPlan(
            name=options.name,
            max_batch_size=options.max_batch_size if request.dynamic_batch else 0,
            labels=labels or tuple(description.get("labels", ())),
            needs_labels=bool(labels),
            preprocess=description.get("preprocess", {}),
            remark=_remark(description),
        )
        folder = import_folder.write_folder(staged, plan)
        cases = _cases(folder.config, description, options.samples)
        try:
            session = open_session(model, session_options())
        except BuildError as error:
            raise load_failure(error, opset) from error
        check = _compare(session, folder.config, source, cases, part(report, 0.6, 0.98))
        outcome = _outcome(target, model, description, opset, check, [str(finding) for finding in folder.findings])
        import_folder.write_report(staged, _document(request, description, outcome))
        if check.has_passed:
            report(0.99, "publishes")
            import_folder.publish(staged, target, options.replace)
    report(1.0, "imported" if check.has_passed else "refused")
    return outcome


@contextmanager
def _staging(repository: Path, name: str) -> Iterator[Path]:
    """Yield a new folder of the model below a hidden folder of the repository, which is removed in the end."""
    hidden = repository / f".import-{name}-{secrets.token_hex(4)}"
    try:
        (hidden / name / import_folder.VERSION).mkdir(parents=True)
    except OSError as error:
        cure = "name another repository with --model-repository DIR, or check its permissions"
        raise BuildError(f"{repository} cannot be written: {error.strerror}: {cure}") from error
    try:
        yield hidden / name
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _take_model(staged: Path) -> Path:
    """Move the exported file and its external data into the version."""
    path = staged / import_folder.VERSION / import_folder.MODEL
    for file in (import_folder.MODEL, f"{import_folder.MODEL}.data"):
        if (staged.parent / file).exists():
            (staged.parent / file).replace(path.with_name(file))
    return path


def _remark(description: Mapping[str, Any]) -> str:
    origin = description.get("framework_model", "")
    weights = f", weights {description['weights']}" if description.get("weights") else ""
    source = f"{origin}{weights}, from " if origin else "From "
    return f"{source}{description['framework']} by `headrace import`; the comparison is in {import_folder.VERSION}/import.json."


def _cases(config: ModelConfig, description: Mapping[str, Any], samples: str) -> Iterator[Case]:
    dtypes = {tensor.name: np.dtype(BY_CONFIG_NAME[tensor.data_type].dtype) for tensor in config.input}
    kinds = {tensor.name: tensor.data_type for tensor in config.input}
    kinds |= {tensor.name: tensor.data_type for tensor in config.output}
    bf16 = [name for name, kind in kinds.items() if kind == "TYPE_BF16"]
    if bf16:
        cure = "import it in FP32 (model.float()), and build it with `headrace build --precision bf16`"
        raise BuildError(f"{', '.join(bf16)} is BF16, which the comparison does not take: {cure}")
    forms = input_forms(description, config, dtypes)
    path, _, function = samples.rpartition(":") if ".py:" in samples else (samples, "", "")
    given: Iterator[Case] = sample_cases(Path(path), function, config) if samples else iter(())
    return chain(given, random_cases(forms, config.max_batch_size > 0))


def _compare(
    session: ort.InferenceSession, config: ModelConfig, source: SourceProcess, cases: Iterator[Case], report: Report
) -> ImportCheck:
    names = [tensor.name for tensor in config.output]
    kinds = {tensor.name: np.dtype(BY_CONFIG_NAME[tensor.data_type].dtype) for tensor in config.input}
    done = 0

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        return _run(session, names, {name: _fed(array, kinds[name]) for name, array in inputs.items()})

    def note(name: str) -> None:
        nonlocal done
        report(1 - 0.9**done, f"compares {name}")
        done += 1

    return compare(cases, source.run, run, note)


def _fed(array: Array, kind: np.dtype[Any]) -> Array:
    if kind.kind != "O":
        return array
    texts = [text.decode() if isinstance(text, bytes) else str(text) for text in array.ravel()]
    return np.array(texts, dtype=object).reshape(array.shape)


def _run(session: ort.InferenceSession, names: Sequence[str], inputs: Mapping[str, Array]) -> dict[str, Array]:
    try:
        results = session.run(list(names), dict(inputs))
    except Exception as error:  # the binding's exceptions share no other base
        reason = str(error).partition(" : ")[2] or str(error)
        cure = "write sizes as x.shape[0] in place of numbers, or import it with --static-batch"
        raise BuildError(f"ONNX Runtime: {reason.strip()}: {cure}") from error
    return dict(zip(names, results, strict=True))


def _outcome(
    target: Path, model: Path, description: Mapping[str, Any], opset: int, check: ImportCheck, remarks: Sequence[str]
) -> ImportOutcome:
    files = [path for path in model.parent.iterdir() if path.name.startswith(import_folder.MODEL)]
    size_bytes = sum(path.stat().st_size for path in files)
    notes = tuple(str(note) for note in description.get("notes", ()))
    return ImportOutcome(target, check, str(description["framework"]), opset, size_bytes, notes, tuple(remarks))


def _document(request: ImportRequest, description: Mapping[str, Any], outcome: ImportOutcome) -> dict[str, Any]:
    origin = request.model or Path(request.path).name
    document: dict[str, Any] = {
        "format": FORMAT,
        "source": f"{origin}:{request.function}" if request.function else origin,
        "framework": outcome.framework,
        "weights": description.get("weights", ""),
        "opset": outcome.opset,
        "onnxruntime": ort.__version__,
        "size_bytes": outcome.size_bytes,
        "dynamic_batch": request.dynamic_batch,
        "notes": list(outcome.notes),
        "check": outcome.check.to_json(),
    }
    result = finite(document)
    assert isinstance(result, dict)
    return result


def summary(outcome: ImportOutcome) -> str:
    """Return one sentence on an import."""
    check = outcome.check
    text = f"{outcome.framework}, opset {outcome.opset}, {size(outcome.size_bytes)}, {len(check.cases)} comparisons"
    return (
        f"imported {outcome.folder} ({text})" if check.has_passed else f"not imported: {outcome.folder.name} ({text})"
    )
