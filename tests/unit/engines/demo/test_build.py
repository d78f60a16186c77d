import json
import subprocess
import sys
from pathlib import Path

import headrace_engines.__main__ as command_line
import pytest
import yaml
from google.protobuf import text_format
from headrace_engines.demo import build, digits, networks
from headrace_engines.demo.build import CATALOGUE, DemoState, build_demo_model, choose_models, demo_state
from headrace_engines.errors import BuildError
from tritonclient.grpc import model_config_pb2

pytestmark = pytest.mark.slow

COMMITTED = Path(__file__).parents[4] / "model_repository"
TINY = CATALOGUE["tiny"]


def _build(output: Path, force: bool = False):
    return build_demo_model(TINY, output, force, lambda *_: None)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _change_stamp(output: Path, **fields: object) -> None:
    path = output / "tiny/1/recipe.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_second_build_touches_nothing(tmp_path):
    first = _build(tmp_path)
    assert (first.state, first.built) == (DemoState.MISSING, True)
    assert first.size_bytes == (tmp_path / "tiny/1/model.onnx").stat().st_size
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    second = _build(tmp_path)
    assert (second.state, second.built) == (DemoState.UP_TO_DATE, False)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_builds_are_reproducible_and_leave_no_other_files(tmp_path):
    _build(tmp_path / "a")
    _build(tmp_path / "b")
    a, b = _contents(tmp_path / "a"), _contents(tmp_path / "b")
    assert list(a) == ["tiny/1/model.onnx", "tiny/1/recipe.json", "tiny/config.pbtxt"]
    assert a["tiny/1/model.onnx"] == b["tiny/1/model.onnx"]


@pytest.mark.parametrize(
    "model", [model for model in CATALOGUE.values() if model.model_file == "model.onnx"], ids=lambda model: model.name
)
def test_a_model_of_an_earlier_text_of_the_same_recipe_is_up_to_date(model, tmp_path):
    """Renamed modules and reworded docstrings build nothing again."""
    folder = tmp_path / model.name / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"onnx")
    stamp = {"weights": "seeded", "size_bytes": 4}
    assert model.equal_recipes
    for recipe in model.equal_recipes:
        (folder / "recipe.json").write_text(json.dumps(stamp | {"recipe": recipe}))
        assert demo_state(model, tmp_path) is DemoState.UP_TO_DATE
    (folder / "recipe.json").write_text(json.dumps(stamp | {"recipe": "0" * 64}))
    assert demo_state(model, tmp_path) is DemoState.OUTDATED


def test_a_changed_recipe_rebuilds(tmp_path):
    _build(tmp_path)
    _change_stamp(tmp_path, recipe="another")
    outcome = _build(tmp_path)
    assert (outcome.state, outcome.built) == (DemoState.OUTDATED, True)
    assert _build(tmp_path).state is DemoState.UP_TO_DATE


def test_a_damaged_model_is_rebuilt(tmp_path):
    _build(tmp_path)
    model = tmp_path / "tiny/1/model.onnx"
    whole = model.read_bytes()
    model.write_bytes(whole[:100])
    assert _build(tmp_path).built
    assert model.read_bytes() == whole


def test_a_users_model_is_not_replaced_without_force(tmp_path):
    (tmp_path / "tiny/1").mkdir(parents=True)
    model = tmp_path / "tiny/1/model.onnx"
    model.write_bytes(b"mine")
    outcome = _build(tmp_path)
    assert (outcome.state, outcome.built) == (DemoState.FOREIGN, False)
    assert model.read_bytes() == b"mine"
    assert _build(tmp_path, force=True).built
    assert model.read_bytes() != b"mine"


def test_configs_are_restored_but_never_overwritten(tmp_path):
    _build(tmp_path)
    config = tmp_path / "tiny/config.pbtxt"
    config.write_text("# mine")
    _build(tmp_path, force=True)
    assert config.read_text() == "# mine"
    config.unlink()
    _build(tmp_path)
    assert config.read_text() == TINY.file_text("config.pbtxt")
    config.rename(config.with_name("config.yaml"))
    _build(tmp_path)
    assert not config.exists()


@pytest.mark.parametrize("present", [False, True], ids=["nothing there", "older model there"])
def test_a_failed_write_preserves_the_previous_files(tmp_path, monkeypatch, present):
    if present:
        _build(tmp_path)
        _change_stamp(tmp_path, recipe="another")
    before = {name: data for name, data in _contents(tmp_path).items() if name.startswith("tiny/1/")}
    write_bytes = Path.write_bytes

    def full_disk(path: Path, data: bytes) -> int:
        if path.name == build.STAMP_FILE:
            raise OSError(28, "No space left on device")
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    outcome = _build(tmp_path)
    assert "No space left" in outcome.error
    assert not outcome.built
    after = _contents(tmp_path)
    after.pop("tiny/config.pbtxt")
    assert after == before
    assert [path.name for path in (tmp_path / "tiny").iterdir() if path.name.startswith(".")] == []


