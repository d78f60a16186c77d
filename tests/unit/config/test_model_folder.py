from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from headrace.config.documents import Document
from headrace.config.model_config import BACKENDS, ModelConfig, is_version
from headrace.config.model_folder import ModelFolder, read_model_folder, served_versions
from headrace.config.pipeline_config import EnsembleStep
from headrace.config.python_rules import reads_device_rows
from headrace.config.traffic_config import Traffic
from headrace.core.errors import ConfigError, Finding
from headrace.models.uploads import check_files
from onnx import TensorProto

from tests.support.onnx_models import identity_model, write_model

FLOAT = TensorProto.FLOAT


def read(repository: Path, name: str = "m") -> ModelFolder:
    return read_model_folder(repository / name, repository)


def errors(repository: Path, name: str = "m") -> list[Finding]:
    with pytest.raises(ConfigError) as caught:
        read(repository, name)
    return [finding for finding in caught.value.findings if finding.fatal]


def messages_of(
    repository: Path, config: str, model: onnx.ModelProto | None = None, name: str = "config.yaml"
) -> list[str]:
    write_model(repository / "m", model, config=config, name=name)
    return [str(finding) for finding in errors(repository)]


def test_a_missing_configuration_is_derived(tmp_path: Path) -> None:
    write_model(tmp_path / "m", identity_model({"x": (FLOAT, ["b", 16])}, {"y": (TensorProto.INT64, ["b", -1])}))
    folder = read(tmp_path)
    config = folder.config
    assert (folder.name, folder.versions, folder.findings, folder.labels) == ("m", (1,), (), {})
    assert (config.name, config.platform, config.backend) == ("m", "onnxruntime_onnx", "onnxruntime")
    assert (config.max_batch_size, config.default_model_filename) == (4, "model.onnx")
    assert config.dynamic_batching is not None
    assert [(t.name, t.data_type, t.dims) for t in config.input] == [("x", "TYPE_FP32", (16,))]
    assert [(t.name, t.data_type, t.dims) for t in config.output] == [("y", "TYPE_INT64", (-1,))]
    assert [(g.name, g.count) for g in config.instance_group] == [("m_0", 1)]
    assert folder.model_file(1) == tmp_path / "m" / "1" / "model.onnx"


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ({"x": (FLOAT, [1, 3])}, {"y": (FLOAT, ["b", 3])}),
        ({"x": (FLOAT, ["b", 3])}, {"y": (FLOAT, [1, 3])}),
        ({"x": (FLOAT, ["b", 3])}, {"y": (FLOAT, [])}),
        ({"x": (FLOAT, ["b", 3]), "z": (FLOAT, [])}, {"y": (FLOAT, ["b", 3])}),
    ],
)
def test_a_model_without_a_free_first_dimension_everywhere_is_not_batched(
    tmp_path: Path, inputs: dict[str, tuple[int, list[int | str]]], outputs: dict[str, tuple[int, list[int | str]]]
) -> None:
    write_model(tmp_path / "m", identity_model(inputs, outputs))
    config = read(tmp_path).config
    assert (config.max_batch_size, config.dynamic_batching) == (0, None)
    assert config.input[0].dims == tuple(-1 if size == "b" else size for size in inputs["x"][1])


def test_free_first_dimensions_of_different_names_are_no_batch(tmp_path: Path) -> None:
    write_model(tmp_path / "m", identity_model({"x": (FLOAT, ["batch", 3])}, {"y": (FLOAT, ["found", 4])}))
    (finding,) = read(tmp_path).findings
    assert not finding.fatal
    assert (read(tmp_path).config.max_batch_size, read(tmp_path).config.dynamic_batching) == (0, None)
    assert '"found" of output' in finding.message
    assert "max_batch_size is 0" in finding.message
    assert "dynamic_batching: {}" in finding.cure


