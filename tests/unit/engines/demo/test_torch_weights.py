import os

import numpy as np
import pytest
from headrace_engines.demo.torch_weights import read_state_dict
from headrace_engines.errors import BuildError


class _Call:
    """Pickles as a call of `function` with `arguments`, as a hostile checkpoint would."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def test_tensors_round_trip(save_checkpoint):
    weight = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    base = np.arange(12, dtype=np.float32)
    content = save_checkpoint(
        {"weight": weight, "transposed_view": (base, (4, 2), (1, 4), 3), "steps": np.array(7, np.int64)}
    )
    state = read_state_dict(content)
    assert list(state) == ["weight", "transposed_view", "steps"]
    np.testing.assert_array_equal(state["weight"], weight)
    np.testing.assert_array_equal(state["transposed_view"], base[3:11].reshape(2, 4).T)
    assert state["steps"].dtype == np.int64
    assert state["steps"].shape == ()
    assert state["steps"] == 7


def test_foreign_globals_are_refused_and_not_called(save_checkpoint, tmp_path):
    marker = tmp_path / "called"
    content = save_checkpoint({"weight": np.zeros(2, np.float32), "trap": _Call(os.mkdir, str(marker))})
    with pytest.raises(BuildError, match=r"uses (posix|nt)\.mkdir"):
        read_state_dict(content)
    assert not marker.exists()


@pytest.mark.parametrize("function", [os.system, eval, getattr, __import__])
def test_dangerous_functions_are_refused(save_checkpoint, function):
    with pytest.raises(BuildError, match="the checkpoint uses"):
        read_state_dict(save_checkpoint({"trap": _Call(function, "0")}))


def test_an_allowed_module_exposes_only_its_allowed_names():
    stack_global = b"\x80\x02ctorch._utils\n_import_dotted_name\n."
    header = b"".join(
        (
            b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.",
            b"\x80\x02M\xe9\x03.",
            b"\x80\x02}X\x0d\x00\x00\x00little_endian\x88s.",
        )
    )
    with pytest.raises(BuildError, match=r"uses torch\._utils\._import_dotted_name"):
        read_state_dict(header + stack_global)


@pytest.mark.parametrize(("shape", "strides", "offset"), [((3, 4), (4, 1), 1), ((13,), (1,), 0), ((2,), (12,), 0)])
def test_a_view_beyond_its_storage_is_refused(save_checkpoint, shape, strides, offset):
    content = save_checkpoint({"view": (np.zeros(12, np.float32), shape, strides, offset)})
    with pytest.raises(BuildError, match="not a readable PyTorch checkpoint"):
        read_state_dict(content)


def test_a_truncated_file_is_refused(save_checkpoint):
    content = save_checkpoint({"weight": np.zeros(100, np.float32)})
    for length in (0, 1, 10, 40, len(content) // 2, len(content) - 4):
        with pytest.raises(BuildError):
            read_state_dict(content[:length])


def test_entries_that_are_no_tensors_are_refused(save_checkpoint):
    with pytest.raises(BuildError, match="not a readable PyTorch checkpoint"):
        read_state_dict(save_checkpoint({"epoch": 3}))
