"""Import with a framework of the tests: what is published, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from headrace.config.model_folder import read_model_folder
from headrace_engines.errors import BuildError
from headrace_engines.importers.model_import import ImportOptions, ImportOutcome, import_model
from headrace_engines.importers.source import ImportRequest
from onnx import helper, numpy_helper

from tests.unit.engines.importers.conftest import Save


class Importer:
    """Imports with the framework of the tests.

    Args:
        repository: folder of the repository.
        program: entry point of the programs.
    """

    def __init__(self, repository: Path, program: Path) -> None:
        self.repository = repository
        self._program = program

    def __call__(self, path: Path, fault: str = "", facts: dict[str, Any] | None = None, **words: Any) -> ImportOutcome:
        dynamic = words.pop("dynamic_batch", True)
        custom = words.pop("custom_objects", "")
        request = ImportRequest(
            "fake_program",
            path=str(path),
            model=fault,
            function=json.dumps(facts or {}),
            dynamic_batch=dynamic,
            custom_objects=custom,
        )
        options = ImportOptions(**{"repository": self.repository, "name": "net", "requirements": ("onnx",), **words})
        return import_model(request, options, program=self._program)

    @property
    def folder(self) -> Path:
        """The imported model."""
        return self.repository / "net"


@pytest.fixture
def importer(tmp_path: Path, program: Path) -> Importer:
    return Importer(tmp_path / "repository", program)


def contents(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_model_is_published_with_configuration_labels_and_report(importer: Importer, save_model: Save) -> None:
    facts = {"labels": ["a", "b", "c"], "notes": ["random weights"]}
    outcome = importer(save_model(), facts=facts)
    assert outcome.check.has_passed
    assert outcome.notes == ("random weights",)
    assert contents(importer.repository) == [
        "net/1/import.json",
        "net/1/model.onnx",
        "net/config.yaml",
        "net/labels.txt",
    ]
    folder = read_model_folder(importer.folder, importer.repository)
    assert not folder.findings
    assert folder.config.max_batch_size == 8
    assert folder.config.dynamic_batching is not None
    assert folder.config.output[0].label_filename == "labels.txt"
    assert folder.labels == {"y": ("a", "b", "c")}
    report = json.loads((importer.folder / "1" / "import.json").read_text())
    assert report["framework"] == "fake 1.0"
    assert report["check"]["passed"] is True
    (output,) = report["check"]["outputs"]
    assert output["largest"] == 0.0
    assert output["elements"] == 2 * 3 * (1 + 2 + 5 + 8)
    assert report["check"]["cases"][:3] == ["random, 1 row", "random, 2 rows", "random, 5 rows"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("last row", "output y differs from the framework: largest error .* of its largest value, on random, 5 rows$"),
        ("nan", "output y is NaN or infinite in the framework for all inputs: nothing was compared"),
        ("dtype", r"output y is float32 \[1, 3\] on random, 1 row, in the framework float64 \[1, 3\]"),
        ("shape", r"output y is float32 \[1, 3\] on random, 1 row, in the framework float32 \[1, 1\]"),
    ],
)
def test_a_model_that_differs_is_not_published(importer: Importer, save_model: Save, fault: str, message: str) -> None:
    outcome = importer(save_model(), fault)
    assert not outcome.check.has_passed
    assert any(re.match(message, text) for text in outcome.check.faults), outcome.check.faults
    assert contents(importer.repository) == []
    assert list(importer.repository.iterdir()) == []


def test_rows_that_depend_on_one_another_are_refused(importer: Importer, save_model: Save) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["z"]),
        helper.make_node("ReduceMean", ["z"], ["m"], axes=[0], keepdims=1, name="mean"),
        helper.make_node("Sub", ["z", "m"], ["y"]),
    ]
    outcome = importer(save_model(nodes))
    assert any(fault.startswith("a row of output y depends on the other rows") for fault in outcome.check.faults)
    assert not importer.folder.exists()


def test_a_batch_that_is_fixed_is_refused_and_taken_without_batching(importer: Importer, save_model: Save) -> None:
    path = save_model(rows=2)
    with pytest.raises(BuildError, match=r"the batch is fixed in the model \(x \[2, 4\], y \[2, 3\]\).*--static-batch"):
        importer(path)
    outcome = importer(path, dynamic_batch=False)
    assert outcome.check.has_passed
    assert "max_batch_size: 0" in (importer.folder / "config.yaml").read_text()


def test_a_framework_that_takes_one_row_only_is_an_error(importer: Importer, save_model: Save) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Reshape", ["z", "two"], ["y"])]
    path = save_model(nodes)
    model = onnx.load_model(path)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 3], np.int64), "two"))
    onnx.save_model(model, path)
    with pytest.raises(BuildError, match="the model fails in its framework on random, 2 rows"):
        importer(path)


def test_free_dimensions_are_compared_in_other_sizes(importer: Importer, save_model: Save) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = save_model(nodes, size="L", out="L")
    check = importer(path).check
    assert check.cases[-1] == "random, other sizes: x [3, 2]"
    check = importer(path, "other sizes", replace=True).check
    assert check.has_passed
    assert check.skipped[0].startswith("random, other sizes: x [3, 2]: the framework refuses them: ")


def test_samples_of_the_user_are_compared_first(importer: Importer, save_model: Save, tmp_path: Path) -> None:
    np.savez(tmp_path / "samples.npz", x=np.random.default_rng(1).normal(size=(9, 4)).astype(np.float32))
    check = importer(save_model(), samples=str(tmp_path / "samples.npz")).check
    assert check.cases[:3] == ["samples.npz, 7 rows", "samples.npz, 2 rows", "random, 1 row"]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((9, 5), np.float32), r"input 'x' takes \[N, 4\], found \[9, 5\]"),
        (np.zeros((9, 4), np.int64), "input 'x' takes FP32, found int64"),
        (None, "does not exist: name an .npz file"),
    ],
)
def test_samples_that_do_not_fit_are_refused(
    importer: Importer, save_model: Save, tmp_path: Path, array: np.ndarray | None, message: str
) -> None:
    if array is not None:
        np.savez(tmp_path / "samples.npz", x=array)
    with pytest.raises(BuildError, match=message):
        importer(save_model(), samples=str(tmp_path / "samples.npz"))


def test_tensors_are_renamed_in_the_whole_graph(importer: Importer, save_model: Save) -> None:
    facts = {"inputs": [{"name": "image", "onnx": "x", "dims": [2, 4]}], "outputs": [{"name": "w", "onnx": "y"}]}
    with pytest.raises(BuildError, match="the tensor y cannot be called w, another one has that name"):
        importer(save_model(), facts=facts)


def test_an_existing_model_is_replaced_only_on_request(importer: Importer, save_model: Save) -> None:
    importer(save_model(), facts={"labels": ["a", "b", "c"]})
    (importer.folder / "notes.md").write_text("mine")
    (importer.folder / "1" / "model.onnx.data").write_text("weights of an earlier import")
    shutil.copytree(importer.folder / "1", importer.folder / "2")
    before = (importer.folder / "1" / "model.onnx").read_bytes()
    path = save_model([helper.make_node("Relu", ["x"], ["y"])], out=4)
    with pytest.raises(BuildError, match="exists: write --name OTHER for another model, or --replace"):
        importer(path)
    (importer.folder / "config.yaml").rename(importer.folder / "config.pbtxt")
    assert importer(path, replace=True).check.has_passed
    assert (importer.folder / "1" / "model.onnx").read_bytes() != before
    assert (importer.folder / "2" / "model.onnx").read_bytes() == before
    assert "notes.md" in contents(importer.folder)
    assert not {"config.pbtxt", "1/model.onnx.data"} & set(contents(importer.folder))


def test_external_data_are_published_with_the_model(importer: Importer, save_model: Save) -> None:
    path = save_model()
    model = onnx.load_model(path)
    onnx.save_model(model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    outcome = importer(path)
    assert outcome.check.has_passed
    assert "1/model.onnx.data" in contents(importer.folder)
    assert outcome.size_bytes > (importer.folder / "1" / "model.onnx.data").stat().st_size
    x = np.ones((1, 4), np.float32)
    session = ort.InferenceSession(importer.folder / "1" / "model.onnx")
    np.testing.assert_array_equal(session.run(["y"], {"x": x})[0], ort.InferenceSession(path).run(["y"], {"x": x})[0])


def test_a_failed_check_leaves_an_existing_model(importer: Importer, save_model: Save) -> None:
    importer(save_model())
    before = {name: (importer.folder / name).read_bytes() for name in contents(importer.folder)}
    assert not importer(save_model(), "last row", replace=True).check.has_passed
    assert {name: (importer.folder / name).read_bytes() for name in contents(importer.folder)} == before


@pytest.mark.parametrize("name", ["", "a/b", ".hidden"])
def test_names_that_are_no_folder_are_refused(importer: Importer, save_model: Save, name: str) -> None:
    with pytest.raises(BuildError, match=f"a model cannot be called '{name}'"):
        importer(save_model(), name=name)


def test_a_link_is_not_replaced(importer: Importer, save_model: Save, tmp_path: Path) -> None:
    importer.repository.mkdir()
    importer.folder.symlink_to(tmp_path)
    with pytest.raises(BuildError, match="net is no folder: remove it"):
        importer(save_model(), replace=True)


def test_a_repository_that_cannot_be_written_is_named(importer: Importer, save_model: Save) -> None:
    importer.repository.write_text("a file")
    with pytest.raises(BuildError, match=r"cannot be written: .*--model-repository"):
        importer(save_model())


def test_labels_of_the_user_must_fit(importer: Importer, save_model: Save, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("\ufeffa\nb\n\n")
    with pytest.raises(BuildError, match=r"--labels has 2 names, no output has as many classes \(y \[3\]\)"):
        importer(save_model(), labels=tmp_path / "labels.txt")
    (tmp_path / "labels.txt").write_text("a\nb\nc\n")
    importer(save_model(), labels=tmp_path / "labels.txt")
    assert (importer.folder / "labels.txt").read_text() == "a\nb\nc\n"


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b"\xff\xfe\xff", "not UTF-8"), (b"\n", "is empty")]
)
def test_a_label_file_that_cannot_be_read_is_named(
    importer: Importer, save_model: Save, tmp_path: Path, content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / "labels.txt").write_bytes(content)
    with pytest.raises(BuildError, match=rf"--labels .*{reason}"):
        importer(save_model(), labels=tmp_path / "labels.txt")


def test_labels_of_a_framework_without_an_output_of_classes_are_left_out(importer: Importer, save_model: Save) -> None:
    assert importer(save_model(), facts={"labels": ["a", "b"]}).check.has_passed
    assert "labels.txt" not in contents(importer.folder)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("fault", "it has no layers: add one"),
        ("chain", "KeyError: 'inner': correct the model"),
        ("crash", r"the process with the framework ended with SIGABRT \(.*\): run it by hand: "),
        ("one row", "the model fails in its framework on random, 1 row: ValueError: one row is refused"),
    ],
)
def test_faults_of_the_framework_are_errors(importer: Importer, save_model: Save, fault: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        importer(save_model(), fault)
    assert list(importer.repository.iterdir()) == []


def test_code_of_the_user_that_fails_is_named_with_its_line(
    importer: Importer, save_model: Save, tmp_path: Path
) -> None:
    custom = tmp_path / "layers.py"
    custom.write_text("import os\nraise ValueError('no such layer')\n")
    with pytest.raises(BuildError, match=r"layers.py cannot be imported: ValueError: no such layer \(line 2: raise"):
        importer(save_model(), custom_objects=str(custom))
    custom.write_text("import gadget_of_nobody\n")
    with pytest.raises(BuildError, match=r"imports gadget_of_nobody, which is not installed: .*--requirement"):
        importer(save_model(), custom_objects=str(custom))


def test_bf16_is_refused_with_a_cure(importer: Importer, save_model: Save) -> None:
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=onnx.TensorProto.BFLOAT16)]
    path = save_model(nodes, out=4)
    model = onnx.load_model(path)
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    onnx.save_model(model, path)
    with pytest.raises(BuildError, match=r"y is BF16, which the comparison does not take: import it in FP32"):
        importer(path)


def test_the_framework_runs_on_the_named_interpreter(importer: Importer, save_model: Save) -> None:
    assert importer(save_model(), python=Path(sys.executable)).check.has_passed
    with pytest.raises(BuildError, match="lacks gadget"):
        importer(save_model(), python=Path(sys.executable), requirements=("gadget",), replace=True)