@pytest.mark.parametrize(
    ("config", "batch", "dims"),
    [
        ("input: [{name: x}]", 4, (16,)),
        ("input: [{name: x, dims: [16]}]", 4, (16,)),
        ("input: [{name: x, dims: [-1, 16]}]", 0, (-1, 16)),
        ("output: [{name: y, dims: [7, 16]}]", 0, (-1, 16)),
        ("max_batch_size: 0", 0, (-1, 16)),
        ("max_batch_size: 32", 32, (16,)),
        ("input: [{name: x, dims: [4, 4], reshape: {shape: [16]}}]", 4, (4, 4)),
        ("input: [{name: x, dims: [-1, 4, 4], reshape: {shape: [-1, 16]}}]", 0, (-1, 4, 4)),
    ],
)
def test_a_partial_configuration_is_completed(tmp_path: Path, config: str, batch: int, dims: tuple[int, ...]) -> None:
    write_model(tmp_path / "m", config=config)
    completed = read(tmp_path).config
    assert completed.max_batch_size == batch
    assert (completed.input[0].data_type, completed.input[0].dims) == ("TYPE_FP32", dims)
    assert len(completed.output) == 1
    # Triton's rule: what is completed and batches gets dynamic batching.
    assert (completed.dynamic_batching is not None) == (batch > 1)


@pytest.mark.parametrize(
    ("config", "on"),
    [
        ("max_batch_size: 32", True),
        ("max_batch_size: 32\ninput: [{name: x}]", True),
        ("max_batch_size: 32\ninput: [{name: x}]\noutput: [{name: y}]", False),
        ("max_batch_size: 1", False),
    ],
)
def test_dynamic_batching_is_completed_where_inputs_or_outputs_are(tmp_path: Path, config: str, on: bool) -> None:
    write_model(tmp_path / "m", config=config)
    assert (read(tmp_path).config.dynamic_batching is not None) == on


@pytest.mark.parametrize(("folder", "inside"), [("model.onnx", "model.onnx"), ("net", "model.onnx"), ("net", "net")])
def test_a_model_of_several_files_is_a_folder(tmp_path: Path, folder: str, inside: str) -> None:
    """Triton's layout: the folder has the name of the model's file, the file in it is `model.onnx`."""
    version = write_model(tmp_path / "m", config=f"default_model_filename: {folder}") / "1"
    content = (version / "model.onnx").read_bytes()
    (version / "model.onnx").unlink()
    (version / folder).mkdir()
    (version / folder / inside).write_bytes(content)
    assert read(tmp_path).model_file(1) == version / folder / inside


def test_outputs_may_be_chosen_inputs_may_not(tmp_path: Path) -> None:
    two = {"a": (FLOAT, ["b", 2]), "c": (FLOAT, ["b", 2])}
    three = {"p": (FLOAT, ["b", 2]), "q": (FLOAT, ["b", 2]), "r": (FLOAT, ["b", 2])}
    write_model(tmp_path / "m", identity_model(two, three), config="output: [{name: r}, {name: p}]")
    assert [tensor.name for tensor in read(tmp_path).config.output] == ["r", "p"]
    (error,) = messages_of(tmp_path, "input: [{name: a}]", identity_model(two, three))
    assert 'm/config.yaml:1: error: the model has the input "c" (FLOAT), the configuration does not list it' in error


def test_outputs_of_types_that_no_request_carries_are_left_out_with_a_warning(tmp_path: Path) -> None:
    outputs = {"y": (FLOAT, ["b", 2]), "z": (TensorProto.COMPLEX64, ["b", 2])}
    write_model(tmp_path / "m", identity_model(None, outputs))
    folder = read(tmp_path)
    assert [tensor.name for tensor in folder.config.output] == ["y"]
    assert [finding.message for finding in folder.findings if "COMPLEX64" in finding.message]