def test_one_failing_model_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    def fail(_report):
        raise BuildError("the weights are not installed")

    monkeypatch.setattr(networks, "build_tiny", fail)
    status = command_line.main(["models", "build", "--output", str(tmp_path), "--only", "tiny", "add_sub"])
    assert status == 1
    assert "tiny was not built: the weights are not installed" in capsys.readouterr().out
    assert (tmp_path / "add_sub/1/model.onnx").is_file()
    assert not (tmp_path / "tiny/1").exists()


def test_up_to_date_models_print_one_line_and_import_nothing_heavy(tmp_path):
    arguments = ["models", "build", "--output", str(tmp_path), "--only", "tiny", "add_sub"]
    assert command_line.main(arguments) == 0
    script = (
        "import sys, headrace_engines.__main__ as m\n"
        f"status = m.main({arguments!r})\n"
        "print(sorted({'numpy', 'onnx', 'onnxruntime', 'sklearn'} & set(sys.modules)), status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"All 2 demo models are up to date in {tmp_path}.\n[] 0\n"


def test_an_unknown_name_is_reported(capsys):
    assert command_line.main(["models", "build", "--only", "tyni"]) == 2
    assert "no demo model is called tyni" in capsys.readouterr().err


def test_stamps_of_engines_are_preserved(tmp_path):
    _build(tmp_path)
    engines = tmp_path / "tiny/1/build.json"
    engines.write_text('{"format": 1, "builds": []}')
    assert not _build(tmp_path).built
    assert _build(tmp_path, force=True).built
    assert engines.read_text() == '{"format": 1, "builds": []}'
    (tmp_path / "tiny/1/recipe.json").unlink()
    assert demo_state(TINY, tmp_path) is DemoState.FOREIGN


def _build_digits(output: Path, monkeypatch):
    """`digits` with a stand-in for the trained model: its samples are what is looked at."""
    monkeypatch.setattr(digits, "build", networks.build_tiny)
    return build_demo_model(CATALOGUE["digits"], output, False, lambda *_: None)


def test_missing_samples_are_written_and_a_users_are_not_replaced(tmp_path, monkeypatch):
    first = _build_digits(tmp_path, monkeypatch)
    assert first.built
    assert first.remark.startswith("calibration.npz and accuracy.npz written beside it")
    laid = _contents(tmp_path)
    assert _build_digits(tmp_path, monkeypatch).remark == ""
    (tmp_path / "digits/calibration.npz").write_bytes(b"mine")
    (tmp_path / "digits/accuracy.npz").unlink()
    outcome = _build_digits(tmp_path, monkeypatch)
    assert (outcome.state, outcome.built) == (DemoState.UP_TO_DATE, False)
    assert outcome.remark.startswith("accuracy.npz written beside it")
    assert _contents(tmp_path) == {**laid, "digits/calibration.npz": b"mine"}


def test_a_model_is_built_even_if_its_samples_fail(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    outcome = _build_digits(tmp_path, monkeypatch)
    assert (outcome.built, outcome.error) == (True, "")
    assert outcome.remark.startswith("has no calibration samples: the package scikit-learn")
    assert sorted(path.name for path in (tmp_path / "digits").iterdir()) == ["1", "config.yaml", "labels.txt"]


def test_a_users_model_gets_no_samples(tmp_path, monkeypatch):
    (tmp_path / "digits/1").mkdir(parents=True)
    (tmp_path / "digits/1/model.onnx").write_bytes(b"mine")
    assert _build_digits(tmp_path, monkeypatch).state is DemoState.FOREIGN
    assert not (tmp_path / "digits/calibration.npz").exists()


def test_written_samples_are_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(digits, "build", networks.build_tiny)
    assert command_line.main(["models", "build", "--output", str(tmp_path), "--only", "digits"]) == 0
    assert "digits: calibration.npz and accuracy.npz written beside it" in capsys.readouterr().out


def test_all_models_are_chosen_unless_some_are_named():
    assert [model.name for model in choose_models([])] == list(CATALOGUE)
    assert [model.name for model in choose_models(["digits", "tiny"])] == ["tiny", "digits"]


@pytest.mark.parametrize(("model", "name"), [(model, name) for model in CATALOGUE.values() for name in model.files])
def test_committed_files_match_the_builder_output(model, name):
    assert (COMMITTED / model.name / name).read_text(encoding="utf-8") == model.file_text(name)


@pytest.mark.parametrize("model", CATALOGUE.values(), ids=lambda model: model.name)
def test_configs_parse_to_the_expected_values(model):
    if "config.yaml" in model.files:
        config = yaml.safe_load(model.file_text("config.yaml"))
        name, batch, outputs = config["name"], config["max_batch_size"], config["output"]
        label_files = [output.get("label_filename") for output in outputs]
    else:
        parsed = text_format.Parse(model.file_text("config.pbtxt"), model_config_pb2.ModelConfig())
        name, batch = parsed.name, parsed.max_batch_size
        label_files = [output.label_filename or None for output in parsed.output]
    assert name == model.name
    large = dict.fromkeys(("resnet50", "efficientnet_lite0"), 128)
    assert batch == {"tiny": 64, "digits": 64, "markov_text": 0, "rnn_text": 16, **large}.get(name, 8)
    assert [file for file in label_files if file] == [file for file in model.files if file.startswith("labels")]
