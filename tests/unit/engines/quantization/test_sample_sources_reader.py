import textwrap

import numpy as np
import pytest
from headrace.config.model_config import ModelConfig
from headrace.config.tensor_config import ModelInput, ModelOutput
from headrace_engines.errors import BuildError
from headrace_engines.quantization.sample_sources import open_samples

OUTPUT = ModelOutput(name="P", data_type="fp32", dims=(10,))


def _config(*inputs, batch=8):
    tensors = inputs or (ModelInput(name="X", data_type="fp32", dims=(2, -1)),)
    return ModelConfig(name="m", max_batch_size=batch, input=tensors, output=(OUTPUT,))


TWO = _config(ModelInput(name="A", data_type="int64", dims=(3,)), ModelInput(name="T", data_type="bytes", dims=(1,)))


def _open(folder, code, config=None, limit=100, function="samples"):
    text = "import numpy as np\n" + textwrap.dedent(code).lstrip("\n")
    (folder / "reader.py").write_text(text)
    return open_samples(f"reader.py:{function}", folder, config or _config(), limit)


def test_arrays_are_read_once_and_returned_repeatedly(tmp_path):
    samples = _open(tmp_path, """
        def samples():
            with open(__file__ + ".log", "a") as log:
                for n in range(6):
                    log.write("x")
                    yield np.full((2, 3), n, np.float64)
    """)  # fmt: skip
    assert samples.origin == "reader.py:samples (6 samples)"
    for _ in range(3):
        result = np.concatenate([batch["X"] for batch in samples.batches(4)])
        assert result.dtype == np.float32
        np.testing.assert_array_equal(result[:, 0, 0], range(6))
    assert (tmp_path / "reader.py.log").read_text() == "x" * 6
    kept, held_out = samples.split(0.34)
    assert (len(kept), next(held_out.batches(9))["X"][0, 0, 0]) == (4, 4)


def test_dicts_with_labels_of_one_or_several_samples(tmp_path):
    samples = _open(tmp_path, """
        def samples():
            yield {"A": [1, 2, 3], "T": np.array(["ä"]), "label": 7}
            yield {"A": np.arange(6).reshape(2, 3), "T": [["b"], ["c"]], "labels": [8, 9]}
    """, TWO)  # fmt: skip
    (batch,) = samples.batches(8)
    np.testing.assert_array_equal(batch["A"], [[1, 2, 3], [0, 1, 2], [3, 4, 5]])
    assert batch["T"].tolist() == [["ä"], ["b"], ["c"]]
    np.testing.assert_array_equal(samples.labels, [7, 8, 9])


def test_an_endless_reader_stops_at_the_limit(tmp_path):
    code = """
        def samples():
            n = 0
            while True:
                yield np.full((5, 2, 1), n := n + 1, np.float32)
    """
    samples = _open(tmp_path, code, limit=7)
    assert len(samples) == 7
    assert _open(tmp_path, code, limit=7).digest == samples.digest
    assert _open(tmp_path, code, limit=6).digest == samples.head(6).digest != samples.digest


def test_a_list_will_do_and_shapes_may_differ(tmp_path):
    samples = _open(tmp_path, "def samples(): return [np.zeros((2, n), np.float32) for n in (3, 3, 4)]")
    assert [batch["X"].shape for batch in samples.batches(8)] == [(2, 2, 3), (1, 2, 4)]


def test_without_a_batch_dimension_each_sample_is_the_whole_input(tmp_path):
    config = _config(ModelInput(name="X", data_type="fp32", dims=(1, 4)), batch=0)
    samples = _open(tmp_path, "def samples(): return [np.zeros((1, 4), 'f'), np.zeros((3, 4), 'f')]", config)
    assert [batch["X"].shape for batch in samples.batches(8)] == [(1, 4)] * 4


def test_the_code_may_use_dataclasses_and_its_own_folder(tmp_path):
    np.save(tmp_path / "values.npy", np.ones((2, 2), np.float32))
    samples = _open(tmp_path, """
        import dataclasses, pathlib

        @dataclasses.dataclass
        class Row:
            values: "list[float]"

        def samples():
            yield Row(np.load(pathlib.Path(__file__).with_name("values.npy"))).values
    """)  # fmt: skip
    assert len(samples) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reader.py", "values.npy"]


@pytest.mark.parametrize(("code", "message"), [
    ("def samples():\n    yield np.zeros((2, 1), 'f')\n    yield 1 / 0", r"^reader.py:4: ZeroDivisionError: division by zero"),
    ("import nothing_of_that_name", r"^reader.py:2: ModuleNotFoundError: No module named"),
    ("def samples(:\n    pass", r"^reader.py:2: "),
    ("def samples():\n    np.zeros(2).reshape(3)\n    yield 1", r"^reader.py:3: ValueError: cannot reshape"),
    ("raise SystemExit(3)", r"^reader.py:2: SystemExit: 3"),
    ("def samples(path): yield 1", r"^reader.py: TypeError: samples\(\) missing 1 required positional argument"),
    ("def other(): pass", r"has no function 'samples' \(it has other\)"),
    ("samples = 3", r"has no function 'samples' \(it has none\)"),
    ("def samples(): return np.zeros((4, 2, 1))", "returns one ndarray, expected an iterable"),
    ("def samples(): pass", "returns one NoneType, expected an iterable"),
    ("def samples(): yield from ()", "yields no samples"),
    ("def samples(): yield {'Y': np.zeros((2, 1), 'f')}", r"item 0: the model's inputs are X, found Y"),
    ("def samples(): yield {}", r"item 0: the model's inputs are X, found nothing"),
    ("def samples(): yield np.zeros((3, 1), 'f')", r"item 0: input 'X' takes \[2, -1\], found \[3, 1\]"),
    ("def samples(): yield np.zeros((2, 1), 'i')", "item 0: input 'X' takes FP32, found int32"),
    ("def samples(): yield [[1.0], [2.0, 3.0]]", "item 0: a value cannot become an array"),
    ("def samples(): yield {'X': np.full((2, 1), np.inf), 'label': 1}", "item 0: 'X' has NaN or infinite values"),
    ("def samples(): yield {'X': np.zeros((2, 1)), 'label': 'cat'}", "item 0: labels are .*: write the number of a class"),
    ("def samples(): yield {'X': np.zeros((2, 1)), 'label': 10}", "item 0: labels go from 10 to 10"),
    ("def samples(): yield {'X': np.zeros((3, 2, 1)), 'label': [1, 2]}", r"different numbers of samples \(X 3, labels 2\)"),
    ("def samples():\n    yield {'X': np.zeros((2, 1)), 'label': 1}\n    yield np.zeros((2, 1))", "labels for 1 of 2"),
])  # fmt: skip
def test_errors_of_the_reader_are_reported(tmp_path, code, message):
    with pytest.raises(BuildError, match=message):
        _open(tmp_path, code)


def test_bare_arrays_do_for_one_input_only(tmp_path):
    with pytest.raises(BuildError, match="the item is one ndarray, the model has 2 inputs: yield a dict with A, T"):
        _open(tmp_path, "def samples(): yield np.zeros(3)", TWO)


def test_a_full_disk_is_reported(tmp_path, monkeypatch):
    class Full:
        def seek(self, *_):
            return 0

        def write(self, _):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Full())
    with pytest.raises(BuildError, match=r"the samples cannot be written to .*: No space left on device: make room"):
        _open(tmp_path, "def samples(): yield np.zeros((2, 1), 'f')")