@pytest.mark.parametrize(
    ("config", "line", "messages"),
    [
        ("input: [{name: z}]", 1, ['input "z" is not in the model', 'the model has the input "x"']),
        ("\noutput: [{name: z}]", 2, ['output "z" is not in the model']),
        ("input:\n- name: x\n  data_type: int8", 3, ['input "x" has the type TYPE_INT8, the model has FLOAT']),
        (
            "input:\n- name: x\n  dims: [17]",
            3,
            ['input "x" has dims [17], the model has [16] behind the batch dimension'],
        ),
        ("input:\n- name: x\n  dims: [-1]", 3, ['input "x" has dims [-1], the model has [16]']),
        (
            "max_batch_size: 0\noutput:\n- name: y\n  dims: [16]",
            4,
            ['output "y" has dims [16], the model has [-1, 16]'],
        ),
        ("input:\n- name: x\n  optional: true", 3, ['input "x" is optional in the configuration']),
        ("dynamic_batching: {preferred_batch_size: [8]}", 1, ["preferred_batch_size 8 is more than max_batch_size 4"]),
        ("preprocess: {input: z}", 1, ['preprocess.input "z" is not an input of the model (write one of x)']),
    ],
)
def test_contradictions_name_the_model_and_the_config(
    tmp_path: Path, config: str, line: int, messages: list[str]
) -> None:
    findings = messages_of(tmp_path, config)
    assert len(findings) == len(messages)
    for text, message in zip(findings, messages, strict=True):
        assert text.startswith(f"m/config.yaml:{line}: error: ")
        assert message in text


def test_a_batch_size_needs_a_free_first_dimension(tmp_path: Path) -> None:
    model = identity_model({"x": (FLOAT, [1, 3])}, {"y": (FLOAT, [1, 3])})
    findings = messages_of(tmp_path, "max_batch_size: 8", model)
    assert len(findings) == 2
    assert 'input "x" has the shape [1, 3] in the model (write max_batch_size: 0' in findings[0]


def test_the_config_may_fix_what_the_model_leaves_free(tmp_path: Path) -> None:
    model = identity_model({"x": (FLOAT, ["b", "n"])}, {"y": (FLOAT, ["b", "n"])})
    write_model(tmp_path / "m", model, config="max_batch_size: 2\ninput: [{name: x, dims: [128]}]")
    config = read(tmp_path).config
    assert (config.input[0].dims, config.output[0].dims) == ((128,), (-1,))


def test_a_shape_missing_in_the_model_must_be_configured(tmp_path: Path) -> None:
    model = identity_model({"x": (FLOAT, [3])}, {"y": (FLOAT, None)})
    (error,) = messages_of(tmp_path, "output: [{name: y}]", model)
    assert 'has no shape for output "y" (write its dims)' in error
    write_model(tmp_path / "m", model, config="output: [{name: y, dims: [3]}]")
    assert read(tmp_path).config.output[0].dims == (3,)


def test_both_formats_at_once_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "m", config='name: "m"', name="config.pbtxt")
    assert "has both config.pbtxt and config.yaml" in messages_of(tmp_path, "name: m")[0]


@pytest.mark.parametrize("file", ["config.pbtxt", "config.yaml"])
def test_the_name_must_be_the_folders(tmp_path: Path, file: str) -> None:
    (error,) = messages_of(tmp_path, '# here\nname: "other"', name=file)
    assert error.startswith(f'm/{file}:2: error: the name "other" is not the folder\'s')


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.yaml").write_text("max_batch_siz: 3\nmetric_tags: {a: b}\noversize: x\n")
    with pytest.raises(ConfigError) as caught:
        read(tmp_path)
    lines = [(f.path, f.line, f.fatal) for f in caught.value.findings]
    assert lines == [
        ("m", None, True),  # no version folder
        ("m/config.yaml", 1, True),
        ("m/config.yaml", 2, False),
        ("m/config.yaml", 3, True),
    ]


@pytest.mark.parametrize("name", ["a..b", "a b", "-x"])
def test_bad_folder_names_are_refused(tmp_path: Path, name: str) -> None:
    write_model(tmp_path / name)
    assert "cannot be a model's name" in errors(tmp_path, name)[0].message


def test_a_folder_without_versions_or_models_is_refused_with_a_cure(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (finding,) = errors(tmp_path)
    assert (finding.message, finding.cure) == ("has no version folder", "put the model's file into m/1/")
    (tmp_path / "m" / "1").mkdir()
    (tmp_path / "m" / "1" / "model.bin").touch()
    (finding,) = errors(tmp_path)
    assert (finding.path, finding.message) == ("m/1/model.onnx", "the model's file is missing")
    assert finding.cure == "the folder has model.bin; name the file model.onnx, or set default_model_filename"


@pytest.mark.parametrize(
    ("file", "backend"),
    [
        ("x.skops", "sklearn"),
        ("model.joblib", "sklearn"),
        ("x.pt", "pytorch"),
        ("x.ubj", "xgboost"),
        ("x.txt", "lightgbm"),
    ],
)
def test_a_file_of_another_format_is_served_by_its_backend(tmp_path: Path, file: str, backend: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / file).touch()
    (finding,) = errors(tmp_path)
    assert finding.cure == f'the folder has {file}; write backend: "{backend}" and default_model_filename: "{file}"'
    (tmp_path / "m" / "config.yaml").write_text(f"default_model_filename: {file}\n")
    assert read(tmp_path).config.backend == backend
    (tmp_path / "m" / "config.yaml").unlink()
    name = BACKENDS[backend].default_model_filename
    (tmp_path / "m" / "1" / file).rename(tmp_path / "m" / "1" / name)
    config = read(tmp_path).config
    assert (config.backend, config.default_model_filename) == (backend, name)


def test_odd_folders_are_ignored_with_a_warning_hidden_ones_in_silence(tmp_path: Path) -> None:
    write_model(tmp_path / "m", version=2)
    large = (str(2**63), "1" * 30)
    for name in ("01", "0", "-1", "x", ".git", "warmup", *large):
        (tmp_path / "m" / name).mkdir()
    (tmp_path / "m" / "3").touch()
    folder = read(tmp_path)
    assert folder.versions == (2,)
    assert {finding.path for finding in folder.findings} == {
        "m/01",
        "m/0",
        "m/-1",
        "m/x",
        *(f"m/{name}" for name in large),
    }
    assert not any(finding.fatal for finding in folder.findings)


@pytest.mark.parametrize("version", [10**18 - 1, 1795000000000000001, 2**63 - 1])
def test_every_number_of_64_bits_is_a_version(tmp_path: Path, version: int) -> None:
    policy = f"version_policy: {{specific: {{versions: [{version}]}}}}"
    write_model(tmp_path / "m", config=policy, version=version)
    folder = read(tmp_path)
    assert (folder.versions, folder.findings) == ((version,), ())
    assert served_versions(folder.config, folder.versions) == (version,)
    assert is_version(str(version))
    assert Traffic.model_validate({"versions": {str(version): "5%"}}).named == {str(version)}
    assert EnsembleStep(model_name="m", model_version=version).model_version == version
    check_files({f"{version}/model.onnx": b""}, Document("config"))


def test_every_served_version_is_compared(tmp_path: Path) -> None:
    write_model(tmp_path / "m", identity_model({"x": (FLOAT, ["b", 5])}, {"y": (FLOAT, ["b", 5])}), version=1)
    write_model(tmp_path / "m", version=2)
    assert read(tmp_path).config.input[0].dims == (16,)
    findings = messages_of(
        tmp_path, "version_policy: {all: {}}", identity_model({"x": (FLOAT, ["b", 5])}, {"y": (FLOAT, ["b", 5])})
    )
    assert [text.endswith("(m/1/model.onnx) (write [5])") for text in findings] == [True, True]


def test_a_version_that_is_named_and_absent(tmp_path: Path) -> None:
    write_model(tmp_path / "m", config="version_policy: {specific: {versions: [1, 7]}}")
    (finding,) = read(tmp_path).findings
    assert (finding.line, finding.fatal) == (1, False)
    assert "version 7" in finding.message
    assert "version 7" in messages_of(tmp_path, "version_policy: {specific: {versions: [7]}}")[0]


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ({}, (9,)),
        ({"version_policy": {"latest": {"num_versions": 2}}}, (3, 9)),
        ({"version_policy": {"latest": {"num_versions": 9}}}, (1, 3, 9)),
        ({"version_policy": {"all": {}}}, (1, 3, 9)),
        ({"version_policy": {"specific": {"versions": [9, 1, 4]}}}, (1, 9)),
    ],
)
def test_served_versions(policy: dict[str, object], served: tuple[int, ...]) -> None:
    config = ModelConfig.model_validate(policy)
    assert served_versions(config, (3, 9, 1)) == served
    assert served_versions(config, ()) == ()


def test_labels_are_read(tmp_path: Path) -> None:
    write_model(tmp_path / "m", config="output: [{name: y, label_filename: names/labels.txt}]")
    (tmp_path / "m" / "names").mkdir()
    path = tmp_path / "m" / "names" / "labels.txt"
    path.write_bytes("\ufeffcat\r\n\r\ndög\u2028x\n\n".encode())
    folder = read(tmp_path)
    assert folder.labels == {"y": ("cat", "", "dög\u2028x")}
    assert any("has 3 names" in finding.message and not finding.fatal for finding in folder.findings)
    path.write_text("\n".join(f"class {i}" for i in range(16)))
    assert len(read(tmp_path).labels["y"]) == 16
    path.write_bytes(b"ok\n\xff\n")
    (finding,) = errors(tmp_path)
    assert (finding.path, finding.line, finding.message) == ("m/names/labels.txt", 2, "is not UTF-8")
    path.unlink()
    assert errors(tmp_path)[0].message == "the label file is missing"


@pytest.mark.parametrize("name", ["../other.txt", "/etc/hostname", "a/../../x", "a\\b"])
def test_file_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    (error,) = messages_of(tmp_path, f"output:\n- name: y\n  label_filename: '{name}'")
    assert error.startswith("m/config.yaml:3: error: ")
    assert "leads out of the model's folder" in error
    (error,) = messages_of(tmp_path, f"default_model_filename: '{name}'")
    assert "is not a file name" in error


@pytest.mark.parametrize("path", ["m", "m/1", "m/1/model.onnx", "m/config.yaml", "m/labels.txt"])
def test_links_that_lead_out_of_the_repository_are_refused(tmp_path: Path, path: str) -> None:
    config = "output: [{name: y, label_filename: labels.txt}]"
    repository = tmp_path / "repository"
    for root in (repository, tmp_path / "elsewhere"):
        write_model(root / "m", config=config)
        (root / "m" / "labels.txt").write_text("a\n" * 16)
    assert read(repository).labels["y"][0] == "a"
    target = repository / path
    target.rename(tmp_path / "moved")
    target.symlink_to(tmp_path / "elsewhere" / path)
    (finding,) = errors(repository)
    assert (finding.path, finding.message) == (path, "is a link that leads out of the repository")


def test_links_inside_of_the_repository_are_followed(tmp_path: Path) -> None:
    write_model(tmp_path / ".store")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "1").symlink_to(Path("..") / ".store" / "1")
    assert read(tmp_path).versions == (1,)


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    (tmp_path / "m" / "config.yaml").symlink_to("config.yaml")
    assert errors(tmp_path)[0].path == "m/config.yaml"


def test_a_configuration_is_a_page_of_text(tmp_path: Path) -> None:
    assert "is larger than" in messages_of(tmp_path, "#" * (1024 * 1024 + 1))[0]
    (tmp_path / "m" / "config.yaml").write_bytes(b"a: 1\nb: \xff")
    assert str(errors(tmp_path)[0]).startswith("m/config.yaml:2: error: is not UTF-8")


def test_a_broken_model_is_reported_with_its_file(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m") / "1" / "model.onnx"
    path.write_bytes(path.read_bytes()[:40])
    (finding,) = errors(tmp_path)
    assert (finding.path, finding.message) == ("m/1/model.onnx", "is no ONNX model, or a truncated one")


def test_an_onnx_model_may_be_a_folder(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    file = tmp_path / "m" / "1" / "model.onnx"
    content = file.read_bytes()
    file.unlink()
    file.mkdir()
    (file / "model.onnx").write_bytes(content)
    assert read(tmp_path).model_file(1) == file / "model.onnx"


def test_an_engine_needs_a_full_configuration_or_the_onnx_file_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.plan").touch()
    (folder / "config.yaml").write_text("backend: tensorrt\nmax_batch_size: 4\ninput: [{name: x, dims: [3]}]\n")
    messages = [finding.message for finding in errors(tmp_path)]
    assert messages == ["output is missing", 'input "x" has no data_type']
    tensors = "input: [{name: x, dims: [16], data_type: fp32}]\noutput: [{name: y, dims: [16], data_type: fp32}]\n"
    (folder / "config.yaml").write_text("backend: tensorrt\nmax_batch_size: 4\n" + tensors)
    config = read(tmp_path).config
    assert (config.platform, config.default_model_filename) == ("tensorrt_plan", "model.plan")
    write_model(folder, config="backend: tensorrt\n")
    assert read(tmp_path).config.input[0].dims == (16,)
    (folder / "1" / "model.plan").unlink()
    assert read(tmp_path).config.input[0].dims == (16,)
    (folder / "1" / "model.onnx").unlink()
    assert errors(tmp_path)[0].path == "m/1/model.plan"
    write_model(folder, config="backend: tensorrt\nfallback: onnxruntime\n")
    assert read(tmp_path).source_file(1) == tmp_path / "m" / "1" / "model.onnx"
    write_model(folder, config="backend: tensorrt\nbuild_on_load: true\n")
    assert read(tmp_path).config.output[0].name == "y"


def test_samples_that_are_not_there_or_lie_elsewhere_are_warned_of(tmp_path: Path) -> None:
    def remarks(calibration: str, accuracy: str) -> list[str]:
        config = f"optimization:\n  calibration: {{data: '{calibration}'}}\n  accuracy: {{data: '{accuracy}'}}\n"
        write_model(tmp_path / "m", config=config)
        findings = read(tmp_path).findings
        assert not any(finding.fatal for finding in findings)
        return [f"{finding.line}: {finding.message}" for finding in findings]

    assert remarks("pictures", "samples.py:held_out") == [
        "2: calibration.data 'pictures' does not exist",
        "3: accuracy.data 'samples.py:held_out' does not exist",
    ]
    (tmp_path / "m" / "samples.py").write_text("")
    (tmp_path / "m" / "pictures" / "held_out").mkdir(parents=True)
    assert remarks("samples.py:calibration", "pictures/held_out") == [], "and the folder is no odd one"
    assert remarks("1/model.onnx", "pictures") == []
    assert read(tmp_path).versions == (1,), "a version's folder stays one"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "m" / "link").symlink_to(tmp_path / "elsewhere")
    for out in ("../elsewhere", str(tmp_path / "elsewhere"), "link", "link/x"):
        assert sum(" leads out of the model's folder" in line for line in remarks(out, out)) == 2


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    (tmp_path / "m" / "config.yaml").mkdir()
    assert "cannot be read" in errors(tmp_path)[0].message


def test_paths_that_are_not_folders(tmp_path: Path) -> None:
    (tmp_path / "m").touch()
    assert errors(tmp_path)[0].message == "is not a folder"
    assert errors(tmp_path, "absent")[0].message == "is not a folder"


def test_a_precision_that_needs_samples_warns_if_none_are_named(tmp_path: Path) -> None:
    write_model(tmp_path / "m", config="optimization: {precision: int8}\n")
    (finding,) = read(tmp_path).findings
    assert (finding.line, finding.fatal) == (1, False)
    assert "int8 cannot be built without samples" in finding.message
    assert "optimization.calibration.data" in finding.cure
    write_model(tmp_path / "m", config="optimization: {precision: fp16}\n")
    assert read(tmp_path).findings == ()


@pytest.mark.parametrize(("value", "is_refused"), [("yes", False), ("no", False), ("maybe", True), ("", True)])
def test_a_python_model_reads_inputs_on_the_host_or_on_a_gpu(tmp_path: Path, value: str, is_refused: bool) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("")
    parameter = f"parameters: {{FORCE_CPU_ONLY_INPUT_TENSORS: '{value}'}}"
    (folder / "config.yaml").write_text(f"backend: python\n{parameter}\n")
    if is_refused:
        with pytest.raises(ConfigError, match=f'FORCE_CPU_ONLY_INPUT_TENSORS is "yes" or "no", not "{value}"'):
            read_model_folder(folder, tmp_path)
    else:
        assert reads_device_rows(read_model_folder(folder, tmp_path).config) == (value == "no")
